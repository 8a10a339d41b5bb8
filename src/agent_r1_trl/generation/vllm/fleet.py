"""The vLLM servers of a run: which of them hold the policy's weights, and what happens to one that does not.

A server that was restarted answers with the weights it was started from, without an error. So each answer must prove
that it comes from the weights of the last sync. An adapter has a name of its own for each sync; the request names it,
and a server without it refuses. Whole weights have no name that vLLM knows: the workers keep it, next to a number of
their process, and are asked for both after each answer. What they say then also holds for the time of the answer,
because a process that ended never comes back.

A server that is gone, silent or without the weights is excluded. It comes back once it holds the weights of the last
sync: in the rollout if it can be given them there, else at the next sync.

Everything here runs on the HTTP client's event loop, so there is nothing to lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.generation.base import GenerationError, TrajectorySlot
from agent_r1_trl.generation.vllm.server_routes import (
    HTTPClient,
    HTTPError,
    UnfitServerError,
    hello,
    identity_of,
    joined_events,
    refusal_of,
)
from agent_r1_trl.generation.vllm.settings import ServerSettings

logger = logging.getLogger(__name__)

Found = dict[str, tuple[str | None, str]]
"""Result of a sync: URL -> which processes hold the weights (None: excluded), and why not."""

_AS_STARTED = "the weights it was started from"
_POLL_S = 1.0


class _UnprovenError(RuntimeError):
    """An answer of which nobody can say which weights it came from."""


@dataclass(eq=False)
class Server:
    """One vLLM server, as this rank knows it."""

    url: str
    model: str
    """Name of its base model."""
    identity: str | None = _AS_STARTED
    """Which processes hold the weights of the last sync; None while it is excluded."""
    reason: str = ""
    """Why it is excluded."""
    health: asyncio.Task[Any] | None = field(default=None, repr=False)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    next_check: asyncio.Task[str | None] | None = field(default=None, repr=False)
    comeback: asyncio.Task[None] | None = field(default=None, repr=False)
    is_restoring: bool = False


class Fleet:
    """Answers requests with those servers, URL -> name of its base model, that hold the weights of the last sync."""

    def __init__(self, http: HTTPClient, models: dict[str, str], settings: ServerSettings):
        self._http = http
        self.servers = {url: Server(url, model) for url, model in models.items()}
        """Those of the list, by URL."""
        self.weights: str | None = None
        """Name of the weights of the last sync; None before the first, when servers answer as they were started."""
        self.is_adapter = False
        """Whether they are an adapter, which requests name."""
        self.restore: Callable[[Server], Awaitable[None]] | None = None
        """Gives a server the weights of the last sync; None where this rank cannot."""
        self.may_be_restored = False
        """Whether any rank can."""
        self._health_timeout_s = settings.health_timeout
        self._retry_window_s = settings.retry_window
        self._num_losses = self._num_discarded = self._num_pending = 0
        self._lost_at = 0.0  # when the last server was excluded
        self._has_servers = asyncio.Event()
        self._has_servers.set()
        self._is_paused = False

    # ---------------------------------------------------------------- requests

    async def complete(self, body: dict[str, Any], slot: TrajectorySlot, cut: asyncio.Event) -> Any:
        """The answer of a server that provably held the weights; first asked is that of the trajectory's last turn.

        Once `cut` is set it is what has come until then, if `body` asks for events.

        Raises:
            GenerationError: no server could serve the request within the retry window.
            RefusedRequestError: one refused it, because it is too long or asks for what vLLM does not know.
        """
        self._num_pending += 1
        deadline, wait_s = None, 0.25
        try:
            while True:
                server = await self._choose(slot, cut)
                if server is None:
                    return joined_events(b"", "no server", is_cut=True)
                identity = server.identity
                try:
                    return await self._ask(server, body, cut)
                except _UnprovenError as error:
                    self._num_discarded += 1
                    failure: Exception = error
                except HTTPError as error:
                    failure = error
                    if not (error.is_passing or (error.status == 404 and self.is_adapter)):
                        raise refusal_of(error) from error
                deadline = deadline or time.monotonic() + self._retry_window_s
                if time.monotonic() > deadline:
                    raise GenerationError(f"{server.url}: {failure}") from failure
                if isinstance(failure, HTTPError) and failure.status not in (None, 404):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(cut.wait(), wait_s)  # it is busy
                    wait_s = min(2 * wait_s, 10.0)
                else:
                    self.leave_out(server, identity, str(failure))
                assert slot.place is not None
                slot.place += 1  # the next one may be better off
        finally:
            self._num_pending -= 1

    async def _choose(self, slot: TrajectorySlot, cut: asyncio.Event) -> Server | None:
        """The trajectory's server, or the next one that is not excluded; None once the request is cut."""
        assert slot.place is not None
        while not cut.is_set():
            servers = list(self.servers.values())
            for place in range(slot.place, slot.place + len(servers)):
                if servers[place % len(servers)].identity is not None:
                    slot.place = place
                    return servers[place % len(servers)]
            left_s = self._lost_at + self._retry_window_s - time.monotonic()
            is_hopeless = all(server.comeback is None or server.comeback.done() for server in servers)
            if is_hopeless or left_s <= 0:
                raise GenerationError(self.explain())
            try:
                await asyncio.wait_for(self._has_servers.wait(), min(left_s, _POLL_S))
            except TimeoutError:
                continue
        return None

    def explain(self, reasons_of: dict[str, str] | None = None) -> str:
        """Why no server can be sampled from (URL -> reason; None: the servers' own reasons), and what to do."""
        if reasons_of is None:
            reasons_of = {server.url: server.reason for server in self.servers.values()}
        reasons = "; ".join(f"{url}: {reason}" for url, reason in reasons_of.items())
        return (
            f"None of the vLLM servers can be sampled from ({reasons}). Start them again with the same command; they "
            f"get the weights at the next sync. A request waits servers.retry_window={self._retry_window_s:g} seconds "
            "for a server to come back."
        )

    async def _ask(self, server: Server, body: dict[str, Any], cut: asyncio.Event | None = None) -> Any:
        """One attempt at one server."""
        identity = server.identity
        name = self.weights if self.is_adapter and self.weights is not None else server.model
        answer = await self._answer_of_the_living(server, body | {"model": name}, cut)
        is_cut = cut is not None and cut.is_set()
        if self.weights is None or (is_cut and answer.get("model") is None):  # no token came: nothing is to be proven
            return answer
        if self.is_adapter:
            if answer.get("model") != name:
                raise _UnprovenError(f"it answered for the model {answer.get('model')!r} instead of {name!r}")
            return answer
        try:
            found = await self._confirmed(server)
        except (HTTPError, UnfitServerError) as error:
            raise _UnprovenError(f"it could not be asked which weights its answer came from: {error}") from error
        if found is None or found != identity:
            raise _UnprovenError("it was restarted and no longer has the weights of the last sync")
        return answer

    async def _answer_of_the_living(self, server: Server, body: dict[str, Any], cut: asyncio.Event | None) -> Any:
        """The answer, or what there is of it once `cut` is set."""
        url = f"{server.url}/v1/completions"
        if cut is None or not body.get("stream"):
            return await self._while_it_lives(server, self._http.request("POST", url, body))
        pieces: list[bytes] = []
        await self._while_it_lives(server, self._http.read_events(url, body, pieces), cut)
        return joined_events(b"".join(pieces), server.url, is_cut=cut.is_set())

    async def _while_it_lives(
        self, server: Server, action: Coroutine[Any, Any, Any], cut: asyncio.Event | None = None
    ) -> Any:
        """The result of a request, however long it takes while the server answers health checks.

        Once `cut` is set the request is cancelled, upon which the server drops it, and the result is None.
        """
        request = asyncio.create_task(action)
        awaited = {request} if cut is None else {request, asyncio.create_task(cut.wait())}
        wait_s = self._health_timeout_s / 2
        try:
            while not (await asyncio.wait(awaited, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                if server.health is None or server.health.done():  # requests that wait together share a check
                    check = self._http.request("GET", f"{server.url}/health", timeout_s=self._health_timeout_s)
                    server.health = asyncio.create_task(check)
                try:
                    await asyncio.shield(server.health)
                except HTTPError as error:
                    # Any other status comes from something that lives.
                    if error.status in (None, 503) and not request.done():
                        raise HTTPError(f"the server does not answer its health check ({error})") from error
            return request.result() if request.done() else None
        finally:
            for task in awaited:
                task.cancel()

    async def _confirmed(self, server: Server) -> str | None:
        """`find_identity`, by a check that begins from now on; answers that came together share one."""
        if server.next_check is None:
            server.next_check = asyncio.create_task(self._check_next(server))
        return await asyncio.shield(server.next_check)

    async def _check_next(self, server: Server) -> str | None:
        async with server.checking:  # while one check runs, the next one gathers answers
            server.next_check = None
            return await self._find_identity(server)

    async def _find_identity(self, server: Server) -> str | None:
        """Which processes of the server hold the weights of the last sync; None if not all do."""
        if self.weights is not None and not self.is_adapter:
            return identity_of(await hello(self._http, server.url, timeout_s=self._health_timeout_s), self.weights)
        models = await self._http.request("GET", f"{server.url}/v1/models", timeout_s=self._health_timeout_s)
        is_there = self.weights is None or self.weights in [entry["id"] for entry in models["data"]]
        return (self.weights or _AS_STARTED) if is_there else None

    # ---------------------------------------------------------------- losing servers, and getting them back

    def leave_out(self, server: Server, identity: str | None, reason: str) -> None:
        """Stop sampling from a server until it holds the weights again.

        `identity` is what it had when it was asked; it may have come back since then.
        """
        if server.identity is None or server.identity != identity:
            return
        server.identity, server.reason = None, reason
        self._num_losses += 1
        self._note_servers()
        logger.warning("The vLLM server %s is excluded from the rollout: %s", server.url, reason)
        server.comeback = asyncio.create_task(self._bring_back(server))

    def _note_servers(self) -> None:
        if any(server.identity is not None for server in self.servers.values()):
            self._has_servers.set()
        elif self._has_servers.is_set():
            self._has_servers.clear()
            self._lost_at = time.monotonic()

    async def _bring_back(self, server: Server) -> None:
        """Take the server in again as soon as it holds the weights; give up where nobody can give it any."""
        while not self._is_paused:
            try:
                identity = await self._find_identity(server)
                if identity is None and not self.may_be_restored:
                    return
                if identity is None and self.restore is not None and self._num_pending:
                    server.is_restoring = True
                    await self.restore(server)
                    identity = await self._find_identity(server)
            except UnfitServerError as error:
                server.reason = str(error)
                return
            except (HTTPError, GenerationError, OSError) as error:
                server.reason, identity = str(error), None
            finally:
                server.is_restoring = False
            if identity is not None and not self._is_paused:
                server.identity = identity
                self._note_servers()
                logger.warning("The vLLM server %s has the weights and takes part again.", server.url)
                return
            await asyncio.sleep(_POLL_S)

    async def pause(self) -> None:
        """End the attempts to bring servers back; one that is sending weights is waited for."""
        self._is_paused = True
        attempts = [(server, server.comeback) for server in self.servers.values() if server.comeback is not None]
        for server, comeback in attempts:
            if not server.is_restoring:
                comeback.cancel()
        await asyncio.gather(*(comeback for _, comeback in attempts), return_exceptions=True)

    @property
    def models(self) -> dict[str, str]:
        """URL -> name of the base model, of every server."""
        return {url: server.model for url, server in self.servers.items()}

    async def adopt(self, models: dict[str, str]) -> None:
        """Make these the servers, URL -> name of its base model; a new one holds no weights until `resume`."""
        old = self.servers
        for url in old.keys() - models.keys():
            logger.warning("The vLLM server %s has left the run: it is no longer in the list.", url)
            left = old[url]
            left.identity, left.reason = None, "it is no longer in the list"
            if left.comeback is not None:
                left.comeback.cancel()
        for url in models.keys() - old.keys():
            logger.warning("The vLLM server %s joins the run.", url)
        self.servers = {
            url: old.get(url) or Server(url, model, identity=None, reason="it has only joined")
            for url, model in models.items()
        }

    async def resume(self, weights: str, found: Found, *, is_adapter: bool) -> None:
        """Sample from the servers that hold `weights` after a sync; the others may still come back."""
        self.weights = weights
        self.is_adapter = is_adapter
        self._is_paused = False
        for server in self.servers.values():
            was_in = server.identity is not None
            server.identity, server.reason = found[server.url]
            if server.identity is None:
                self._num_losses += was_in
                logger.warning("The vLLM server %s is excluded until the next sync: %s", server.url, server.reason)
                server.comeback = asyncio.create_task(self._bring_back(server))
        self._note_servers()

    def take_counts(self) -> dict[str, float]:
        """Metrics: servers excluded now; servers lost and answers thrown away since the last call."""
        counts = {
            "sampling/servers_excluded": float(sum(server.identity is None for server in self.servers.values())),
            "sampling/servers_lost": float(self._num_losses),
            "sampling/answers_discarded": float(self._num_discarded),
        }
        self._num_losses = self._num_discarded = 0
        return counts

    # ---------------------------------------------------------------- scores

    async def scores(self, token_ids: list[int]) -> dict[str, list[float]]:
        """URL -> log-probabilities of each id after the first, (N - 1,), for the servers that are not excluded.

        Raises:
            GenerationError: none is left.
        """
        servers = [server for server in self.servers.values() if server.identity is not None]
        answers = await asyncio.gather(*(self._score_or_leave_out(server, token_ids) for server in servers))
        found = {server.url: scores for server, scores in zip(servers, answers, strict=True) if scores is not None}
        if not found:
            raise GenerationError(self.explain())
        return found

    async def _score_or_leave_out(self, server: Server, token_ids: list[int]) -> list[float] | None:
        identity = server.identity
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "return_token_ids": True}
        try:
            entries = (await self._ask(server, body))["choices"][0]["prompt_logprobs"][1:]
        except (HTTPError, _UnprovenError) as error:
            if isinstance(error, HTTPError) and not (error.is_passing or error.status == 404):
                raise GenerationError(str(error)) from error
            self.leave_out(server, identity, str(error))
            return None
        return [entry[str(token_id)]["logprob"] for entry, token_id in zip(entries, token_ids[1:], strict=True)]
