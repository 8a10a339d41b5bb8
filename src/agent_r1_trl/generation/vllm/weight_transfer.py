"""Weights from the trainer to the workers of vLLM servers, some at a time: over NCCL, or through files that both see.

    trainer                                    each worker of a server (`worker_extension.py`)
    agent_r1_begin   name of the weights   ->  forgets that of the weights it has, joins the NCCL group if there is one
    agent_r1_load    names, dtypes, shapes ->  takes these weights from NCCL or from a file, and loads them
    agent_r1_end                           ->  has the weights of that name, if none is missing

Each of these is a request over HTTP, whose answer says what went wrong. A policy that is merged layer by layer, or
gathered from shards, is never in memory twice, nor on the disk as a whole.

Over NCCL vLLM's own communicator (`PyNcclCommunicator`) does the work. What differs from vLLM's weight-transfer engine
is that nothing waits without a limit, and how the members meet: the number under which NCCL's members find one another
goes over HTTP, in place of a store at a port without a password. One group holds one server, so a server that dies
takes no other with it, and lasts for one transfer, so that it costs no memory on a GPU while nothing is sent.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from agent_r1_trl.generation.vllm.server_routes import HTTPClient, ask_each, rpc

_POLL_S = 0.05
_ABORT_S = 5.0


class GroupError(ConnectionError):
    """NCCL failed, or a member of the group did not come, is gone or hangs."""


def describe_gpu(device: torch.device) -> dict[str, str] | None:
    """Facts about this process for the other members: its version of NCCL and its GPU. None: it cannot use NCCL."""
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
        self._rank = rank
        self._size = size
        self._device = device
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

        rank = self._rank
        size = self._size
        made = self.number

        class Meeting(StatelessProcessGroup):
            """The part of a process group that a communicator uses: who it is, and one object from member 0."""

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


# -------------------------------------------------------------------- a transfer

CHUNK_BYTES = 256 * 2**20
"""How many bytes travel at a time, unless one weight has more."""
_MEETING_S = 60.0

Named = tuple[str, torch.Tensor]


class WeightTransfer:
    """One set of weights, for several servers; a server that fails is left behind.

    Args:
        http: client for the requests.
        name: of the weights.
        folder: that the servers see which are not in an NCCL group; files are there only while they are read.
        device: our GPU, if a server is reached over NCCL.
        timeout_s: seconds that a server may take over one chunk.
    """

    def __init__(self, http: HTTPClient, name: str, folder: Path, device: torch.device, *, timeout_s: float):
        self._http = http
        self._name = name
        self._timeout_s = timeout_s
        self._folder = folder / uuid.uuid4().hex
        self._device = device
        self._groups: dict[str, NCCLGroup | None] = {}  # URL of a server that takes part -> its group
        self.failures: dict[str, Exception] = {}
        """URL -> what broke the transfer to it."""

    def send(self, weights: Iterable[Named], sizes: dict[str, tuple[int, bool]], *, is_complete: bool) -> list[str]:
        """Send every weight, in order, and return the URLs of the servers that have them now.

        Always iterates over all weights: where they are sharded, the other ranks do.

        Args:
            weights: name and tensor; each is read before the next is asked for.
            sizes: URL -> number of the server's workers, and whether NCCL reaches them.
            is_complete: whether every weight of the model is among them.
        """
        weights = iter(weights)
        try:
            self._http.run(self._each(sizes, lambda url: self._begin(url, *sizes[url])))
            has_groups = any(self._groups.values())
            for chunk in chunks(weights, self._device if has_groups else torch.device("cpu")):
                if has_groups and self._device.type == "cuda":  # threads read the copies
                    torch.cuda.synchronize(self._device)
                file = self._written(chunk)
                self._http.run(self._each(self._groups, lambda url: self._load(url, chunk, file)))  # noqa: B023
                if file is not None:
                    file.unlink()
                if not self._groups:
                    break
            self._http.run(self._each(self._groups, lambda url: self._ask(url, "agent_r1_end", is_complete)))
            return list(self._groups)
        finally:
            for _ in weights:
                pass
            for url in list(self._groups):
                self._leave(url)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _each(self, urls: Iterable[str], action: Callable[[str], Awaitable[None]]) -> None:
        """Act for all servers at once; those for which it fails are left behind."""
        _, failures = await ask_each(urls, action)
        for url, error in failures.items():
            self._leave(url, error)

    def _leave(self, url: str, error: Exception | None = None) -> None:
        if error is not None:
            self.failures[url] = error
        group = self._groups.pop(url, None)
        if group is not None:
            group.close()

    async def _ask(self, url: str, method: str, *arguments: object) -> None:
        await rpc(self._http, url, method, self._name, *arguments, timeout_s=self._timeout_s)

    async def _begin(self, url: str, num_workers: int, is_over_nccl: bool) -> None:
        if not is_over_nccl:
            self._groups[url] = None
            await self._ask(url, "agent_r1_begin", None)
            return
        group = self._groups[url] = NCCLGroup(0, num_workers + 1, self._device, timeout_s=_MEETING_S)

        async def invite() -> None:
            number = await asyncio.wrap_future(group.number)
            about = {"number": number.hex(), "size": num_workers + 1, "timeout_s": _MEETING_S}
            await self._ask(url, "agent_r1_begin", about)

        await asyncio.gather(invite(), asyncio.to_thread(group.meet))  # the first that fails has the cause

    async def _load(self, url: str, chunk: dict[str, torch.Tensor], file: Path | None) -> None:
        entries = [(name, str(value.dtype).removeprefix("torch."), [*value.shape]) for name, value in chunk.items()]
        group = self._groups[url]
        if group is None:
            await self._ask(url, "agent_r1_load", entries, str(file))
        else:  # both at once; the first that fails has the cause
            call = self._ask(url, "agent_r1_load", entries, None)
            await asyncio.gather(call, asyncio.to_thread(group.broadcast, [*chunk.values()]))

    def _written(self, chunk: dict[str, torch.Tensor]) -> Path | None:
        """A file with the chunk, if a server needs one; servers that do are left behind when it cannot be written."""
        from safetensors.torch import save_file

        readers = [url for url, group in self._groups.items() if group is None]
        if not readers:
            return None
        file = self._folder / f"{uuid.uuid4().hex}.safetensors"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(chunk, file)
        except Exception as error:
            for url in readers:
                self._leave(url, error)
            return None
        return file


def chunks(weights: Iterable[Named], device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Weights by name, contiguous and on the device, at most `CHUNK_BYTES` or one larger weight at a time."""
    chunk: dict[str, torch.Tensor] = {}
    size = 0
    for name, value in weights:
        if chunk and size + value.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
        if value.nbytes > CHUNK_BYTES:
            yield {name: value.detach().to(device).contiguous()}  # read where it lies, before the next one is made
            continue
        chunk[name] = value.detach().to(device, copy=True).contiguous()
        size += value.nbytes
    if chunk:
        yield chunk
