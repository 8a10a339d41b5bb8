"""Weights from the trainer to the workers of vLLM servers, some at a time: over NCCL, or through files that both see.

    trainer                                    each worker of a server (`worker_extension.py`)
    agent_r1_begin   name of the weights   ->  forgets that of the weights it has, joins the NCCL group if there is one
    agent_r1_load    names, dtypes, shapes ->  takes these weights from NCCL or from a file, and loads them
    agent_r1_end                           ->  has the weights of that name, if none is missing

Each of these is a request over HTTP, whose answer says what went wrong. A policy that is merged layer by layer, or
gathered from shards, is never in memory twice, nor on the disk as a whole.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from agent_r1_trl.generation.vllm.nccl_group import NCCLGroup
from agent_r1_trl.generation.vllm.server_routes import HTTPClient, ask_each, rpc

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
        self._http, self._name, self._timeout_s = http, name, timeout_s
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

    async def _ask(self, url: str, method: str, *arguments: Any) -> None:
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
