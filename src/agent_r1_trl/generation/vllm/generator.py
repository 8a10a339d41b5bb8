"""Generation with vLLM inside this process; every request enters and leaves the engine on its own.

A worker thread steps the engine while requests are unfinished and answers each as soon as it ends. Between rollouts
`sync` loads the policy's weights; adapters are merged into copies (`weights.py`).

Covered here: requests, weights, log-probabilities of given ids. Not covered: starting the engine (`engine.py`),
tensor parallelism (its ranks would have to step in lockstep).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from agent_r1_trl.generation.base import Generation, GenerationError, GenerationRequest
from agent_r1_trl.generation.vllm.kept import num_logprobs, read_kept_ids
from agent_r1_trl.generation.weights import check_adapters, policy_weights
from agent_r1_trl.generation.worker import ThreadedGenerator, WorkerRequest

if TYPE_CHECKING:
    from vllm import RequestOutput


def load_weights(engine_model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
    """Load weights by checkpoint name into vLLM's own model, in the process that holds it.

    Returns:
        Names of the model's parameters that were loaded; None from a model that does not say.

    Raises:
        ValueError: a weight does not fit the model.
    """
    latest = "the first weight"

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal latest
        for name, weight in weights:
            latest = f"{name} {tuple(weight.shape)}"
            yield name, weight

    try:
        with torch.no_grad():
            loaded: set[str] | None = engine_model.load_weights(noted())
    except (AttributeError, KeyError, ValueError, AssertionError, RuntimeError) as error:  # vLLM's often have no text
        raise ValueError(f"{latest}: {type(error).__name__} {error}".rstrip()) from error
    return loaded


def check_complete(engine_model: nn.Module, loaded: set[str] | None) -> None:
    """Refuse weights of which some did not come."""
    # Experts are loaded under other names than the parameters they end up in.
    needed = {name for name, _ in engine_model.named_parameters() if ".experts." not in name}
    missing = sorted(needed - set(loaded or ()))
    if loaded is not None and missing:
        raise KeyError(f"no value for {', '.join(missing[:5])}")


class _Source:
    """Weights on their way to an engine, and the error of the side that gives them, if there is one."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]):
        self._weights = weights
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from self._weights
        except Exception as error:
            self.error = error
            raise


@dataclass
class _Running:
    """A request in the engine, and what it has sampled so far as the engine has told it."""

    request: WorkerRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """One mapping per token, id -> vLLM's `Logprob`."""


