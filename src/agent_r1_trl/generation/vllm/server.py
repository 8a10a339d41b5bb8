"""Generation with one or more vLLM servers; token ids go in, the sampled ids and their log-probabilities come out.

Every rank speaks to the servers itself, so ranks that need different numbers of turns never wait for one another in a
rollout. A trajectory stays with the server that has its keys and values in the prefix cache. Between rollouts `sync`
brings the weights: an adapter alone where the servers serve LoRA, as a folder that they see under the same path; else
all weights that training changed, adapters merged into copies, over NCCL or through a folder.

The list of servers may be a file, which the first rank reads again at each sync: a server that is new in it gets the
weights before it is sampled from, and one that is gone from it is dropped (`server_file.py`).

Each sync gives the weights a new name, which a server proves to hold (`fleet.py`). A server that cannot be reached or
breaks off is excluded; a sync fails only when no server is left, or when one is unfit from the start. A server that
was restarted gets the weights again in the rollout.

Not covered: which servers are sampled from (`fleet.py`), the transfer of whole weights (`weight_transfer.py`,
`worker_extension.py`), starting a server (`docs/serving.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from agent_r1_trl.generation.base import (
    Generation,
    GenerationError,
    GenerationRequest,
    Generator,
    RefusedRequestError,
    SamplingParams,
    TrajectorySlot,
    check_request,
    current_slot,
)
from agent_r1_trl.generation.vllm.fleet import Fleet, Found, Server
from agent_r1_trl.generation.vllm.kept import MORE, num_logprobs, read_kept_ids
from agent_r1_trl.generation.vllm.server_file import ServerFile
from agent_r1_trl.generation.vllm.server_routes import (
    NO_NCCL,
    HTTPClient,
    HTTPError,
    NoAdaptersError,
    UnfitServerError,
    ask_each,
    base_model,
    check_urls,
    hello,
    identity_of,
    load_adapter,
    reset_prefix_cache,
    wait_for_servers,
)
from agent_r1_trl.generation.vllm.settings import ServerSettings
from agent_r1_trl.generation.vllm.weight_transfer import (
    GroupError,
    Named,
    WeightTransfer,
    describe_gpu,
    reason_against,
)
from agent_r1_trl.generation.weights import (
    adapter_tensors,
    check_adapters,
    is_sharded,
    policy_weights,
    served_adapter,
    write_adapter,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POLL_S = 1.0

Workers = dict[str, list[dict[str, Any]]]
"""URL -> what each worker of the server says about itself."""


class VLLMServerGenerator(Generator):
    """A `Generator` on vLLM servers.

    Args:
        urls: of the servers, such as `http://127.0.0.1:8000`, or the path of a file with one URL a line, which is read
            again at each sync. All must hold the policy's architecture.
        stop_token_ids: ids that end a turn; a sampled one is kept as the last id.
        settings: times, and the way of the weights; `urls` in it are not read.
        adapter_dir: where adapters are written for the servers to read, which must see it under the same path. None
            merges adapters and sends whole weights.
        weights_dir: where whole weights pass to the servers that NCCL does not reach, which must see it under the
            same path; None for this machine's temporary folder.
        startup_timeout_s: seconds to wait for servers that are still starting.
        max_connections: maximum number of connections to each server.
        may_restore: whether the model that was synced stays as it is until the next sync, so that a server that was
            restarted in a rollout can get its weights again.
        keeps_parts: whether requests can be cut (`interrupt`). Answers then come as a stream of tokens, which costs
            processor time here and in the server.

    Raises:
        ValueError: a URL is not one, or comes twice; or the file cannot be read.
        GenerationError: a server does not answer within `startup_timeout_s`, or the file names none.
    """

    def __init__(
        self,
        urls: Sequence[str] | Path,
        *,
        stop_token_ids: Collection[int],
        settings: ServerSettings | None = None,
        adapter_dir: str | Path | None = None,
        weights_dir: str | Path | None = None,
        startup_timeout_s: float = 240.0,
        max_connections: int = 256,
        may_restore: bool = False,
        keeps_parts: bool = False,
    ) -> None:
        self._rank = own_rank()
        self._file = ServerFile(urls) if isinstance(urls, Path) else None
        self._absent: dict[str, str] = {}  # URL in the file -> why the server has not joined
        own_urls = check_urls(urls) if not isinstance(urls, Path) else self._first_urls(startup_timeout_s)
        self._settings = settings = settings or ServerSettings()
        self._stop_token_ids = sorted(stop_token_ids)
        self._http = HTTPClient(max_connections=max_connections, timeout_s=settings.request_timeout)
        self._next_place = itertools.count(self._rank)  # ranks start at different servers
        try:
            models = self._http.run(wait_for_servers(self._http, own_urls, startup_timeout_s))
        except GenerationError:
            self._http.close()
            raise
        lengths = [model["max_model_len"] for model in models.values() if model.get("max_model_len")]
        self.max_model_length = min(lengths, default=None)
        names = {url: model["id"] for url, model in models.items()}
        self._fleet = Fleet(self._http, names, settings)
        self._adapter_dir = Path(adapter_dir).resolve() if adapter_dir is not None else None
        self._way, self._may_restore = settings.weight_transfer, may_restore
        self._keeps_parts, self._cut = keeps_parts, asyncio.Event()  # set once: requests that come later have another
        self._run_name = agreed(f"agent-r1-{uuid.uuid4().hex[:8]}")
        self._weights_folder = Path(weights_dir or tempfile.gettempdir()).resolve() / self._run_name
        self._gpu: dict[str, str] | None = None  # as other members of an NCCL group know it
        self._device = torch.device("cpu")
        self._num_syncs = 0
        self._has_all_weights = False
        self._model: Any = None

    # ---------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one turn; see `Generator`.

        The answer provably comes from the weights of the last sync. Cancelling closes the connection, upon which the
        server drops the request.

        Raises:
            GenerationError: no server answered, or one refused the request (`RefusedRequestError`).
        """
        check_request(request)
        params = request.params
        slot = current_slot.get() or TrajectorySlot()
        if slot.place is None:
            slot.place = next(self._next_place)
        body = vars(params) | {
            "prompt": request.prompt_ids,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "stop_token_ids": self._stop_token_ids,
            "ignore_eos": True,  # the stop ids alone end a turn
            "logprobs": num_logprobs(params),
            "return_tokens_as_token_ids": True,  # in place of text; `return_token_ids` would send the prompt back, too
            "stream": self._keeps_parts,
            "priority": slot.order,  # a server whose policy is first come, first served does not read it
        }
        try:
            answer = await asyncio.wrap_future(self._http.start(self._fleet.complete(body, slot, self._cut)))
        except RefusedRequestError as error:
            if (num := num_logprobs(params)) and "logprobs" in str(error):
                fix = f"Start the server with --max-logprobs {num} (top_k={params.top_k} and {MORE}), or lower top_k."
                raise RefusedRequestError(f"{error} {fix}") from error
            raise
        return _as_generation(answer["choices"][0], params)

    def interrupt(self) -> bool:
        """See `Generator`. Our connections are closed, so that nobody else's requests on the servers are touched."""
        if self._keeps_parts:
            cut, self._cut = self._cut, asyncio.Event()
            self._http.start(_set(cut))
        return self._keeps_parts

    def scores(self, token_ids: list[int]) -> dict[str, list[float]]:
        """See `Generator`; the engines' names are the URLs of the servers that take part."""
        return self._http.run(self._fleet.scores(token_ids))

    def metrics(self) -> dict[str, float]:
        """See `Generator`: how many servers are excluded now, and what was lost since the last call."""
        return self._fleet.take_counts()

    def close(self) -> None:
        """Cancel what is in flight, close the connections and remove our files; the servers go on."""
        self._http.run(self._fleet.pause())
        if self._rank == 0:
            if self._fleet.is_adapter:
                shutil.rmtree(self._folder(self._fleet.weights), ignore_errors=True)
            shutil.rmtree(self._weights_folder, ignore_errors=True)
        self._http.close()

    # ---------------------------------------------------------------- weights

    def sync(self, model: nn.Module) -> bool:
        """Give every server that answers the policy's weights; the others are excluded, with a warning.

        The first rank sends; the others help to gather sharded parameters and wait until the servers are ready.

        Raises:
            GenerationError: no server could take the weights; or, at the first sync, one lacks what a transfer needs.
        """
        self._num_syncs += 1
        self._http.run(self._fleet.pause())
        wait_for_all_ranks()  # one of them may have been giving a server the weights of the last sync
        # A new name each time: neither a cached prefix nor a restarted server can answer for it with older weights.
        name = f"{self._run_name}-{self._num_syncs}"
        found = self._sync_adapter(model, name)
        is_adapter = found is not None
        if found is None:
            found = self._sync_whole(model, name)
        self._model = model
        if self._file is not None:  # the first rank has read it
            self._http.run(self._fleet.adopt(agreed(self._fleet.models)))
        is_restorable = is_adapter or (self._may_restore and not is_sharded(model))
        self._fleet.may_be_restored = is_restorable
        self._fleet.restore = self._restore if is_restorable and (is_adapter or self._rank == 0) else None
        self._http.run(self._fleet.resume(name, found, is_adapter=is_adapter))
        return True

    def _led(self, action: Callable[[], Any], follow: Callable[[], Any] = lambda: None) -> Any:
        """The result of `action` on the first rank, on every rank, while the others do `follow`; or its error."""
        value, error = None, None
        try:
            value = action() if self._rank == 0 else follow()
        except Exception as caught:
            error = caught
        value, message = agreed((value, None if error is None else str(error)))
        if error is not None or message is not None:
            raise error or GenerationError(message)
        return value

    async def _until_one_takes(self, action: Callable[[str], Any]) -> dict[str, tuple[Any, str]]:
        """URL -> what `action` returned and "", or None and why it failed; repeated until it succeeds for a server."""
        deadline = time.monotonic() + self._settings.retry_window
        while True:
            await self._read_file()
            found, failures = await ask_each(self._fleet.servers, action)
            self._refuse_unfit(failures)
            reasons = {url: str(error) for url, error in failures.items()}
            if found:
                return {url: (found.get(url), reasons.get(url, "")) for url in self._fleet.servers}
            if time.monotonic() > deadline or (self.is_cancelled is not None and self.is_cancelled.is_set()):
                raise GenerationError(self._fleet.explain(self._absent | reasons))
            await asyncio.sleep(_POLL_S)

    def _refuse_unfit(self, failures: dict[str, Exception]) -> None:
        """Raise the error of a server that was unfit from the start."""
        for error in failures.values():
            if isinstance(error, UnfitServerError) and self._fleet.weights is None:
                raise error

    # ---------------------------------------------------------------- the list of servers

    def _first_urls(self, timeout_s: float) -> list[str]:
        """The servers that the file names at the start, on every rank."""
        assert self._file is not None
        file = self._file
        return self._led(lambda: file.wait(timeout_s))

    async def _read_file(self) -> None:
        """Let servers join and leave as the file says now; where it cannot be read or names none, all stay."""
        if self._file is None:
            return
        try:
            urls = self._file.read()
        except ValueError as error:
            self._file.say_once(f"{error} The servers stay as they were.")
            return
        if not urls:
            self._file.say_once(f"{self._file.setting} names no server. The servers stay as they were.")
            return
        known = self._fleet.models
        joined, failures = await ask_each([url for url in urls if url not in known], self._meet)
        self._absent = {url: str(error) for url, error in failures.items()}
        if failures:
            self._file.say_once(
                f"Not in the run yet, though {self._file.path} names them: {'; '.join(self._absent.values())}"
            )
        known |= joined
        models = {url: known[url] for url in urls if url in known}
        if models != self._fleet.models:
            await self._fleet.adopt(models)

    async def _meet(self, url: str) -> str:
        """The name of a new server's base model."""
        model = await base_model(self._http, url, timeout_s=self._settings.health_timeout)
        length, own_length = model.get("max_model_len"), self.max_model_length
        if length and own_length and length < own_length:
            raise UnfitServerError(
                f"{url} takes {length} tokens, and this run's trajectories have up to {own_length}. Start it with "
                f"--max-model-len {own_length}."
            )
        return model["id"]

    # ---------------------------------------------------------------- adapters

    def _folder(self, name: str | None) -> Path:
        assert self._adapter_dir is not None
        return self._adapter_dir / str(name)

    def _sync_adapter(self, model: PreTrainedModel, name: str) -> Found | None:
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
        await load_adapter(self._http, url, name, self._folder(name))
        if self._fleet.weights is not None:
            with contextlib.suppress(HTTPError):  # a server that was restarted does not have the old one
                await self._http.request("POST", f"{url}/v1/unload_lora_adapter", {"lora_name": self._fleet.weights})
        return name

    # ---------------------------------------------------------------- whole weights

    def _sync_whole(self, model: nn.Module, name: str) -> Found:
        """Send all weights, or those that training can change if every server has the others."""
        check_adapters(model, is_merged=True)
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
        """The workers' answers about themselves, if there is a way to them."""
        workers = await hello(self._http, url, self._weights_folder, timeout_s=self._settings.health_timeout)
        no_nccl = self._reason_against_nccl(workers)
        sees = all(worker["sees"] for worker in workers)
        if no_nccl is not None and (self._way == "nccl" or not sees):
            folder = "that is not asked for" if sees else f"its workers cannot read {self._weights_folder}"
            raise UnfitServerError(
                f"servers.weight_transfer={self._way!r}: weights cannot reach {url}. Not over NCCL: "
                f"{no_nccl}. Not through a folder: {folder}. Set servers.weight_transfer to 'auto' or "
                "'folder' and start the server where it sees output_dir under the same path, or train and serve on "
                "GPUs of their own."
            )
        return workers

    def _reason_against_nccl(self, workers: list[dict[str, Any]]) -> str | None:
        if self._way == "folder":
            return "it is not asked for"
        return reason_against(self._gpu, [worker["gpu"] for worker in workers])

    def _send(self, weights: Iterable[Named], workers: Workers, name: str, *, is_complete: bool) -> Found:
        """Send to the servers of these workers, over NCCL where that can be, and see which hold the weights then."""
        timeout_s = self._settings.sync_timeout
        transfer = WeightTransfer(self._http, name, self._weights_folder, self._device, timeout_s=timeout_s)
        sizes = {url: (len(found), self._reason_against_nccl(found) is None) for url, found in workers.items()}
        received = transfer.send(weights, sizes, is_complete=is_complete)
        found, failures = self._http.run(ask_each(received, lambda url: self._finalize(url, name)))
        failures |= transfer.failures
        self._refuse_unfit(failures)
        for url, error in failures.items():
            fix = f". {NO_NCCL}" if isinstance(error, GroupError) else ""
            found[url] = (None, f"the weight transfer broke ({error}{fix})")
        return found

    async def _finalize(self, url: str, name: str) -> tuple[str | None, str]:
        """Which processes of a server hold the weights, checked last of all; or None and why not."""
        await reset_prefix_cache(self._http, url, timeout_s=self._settings.health_timeout)
        identity = identity_of(await hello(self._http, url, timeout_s=self._settings.health_timeout), name)
        return identity, "" if identity is not None else "it was restarted during the weight sync"

    async def _restore(self, server: Server) -> None:
        """Give a server that was restarted in a rollout the weights of the last sync."""
        name = str(self._fleet.weights)
        if self._fleet.is_adapter:
            await load_adapter(self._http, server.url, name, self._folder(name))
            return
        workers = {server.url: await self._hello(server.url)}

        def send_again() -> Found:
            with torch.no_grad():
                return self._send(policy_weights(self._model), workers, name, is_complete=True)

        identity, reason = (await asyncio.to_thread(send_again))[server.url]
        if identity is None:
            raise GenerationError(reason)


async def _set(event: asyncio.Event) -> None:
    event.set()


def _as_generation(choice: dict[str, Any], params: SamplingParams) -> Generation:
    if choice["finish_reason"] not in ("stop", "length", "interrupted"):
        raise GenerationError(f"The server ended the request with {choice['finish_reason']!r}.")
    found, written = choice["logprobs"], "token_id:"
    if not all(token.startswith(written) for token in found["tokens"]):
        raise GenerationError("The server wrote tokens as text, not as ids; only vLLM's own server is supported.")
    ids = [int(token.removeprefix(written)) for token in found["tokens"]]
    likely = (
        {int(token.removeprefix(written)): value for token, value in entry.items()}
        for entry in found.get("top_logprobs") or ()
    )
    kept_ids = read_kept_ids(likely, params)
    return Generation(token_ids=ids, logprobs=found["token_logprobs"], stop=choice["finish_reason"], kept_ids=kept_ids)


def own_rank() -> int:
    """Number of this process; 0 where there is only one."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def wait_for_all_ranks() -> None:
    """Return once every rank has called it."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def agreed(value: object) -> Any:
    """The first rank's value, on every rank; all of them have to call. The first one does not wait for the others."""
    if not torch.distributed.is_initialized():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
