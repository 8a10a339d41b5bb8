"""Generation with one or more vLLM servers; token ids go in, the sampled ids and their log-probabilities come out.

Every rank speaks to the servers itself, so ranks that need different numbers of turns never wait for one another in a
rollout. A trajectory stays with the server that has its keys and values in the prefix cache. Between rollouts `sync`
brings the weights: an adapter alone where the servers serve LoRA, else all weights that training changed, adapters
merged into copies, over gloo.

Covered here: requests, balancing, weights, log-probabilities of given ids. Not covered: HTTP (`http_client.py`), the
transfer (`gloo_transfer.py`, `worker_extension.py`), starting a server (`docs/serving.md`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent_r1_trl.generation.base import (
    Generation,
    GenerationError,
    Generator,
    SamplingParams,
    TrajectorySlot,
    check_request,
    current_slot,
)
from agent_r1_trl.generation.vllm.find_servers import check_urls, own_address, wait_for_servers
from agent_r1_trl.generation.vllm.gloo_transfer import open_group, open_store, send_weights
from agent_r1_trl.generation.vllm.http_client import HTTPClient, HTTPError
from agent_r1_trl.generation.vllm.lora_files import adapter_tensors, served_adapter, write_adapter
from agent_r1_trl.generation.weights import policy_weights

_WORKER = "agent_r1_trl.generation.vllm.worker_extension.PolicyWorker"
_SAME_MODEL = "It must run the policy's architecture, vocabulary size included: start it with the trainer's model."
_ADAPTERS_ONLY = (
    "It was started with --enable-lora and can take adapters only. For LoRA start every server with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or none; for full fine-tuning, DoRA or modules_to_save start all without."
)


class VLLMServerGenerator(Generator):
    """A `Generator` on vLLM servers.

    Args:
        urls: of the servers, such as `http://127.0.0.1:8000`. All must hold the policy's architecture.
        stop_token_ids: ids that end a turn; a sampled one is kept as the last id.
        adapter_dir: where adapters are written for the servers to read (a folder that both see); None merges adapters
            and sends whole weights.
        request_timeout_s: seconds for one turn.
        startup_timeout_s: seconds to wait for servers that are still starting.
        max_attempts: per request, with growing waits; a retry goes to the next server.
        max_connections: maximum number of connections to each server.
        sync_host: address of this machine that the servers can reach; None finds it.
        sync_port: port there; 0 takes any free one.
        sync_timeout_s: seconds for one message of a transfer.

    Raises:
        ValueError: a URL is not one, or comes twice.
        GenerationError: a server does not answer within `startup_timeout_s`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        stop_token_ids: Collection[int],
        adapter_dir: str | Path | None = None,
        request_timeout_s: float = 600.0,
        startup_timeout_s: float = 240.0,
        max_attempts: int = 5,
        max_connections: int = 256,
        sync_host: str | None = None,
        sync_port: int = 0,
        sync_timeout_s: float = 600.0,
    ) -> None:
        self.urls = check_urls(urls)
        self._stop_token_ids = sorted(stop_token_ids)
        self._adapter_dir = Path(adapter_dir).resolve() if adapter_dir is not None else None
        self._sync_address = (sync_host, sync_port)
        self._sync_timeout_s = sync_timeout_s
        self._http = HTTPClient(
            max_connections=max_connections, timeout_s=request_timeout_s, max_attempts=max_attempts
        )
        self._rank = _rank()
        self._next_place = itertools.count(self._rank)  # ranks start at different servers
        self._run_name = _agreed(f"agent-r1-{uuid.uuid4().hex[:8]}")
        self._num_syncs = 0
        self._has_all_weights = False
        self._adapter_name: str | None = None
        self._groups: list[Any] = []
        self._store: Any = None
        try:
            self._models = self._http.run(
                wait_for_servers(self._http, self.urls, startup_timeout_s)
            )  # URL -> name of its base model
        except GenerationError:
            self._http.close()
            raise

    # ---------------------------------------------------------------- requests

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, seed: int, params: SamplingParams
    ) -> Generation:
        """Sample up to `max_tokens` ids after `prompt_ids`; see `Generator`.

        Cancelling closes the connection, upon which the server drops the request.

        Raises:
            GenerationError: no server answered, or one refused the request.
        """
        check_request(prompt_ids, max_tokens)
        body = {
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": self._stop_token_ids,
            "ignore_eos": True,  # the stop ids alone end a turn
            "logprobs": 0,  # of the sampled id only
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # spares the server the text
            "detokenize": False,
        }
        slot = current_slot.get() or TrajectorySlot()
        answer = await asyncio.wrap_future(self._http.start(self._complete(body, slot)))
        return _as_generation(answer["choices"][0])

    async def _complete(self, body: dict[str, Any], slot: TrajectorySlot) -> Any:
        if slot.place is None:
            slot.place = next(self._next_place)
        first = slot.place

        def url_of(attempt: int) -> str:
            slot.place = first + attempt
            url = self.urls[slot.place % len(self.urls)]
            body["model"] = self._adapter_name or self._models[url]
            return f"{url}/v1/completions"

        try:
            return await self._http.retried("POST", url_of, body)
        except HTTPError as error:
            raise GenerationError(str(error)) from error

    def scores(self, token_ids: list[int]) -> dict[str, list[float]]:
        """See `Generator`; the engines' names are the servers' URLs."""

        async def all_scores() -> list[Any]:
            return await asyncio.gather(*(self._score(url, token_ids) for url in self.urls))

        return dict(zip(self.urls, self._run(all_scores()), strict=True))

    async def _score(self, url: str, token_ids: list[int]) -> list[float]:
        body = {
            "model": self._adapter_name or self._models[url],
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
            "detokenize": False,
        }
        answer = await self._http.retried("POST", lambda attempt: f"{url}/v1/completions", body)
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        return [entry[str(token_id)]["logprob"] for entry, token_id in zip(entries, token_ids[1:], strict=True)]

    # ---------------------------------------------------------------- weights

    def sync(self, model: nn.Module) -> bool:
        """Give every server the policy's weights.

        The first rank sends; the others help to gather sharded parameters and wait until the servers are ready.

        Raises:
            GenerationError: a server could not be reached, lacks what a transfer needs, or could not load the weights.
        """
        self._num_syncs += 1
        if not self._sync_adapter(model):
            weights = policy_weights(model, only_trainable=self._has_all_weights)
            if self._rank == 0:
                self._send(weights, is_complete=not self._has_all_weights)
            else:
                for _ in weights:
                    pass
            self._has_all_weights = True
        _agreed(None)
        return True

    def _sync_adapter(self, model: Any) -> bool:
        """Send the adapter alone; False if it cannot be served."""
        adapter = served_adapter(model) if self._adapter_dir is not None else None
        if adapter is None or self._has_all_weights:
            return False
        assert self._adapter_dir is not None
        tensors = adapter_tensors(model, adapter)
        # A new name and a new path: neither a cached prefix nor a restarted server can answer with older weights.
        name = f"{self._run_name}-{self._num_syncs}"
        is_served = True
        if self._rank == 0:
            write_adapter(model, adapter, tensors, self._adapter_dir / name)
            is_served = self._run(self._load_adapter(name))
        if not _agreed(is_served):
            return False
        self._adapter_name = name
        return True

    async def _load_adapter(self, name: str) -> bool:
        assert self._adapter_dir is not None
        body = {"lora_name": name, "lora_path": str(self._adapter_dir / name)}
        try:
            await asyncio.gather(
                *(self._http.request("POST", f"{url}/v1/load_lora_adapter", body) for url in self.urls)
            )
        except HTTPError as error:
            shutil.rmtree(self._adapter_dir / name)
            if error.status == 404 and '"Not Found"' in str(error):
                return False  # the server has no such route: it does not serve adapters
            raise GenerationError(
                f"A server that serves LoRA did not load the adapter: {error}. It must see the folder "
                f"{self._adapter_dir} under the same path, and be started with --enable-lora and a --max-lora-rank of "
                "at least the adapter's."
            ) from error
        if self._adapter_name is not None:
            for url in self.urls:
                old = {"lora_name": self._adapter_name}
                await self._http.request("POST", f"{url}/v1/unload_lora_adapter", old)
            shutil.rmtree(self._adapter_dir / self._adapter_name)
        return True

    def _send(self, weights: Any, *, is_complete: bool) -> None:
        if not self._groups:
            self._connect()
        calls = [self._http.start(self._rpc(url, "agent_r1_receive", is_complete)) for url in self.urls]
        send_weights(self._groups, weights)
        for call in calls:
            self._wait_for(call)
        # What was computed with the old weights must not be continued with the new ones.
        for url in self.urls:
            self._run(self._http.request("POST", f"{url}/reset_prefix_cache"))

    def _connect(self) -> None:
        """One group per server: this process and the server's workers."""
        host, port = self._sync_address
        host = host or own_address(self.urls)
        try:
            self._store = open_store(host, port, is_server=True, timeout_s=self._sync_timeout_s)
        except torch.distributed.DistNetworkError as error:
            raise GenerationError(
                f"vllm_group_port={port}: the trainer cannot listen there, most likely because another run does "
                f"({error}). Set vllm_group_port to a free port that the servers can reach, or to 0 for any."
            ) from error
        for index, url in enumerate(self.urls):
            size = 1 + len(self._run(self._rpc(url, "agent_r1_hello")))
            name = f"{self._run_name}-{index}"
            arguments = (host, self._store.port, name, size, self._sync_timeout_s)
            call = self._http.start(self._rpc(url, "agent_r1_connect", *arguments))
            self._groups.append(open_group(self._store, name, rank=0, size=size, timeout_s=self._sync_timeout_s))
            self._wait_for(call)

    async def _rpc(self, url: str, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call a method of `PolicyWorker` on every worker of a server."""
        try:
            answer = await self._http.request("POST", f"{url}/collective_rpc", {"method": method, "args": arguments})
        except HTTPError as error:
            raise GenerationError(
                f"{error}. To take weights from a trainer the server must run with VLLM_SERVER_DEV_MODE=1 and "
                f"--worker-extension-cls {_WORKER}; see docs/serving.md."
            ) from error
        results = [item if isinstance(item, dict) else json.loads(item) for item in answer["results"]]
        errors = sorted({item["error"] for item in results if "error" in item})
        if errors:
            cure = _ADAPTERS_ONLY if ".base_layer." in errors[0] else _SAME_MODEL
            raise GenerationError(
                f"The server {url} could not load the policy's weights ({'; '.join(errors)}). {cure}"
            )
        return results

    # ---------------------------------------------------------------- life

    def close(self) -> None:
        """Cancel what is under way and close the connections; the servers go on."""
        if self._adapter_dir is not None and self._adapter_name is not None and self._rank == 0:
            shutil.rmtree(self._adapter_dir / self._adapter_name, ignore_errors=True)
        self._http.close()
        self._groups.clear()
        self._store = None

    def _run(self, coroutine: Any) -> Any:
        return self._wait_for(self._http.start(coroutine))

    def _wait_for(self, call: Any) -> Any:
        try:
            return call.result()
        except HTTPError as error:
            raise GenerationError(str(error)) from error


def _as_generation(choice: dict[str, Any]) -> Generation:
    if choice["finish_reason"] not in ("stop", "length"):
        raise GenerationError(f"The server ended the request with {choice['finish_reason']!r}.")
    return Generation(
        token_ids=choice["token_ids"], logprobs=choice["logprobs"]["token_logprobs"], stop=choice["finish_reason"]
    )


def _rank() -> int:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_distributed else 0


def _agreed(value: Any) -> Any:
    """The first rank's value, on every rank; all of them have to call."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
