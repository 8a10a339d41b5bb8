"""Bring the policy's weights to vLLM servers: at each sync to all of them, and in a rollout to one that was restarted.

Each sync gives the weights a new name, which a server proves to hold (`fleet.py`). A server that cannot be reached or
breaks off is left out; a sync fails only when no server is left, or when one is unfit from the start.

An adapter is a folder that a server loads from a path. A server whose workers do not see the trainer's folder, on
another machine say, is sent the files over HTTP, and keeps them under one path on all its machines.

Covered here: adapter or whole weights, who takes part and how, what the ranks must agree on. Not covered: the transfer
of whole weights (`weight_transfer.py`), a worker's side of it (`worker_extension.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_r1_trl.generation.base import GenerationError
from agent_r1_trl.generation.vllm.fleet import Fleet, Found, Server
from agent_r1_trl.generation.vllm.http_client import HTTPClient, HTTPError
from agent_r1_trl.generation.vllm.lora_files import (
    ADAPTER_FILES,
    adapter_tensors,
    encoded_adapter,
    served_adapter,
    write_adapter,
)
from agent_r1_trl.generation.vllm.nccl_group import GroupError, describe_gpu, reason_against
from agent_r1_trl.generation.vllm.server_routes import (
    NoAdaptersError,
    UnfitServerError,
    hello,
    identity_of,
    load_adapter,
    reset_prefix_cache,
    rpc,
)
from agent_r1_trl.generation.vllm.weight_transfer import Named, WeightTransfer
from agent_r1_trl.generation.weights import gather_for, gather_nothing, policy_weights

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_FORGET_S = 5.0

Workers = dict[str, list[dict[str, Any]]]
"""URL -> what each worker of the server says about itself."""


class ServerSync:
    """Gives the servers of a fleet the policy's weights.

    Args:
        http: client for the requests.
        fleet: of the servers.
        adapter_dir: see `VLLMServerGenerator`.
        weights_dir: the same.
        way: the same, `weight_transfer`.
        timeout_s: the same, `sync_timeout_s`.
        may_restore: see `VLLMServerGenerator`.
        may_wait: whether it is still worth waiting for servers.
    """

    def __init__(
        self,
        http: HTTPClient,
        fleet: Fleet,
        *,
        adapter_dir: Path | None,
        weights_dir: Path | None,
        way: str,
        timeout_s: float,
        may_restore: bool,
        may_wait: Callable[[], bool] = lambda: True,
    ):
        self._http = http
        self._fleet = fleet
        self._adapter_dir = adapter_dir
        self._way = way
        self._gpu: dict[str, str] | None = None  # as other members of an NCCL group know it
        self._device = torch.device("cpu")
        self._without_nccl: dict[str, str] = {}  # URL -> why
        self._timeout_s = timeout_s
        self._may_restore, self._may_wait = may_restore, may_wait
        self._rank = own_rank()
        self._run_name = agreed(f"agent-r1-{uuid.uuid4().hex[:8]}")
        self._weights_folder = (weights_dir or Path(tempfile.gettempdir())) / self._run_name
        self._num_syncs = 0
        self._has_all_weights = False
        self._model: Any = None
        self._sees_adapters: dict[str, bool] = {}  # URL -> whether the server sees the folders of adapters

    def sync(self, model: nn.Module) -> None:
        """See `VLLMServerGenerator.sync`."""
        self._num_syncs += 1
        self._http.run(self._fleet.pause())
        # A new name each time: neither a cached prefix nor a restarted server can answer for it with older weights.
        name = f"{self._run_name}-{self._num_syncs}"
        found = self._sync_adapter(model, name)
        is_adapter = found is not None
        if found is None:
            found = self._sync_whole(model, name)
        self._model = model
        is_restorable = is_adapter or (self._may_restore and gather_for(model) is gather_nothing)
        self._fleet.may_be_restored = is_restorable
        self._fleet.restore = self._restore if is_restorable and (is_adapter or self._rank == 0) else None
        self._http.run(self._fleet.resume(name, found, is_adapter=is_adapter))

    def close(self) -> None:
        """Stop bringing servers back, and remove the adapter's files."""
        self._http.run(self._fleet.pause())
        if self._fleet.is_adapter and self._rank == 0:
            shutil.rmtree(self._folder(self._fleet.weights), ignore_errors=True)
            self._http.run(self._forget(str(self._fleet.weights)))
        if self._rank == 0:
            shutil.rmtree(self._weights_folder, ignore_errors=True)

    def _led(self, action: Callable[[], Any], follow: Callable[[], Any] = lambda: None) -> Any:
        """What `action` returns on the first rank, on every rank, while the others do `follow`; or its error."""
        value, error = None, None
        try:
            value = action() if self._rank == 0 else follow()
        except Exception as caught:
            error = caught
        value, message = agreed((value, None if error is None else str(error)))
        if error is not None:
            raise error
        if message is not None:
            raise GenerationError(message)
        return value

    async def _until_one_takes(self, action: Callable[[str], Any]) -> dict[str, tuple[Any, str]]:
        """URL -> what `action` returned and "", or None and why it failed; repeated until it succeeds for a server.

        Raises:
            UnfitServerError: one server is unfit, before any sync has succeeded.
            GenerationError: no server could be reached within the retry window.
        """
        deadline = time.monotonic() + self._fleet.retry_window_s
        while True:
            urls = list(self._fleet.servers)
            answers = await asyncio.gather(*(action(url) for url in urls), return_exceptions=True)
            found: dict[str, tuple[Any, str]] = {}
            for url, answer in zip(urls, answers, strict=True):
                is_expected = isinstance(answer, (HTTPError, GenerationError))
                is_unfit = isinstance(answer, UnfitServerError) and self._fleet.weights is None
                if isinstance(answer, BaseException) and (is_unfit or not is_expected):
                    raise answer
                found[url] = (None, str(answer)) if is_expected else (answer, "")
            if any(answer is not None for answer, _ in found.values()):
                return found
            if time.monotonic() > deadline or not self._may_wait():
                raise GenerationError(self._fleet.explain({url: reason for url, (_, reason) in found.items()}))
            await asyncio.sleep(_POLL_S)

    # ---------------------------------------------------------------- adapters

    def _folder(self, name: str | None) -> Path:
        assert self._adapter_dir is not None
        return self._adapter_dir / str(name)

    def _sync_adapter(self, model: Any, name: str) -> Found | None:
        """Send the adapter alone; None if it cannot be served."""
        adapter = served_adapter(model) if self._adapter_dir is not None else None
        if adapter is None or self._has_all_weights:
            return None
        tensors = adapter_tensors(model, adapter)

        def serve() -> Found | None:
            write_adapter(model, adapter, tensors, self._folder(name))
            try:
                found = self._http.run(self._until_one_takes(lambda url: self._load(url, name)))
            except GenerationError as error:
                shutil.rmtree(self._folder(name))
                if isinstance(error, NoAdaptersError):
                    return None
                raise
            if self._fleet.weights is not None:
                shutil.rmtree(self._folder(self._fleet.weights), ignore_errors=True)
            return found

        return self._led(serve)

    async def _load(self, url: str, name: str) -> str:
        await self._fleet.check_model(self._fleet.servers[url])
        path = await self._path_for(url, self._folder(name), old=self._fleet.weights)
        await load_adapter(self._http, url, name, path)
        if self._fleet.weights is not None:
            with contextlib.suppress(HTTPError):  # a server that was restarted does not have the old one
                await self._http.request("POST", f"{url}/v1/unload_lora_adapter", {"lora_name": self._fleet.weights})
        return name

    async def _path_for(self, url: str, folder: Path, *, old: str | None = None) -> str:
        """Path of the adapter's files on the server's machine; they are sent if it does not see `folder`.

        Args:
            url: of the server.
            folder: with the files; its name is the adapter's.
            old: name of the adapter that the server still serves; older ones of this run are removed there.

        Raises:
            HTTPError: the server does not answer.
            UnfitServerError: its workers cannot keep the files.
        """
        if url not in self._sees_adapters:
            try:
                file = folder / ADAPTER_FILES[0]
                workers = await hello(self._http, url, file, timeout_s=self._fleet.health_timeout_s)
                self._sees_adapters[url] = all(worker["sees"] for worker in workers)
            except UnfitServerError:  # without the worker extension it can only see them
                self._sees_adapters[url] = True
        if self._sees_adapters[url]:
            return str(folder)
        files = await asyncio.to_thread(encoded_adapter, folder)
        answers = await rpc(self._http, url, "agent_r1_adapter", folder.name, files, old, timeout_s=self._timeout_s)
        paths = {answer["path"] for answer in answers}
        if len(paths) > 1:
            raise UnfitServerError(
                f"The workers of {url} have different temporary folders ({', '.join(sorted(paths))}), and vLLM loads "
                "an adapter from one path. Set TMPDIR to the same folder for all of them."
            )
        return str(paths.pop())

    async def _forget(self, name: str) -> None:
        """Have the servers remove the adapters that were sent to them, if they still answer."""
        for url, sees in self._sees_adapters.items():
            if not sees:
                with contextlib.suppress(HTTPError, GenerationError):
                    await rpc(self._http, url, "agent_r1_forget", name, timeout_s=_FORGET_S)

    # ---------------------------------------------------------------- whole weights

    def _sync_whole(self, model: nn.Module, name: str) -> Found:
        """Send all weights, or those that training can change if every server has the others."""
        workers: Workers = {}
        absent: Found = {}

        def muster() -> bool:
            self._device = next(model.parameters()).device
            self._gpu = None if self._way == "folder" else describe_gpu(self._device)
            self._weights_folder.mkdir(parents=True, exist_ok=True)
            for url, (answer, reason) in self._http.run(self._until_one_takes(self._hello)).items():
                if answer is None:
                    absent[url] = (None, reason)
                else:
                    workers[url] = answer
            has_last = [identity_of(answer, str(self._fleet.weights)) is not None for answer in workers.values()]
            return not (self._has_all_weights and all(has_last))

        is_complete = self._led(muster)
        weights = policy_weights(model, only_trainable=not is_complete)

        def send() -> Found:
            found = absent | self._send(weights, workers, name, is_complete=is_complete)
            if all(identity is None for identity, _ in found.values()):
                raise GenerationError(self._fleet.explain({url: reason for url, (_, reason) in found.items()}))
            return found

        found = self._led(send, lambda: [None for _ in weights])
        self._has_all_weights = True
        return found

    async def _hello(self, url: str) -> list[dict[str, Any]]:
        """What the workers of a server say about themselves, if there is a way to them."""
        workers = await hello(self._http, url, self._weights_folder, timeout_s=self._fleet.health_timeout_s)
        no_nccl = self._reason_against_nccl(url, workers)
        sees = all(worker["sees"] for worker in workers)
        if no_nccl is not None and self._way == "nccl":
            raise UnfitServerError(
                f"servers.weight_transfer='nccl': weights cannot go to {url} over NCCL, because {no_nccl}. Set "
                "servers.weight_transfer to 'folder', or to 'auto', which takes NCCL where it can."
            )
        if no_nccl is not None and not sees:
            raise UnfitServerError(
                f"servers.weight_transfer={self._way!r}: weights cannot go to {url}. Over NCCL not, because "
                f"{no_nccl}; through a folder not, because its workers cannot read {self._weights_folder}. Start the "
                "server where it sees output_dir under the same path, or train and serve on GPUs of their own, or "
                "train LoRA with a server of adapters (--enable-lora), which is sent the files."
            )
        return workers

    def _reason_against_nccl(self, url: str, workers: list[dict[str, Any]]) -> str | None:
        if self._way == "folder":
            return "it is not asked for"
        return self._without_nccl.get(url) or reason_against(self._gpu, [worker["gpu"] for worker in workers])

    def _send(self, weights: Iterable[Named], workers: Workers, name: str, *, is_complete: bool) -> Found:
        """Send to the servers of these workers, and see which of them hold the weights then.

        Always iterates over all weights: where they are sharded, the other ranks do.
        """
        transfer = WeightTransfer(self._http, name, self._weights_folder, timeout_s=self._timeout_s)
        weights = iter(weights)
        try:
            self._http.run(transfer.each(lambda url: self._begin(transfer, url, workers[url]), workers))
            transfer.send(weights, self._device)
            found = self._http.run(transfer.each(lambda url: self._end(transfer, url, name, is_complete)))
        finally:
            for _ in weights:
                pass
            transfer.close()
        for url, error in transfer.failures.items():
            if isinstance(error, UnfitServerError) and self._fleet.weights is None:
                raise error
            found[url] = (None, f"the weight transfer broke ({error})")
        return found

    async def _begin(self, transfer: WeightTransfer, url: str, workers: list[dict[str, Any]]) -> None:
        """Begin over NCCL if that can be, else through the folder."""
        if self._reason_against_nccl(url, workers) is None:
            try:
                await transfer.begin(url, len(workers), self._device)
                return
            except GroupError as error:
                if self._way == "nccl" or not all(worker["sees"] for worker in workers):
                    raise
                self._without_nccl[url] = str(error)
                logger.warning("Weights go to %s through %s, not over NCCL: %s", url, self._weights_folder, error)
        await transfer.begin(url, len(workers), None)

    async def _end(self, transfer: WeightTransfer, url: str, name: str, is_complete: bool) -> tuple[str | None, str]:
        """Which processes of a server hold the weights, checked last of all; or None and why not."""
        await transfer.end(url, is_complete=is_complete)
        await reset_prefix_cache(self._http, url, timeout_s=self._fleet.health_timeout_s)
        identity = identity_of(await hello(self._http, url, timeout_s=self._fleet.health_timeout_s), name)
        return identity, "" if identity is not None else "it was restarted during the weight sync"

    # ---------------------------------------------------------------- in a rollout

    async def _restore(self, server: Server) -> None:
        """Give a server that was restarted the weights of the last sync.

        Raises:
            HTTPError: it does not answer.
            GenerationError: it could not take them.
        """
        if self._fleet.is_adapter:
            await self._fleet.check_model(server)  # before the other ranks, too, can sample from it
            name = str(self._fleet.weights)
            path = await self._path_for(server.url, self._folder(name))
            await load_adapter(self._http, server.url, name, path)
            return
        workers = await self._hello(server.url)
        identity, reason = await asyncio.to_thread(self._send_again, server.url, workers)
        if identity is None:
            raise GenerationError(reason)

    def _send_again(self, url: str, workers: list[dict[str, Any]]) -> tuple[str | None, str]:
        with torch.no_grad():
            weights = policy_weights(self._model)
            return self._send(weights, {url: workers}, str(self._fleet.weights), is_complete=True)[url]


def own_rank() -> int:
    """Number of this process; 0 where there is only one."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_distributed else 0


def agreed(value: Any) -> Any:
    """The first rank's value, on every rank; all of them have to call."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
