"""Plays the trajectories of each generation batch, with the policy's current weights or one batch ahead.

Covered here: the generator and its weights, sampling settings, `overlap_rollout`. Not covered: what happens inside a
trajectory (`agent_r1_trl.rollout`), which rows count and what they earn (`rewards.py`).
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from trl.models import unwrap_model_for_generation

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments.factory import users_environments
from agent_r1_trl.generation import SamplingParams, TransformersGenerator
from agent_r1_trl.generation.base import Generator, as_generator
from agent_r1_trl.generation.sync import sync_weights
from agent_r1_trl.generation.vllm.build import build_vllm, check_vllm
from agent_r1_trl.journal import RolloutLog
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner, context_length, rollout_requests
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.failures import FailureWatch, gather_failures
from agent_r1_trl.trainers.journal import ReplayedRollout, TrainingJournal
from agent_r1_trl.trainers.lookahead import Lookahead
from agent_r1_trl.trajectory import Trajectory


@dataclass(kw_only=True, frozen=True)
class Position:
    """Where the run stands when a rollout is asked for."""

    micro_step: int
    """Number of micro-batches trained on so far: TRL's `_step`. It seeds the draws."""
    optimizer_step: int
    """Number of optimizer steps behind the policy's weights."""
    num_micro_steps: int
    """Number of micro-batches of the whole run."""
    group_size: int
    """Trajectories of one prompt; they are consecutive rows."""
    is_training: bool
    first_row: int = 0
    """Index in the evaluation of the first row of all ranks; 0 in training."""


class Rollout:
    """Trajectories that are being played, or have been.

    Args:
        runner: plays them.
        requests: one per trajectory.
        params: how tokens are drawn.
        synced_step: number of optimizer steps behind the generator's weights.
        journal: keeps it on disk.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        *,
        synced_step: int,
        journal: RolloutLog | None = None,
    ):
        self.synced_step = synced_step
        self.environments: list[Any] | None = None
        """The trajectories' environments once they have ended, as `users_environments` gives them."""
        self.seconds = 0.0
        """Wall time from start to end."""
        start = time.perf_counter()

        def finish(_: Any) -> None:
            self.seconds = time.perf_counter() - start
            self.environments = users_environments(runner.environments, runner.env_factory)
            self._has_ended.set()

        self._has_ended = threading.Event()
        self._future = runner.start(requests, params=params, journal=journal)
        self._future.add_done_callback(finish)

    def wait(self) -> None:
        """Return when all trajectories have ended, well or not."""
        try:
            self._has_ended.wait()
        except BaseException:  # KeyboardInterrupt: stop what is running
            self.cancel()
            raise

    @property
    def trajectories(self) -> list[Trajectory]:
        """In the order of the requests.

        Raises:
            Exception: what an environment's author or a reward function got wrong; see `run_trajectory`.
        """
        return self._future.result()

    def cancel(self) -> None:
        """Stop the trajectories."""
        self._future.cancel()


@dataclass
class PlayedBatch:
    """One generation batch on this rank: B rows of the data set and what became of them."""

    rows: Sequence[dict[str, Any]]
    trajectories: list[Trajectory]
    environments: list[Any] | None
    reward_values: torch.Tensor = field(init=False)
    """(B, F) what each of F reward functions returned, once they ran; NaN for rows that a function did not score."""
    in_baseline: torch.Tensor = field(init=False)
    """(B,) bool: whose reward counts in statistics, once the reward functions ran."""
    in_loss: torch.Tensor = field(init=False)
    """(B,) bool: whose tokens get gradients; these rows are all in the baseline."""

    @property
    def rows_with_prompts(self) -> list[dict[str, Any]]:
        """The rows as TRL and reward functions see them: with the prompt that the environment made."""
        pairs = zip(self.rows, self.trajectories, strict=True)
        return [{**row, "prompt": trajectory.prompt_messages} for row, trajectory in pairs]


