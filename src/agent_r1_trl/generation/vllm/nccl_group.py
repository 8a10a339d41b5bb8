"""A group of the trainer and the workers of one vLLM server, over NCCL: weights go from GPU to GPU.

vLLM's own communicator (`PyNcclCommunicator`) does the work. What differs from vLLM's weight-transfer engine is that
nothing waits without a limit, and how the members meet: the number under which NCCL's members find one another goes
over HTTP (`weight_transfer.py`), in place of a store at a port without a password.

One group holds one server, so a server that dies takes no other with it, and lasts for one transfer, so that it costs
no memory on a GPU while nothing is sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch

_POLL_S = 0.05
_ABORT_S = 5.0


class GroupError(ConnectionError):
    """NCCL failed, or a member of the group did not come, is gone or hangs."""


def describe_gpu(device: torch.device) -> dict[str, str] | None:
    """What other members must know of this process: its version of NCCL and its GPU. None: it cannot use NCCL."""
    if device.type != "cuda":
        return None
    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        version = NCCLLibrary().ncclGetVersion()
    except (ImportError, OSError, RuntimeError):
        return None
    return {"nccl": version, "gpu": str(torch.cuda.get_device_properties(device).uuid)}


def reason_against(trainer: dict[str, str] | None, workers: list[dict[str, str] | None]) -> str | None:
    """Why trainer and workers, of which `describe_gpu` says this, cannot form a group; None if they can."""
    if trainer is None:
        return "the trainer has no GPU, or vLLM with NCCL is not installed beside it"
    if not all(workers):
        return "the server runs on no GPU, or without NCCL"
    versions = {worker["nccl"] for worker in workers if worker} | {trainer["nccl"]}
    if len(versions) > 1:
        return f"trainer and server have different versions of NCCL ({', '.join(sorted(versions))})"
    gpus = [trainer["gpu"], *(worker["gpu"] for worker in workers if worker)]
    if len(set(gpus)) < len(gpus):
        return "two of the members share a GPU, which NCCL does not allow"
    return None


class NCCLGroup:
    """One member of a group; member 0, the trainer, sends to all others. After `timeout_s` a call fails."""

    def __init__(self, rank: int, size: int, device: torch.device, *, timeout_s: float):
        self._rank, self._size, self._device = rank, size, device
        self._timeout_s = timeout_s
        self._communicator: Any = None
        self._is_closed = False
        self.number: Future[bytes] = Future()
        """Under which the members find one another; member 0 hands it to the others."""
        # A stream of its own: a group that hangs must not hold up the others. Without a GPU (in tests) there is none.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def meet(self, number: bytes | None = None) -> None:
        """Return when all members are there; `number` is None in member 0, which makes it and gives `self.number`."""
        self._within_limit(lambda: self._meet(number))

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous tensors on the group's device, or receive into them; returns when they are there."""
        if self._device.type == "cuda":  # what they are made of, or what used their memory before, may be in flight
            torch.cuda.current_stream(self._device).synchronize()
        self._within_limit(lambda: self._broadcast(tensors))

    def close(self) -> None:
        """Leave the group; whatever waits in it ends."""
        self._is_closed = True
        self.number.cancel()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            nccl = communicator.nccl
            leave = getattr(nccl, "ncclCommAbort", nccl.ncclCommDestroy)
            leaving = threading.Thread(target=leave, args=(communicator.comm,), daemon=True)  # it may hang itself
            leaving.start()
            leaving.join(_ABORT_S)

    def _meet(self, number: bytes | None) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        rank, size, made = self._rank, self._size, self.number

        class Meeting(StatelessProcessGroup):
            """What a communicator asks of a process group: who it is, and one object from member 0."""

            def __init__(self) -> None:
                self.rank, self.world_size = rank, size

            def broadcast_obj(self, obj: Any, src: int) -> Any:
                if number is not None:
                    return type(obj).from_buffer_copy(number)
                made.set_result(bytes(obj))
                return obj

        communicator = PyNcclCommunicator(Meeting(), device=self._device)
        if communicator.disabled:
            raise GroupError("vLLM found no NCCL library, or VLLM_DISABLE_PYNCCL is set")
        self._communicator = communicator
        if self._is_closed:  # it took too long
            self.close()

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        communicator = self._communicator
        if communicator is None:  # closed meanwhile
            return
        with torch.accelerator.device_index(self._device.index):
            for tensor in tensors:
                communicator.broadcast(tensor.view(-1).view(torch.uint8), src=0, stream=self._stream)
            if self._stream is not None:
                self._stream.synchronize()

    def _within_limit(self, work: Callable[[], None]) -> None:
        """Work in a thread: NCCL waits for the other members for ever."""
        result: Future[None] = Future()

        def run() -> None:
            try:
                work()
                result.set_result(None)
            except Exception as error:
                result.set_exception(error)

        deadline = time.monotonic() + self._timeout_s
        if not self._is_closed:
            threading.Thread(target=run, name="nccl", daemon=True).start()
        while not (is_done := wait([result], _POLL_S).done) and not self._is_closed and time.monotonic() < deadline:
            pass
        if self._is_closed or not is_done:
            self.close()
            raise GroupError(f"a member of the NCCL group is gone, or took longer than {self._timeout_s:g} s")
        error = result.exception()
        if error is not None:
            self.close()
            raise GroupError(f"NCCL: {type(error).__name__}: {error}") from error
