"""Generation with one or more vLLM servers; token ids go in, the sampled ids and their log-probabilities come out.

Every rank speaks to the servers itself, so ranks that need different numbers of turns never wait for one another in a
rollout. A trajectory stays with the server that has its keys and values in the prefix cache. Between rollouts `sync`
brings the weights: an adapter alone where the servers serve LoRA, else all weights that training changed, adapters
merged into copies, over NCCL or through a folder.

Covered here: requests, settings, log-probabilities of given ids. Not covered: which servers take part (`fleet.py`),
how the weights get there (`server_sync.py`, `weight_transfer.py`, `worker_extension.py`), HTTP (`http_client.py`,
`server_routes.py`), starting a server (`docs/serving.md`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

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
from agent_r1_trl.generation.vllm.find_servers import check_exposure, check_urls, wait_for_servers
from agent_r1_trl.generation.vllm.fleet import Fleet
from agent_r1_trl.generation.vllm.http_client import HTTPClient
from agent_r1_trl.generation.vllm.server_sync import ServerSync, own_rank


class VLLMServerGenerator(Generator):
    """A `Generator` on vLLM servers.

    Args:
        urls: of the servers, such as `http://127.0.0.1:8000`. All must hold the policy's architecture.
        stop_token_ids: ids that end a turn; a sampled one is kept as the last id.
        adapter_dir: where adapters are written for the servers to read, which must see it under the same path. None
            merges adapters and sends whole weights.
        weights_dir: where whole weights pass to the servers that NCCL does not reach, which must see it under the
            same path; None for this machine's temporary folder.
        request_timeout_s: seconds for one turn; a server that takes longer is left out.
        health_timeout_s: seconds that a server may be silent to a health check while requests wait for it.
        retry_window_s: seconds for which a request, or a sync, waits while no server can serve it.
        startup_timeout_s: seconds to wait for servers that are still starting.
        max_connections: maximum number of connections to each server.
        sync_timeout_s: seconds that a server may take over one part (256 MiB) of a transfer.
        weight_transfer: what whole weights go over: `nccl` (from GPU to GPU), `folder` (through `weights_dir`), or
            `auto`, the first for each server that can.
        may_restore: whether the model that was synced stays as it is until the next sync, so that a server that was
            restarted in a rollout can get its weights again.
        allow_public: use servers whose development routes are open at a public address.

    Raises:
        ValueError: a URL is not one, or comes twice.
        GenerationError: a server does not answer within `startup_timeout_s`; see also `allow_public`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        stop_token_ids: Collection[int],
        adapter_dir: str | Path | None = None,
        weights_dir: str | Path | None = None,
        request_timeout_s: float = 600.0,
        health_timeout_s: float = 30.0,
        retry_window_s: float = 300.0,
        startup_timeout_s: float = 240.0,
        max_connections: int = 256,
        sync_timeout_s: float = 120.0,
        weight_transfer: str = "auto",
        may_restore: bool = False,
        allow_public: bool = False,
    ) -> None:
        self.urls = check_urls(urls)
        self._stop_token_ids = sorted(stop_token_ids)
        self._http = HTTPClient(max_connections=max_connections, timeout_s=request_timeout_s)
        self._next_place = itertools.count(own_rank())  # ranks start at different servers
        try:
            models = self._http.run(wait_for_servers(self._http, self.urls, startup_timeout_s))
            exposure = check_exposure(self._http, self.urls, allow_public=allow_public, may_warn=own_rank() == 0)
            self._http.run(exposure)
        except GenerationError:
            self._http.close()
            raise
        lengths = [model["max_model_len"] for model in models.values() if model.get("max_model_len")]
        self.max_model_length = min(lengths, default=None)
        names = {url: model["id"] for url, model in models.items()}
        self._fleet = Fleet(self._http, names, health_timeout_s=health_timeout_s, retry_window_s=retry_window_s)
        self._weights = ServerSync(
            self._http,
            self._fleet,
            adapter_dir=Path(adapter_dir).resolve() if adapter_dir is not None else None,
            weights_dir=Path(weights_dir).resolve() if weights_dir is not None else None,
            way=weight_transfer,
            timeout_s=sync_timeout_s,
            may_restore=may_restore,
            may_wait=lambda: self.is_cut is None or not self.is_cut.is_set(),
        )

    # ---------------------------------------------------------------- requests

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, seed: int, params: SamplingParams
    ) -> Generation:
        """Sample up to `max_tokens` ids after `prompt_ids`; see `Generator`.

        The answer provably comes from the weights of the last sync. Cancelling closes the connection, upon which the
        server drops the request.

        Raises:
            GenerationError: no server answered, or one refused the request (`RefusedRequestError`).
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
            "return_tokens_as_token_ids": True,  # in place of text; `return_token_ids` would send the prompt back, too
        }
        slot = current_slot.get() or TrajectorySlot()
        if slot.place is None:
            slot.place = next(self._next_place)
        answer = await asyncio.wrap_future(self._http.start(self._fleet.complete(body, slot)))
        return _as_generation(answer["choices"][0])

    def scores(self, token_ids: list[int]) -> dict[str, list[float]]:
        """See `Generator`; the engines' names are the URLs of the servers that take part."""
        return self._http.run(self._fleet.scores(token_ids))

    def metrics(self) -> dict[str, float]:
        """See `Generator`: how many servers are left out now, and what was lost since the last call."""
        return self._fleet.take_counts()

    def sync(self, model: nn.Module) -> bool:
        """Give every server that answers the policy's weights; the others are left out, with a warning.

        The first rank sends; the others help to gather sharded parameters and wait until the servers are ready.

        Raises:
            GenerationError: no server could take the weights; or, at the first sync, one lacks what a transfer needs.
        """
        self._weights.sync(model)
        return True

    def close(self) -> None:
        """Cancel what is under way and close the connections; the servers go on."""
        self._weights.close()
        self._http.close()


def _as_generation(choice: dict[str, Any]) -> Generation:
    if choice["finish_reason"] not in ("stop", "length"):
        raise GenerationError(f"The server ended the request with {choice['finish_reason']!r}.")
    found, written = choice["logprobs"], "token_id:"
    if not all(token.startswith(written) for token in found["tokens"]):
        raise GenerationError("The server wrote tokens as text, not as ids; only vLLM's own server is supported.")
    ids = [int(token.removeprefix(written)) for token in found["tokens"]]
    return Generation(token_ids=ids, logprobs=found["token_logprobs"], stop=choice["finish_reason"])