def trl_generation(
    played: PlayedBatch,
    *,
    tokenizer: Any,
    in_loss: Callable[[Trajectory], bool],
    has_logprobs: bool,
    is_single_turn: bool,
) -> tuple:
    """The 8-tuple that TRL's `_generate` returns, for the trajectories of a rollout.

    Args:
        played: B trajectories.
        tokenizer: of the policy; its padding token stands for an empty prompt or completion, on which TRL crashes.
        in_loss: whether a trajectory's action tokens enter the loss.
        has_logprobs: whether TRL compares the sampler's log-probs with the trainer's (`use_vllm`).
        is_single_turn: whether prompts are answered without environment and tools. TRL then hands a reply to the
            reward functions as one text, reasoning included, unless the tokenizer says how replies are parsed.
    """
    trajectories, pad_token_id = played.trajectories, tokenizer.pad_token_id
    completion_ids = [trajectory.completion_ids or [pad_token_id] for trajectory in trajectories]
    completions = [trajectory.answered_messages for trajectory in trajectories]
    if is_single_turn and not any(getattr(tokenizer, f"response_{kind}", None) for kind in ("template", "schema")):
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    tool_mask = [
        trajectory.action_mask or [0] if in_loss(trajectory) else [0] * len(ids)
        for trajectory, ids in zip(trajectories, completion_ids, strict=True)
    ]
    return (
        [trajectory.prompt_ids or [pad_token_id] for trajectory in trajectories],
        completion_ids,
        tool_mask,
        completions,
        [trajectory.logprobs or [0.0] for trajectory in trajectories] if has_logprobs else None,
        {"trajectory": trajectories},
        None,
        [],
    )


