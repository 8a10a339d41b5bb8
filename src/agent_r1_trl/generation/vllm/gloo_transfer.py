"""Weights from the trainer to the workers of a vLLM server, over torch's gloo.

Why not one of vLLM's own transfers: each needs a GPU on both sides (NCCL, CUDA IPC), and NCCL refuses two ranks on one
device. Gloo needs sockets only, so what the tests run on a CPU is what runs elsewhere. The price: on a GPU the weights
pass through host memory.

A transfer is a row of buckets, each two lengths, a header of names, dtypes and shapes, and the bytes; then an empty
one. The lengths travel with the data, so neither side has to know beforehand what comes, and a policy that is merged
layer by layer is never in memory twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

_BUCKET_BYTES = 64 * 2**20

Named = tuple[str, torch.Tensor]


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> TCPStore:
    """The meeting point of both sides; the trainer serves it (port 0: any free one).

    torch's default process group is not involved: the trainer's own, if there is one, stays as it is.
    """
    return TCPStore(host, port, is_master=is_server, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def open_group(store: Store, name: str, *, rank: int, size: int, timeout_s: float) -> Any:
    """Join the group of one server: rank 0 is the trainer, the workers follow. Returns when all are there."""
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, timedelta(seconds=timeout_s))


def send_weights(groups: Sequence[Any], weights: Iterable[Named]) -> None:
    """Send every weight to every group, in order.

    Args:
        groups: from `open_group`, as rank 0.
        weights: name and tensor, on any device.
    """
    try:
        for bucket in _buckets(weights):
            header = json.dumps([(name, str(value.dtype)[6:], list(value.shape)) for name, value in bucket]).encode()
            payload = torch.cat([_as_bytes(value) for _, value in bucket])
            _send_to_all(groups, torch.tensor([len(header), len(payload)]))
            _send_to_all(groups, torch.tensor(list(header), dtype=torch.uint8))
            _send_to_all(groups, payload)
    finally:  # the other side waits for this, also when a weight could not be made
        _send_to_all(groups, torch.tensor([0, 0]))


def receive_weights(group: Any) -> Iterator[Named]:
    """What `send_weights` sends, one weight at a time, on the CPU. Iterate to the end, or the next transfer fails."""
    while True:
        header_size, payload_size = _receive(group, torch.empty(2, dtype=torch.long)).tolist()
        if header_size == 0:
            return
        header = _receive(group, torch.empty(header_size, dtype=torch.uint8))
        payload = _receive(group, torch.empty(payload_size, dtype=torch.uint8))
        start = 0
        for name, dtype_name, shape in json.loads(bytes(header.tolist())):
            dtype = getattr(torch, dtype_name)
            end = start + dtype.itemsize * torch.Size(shape).numel()
            yield name, payload[start:end].clone().view(dtype).reshape(shape)  # a copy is aligned, a slice need not be
            start = end


def _buckets(weights: Iterable[Named]) -> Iterator[list[Named]]:
    bucket: list[Named] = []
    size = 0
    for name, value in weights:
        if bucket and size + value.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, value))
        size += value.nbytes
    if bucket:
        yield bucket


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _send_to_all(groups: Sequence[Any], tensor: torch.Tensor) -> None:
    for work in [group.broadcast(tensor, 0) for group in groups]:
        work.wait()


def _receive(group: Any, buffer: torch.Tensor) -> torch.Tensor:
    group.broadcast(buffer, 0).wait()
    return buffer
