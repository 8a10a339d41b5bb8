"""Weights as pieces of bytes: the same bits in the same order, with one buffer and one weight at a time."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl.generation.vllm.weight_stream import pack, parts, unpack
from tests.effort import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]


def weight(shape, dtype, seed=0):
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(shape)


def bits(value):
    return value.contiguous().reshape(-1).view(torch.uint8).tolist()


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=12),
    st.sampled_from([1, 16, 40, 64, 1000]),
)
def test_every_weight_arrives_bit_for_bit_in_order(kinds, part_bytes):
    weights = [(str(index), weight(shape, dtype, index)) for index, (shape, dtype) in enumerate(kinds)]
    found = []
    for piece in pack(weights, part_bytes=part_bytes):
        together = torch.cat([part.clone() for part in parts(piece.payload, part_bytes)] or [piece.payload])
        found += [(name, value.clone()) for name, value in unpack(piece._replace(payload=together))]
    assert [(name, value.dtype, value.shape) for name, value in found] == [
        (name, value.dtype, value.shape) for name, value in weights
    ]
    assert [bits(value) for _, value in found] == [bits(value) for _, value in weights]


def test_small_weights_share_pieces_and_a_large_one_is_read_where_it_lies():
    large = torch.arange(100.0)
    weights = [("a", torch.ones(3)), ("b", torch.ones(5).bfloat16()), ("c", large), ("d", torch.zeros(1))]
    pieces = []
    for piece in pack(weights, part_bytes=64):
        pieces.append([entry[0] for entry in piece.entries])
        if pieces[-1] == ["c"]:
            assert piece.payload.data_ptr() == large.data_ptr()
            assert [len(part) for part in parts(piece.payload, 64)] == [64] * 6 + [16]
    assert pieces == [["a", "b"], ["c"], ["d"]]


def test_a_view_that_is_not_contiguous_is_sent_as_it_reads():
    base = torch.arange(12.0).reshape(3, 4)
    ((_, value),) = [item for piece in pack([("t", base.T)]) for item in unpack(piece)]
    assert torch.equal(value, base.T)


@pytest.mark.parametrize("size", [8, 1000])
def test_one_weight_at_a_time_is_alive(size):
    """As where adapters are merged, or shards gathered, for the transfer alone."""
    alive, most = [], 0

    def made():
        nonlocal most
        for index in range(20):
            value = torch.full((size,), float(index))
            alive.append(weakref.ref(value))
            yield str(index), value
            del value
            most = max(most, sum(reference() is not None for reference in alive))

    for piece in pack(made(), part_bytes=256):
        del piece
    assert most <= 1
