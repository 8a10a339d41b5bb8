"""One call of the attention for all segments of a packed row equals a call for each segment.

The operators are those of PyTorch, with kernels that compute on a CPU (`tests/fake_kernels.py`).
"""

from itertools import pairwise

import pytest
import torch

from agent_r1_trl.update import one_call
from agent_r1_trl.update.packed_attention import packed_attention
from agent_r1_trl.update.packing import pack
from tests.fake_kernels import CALLED, KERNELS, in_one_call
from tests.update.test_packing import assert_packed_equals_padded, forked, forks, ragged

FORMS = {
    "plain": {},
    "window": {"window": 3},
    "a window of one token": {"window": 1},
    "a window wider than all": {"window": 1000},
    "shared key heads": {"key_heads": 2},
    "one key head": {"key_heads": 1},
    "wide heads": {"dim": 256},
    "another scale": {"scaling": 0.3},
}


def states_of(batch, *, heads=4, key_heads=4, dim=64, value_dim=None, dtype=torch.float64):
    """Queries, keys and values as a model has them: views of (1, N, heads, D)."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = batch.input_ids.shape[1]
    states = []
    for num_heads, width in ((heads, dim), (key_heads, dim), (key_heads, value_dim or dim)):
        whole = torch.randn(1, num_tokens, num_heads, width, generator=generator, dtype=dtype)
        states.append(whole.transpose(1, 2).requires_grad_())
    return states


def attention_and_gradients(states, batch, *, window=None, scaling=None):
    module = torch.nn.Module()
    output, _ = packed_attention(
        module, *states, None, packed_layout=batch.layout, sliding_window=window, scaling=scaling
    )
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return output, *torch.autograd.grad((output * weights).sum(), states)


@pytest.mark.parametrize(("rows", "share_prefixes"), [(ragged, False), (ragged, True), (forked, True), (forks, True)])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float64) for form in FORMS), ("window", torch.float32), ("plain", torch.float32)],
)
@pytest.mark.parametrize("kind", KERNELS)
def test_outputs_and_gradients_are_those_of_the_segments(kind, form, rows, share_prefixes, dtype, monkeypatch):
    options = dict(FORMS[form])
    asked = {name: options.pop(name) for name in ("window", "scaling") if name in options}
    found = {}
    for each in (None, kind):
        with in_one_call(monkeypatch, each):
            batch = pack(*rows(), share_prefixes=share_prefixes)
            assert (batch.layout.offsets is None) == (each is None)
            CALLED.clear()
            found[each] = attention_and_gradients(states_of(batch, dtype=dtype, **options), batch, **asked)
            assert ([] if each is None else [f"{kind} forward", f"{kind} backward"]) == CALLED
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, expected in zip(found[kind], found[None], strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def test_values_may_be_narrower_than_keys(monkeypatch):
    found = []
    for kind in (None, "efficient"):
        with in_one_call(monkeypatch, kind):
            batch = pack(*forked(), share_prefixes=True)
            found.append(attention_and_gradients(states_of(batch, dim=24, value_dim=16), batch))
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-12)


def test_offsets_are_those_of_the_tree(monkeypatch):
    """Five rows that begin alike: 1 2 3 4 .., then 5 6 or 7 and so on (`forks`)."""
    with in_one_call(monkeypatch, "flash"):
        layout = pack(*forks(), share_prefixes=True).layout
    offsets, ends = layout.offsets, [0]
    places = []
    for segment in layout.segments:
        seen = [place for start, end in segment.prefix for place in range(start, end)]
        places += [*seen, *range(segment.start, segment.end)]
        ends.append(len(places))
    assert offsets.key_places.tolist() == places
    assert offsets.key_ends.tolist() == ends
    assert offsets.query_ends.tolist() == [0, *(segment.end for segment in layout.segments)]
    assert offsets.longest_keys == max(end - start for start, end in pairwise(ends))


def test_rows_without_a_common_beginning_are_not_copied(monkeypatch):
    with in_one_call(monkeypatch, "flash"):
        offsets = pack(*ragged(), share_prefixes=False).layout.offsets
    assert offsets.key_places is None
    assert offsets.key_ends.tolist() == offsets.query_ends.tolist()


def test_gradients_of_a_shared_prefix_are_added_up_in_float32():
    """Of 4096 copies of one key, each with the gradient 1: bfloat16 stops counting at 256."""
    whole = torch.zeros(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    copies = one_call._Gather.apply(whole, torch.zeros(4096, dtype=torch.int32))
    copies.sum().backward()
    assert whole.grad.unique().tolist() == [4096.0]


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("rows", [ragged, forked])
@pytest.mark.parametrize(
    ("model", "share_prefixes", "checkpointing"),
    [
        ("qwen3", True, False),
        ("qwen3", False, True),
        ("windows in some layers", True, True),
        ("windows in all layers", True, False),
    ],
)
def test_a_model_computes_what_it_does_on_padded_rows(model, share_prefixes, checkpointing, rows, kind, monkeypatch):
    with in_one_call(monkeypatch, kind):
        CALLED.clear()
        assert_packed_equals_padded(model, rows, share_prefixes=share_prefixes, checkpointing=checkpointing)
        assert len(CALLED) >= 4, "forward and backward of two layers"


def test_under_autocast_states_are_those_of_its_dtype(monkeypatch):
    seen = []

    def look(queries, keys, values, offsets, *others):
        seen.append({queries.dtype, keys.dtype, values.dtype})
        return one_call.flash_call(queries, keys, values, offsets, *others)

    monkeypatch.setitem(KERNELS, "look", look)
    with in_one_call(monkeypatch, "look"), torch.autocast("cpu", torch.bfloat16):
        batch = pack(*forked(), share_prefixes=True)
        attention_and_gradients(states_of(batch, dtype=torch.float32), batch)
    assert seen == [{torch.bfloat16}]


# -------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim", "capability", "expected"),
    [
        (torch.bfloat16, 64, 64, (9, 0), one_call.flash_call),
        (torch.float16, 128, 128, (8, 0), one_call.flash_call),
        (torch.bfloat16, 256, 256, (10, 0), one_call.flash_call),
        (torch.float32, 64, 64, (9, 0), one_call.efficient_call),
        (torch.float16, 64, 64, (7, 5), one_call.efficient_call),
        (torch.bfloat16, 192, 128, (9, 0), one_call.efficient_call),
        (torch.bfloat16, 264, 264, (9, 0), one_call.efficient_call),
        (torch.bfloat16, 20, 20, (9, 0), None),
        (torch.float64, 64, 64, (9, 0), None),
    ],
)
def test_the_kernel_is_that_of_dtype_head_and_card(dtype, dim, value_dim, capability, expected, monkeypatch):
    monkeypatch.setattr(one_call, "has_one_call", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query, value = (torch.zeros(1, 2, 3, width, dtype=dtype) for width in (dim, value_dim))
    assert one_call.choose_kernel(query, query, value) is expected


def test_a_cpu_has_a_call_for_each_segment():
    query = torch.zeros(1, 2, 3, 64)
    assert one_call.choose_kernel(query, query, query) is None
    assert pack(*forked(), share_prefixes=True).layout.offsets is None


def test_a_head_that_no_kernel_takes_is_computed_segment_by_segment(monkeypatch):
    batches = [pack(*forked(), share_prefixes=True)]
    monkeypatch.setattr(one_call, "has_one_call", lambda device: True)
    batches.append(pack(*forked(), share_prefixes=True))
    expected, found = (attention_and_gradients(states_of(batch, dim=20), batch) for batch in batches)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