class Rollouts:
    """Plays one trajectory per row of a generation batch.

    Args:
        args: of the trainer.
        accelerator: of the trainer.
        policy: the model, unwrapped.
        tokenizer: of the policy.
        env_factory: makes a fresh environment for each trajectory.
        generator: a `Generator` that the user brought; None makes one from the arguments at the first rollout.
        eos_token_ids: ids that end a turn besides the chat template's own.

    Raises:
        ImportError: vLLM is asked for and not installed.
        ValueError: the arguments ask for an engine that cannot run this policy.
    """

    def __init__(
        self,
        args: MultiTurnConfig,
        accelerator: Any,
        policy: Any,
        tokenizer: Any,
        env_factory: Callable[[], Any],
        *,
        generator: Any = None,
        eos_token_ids: Sequence[int] = (),
    ):
        self.args = args
        self.tokenizer = tokenizer
        self.env_factory = env_factory
        self._accelerator = accelerator
        self._is_on_gpu = accelerator.device.type == "cuda"
        if args.use_vllm and generator is None and args.replay is None:
            check_vllm(args, policy, is_on_gpu=self._is_on_gpu)
        self.chat = ChatFormat(
            tokenizer,
            chat_template=args.chat_template,
            response_template=args.response_template,
            chat_template_kwargs=args.chat_template_kwargs,
            thinking=args.thinking,
            extra_stop_token_ids=eos_token_ids,
        )
        self.limits = args.rollout_limits(context_length(policy.config))
        self.params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )
        self.upcoming: Rollout | ReplayedRollout | None = None
        """The next batch's rollout, played while the update trains on this one (`overlap_rollout`)."""
        self.failures = FailureWatch(args.max_failure_share, args.failure_window)
        self.synced_step = -1
        """Number of optimizer steps behind the generator's weights; -1 before the first sync."""
        self._generator = None if generator is None else as_generator(generator)
        self._runner: RolloutRunner | None = None
        self._window = Lookahead()
        self.journal = TrainingJournal(args, accelerator, self.limits, self.chat.chat_template, env_factory)

    # ---------------------------------------------------------------- playing

    def play(
        self, rows: Sequence[dict[str, Any]], model: Any, position: Position
    ) -> tuple[PlayedBatch, dict[str, float]]:
        """Play one trajectory per row. With `overlap_rollout` it is under way already, and the next one begins.

        A collective call where parameters are sharded: ZeRO-3 gathers them once, around the whole rollout.

        Args:
            rows: this rank's rows of the data set.
            model: the policy as accelerate wrapped it.
            position: where the run stands.

        Returns:
            The trajectories, and metrics of the rollout.

        Raises:
            NothingPlayedError: too many trajectories of the training have failed; lists the causes.
            SyncError: generator and trainer give different log-probabilities after a weight sync.
        """
        start = time.perf_counter()
        if self.upcoming is not None:
            self.upcoming.wait()  # its generator must not change weights on the way
        gather = self.args.ds3_gather_for_generation and not self.args.use_vllm
        with (
            torch.no_grad(),
            unwrap_model_for_generation(model, self._accelerator, gather_deepspeed3_params=gather) as policy,
        ):
            metrics = self.sync(policy, position.optimizer_step)
            self.journal.take_weights(policy, position)
            if self.upcoming is not None and position.is_training:
                rollout, self.upcoming = self.upcoming, None
            else:
                rollout = self._start(rows, position.micro_step, position)
                rollout.wait()
            if self.args.overlap_rollout and position.is_training:
                self._start_upcoming(position)
            self._rest()
        if self._accelerator.device.type == "cpu":
            release_free_memory()
        played = PlayedBatch(rows, rollout.trajectories, rollout.environments)
        if position.is_training:
            self.failures.judge(gather_failures(played.trajectories), group_size=position.group_size)
        metrics["time/rollout_s"] = rollout.seconds
        if self.args.overlap_rollout:
            metrics["time/wait_s"] = time.perf_counter() - start
            metrics["sampling/staleness"] = position.optimizer_step - rollout.synced_step
        return played, metrics

    def _start(self, rows: Sequence[dict[str, Any]], micro_step: int, position: Position) -> Rollout | ReplayedRollout:
        requests = rollout_requests(
            rows,
            first_row=position.first_row + self._accelerator.process_index * len(rows),
            group_size=position.group_size,
            seed=self.args.seed,
            step=micro_step if position.is_training else None,
        )
        replayed = self.journal.replay(requests, micro_step, position.optimizer_step)
        if replayed is not None:
            return replayed
        params = self.params
        if not position.is_training and self.args.eval_temperature is not None:
            params = replace(params, temperature=self.args.eval_temperature)
        journal = self.journal.open(requests, params, micro_step, self.synced_step) if position.is_training else None
        return Rollout(self.runner, requests, params, synced_step=self.synced_step, journal=journal)

    def _start_upcoming(self, position: Position) -> None:
        """Begin the next generation batch, if the run gets that far."""
        micro_step = position.micro_step + self.args.steps_per_generation * self.args.num_iterations
        if micro_step >= position.num_micro_steps:
            return
        rows = self._window.at(micro_step)
        if rows is not None:
            self.upcoming = self._start(rows, micro_step, position)

    def look_ahead(self, batches: Iterator[Any], micro_step: int) -> Iterator[Any]:
        """The Trainer's batches, passed on through a window that `overlap_rollout` can look ahead in."""
        return self._window.over(batches, micro_step) if self.args.overlap_rollout else batches

    def end_run(self) -> None:
        """Stop a rollout that no update will train on, and sync again before the next one.

        The policy may now be that of the best checkpoint, and the next run counts its steps from 0 again.
        """
        if self.upcoming is not None:
            self.upcoming.cancel()
            self.upcoming = None
        self.journal.end_run()
        self.synced_step = -1

    @property
    def runner(self) -> RolloutRunner:
        """Plays the trajectories; there is one from the first `sync` on."""
        assert self._runner is not None
        return self._runner

    # ---------------------------------------------------------------- weights

    def sync(self, policy: Any, step: int) -> dict[str, float]:
        """Bring the weights of optimizer step `step` to the generator, unless it has them, and check them there.

        A collective call where parameters are sharded.

        Args:
            policy: the model, unwrapped.
            step: number of optimizer steps behind its weights.

        Returns:
            Metrics of the sync; empty if there was nothing to do.

        Raises:
            SyncError: generator and trainer give different log-probabilities.
        """
        if self.journal.is_replay:
            return {}
        if self._runner is None:
            generator = self._generator if self._generator is not None else self._build(policy)
            self._runner = RolloutRunner(self.env_factory, generator, self.chat, self.limits, self.params)
        if self.synced_step == step:
            return {}
        self.synced_step = step
        return sync_weights(
            self._runner.generator,
            policy,
            self.tokenizer,
            max_gap=self.args.max_sync_logprob_gap,
            is_autocast=self._accelerator.mixed_precision != "no",
        )

    def _build(self, policy: Any) -> Generator:
        if self.args.use_vllm:
            return build_vllm(policy, self.args, stop_token_ids=self.chat.stop_token_ids, is_on_gpu=self._is_on_gpu)
        return TransformersGenerator(
            policy,
            pad_token_id=self.tokenizer.pad_token_id,
            stop_token_ids=self.chat.stop_token_ids,
            max_batch_size=self.args.generation_batch_rows,
        )

    def _rest(self) -> None:
        """Give a resting engine's memory to the update (`vllm_enable_sleep_mode`)."""
        may_sleep = self.args.use_vllm and self.args.vllm_enable_sleep_mode
        if may_sleep and self.runner.generator.sleep() is not False:
            self.synced_step = -1  # its weights are gone

    def close(self) -> None:
        """End the generator and the rollout's thread; a generator that the user brought stays open."""
        if self._runner is None:
            return
        if self._generator is None:
            self._runner.generator.close()
        self._runner.close()
        self._runner = None
        self.synced_step = -1


def release_free_memory() -> None:
    """Give freed memory between live blocks back to the system; does nothing where the C library cannot (glibc can).

    Trajectories differ in length, so every step asks for blocks of other sizes, and from several threads: glibc keeps
    the holes, and a long run on the CPU would grow from step to step. Takes a fraction of a second.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
