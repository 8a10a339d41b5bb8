"""Every layout of the update gives the padded batch's log-probs, entropies, losses and gradients."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from agent_r1_trl.update import packing
from agent_r1_trl.update.batches import take_rows, trim_padding
from agent_r1_trl.update.layout import regroup
from agent_r1_trl.update.packed_attention import SEGMENTS, use_packed_attention
from agent_r1_trl.update.packing import PackedSegment, pack, packed_log_probs
from tests.fake_kernels import in_one_call
from tests.trainers.helpers import loss_and_gradients, make_trainer, scored_batch

# -------------------------------------------------------------------- the row


def by_hand():
    """Three rows: two with the prompt [1, 2], one with [3, 4, 5]; completions of 2, 1 and 3 tokens."""
    ids = torch.tensor([[0, 1, 2, 10, 11, 0], [0, 1, 2, 12, 0, 0], [3, 4, 5, 13, 14, 15]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    scored = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1]])
    return ids, mask, scored


def test_a_packed_row_holds_the_tokens_up_to_the_last_one_that_predicts():
    batch = pack(*by_hand(), share_prefixes=False)
    assert batch.input_ids.tolist() == [[1, 2, 10, 1, 2, 3, 4, 5, 13, 14]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4]]
    assert batch.layout.segments == [PackedSegment(0, 3), PackedSegment(3, 5), PackedSegment(5, 10)]


def test_rows_with_the_same_prompt_share_one_copy_of_it():
    batch = pack(*by_hand(), share_prefixes=True)
    assert batch.input_ids.tolist() == [[1, 2, 10, 3, 4, 5, 13, 14]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.layout.segments == [PackedSegment(0, 2), PackedSegment(2, 3, ((0, 2),)), PackedSegment(3, 8)]


def forks():
    """Four rows of one trajectory that fork twice, one of them twice, and a row that nothing is scored in.

    1 2 | 3 4 5 6, 1 2 | 3 4 7, 1 2 | 8 9 9 (twice), 1 2 | 8 5 5
    """
    completions = [[3, 4, 5, 6], [8, 9, 9, 0], [3, 4, 7, 0], [8, 9, 9, 0], [8, 5, 5, 0]]
    ids = torch.tensor([[1, 2, *completion] for completion in completions])
    scored = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    return ids, (ids > 0).long(), scored


def test_forks_of_a_trajectory_are_the_branches_of_a_tree():
    batch = pack(*forks(), share_prefixes=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert batch.layout.segments == [
        PackedSegment(0, 2), PackedSegment(2, 4, ((0, 2),)), PackedSegment(4, 5, ((0, 4),)),
        PackedSegment(5, 7, ((0, 2),)),
    ]  # fmt: skip


def test_a_long_branch_is_computed_in_steps(monkeypatch):
    monkeypatch.setattr(packing, "STEP_ON_CPU", 2)
    ids = torch.tensor([[1, 1, 1, 2, 3, 4, 5, 6, 9], [1, 1, 1, 7, 8, 9, 9, 9, 9]])
    batch = pack(ids, torch.ones_like(ids), torch.tensor([[1] * 6, [1] + [0] * 5]), share_prefixes=True)
    assert batch.input_ids.tolist() == [[1, 1, 1, 2, 3, 4, 5, 6]]
    assert batch.layout.segments == [
        PackedSegment(0, 3), PackedSegment(3, 5, ((0, 3),)), PackedSegment(5, 7, ((0, 3), (3, 5))),
        PackedSegment(7, 8, ((0, 3), (3, 7))),
    ]  # fmt: skip
    assert batch.layout.seen == [[], [0], [0, 1], [0, 1, 2]]


def test_the_head_reads_a_token_that_rows_share_once():
    batch = pack(*forks(), share_prefixes=True)
    pairs = list(zip(batch.layout.sources.tolist(), batch.labels[0].tolist(), strict=True))
    assert pairs == [(2, 4), (3, 7), (4, 6), (5, 9), (6, 9)]
    spread = batch.layout.spread(torch.tensor([[10.0, 20.0, 30.0, 40.0, 50.0]]))
    assert spread.tolist() == [[0, 0, 0, 30], [0, 40, 50, 0], [0, 10, 20, 0], [0, 40, 50, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_a_batch_that_nothing_is_scored_in_costs_one_token(share_prefixes):
    ids, mask, scored = by_hand()
    batch = pack(ids, mask, scored * 0, share_prefixes=share_prefixes)
    assert batch.input_ids.tolist() == [[1]]
    assert batch.labels.shape == (1, 0)
    assert not batch.layout.spread(torch.zeros(1, 0)).any()


# -------------------------------------------------------------------- log-probs, entropies, gradients


SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


SLIDING = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_model(family, **options):
    torch.manual_seed(0)
    config, model = FAMILIES[family]
    policy = model(config(**SHAPE | options, head_dim=8))
    for parameter in policy.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 0.2)
    add_fused_lm_head(policy, temperature=0.7, outputs=("log_probs", "entropy"))
    return policy


def ragged(seed=0):
    """Six rows, two groups of three; prompts of 3 and 5 tokens, completions of 1 to 7."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SHAPE["vocab_size"], (6, 12), generator=generator)
    mask = torch.ones_like(ids)
    ids[:3, :5], ids[3:, :5] = ids[0, :5].clone(), ids[3, :5].clone()
    mask[:3, :2] = 0
    for row, length in enumerate([7, 3, 1, 5, 2, 4]):
        mask[row, 5 + length :] = 0
    return ids, mask, (torch.rand(6, 7, generator=generator) < 0.6) & mask[:, 5:].bool()


