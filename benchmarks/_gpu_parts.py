"""Two parts of `gpu.py`: attention kernels against a naive loop, and where an optimizer step spends its time."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import train_step
from torch.profiler import ProfilerActivity, profile

Row = dict[str, Any]

# ---------------------------------------------------------------- kernels


class Heads(NamedTuple):
    """A layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def name(self) -> str:
        """For tables."""
        text = f"{self.num_heads} heads, {self.num_kv_heads} key heads of {self.head_dim}"
        return text if self.window is None else f"{text}, window {self.window}"


HEADS = (Heads(14, 2, 64), Heads(28, 4, 128), Heads(8, 1, 256), Heads(8, 2, 128, window=48))
TOY_HEADS = (Heads(4, 2, 16), Heads(4, 1, 8, window=5))
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative error of an output or gradient, in the norm over the whole of it."""
ROWS = ("ragged", "shared", "single tokens")


def run_kernels(args: argparse.Namespace) -> Iterator[Row]:
    """The attention of packed rows, forward and backward, against attention in float64 with the whole mask."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = [torch.float32] if device == "cpu" else list(TOLERANCES)
    for heads, rows, dtype in itertools.product(TOY_HEADS if args.toy else HEADS, ROWS, dtypes):
        row: Row = {"name": f"{heads.name}, {rows}, {str(dtype).removeprefix('torch.')}"}
        try:
            errors = kernel_errors(heads, make_layout(rows, device, toy=args.toy), dtype, device)
            worst = max(errors.values())
            yield row | errors | {"ok": worst <= TOLERANCES[dtype]}
        except Exception as error:
            yield row | {"ok": False, "error": f"{type(error).__name__}: {error}"[:200]}


def make_layout(rows: str, device: str, *, toy: bool) -> Any:
    """Layout of a packed row: of different lengths, behind one prompt, or of segments of one token each."""
    from agent_r1_trl.update.packing import pack

    if rows == "single tokens":
        ids = torch.arange(1, 9, device=device).view(4, 2)
        return pack(ids, torch.ones_like(ids), torch.ones_like(ids[:, 1:]).bool(), share_prefixes=False).layout
    num_rows, num_prompt, longest = (3, 16, 24) if toy else (8, 160, 180)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 1000, (num_rows, num_prompt + longest), generator=generator)
    ids[:, :num_prompt] = ids[0, :num_prompt].clone()
    mask = torch.ones_like(ids)
    for row in range(num_rows):
        mask[row, num_prompt + longest // (row + 1) :] = 0
    ids, mask = ids.to(device), mask.to(device)
    return pack(ids, mask, mask[:, num_prompt:].bool(), share_prefixes=rows == "shared").layout


def kernel_errors(heads: Heads, layout: Any, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Relative errors of the output and of the three gradients."""
    from agent_r1_trl.update.packed_attention import packed_attention

    num_tokens = sum(layout.sizes)
    generator = torch.Generator().manual_seed(1)
    sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    exact = [torch.randn(1, num, num_tokens, heads.head_dim, generator=generator).to(dtype).double() for num in sizes]
    direction = torch.randn(1, num_tokens, heads.num_heads, heads.head_dim, generator=generator).to(dtype)
    found = [states.to(device, dtype).requires_grad_() for states in exact]
    layer = SimpleNamespace(is_causal=True)
    output, _ = packed_attention(layer, *found, None, packed_layout=layout, sliding_window=heads.window)  # type: ignore[arg-type]
    output.backward(direction.to(device))
    exact = [states.requires_grad_() for states in exact]
    expected = naive_attention(*exact, layout, heads.window)
    expected.backward(direction.double())
    size = float(direction.double().norm())
    errors = {"output": relative_error(output, expected, size)}
    for name, ours, other in zip(("queries", "keys", "values"), found, exact, strict=True):
        errors[name] = relative_error(ours.grad, other.grad, size)
    return errors


def naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Any, window: int | None
) -> torch.Tensor:
    """(1, N, heads, D) by one softmax over all N tokens, of which each sees those of its own row alone."""
    num_tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    is_seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for segment in layout.segments:
        before = [place for start, end in segment.prefix for place in range(start, end)]
        for token in range(segment.start, segment.end):
            seen = [*before, *range(segment.start, token + 1)]
            is_seen[token, seen if window is None else seen[-window:]] = True
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    return (scores.masked_fill(~is_seen, -torch.inf).softmax(dim=3) @ value).transpose(1, 2)


def relative_error(found: torch.Tensor | None, expected: torch.Tensor | None, size: float) -> float:
    """|found - expected| / |expected|; over `size` where 0 is expected, as of the queries of single tokens."""
    assert found is not None and expected is not None
    distance = float((found.detach().cpu().double() - expected.detach()).norm())
    return distance / (float(expected.detach().norm()) or size)


# ---------------------------------------------------------------- profile


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
PROFILED = ("trl", "shared", "tokens")


def run_profile(args: argparse.Namespace, words: list[str]) -> Iterator[Row]:
    """One optimizer step of each layout in PyTorch's profiler; on a CPU without a device's share of the time."""
    for layout in PROFILED[:1] + PROFILED[-1:] if args.toy else PROFILED:
        try:
            options = train_step.parse_arguments([*words, "--only", layout])
            yield {"name": layout} | profile_step(options, layout)
        except Exception as error:
            yield {"name": layout, "ok": False, "error": f"{type(error).__name__}: {error}"[:200]}


def profile_step(options: argparse.Namespace, layout: str) -> Row:
    """Seconds of a step, the share in which the device waited for the host, and the kernel that takes longest."""
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with tempfile.TemporaryDirectory() as folder:
        trainer, batch = train_step.prepare(options, layout, folder)
        for _ in range(2):  # Triton compiles, cuBLAS chooses
            timed_step(trainer, batch)
        seconds = timed_step(trainer, batch)
        with profile(activities=activities) as recorded:
            timed_step(trainer, batch)
    events = recorded.events()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [event for event in events if has_gpu and event.device_type == cuda]
    totals: dict[str, float] = {}
    for event in kernels or events:
        totals[event.name] = totals.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
    longest = max(totals, key=lambda name: totals[name])
    row: Row = {"seconds": seconds, "longest": longest[:60], "longest_s": totals[longest], "ok": True}
    if has_gpu:
        busy = sum(totals.values())
        launches = sum(event.name.startswith(LAUNCHES) for event in events)
        row |= {"launches": launches, "device_s": busy, "idle_share": max(0.0, 1 - busy / seconds)}
    return row


def timed_step(trainer: Any, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of an optimizer step, until the device is done."""
    begun = time.perf_counter()
    train_step.optimizer_step(trainer, batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun
