"""What a token of a packed row sees, by the attention that a model runs on."""

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    FalconConfig,
    FalconModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2PreTrainedModel,
    MambaConfig,
    MambaModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import add_fused_lm_head

from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.update import one_call
from agent_r1_trl.update.layout import UpdateLayout
from agent_r1_trl.update.packed_attention import (
    LENGTHS,
    PACKED_ATTENTION,
    packed_attention,
    use_packed_attention,
)
from agent_r1_trl.update.packing import Layout, pack, packed_log_probs
from tests.families.configurations import build
from tests.trainers.helpers import make_args
from tests.update.test_packing import SHAPE, SLIDING, forked, forks, make_model, ragged

# -------------------------------------------------------------------- sdpa, segment by segment


def test_a_window_hides_what_is_further_back():
    mask = Layout([], *[torch.zeros(0)] * 4).mask(2, 4, torch.zeros(1), window=2)
    assert (mask == 0).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


class CopiesOfMasks(TorchDispatchMode):
    """Counts operations that make a tensor of a mask, attention itself aside."""

    def __init__(self, layout):
        super().__init__()
        self.layout, self.found = layout, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ours = {mask.untyped_storage().data_ptr() for mask in self.layout._masks.values()}
        read = {item.untyped_storage().data_ptr() for item in args if isinstance(item, torch.Tensor)}
        if ours & read and "attention" not in func.name() and not func.is_view:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, SLIDING], ids=["full", "window"])
def test_no_layer_copies_a_mask(dtype, window):
    """Kernels for CUDA also copy masks whose rows are not aligned, which shows in the strides alone."""
    model = make_model("qwen3", **(window or {})).train()
    use_packed_attention(model, share_prefixes=True)
    batch = pack(*forked(), share_prefixes=True)
    masks = batch.layout._masks
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16), CopiesOfMasks(batch.layout) as copies:
        packed_log_probs(model, model.base_model, batch)
    assert masks and copies.found == []
    assert {mask.dtype for mask in masks.values()} == {dtype}
    assert {mask.stride(0) % 8 for mask in masks.values()} == {0}
    assert any(mask.shape[1] % 8 for mask in masks.values()), "else nothing was asked of the strides"


