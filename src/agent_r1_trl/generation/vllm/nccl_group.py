"""A group of the trainer and the workers of one vLLM server, over NCCL: weights go from GPU to GPU.

vLLM's own communicator (`PyNcclCommunicator`) does the work. What differs from vLLM's weight-transfer engine, and from
TRL's client, is how the members meet: those open a store at a port without a password and read pickles from it. Here
the number under which NCCL's members find one another goes over the connections on which trainer and worker have
proved that they know this transfer's token; NCCL turns away who does not know the number.

One group holds one server, so a server that dies takes no other with it, and lasts for one transfer, so that it costs
no memory on a GPU while nothing is sent.

Covered here: who can be in a group, meeting, broadcasting, giving up. Not covered: what is sent and when
(`weight_transfer.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

_POLL_S = 2e-4
_MEETING_POLL_S = 0.05
_ABORT_S = 5.0


class GroupError(ConnectionError):
    """The members did not meet, or one is gone."""


# -------------------------------------------------------------------- who can be in a group


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
    """Why trainer and workers cannot form a group, or None if they can.

    Args:
        trainer: what `describe_gpu` says there.
        workers: the same of each worker of a server.
    """
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


# -------------------------------------------------------------------- the group


class NCCLGroup:
    """Member 0 (the trainer) sends bytes to all others. Use `open_group` to make one."""

    def __init__(self, communicator: Any, device: torch.device):
        self._communicator = communicator
        self._line = DeviceLine(device)

    def broadcast(self, part: torch.Tensor, *, timeout_s: float, is_broken: Callable[[], bool]) -> None:
        """Send bytes to the other members, or receive them; returns when they are there.

        Args:
            part: (num_bytes,) uint8, on the group's device.
            timeout_s: after which the group is given up.
            is_broken: whether another member is known to be gone.

        Raises:
            GroupError: a member is gone or hangs; the group is closed.
        """
        deadline = time.monotonic() + timeout_s
        communicator = self._communicator
        if communicator is None:
            raise GroupError("the NCCL group was closed, because a member is gone")
        communicator.broadcast(part, src=0, stream=self._line.begin())
        self._line.end()
        while not self._line.is_done():
            if is_broken() or time.monotonic() > deadline:
                self.close()
                raise GroupError("a member of the NCCL group is gone, or took too long")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Free the group, whatever the other members do."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            # Aborting does not wait for the others; it can still hang in the driver, which nobody should wait for.
            thread = threading.Thread(target=_abort, args=(communicator,), name="nccl-abort", daemon=True)
            thread.start()
            thread.join(_ABORT_S)


def open_group(
    rank: int,
    size: int,
    device: torch.device,
    share: Callable[[bytes], bytes],
    *,
    timeout_s: float,
    is_hopeless: Callable[[], bool] = lambda: False,
) -> NCCLGroup:
    """Meet the other members.

    Args:
        rank: of this member; 0 is the trainer.
        size: number of members.
        device: GPU of this member.
        share: hands the number of member 0 to the others: there it sends what it is given, elsewhere it returns what
            came.
        timeout_s: for all of it.
        is_hopeless: whether another member is known not to come.

    Raises:
        GroupError: not everybody came in time, or NCCL cannot be used.
    """
    meeting: Future[Any] = Future()

    def meet() -> None:
        try:
            meeting.set_result(_meet(rank, size, device, share))
        except Exception as error:
            meeting.set_exception(error)

    threading.Thread(target=meet, name="nccl-meeting", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not wait([meeting], timeout=_MEETING_POLL_S).done:
        if is_hopeless() or time.monotonic() > deadline:
            meeting.add_done_callback(_abort_late)
            raise GroupError(f"the members of the NCCL group did not meet within {timeout_s:g} s")
    error = meeting.exception()
    if error is not None:
        raise GroupError(f"NCCL: {type(error).__name__}: {error}") from error
    return NCCLGroup(meeting.result(), device)


def _abort_late(meeting: Future[Any]) -> None:
    if meeting.exception() is None:
        _abort(meeting.result())


def _meet(rank: int, size: int, device: torch.device, share: Callable[[bytes], bytes]) -> Any:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    class Meeting(StatelessProcessGroup):
        """What a communicator asks of a process group: who it is, and one object from member 0."""

        def __init__(self) -> None:
            self.rank, self.world_size = rank, size

        def broadcast_obj(self, obj: Any, src: int) -> Any:
            return type(obj).from_buffer_copy(share(bytes(obj)))

    communicator = PyNcclCommunicator(Meeting(), device=device)
    if communicator.disabled:
        raise GroupError("vLLM found no NCCL library, or VLLM_DISABLE_PYNCCL is set")
    return communicator


def _abort(communicator: Any) -> None:
    nccl = communicator.nccl
    getattr(nccl, "ncclCommAbort", nccl.ncclCommDestroy)(communicator.comm)


class DeviceLine:
    """The order of a group's work on its GPU: after what was asked of the GPU before, and watched from here."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()

    def begin(self) -> Any:
        """The stream for the group's next work, which comes after all that the GPU was asked for before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._stream

    def end(self) -> None:
        """The group's work has been asked for."""
        self._event.record(self._stream)

    def is_done(self) -> bool:
        """Whether it has been done."""
        return bool(self._event.query())