def forked(seed=0):
    """Twelve rows of two trajectories that fork again and again, and a copy of one of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SHAPE["vocab_size"], (12, 20), generator=generator)
    for row in range(1, 12):
        parent = int(torch.randint(0, row, (1,), generator=generator))
        common = int(torch.randint(4, 20, (1,), generator=generator)) if row != 6 else 0
        ids[row, :common] = ids[parent, :common]
    ids[11] = ids[4]
    return ids, torch.ones_like(ids), torch.rand(12, 16, generator=generator) < 0.4


MODELS = {
    "qwen3": ("qwen3", {}),
    "windows in some layers": ("qwen3", SLIDING),
    "windows in all layers": ("mistral", {"sliding_window": 5}),
    "llama": ("llama", {}),
}
OTHERS = (("llama", False), ("qwen3", True))


def gradients_of(model, log_probs, entropies, weights):
    model.zero_grad()
    ((log_probs * weights[0] + entropies * weights[1]).sum() / 10).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_packed_equals_padded(kind, rows, *, share_prefixes, checkpointing):
    family, options = MODELS[kind]
    model = make_model(family, **options).train()
    ids, mask, scored = rows()
    width = scored.shape[1]
    weights = torch.randn(2, *scored.shape) * scored
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    expected = output.log_probs[:, -width:], output.entropy[:, -width:]
    gradients = gradients_of(model, *expected, weights)

    assert use_packed_attention(model, share_prefixes=share_prefixes) == SEGMENTS
    if checkpointing:
        model.gradient_checkpointing_enable()
    packed = packed_log_probs(model, model.base_model, pack(ids, mask, scored, share_prefixes=share_prefixes))
    for ours, theirs in zip(packed, expected, strict=True):
        torch.testing.assert_close(ours, theirs * scored, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients_of(model, *packed, weights), gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("share_prefixes", "step"), [(False, 100), (True, 100), (True, 2)], ids=["packed", "shared", "shared, in steps"]
)
@pytest.mark.parametrize("rows", [ragged, forked])
@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        ("qwen3", False),
        ("windows in some layers", False),
        ("windows in all layers", False),
        ("llama", True),
        *(pytest.param(*both, marks=pytest.mark.matrix) for both in OTHERS),
    ],
)
def test_a_packed_forward_equals_the_padded_one(kind, share_prefixes, step, checkpointing, rows, monkeypatch):
    monkeypatch.setattr(packing, "STEP_ON_CPU", step)
    assert_packed_equals_padded(kind, rows, share_prefixes=share_prefixes, checkpointing=checkpointing)


def test_a_prepared_model_does_what_it_did_without_a_layout():
    model = make_model("qwen3").eval()
    ids, mask, _ = ragged()
    expected = model(input_ids=ids, attention_mask=mask).logits
    use_packed_attention(model)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, expected, atol=0, rtol=0)


def test_the_attention_function_is_not_saved(tmp_path):
    model = make_model("qwen3")
    use_packed_attention(model)
    model.save_pretrained(tmp_path)
    assert Qwen3ForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


# -------------------------------------------------------------------- micro-batches


def micro_batches(prompts, lengths):
    """Two micro-batches of two rows each; prompts padded on the left, completions of 1s."""
    prompts, lengths = torch.tensor(prompts), torch.tensor(lengths)
    mask = (torch.arange(9) < lengths.unsqueeze(1)).long()
    rows = {
        "prompt_ids": prompts,
        "prompt_mask": (prompts > 0).long(),
        "completion_ids": mask,
        "completion_mask": mask,
    }
    rows |= {"num_items_in_batch": torch.tensor(5.0), "old_per_token_logps": None}
    return [take_rows(rows, [0, 1]), take_rows(rows, [2, 3])]


def test_rows_of_like_length_meet_and_stay_in_their_optimizer_step():
    buffer = micro_batches([[0, 1]] * 4, [2, 8, 7, 3]) + micro_batches([[0, 1]] * 4, [1, 9, 6, 4])
    grouped = regroup(buffer, steps_per_update=2, by_beginning=False)
    lengths = [inputs["completion_mask"].sum(dim=1).tolist() for inputs in grouped]
    assert lengths == [[8, 7], [3, 2], [9, 6], [4, 1]]
    assert all(inputs["num_items_in_batch"] == 5 and inputs["old_per_token_logps"] is None for inputs in grouped)


def test_contexts_that_repeat_each_other_meet_whatever_their_padding():
    buffer = micro_batches([[0, 0, 5, 6], [0, 0, 0, 4], [5, 6, 1, 8], [0, 4, 1, 9]], [1] * 4)
    found = [inputs["prompt_ids"].tolist() for inputs in regroup(buffer, steps_per_update=2, by_beginning=True)]
    assert found == [[[0, 0, 0, 4], [0, 4, 1, 9]], [[0, 0, 5, 6], [5, 6, 1, 8]]]


def test_columns_of_padding_are_cut():
    inputs, _ = micro_batches([[0, 1], [0, 2]] * 2, [2, 4, 9, 9])
    trimmed = trim_padding({**inputs, "advantages": torch.ones(2, 9)})
    assert trimmed["prompt_ids"].tolist() == [[1], [2]]
    assert trimmed["completion_ids"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert trimmed["advantages"].shape == (2, 4)


# -------------------------------------------------------------------- the trainers


@pytest.mark.parametrize("kernel", [None, "flash", "efficient"])
def test_a_lora_run_packs(tmp_path, kernel, monkeypatch):
    """Next to a reference, the model without its adapter."""
    from peft import LoraConfig

    losses = []
    for layout in ("padded", "shared"):
        torch.manual_seed(0)
        trainer = make_trainer(
            tmp_path / layout, update_layout=layout, beta=0.1,
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        )  # fmt: skip
        with in_one_call(monkeypatch, kernel):
            losses.append(loss_and_gradients(trainer, scored_batch(trainer)))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=1e-5)