class VLLMGenerator(ThreadedGenerator):
    """A `Generator` on a vLLM engine in this process.

    Args:
        model: checkpoint path or Hub name; or a transformers or PEFT model, whose weights are loaded by a first
            `sync`; or a `vllm.LLM` or `LLMEngine` of your own (started with `logprobs_mode="processed_logprobs"`, in
            one process, without tensor parallelism).
        stop_token_ids: ids that end a turn; a sampled one is kept as the last id. The model's own EOS ids count only
            if they are among them.
        max_model_len: maximum number of tokens of a request, prompt included (None: what the model allows).
        max_num_seqs: maximum number of requests that run at the same time.
        step_timeout_s: seconds after which a step of the engine counts as hanging, and its requests fail.
        keeps_parts: whether requests can be cut (`interrupt`): the engine then tells of every token, not of the last
            one alone, which costs processor time.
        **engine_options: of `vllm.EngineArgs`, such as `gpu_memory_utilization`, `dtype` or `enable_sleep_mode`.
    """

    def __init__(
        self,
        model: object,
        *,
        stop_token_ids: Collection[int],
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        step_timeout_s: float = 600.0,
        keeps_parts: bool = False,
        **engine_options: object,
    ) -> None:
        super().__init__("The vLLM engine in this process", step_timeout_s=step_timeout_s)
        self._stop_token_ids = sorted(stop_token_ids)
        self._engine_lock = threading.RLock()
        self._running: dict[str, _Running] = {}
        self._keeps_parts = keeps_parts
        self._names = itertools.count()
        self._has_all_weights = isinstance(model, str)
        self._had_process_group = torch.distributed.is_initialized()
        self._engine: Any = getattr(model, "llm_engine", model)
        self._is_owner = isinstance(model, (str, nn.Module))
        if isinstance(model, nn.Module):
            check_adapters(model, is_merged=True)
        if self._is_owner:
            from agent_r1_trl.generation.vllm.engine import build_engine

            engine_options |= {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
            self._engine = build_engine(model, **engine_options)
        self._has_priorities = self._engine.vllm_config.scheduler_config.policy == "priority"
        self.max_model_length = self._engine.vllm_config.model_config.max_model_len
        if isinstance(model, nn.Module):
            self.sync(model)

    # ---------------------------------------------------------------- weights

    def sync(self, model: nn.Module) -> bool:
        """Load the policy's weights: all of them the first time, later those that training can change."""
        weights = policy_weights(model, only_trainable=self._has_all_weights)
        self.update_weights(weights, is_complete=not self._has_all_weights)
        self._has_all_weights = True
        return True

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, is_complete: bool = False) -> None:
        """Load weights by their checkpoint names, after the requests that are in flight have ended.

        Args:
            weights: name and tensor, on any device.
            is_complete: whether every weight of the model must be among them.

        Raises:
            ValueError: the engine's model lacks a weight, has it in another shape, or did not receive one it needs.
            GenerationError: the engine is dead or hangs.
        """
        source = _Source(weights)

        def load(engine_model: nn.Module) -> None:
            loaded = load_weights(engine_model, source)
            if is_complete:
                check_complete(engine_model, loaded)

        with self._engine_at_rest():
            if self._is_asleep:
                self._wake_up("weights")
            try:
                self._engine.apply_model(load)
            except (AttributeError, KeyError, ValueError, AssertionError, RuntimeError) as error:
                if source.error is not None:
                    raise source.error from None  # no fault of the engine
                raise ValueError(
                    f"vLLM could not load the policy's weights ({type(error).__name__}: {error}). "
                    "The engine must run the policy's architecture, vocabulary size included."
                ) from error
            self._reset_prefix_cache()

    def _reset_prefix_cache(self) -> None:
        """Forget what was computed with the old weights: it must not be continued with the new ones.

        Raises:
            GenerationError: the engine keeps it.
        """
        is_kept = self._engine.reset_prefix_cache() is False
        if is_kept:
            # Requests that are not ours hold it, in an engine of the user's own. They start again, as on a server.
            with suppress(RuntimeError):  # vLLM's, where even that does not free the cache
                is_kept = self._engine.reset_prefix_cache(reset_running_requests=True) is False
        if is_kept:
            raise GenerationError(
                "The vLLM engine in this process keeps its prefix cache, which was computed with older weights "
                "(reset_prefix_cache() returned False): requests or transfers of other users hold blocks of it. End "
                "them before a sync, or give the run an engine of its own (vllm_mode='colocate')."
            )

    def scores(self, token_ids: list[int]) -> dict[str, list[float]]:
        """See `Generator`; there is one engine, the one in this process."""
        from vllm import SamplingParams as EngineParams

        with self._engine_at_rest():
            if self._is_asleep:
                self._wake_up("kv_cache")
            params = EngineParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
            name = self._next_name()
            self._engine.add_request(name, {"prompt_token_ids": token_ids}, params)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.request_id == name and output.finished:
                        pairs = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
                        return {"the engine in this process": [entry[token_id].logprob for entry, token_id in pairs]}
        raise GenerationError("The vLLM engine in this process dropped a request without an answer.")

    @contextmanager
    def _engine_at_rest(self) -> Iterator[None]:
        """The engine, once no request is in flight; a GenerationError if a step hangs or the engine has died."""
        if not self._engine_lock.acquire(timeout=self._step_timeout_s or -1):
            self._check_step()
            raise GenerationError("The vLLM engine in this process is busy with requests that do not end.")
        try:
            yield
        except Exception as error:
            if type(error).__name__ != "EngineDeadError":
                raise
            raise GenerationError(f"The vLLM engine has died ({error}). Start the run again.") from error
        finally:
            self._engine_lock.release()

    # ---------------------------------------------------------------- memory

    @property
    def _is_asleep(self) -> bool:
        return bool(self._engine.vllm_config.model_config.enable_sleep_mode and self._engine.is_sleeping())

    def _wake_up(self, part: str) -> None:
        """Take memory for a part of the engine again, which the trainer's allocator keeps cached until it is asked."""
        torch.cuda.empty_cache()  # vLLM 0.22 does not, and then runs out of memory
        self._engine.wake_up(tags=[part])

    def sleep(self) -> None:
        """Give the memory of weights and cache to the trainer; `sync` before the next request. GPU only."""
        with self._engine_at_rest():
            self._engine.sleep(level=2)
            self._has_all_weights = False

    def close(self) -> None:
        """Fail the requests that are in flight, refuse further ones and free the engine."""
        super().close()
        if not self._engine_lock.acquire(blocking=False):
            return  # a step hangs in it, and nothing can be freed
        try:
            engine, self._engine = self._engine, None
            if self._is_owner and engine is not None:
                from agent_r1_trl.generation.vllm.engine import shut_down

                shut_down(engine, owns_process_group=not self._had_process_group)
        finally:
            self._engine_lock.release()

    # ---------------------------------------------------------------- worker thread

    def _serve(self) -> None:
        """Step the engine until no request is left."""
        with self._engine_lock:
            if torch.cuda.is_available():  # the current device is a property of the thread
                torch.cuda.set_device(self._engine.model_executor.driver_worker.device)
            if self._is_asleep:
                self._wake_up("kv_cache")
            while True:
                self._cut()
                with self._changed:
                    self._check_open()
                    new = [self._waiting.popleft() for _ in range(len(self._waiting))]
                for request in new:
                    self._add(request)
                self._abort_cancelled()
                if self._running:
                    self._note_step()
                    for output in self._engine.step():
                        self._take(output)
                    if self._running and not self._engine.has_unfinished_requests():
                        raise RuntimeError("the engine dropped requests without an answer")
                with self._changed:
                    if not self._running and not self._waiting:
                        return
                self._deliver()

    def _add(self, request: WorkerRequest) -> None:
        name = self._next_name()
        try:
            prompt = {"prompt_token_ids": request.asked.prompt_ids}
            order = {"priority": request.order} if self._has_priorities else {}
            self._engine.add_request(name, prompt, self._engine_params(request.asked), **order)
        except Exception as error:  # a prompt longer than max_model_len, say: that request's own fault
            request.fail(error)
            self._ended.append(request)
        else:
            self._running[name] = _Running(request)

    def _next_name(self) -> str:
        return f"request-{next(self._names)}"

    def _engine_params(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        return EngineParams(
            **vars(request.params),
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=True,
            logprobs=num_logprobs(request.params),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if self._keeps_parts else RequestOutputKind.FINAL_ONLY,
        )

    def interrupt(self) -> bool:
        """See `Generator`."""
        return self._keeps_parts and super().interrupt()

    def _cut(self) -> None:
        """End the requests where they are, if that is asked for."""
        if not self._is_cut():
            return
        for running in self._running.values():
            self._finish(running, "interrupted")
        self._engine.abort_request(list(self._running))
        self._running.clear()

    def _take(self, output: RequestOutput) -> None:
        """Take in what the engine has sampled of a request."""
        running = self._running.get(output.request_id)
        if running is None:
            return
        completion = output.outputs[0]
        running.token_ids += completion.token_ids
        running.logprobs += completion.logprobs or ()
        if output.finished:
            self._finish(self._running.pop(output.request_id), completion.finish_reason)

    def _finish(self, running: _Running, reason: str | None) -> None:
        """Turn what the engine has sampled into a `Generation`."""
        request, token_ids = running.request, running.token_ids
        if reason not in ("stop", "length", "interrupted"):
            request.outcome = GenerationError(f"vLLM ended the request with {reason!r}.")
        else:
            pairs = zip(running.logprobs, token_ids, strict=True)
            logprobs = [entry[token_id].logprob for entry, token_id in pairs]
            try:
                likely = ({token: item.logprob for token, item in entry.items()} for entry in running.logprobs)
                kept_ids = read_kept_ids(likely, request.asked.params)
                request.outcome = Generation(
                    token_ids=token_ids, logprobs=logprobs, stop=cast(Any, reason), kept_ids=kept_ids
                )
            except GenerationError as error:
                request.fail(error)
        self._ended.append(request)

    def _abort_cancelled(self) -> None:
        cancelled = [name for name, running in self._running.items() if running.request.is_cancelled]
        if cancelled:
            self._engine.abort_request(cancelled)
            self._ended.extend(self._running.pop(name).request for name in cancelled)

    def _fail_all(self, error: BaseException) -> None:
        """End everything that runs or waits with the error as its cause."""
        self._say(error)
        with self._engine_lock, suppress(Exception):  # the engine may be beyond repair; the requests end all the same
            self._engine.abort_request(list(self._running))
        with self._changed:
            failed = [*(running.request for running in self._running.values()), *self._waiting]
            self._waiting.clear()
        self._running.clear()
        for request in failed:
            request.fail(error)
        self._ended.extend(failed)