def test_heads_that_share_one_key_head_are_no_views_of_it(monkeypatch):
    attention, strides = torch.nn.functional.scaled_dot_product_attention, []

    def look(query, key, value, **options):
        strides.extend([key.stride(1), value.stride(1)])
        return attention(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    model = make_model("qwen3", num_key_value_heads=1)
    use_packed_attention(model, share_prefixes=True)
    with torch.no_grad():
        packed_log_probs(model, model.base_model, pack(*forked(), share_prefixes=True))
    assert strides and 0 not in strides


def test_no_plan_is_built_for_every_new_length(tmp_path):
    """cuDNN's attention makes one of each shape."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    UpdateLayout(make_args(tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    TransformersGenerator(make_model("llama"), pad_token_id=0, stop_token_ids=[])
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_mask_of_double_precision_stays_one_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert Layout([], *[torch.zeros(0)] * 4).mask(2, 4, torch.zeros(1).double()).dtype == torch.float64


def test_no_segment_has_a_gradient_as_large_as_the_whole_row():
    batch = pack(*forked(), share_prefixes=True)
    states = [torch.randn(1, 2, batch.input_ids.shape[1], 8, requires_grad=True) for _ in range(3)]
    output, _ = packed_attention(torch.nn.Module(), *states, None, packed_layout=batch.layout)
    waiting, names = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        names.add(node.name())
        waiting += [other for other, _ in node.next_functions if other is not None]
    assert len(batch.layout.segments) > 2 and not any(name.startswith("Slice") for name in names)


def test_a_soft_capped_score_is_refused_when_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # transformers 5.23 refuses it by itself
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, sliding_window=4, attn_implementation="sdpa"))
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    use_packed_attention(model)
    with pytest.raises(ValueError, match=r"update_layout: .*softcap.*update_layout='grouped'"):
        packed_log_probs(model, model.base_model, pack(*ragged(), share_prefixes=False))


def test_a_compiled_model_is_compiled_for_the_first_row_alone():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = make_model("qwen3").train()
    use_packed_attention(model, share_prefixes=True)
    for layer in model.model.layers:
        layer.compile(backend=count, dynamic=True)
    found = []
    for rows in (ragged(0), forked(1), ragged(2), forked(3)):
        log_probs, _ = packed_log_probs(model, model.base_model, pack(*rows, share_prefixes=True))
        log_probs.sum().backward()
        found.append(len(graphs))
    assert 0 < found[0] < 8, "a graph on each side of the attention of a layer"
    assert set(found) == {found[0]}


# -------------------------------------------------------------------- one call with lengths


def test_flash_attention_is_told_the_lengths_of_the_rows(monkeypatch):
    """FlashAttention needs a GPU: in its place stands a function that reads the same arguments."""
    seen = []

    def by_lengths(module, query, key, value, attention_mask, **options):
        assert attention_mask is None
        ends = options["cu_seq_lens_q"].tolist()
        assert options["cu_seq_lens_q"].dtype == torch.int32
        assert options["cu_seq_lens_k"].tolist() == ends
        lengths = [end - start for start, end in pairwise(ends)]
        assert options["max_length_q"] == options["max_length_k"] == max(lengths)
        seen.append(lengths)
        repeat = query.shape[1] // key.shape[1]
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), is_causal=True,
                scale=options["scaling"],
            )
            for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
        ]  # fmt: skip
        return torch.cat(parts, dim=2).transpose(1, 2), None

    model = make_model("qwen3")
    batch = ragged()
    use_packed_attention(model)
    expected, _ = packed_log_probs(model, model.base_model, pack(*batch, share_prefixes=False))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", by_lengths)
    model.config._attn_implementation = "flash_attention_2"
    kind = use_packed_attention(model)
    assert kind == LENGTHS
    packed = pack(*batch, share_prefixes=False, attention=kind)
    ours, _ = packed_log_probs(model, model.base_model, packed)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
    assert seen == [[segment.end - segment.start for segment in packed.layout.segments]] * 2


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize("used", ["eager", "flex_attention"])
def test_a_model_that_packing_does_not_cover_is_refused_and_the_fix_works(tmp_path, used):
    packed, grouped = (UpdateLayout(make_args(tmp_path, update_layout=name)) for name in ("packed", "grouped"))
    with pytest.raises(ValueError, match=rf"update_layout: the model has .*'{used}'.* attn_implementation='sdpa'"):
        packed.prepare(make_model("qwen3", attn_implementation=used))
    packed.prepare(make_model("qwen3", attn_implementation="sdpa"))
    grouped.prepare(make_model("qwen3", attn_implementation=used))


def test_flash_attention_knows_no_shared_prefixes(tmp_path):
    model = make_model("qwen3")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2', which knows no prefix.*Set update_layout='packed'"):
        UpdateLayout(make_args(tmp_path, update_layout="shared")).prepare(model)
    UpdateLayout(make_args(tmp_path, update_layout="packed")).prepare(model)


def test_on_a_gpu_a_model_with_flash_attention_shares_prefixes_by_pytorchs(tmp_path, monkeypatch):
    monkeypatch.setattr(one_call, "is_on_this_machine", lambda: True)
    model = make_model("qwen3")
    model.config._attn_implementation = "flash_attention_2"
    UpdateLayout(make_args(tmp_path, update_layout="shared")).prepare(model)
    assert model.config._attn_implementation == PACKED_ATTENTION


def test_models_of_one_update_have_one_kind_of_attention(tmp_path):
    other = make_model("qwen3")
    other.config._attn_implementation = "flash_attention_2"
    layout = UpdateLayout(make_args(tmp_path, update_layout="packed"))
    layout.prepare(make_model("qwen3"))
    with pytest.raises(ValueError, match=r"update_layout='packed': critic_model has another attention"):
        layout.prepare(other, name="critic_model")


def test_a_model_that_looks_ahead_is_refused():
    model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    use_packed_attention(model)
    ids, mask, scored = forks()
    with pytest.raises(ValueError, match=r"update_layout: .*is_causal=False.*update_layout='grouped'"):
        model(**pack(ids % 9, mask, scored, share_prefixes=False).inputs)


def test_a_model_whose_attention_cannot_be_exchanged_is_not_told_to_exchange_it():
    with pytest.raises(
        ValueError, match=r"the model has an attention of its own, .* do not cover. Set update_layout="
    ):
        use_packed_attention(
            FalconModel(FalconConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        )


def test_a_model_without_attention_is_not_told_to_load_another_one():
    config = MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(ValueError, match=r"the kinds linear_attention, .* do not cover. Set update_layout='grouped'"):
        use_packed_attention(MambaModel(config))


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_a_model_that_keeps_the_layout_from_its_attention_is_refused_at_the_start(family, tmp_path):
    model = build(family, vocabulary=97, pad_token_id=0, eos_token_id=1)
    layout = UpdateLayout(make_args(tmp_path, update_layout="packed"))
    with pytest.raises(
        ValueError, match=r"ForCausalLM\) fails on packed rows.*Set update_layout='grouped' or 'padded'"
    ):
        layout.prepare(model)


@pytest.mark.parametrize("update_layout", ["packed", "shared"])
def test_a_model_whose_packed_rows_see_each_other_is_refused_at_the_start(update_layout, tmp_path, monkeypatch):
    model = build("qwen3", vocabulary=97, pad_token_id=0, eos_token_id=1)

    def forgetful(module, query, key, value, attention_mask, *, packed_layout=None, **options):
        return packed_attention(module, query, key, value, None, is_causal=True, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, PACKED_ATTENTION, forgetful)
    args = make_args(tmp_path, update_layout=update_layout)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM\) computes other hidden states in packed rows"):
        UpdateLayout(args).prepare(model)


def test_the_trial_of_packed_rows_leaves_the_model_as_it_was(tmp_path):
    model = build("qwen3", vocabulary=97, pad_token_id=0, eos_token_id=1).train()
    model.lm_head.eval()
    before, state = [module.training for module in model.modules()], torch.get_rng_state()
    args = make_args(tmp_path, update_layout="shared")
    UpdateLayout(args).prepare(model)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_whose_attention_takes_a_view_of_the_result_is_trained(tmp_path):
    model = build("afmoe", vocabulary=97, pad_token_id=0, eos_token_id=1)
    args = make_args(tmp_path, update_layout="packed")
    UpdateLayout(args).prepare(model)
