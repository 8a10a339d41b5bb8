"""Bring the policy's weights to vLLM servers: at each sync to all of them, and in a rollout to one that was restarted.

Each sync gives the weights a new name, which a server proves to hold (`fleet.py`). A server that cannot be reached or
breaks off is left out; a sync fails only when no server is left, or when one is unfit from the start.

Covered here: adapter or whole weights, who takes part, what the ranks must agree on. Not covered: the transfer itself
(`weight_transfer.py`), a worker's side of it (`worker_extension.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_r1_trl.generation.base import GenerationError
from agent_r1_trl.generation.vllm.adapter_delivery import AdapterDelivery
from agent_r1_trl.generation.vllm.find_servers import own_address
from agent_r1_trl.generation.vllm.fleet import Fleet, Found, Server
from agent_r1_trl.generation.vllm.http_client import HTTPClient, HTTPError
from agent_r1_trl.generation.vllm.lora_files import adapter_tensors, served_adapter, write_adapter
from agent_r1_trl.generation.vllm.nccl_group import describe_gpu, reason_against
from agent_r1_trl.generation.vllm.server_routes import (
    NoAdaptersError,
    UnfitServerError,
    hello,
    identity_of,
    load_adapter,
    reset_prefix_cache,
    rpc,
)
from agent_r1_trl.generation.vllm.weight_stream import Named
from agent_r1_trl.generation.vllm.weight_transfer import WeightSender
from agent_r1_trl.generation.weights import gather_for, gather_nothing, policy_weights

logger = logging.getLogger(__name__)

_WHOLE_TRANSFER_S = 86_400.0  # each part of it has its own limit
_POLL_S = 1.0

Workers = dict[str, list[dict[str, Any]]]
"""URL -> what each worker of the server says about itself."""


class ServerSync:
    """Gives the servers of a fleet the policy's weights.

    Args:
        http: client for the requests.
        fleet: of the servers.
        adapter_dir: see `VLLMServerGenerator`.
        address: host (None finds it) and port (0: any) where this machine sends weights.
        way: what weights go over; see `VLLMServerGenerator`.
        timeout_s: seconds that a server may take over one part of a transfer.
        may_restore: see `VLLMServerGenerator`.
        may_wait: whether it is still worth waiting for servers.
    """

    def __init__(
        self,
        http: HTTPClient,
        fleet: Fleet,
        *,
        adapter_dir: Path | None,
        address: tuple[str | None, int],
        way: str,
        timeout_s: float,
        may_restore: bool,
        may_wait: Callable[[], bool] = lambda: True,
    ):
        self._http = http
        self._fleet = fleet
        self._adapter_dir = adapter_dir
        self._host, self._port = address
        self._way = way
        self._gpu: dict[str, str] | None = None  # as other members of an NCCL group know it
        self._device = torch.device("cpu")
        self._without_nccl: dict[str, str] = {}  # URL -> why
        self._timeout_s = timeout_s
        self._may_restore, self._may_wait = may_restore, may_wait
        self._rank = own_rank()
        self._run_name = agreed(f"agent-r1-{uuid.uuid4().hex[:8]}")
        self._num_syncs = 0
        self._has_all_weights = False
        self._model: Any = None
        self._restoring = asyncio.Lock()  # two transfers at once would need two ports
        self._delivery = AdapterDelivery(
            http,
            lambda: (self._open_sender(), self._own_address),
            may_send=self._rank == 0,
            timeout_s=timeout_s,
            health_timeout_s=fleet.health_timeout_s,
        )

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
            self._http.run(self._delivery.forget(str(self._fleet.weights)))

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
        path = await self._delivery.path_for(url, self._folder(name), old=self._fleet.weights)
        await load_adapter(self._http, url, name, path)
        if self._fleet.weights is not None:
            with contextlib.suppress(HTTPError):  # a server that was restarted does not have the old one
                await self._http.request("POST", f"{url}/v1/unload_lora_adapter", {"lora_name": self._fleet.weights})
        return name

    # ---------------------------------------------------------------- whole weights

    def _sync_whole(self, model: nn.Module, name: str) -> Found:
        """Send all weights, or those that training can change if every server has the others."""
        self._device = next(model.parameters()).device
        self._gpu = describe_gpu(self._device) if self._rank == 0 and self._way != "sockets" else None
        sender: Any = None
        workers: Workers = {}
        absent: Found = {}

        def muster() -> bool:
            nonlocal sender
            sender = self._open_sender()
            for url, (answer, reason) in self._http.run(self._until_one_takes(self._hello)).items():
                if answer is None:
                    absent[url] = (None, reason)
                else:
                    workers[url] = answer
            has_last = [identity_of(answer, str(self._fleet.weights)) is not None for answer in workers.values()]
            return not (self._has_all_weights and all(has_last))

        try:
            is_complete = self._led(muster)
            weights = policy_weights(model, only_trainable=not is_complete)

            def send() -> Found:
                found = absent | self._send(sender, weights, workers, name, is_complete=is_complete)
                if all(identity is None for identity, _ in found.values()):
                    raise GenerationError(self._fleet.explain({url: reason for url, (_, reason) in found.items()}))
                return found

            found = self._led(send, lambda: [None for _ in weights])
        finally:
            if sender is not None:
                sender.close()
        self._has_all_weights = True
        return found

    async def _hello(self, url: str) -> list[dict[str, Any]]:
        workers = await hello(self._http, url, timeout_s=self._fleet.health_timeout_s)
        reason = reason_against(self._gpu, [worker["gpu"] for worker in workers])
        if self._way == "nccl" and reason is not None:
            raise UnfitServerError(
                f"vllm_weight_transfer='nccl': weights cannot go to {url} over NCCL, because {reason}. Set "
                "vllm_weight_transfer to 'sockets', or to 'auto', which takes NCCL where it can."
            )
        return workers

    def _open_sender(self) -> WeightSender:
        """Listen for workers. Two runs may share a port as long as they wait for one another; not from the start."""
        deadline = time.monotonic() + (0.0 if self._fleet.weights is None else self._fleet.retry_window_s)
        while True:
            try:
                return WeightSender(self._own_address, self._port, timeout_s=self._timeout_s)
            except OSError as error:
                if time.monotonic() >= deadline or not self._may_wait():
                    raise GenerationError(
                        f"vllm_group_port={self._port}: the trainer cannot listen there, most likely because another "
                        f"run does ({error}). Set vllm_group_port to a free port that the servers can reach, or to 0 "
                        "for any."
                    ) from error
            time.sleep(_POLL_S)

    @property
    def _own_address(self) -> str:
        return self._host or own_address(list(self._fleet.servers))

    def _send(
        self, sender: WeightSender, weights: Iterable[Named], workers: Workers, name: str, *, is_complete: bool
    ) -> Found:
        """Send to the servers of these workers, and see which of them hold the weights then.

        Always iterates over all weights: where they are sharded, the other ranks do.
        """
        calls: dict[str, Future[Any]] = {}
        for url in workers:
            arguments = (self._own_address, sender.port, sender.expect(url), self._timeout_s, name, is_complete)
            received = rpc(self._http, url, "agent_r1_receive", *arguments, timeout_s=_WHOLE_TRANSFER_S)
            calls[url] = self._http.start(received)
        sender.wait_for({url: (len(workers[url]), call.done) for url, call in calls.items()})
        self._open_groups(sender, workers)
        sender.send(weights, device=self._device)
        return {url: self._outcome(url, call, name, sender.failures.get(url)) for url, call in calls.items()}

    def _open_groups(self, sender: WeightSender, workers: Workers) -> None:
        """Let the weights go over NCCL to those servers whose GPUs allow it."""
        gpus = {url: [worker["gpu"] for worker in found] for url, found in workers.items()}
        fit = [
            url for url in workers if reason_against(self._gpu, gpus[url]) is None and url not in self._without_nccl
        ]
        for url, reason in sender.open_groups(fit, self._device).items():
            if self._way == "nccl":
                sender.drop(url, f"{reason}; vllm_weight_transfer='sockets' does without NCCL")
                continue
            self._without_nccl[url] = reason
            logger.warning("Weights go to %s through host memory, not over NCCL: %s", url, reason)

    def _outcome(self, url: str, call: Future[Any], name: str, failure: str | None) -> tuple[str | None, str]:
        """Which processes of a server hold the weights, checked last of all; or None and what failed."""
        try:
            call.result(1.0 if failure else self._timeout_s)  # a server that broke off has often said why
            self._http.run(reset_prefix_cache(self._http, url, timeout_s=self._fleet.health_timeout_s))
            identity = identity_of(self._http.run(self._hello(url)), name)
        except UnfitServerError as error:
            if self._fleet.weights is None:
                raise
            return None, str(error)
        except (HTTPError, TimeoutError) as error:
            call.cancel()
            return None, f"the weight transfer broke ({failure or error or 'no answer'})"
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
            path = await self._delivery.path_for(server.url, self._folder(name))
            await load_adapter(self._http, server.url, name, path)
            return
        async with self._restoring:
            workers = await self._hello(server.url)
            identity, reason = await asyncio.to_thread(self._send_again, server.url, workers)
        if identity is None:
            raise GenerationError(reason)

    def _send_again(self, url: str, workers: list[dict[str, Any]]) -> tuple[str | None, str]:
        sender = self._open_sender()
        try:
            weights = policy_weights(self._model)
            with torch.no_grad():
                found = self._send(sender, weights, {url: workers}, str(self._fleet.weights), is_complete=True)
        finally:
            sender.close()
        return found[url]


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
