"""Samples the trajectories of each generation batch, with the policy's current weights or ahead of the update.

What happens inside a trajectory stands in `agent_r1_trl.rollout`, which rollouts run ahead in `ahead.py`, which rows
count and what they earn in `rewards.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trl.models import unwrap_model_for_generation

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.plain_text import PlainText
from agent_r1_trl.critic.attach import base_causal_lm
from agent_r1_trl.environments.factory import users_environments
from agent_r1_trl.environments.trl_adapters import SingleTurnEnv
from agent_r1_trl.generation import SamplingParams, TransformersGenerator
from agent_r1_trl.generation.base import Generator, as_generator
from agent_r1_trl.generation.fsdp2 import gathered_for_sampling
from agent_r1_trl.generation.gate import GatedGenerator
from agent_r1_trl.generation.rotary import (
    check_engine_length,
    fix_rotary_embeddings,
    longrope_switch,
    vllm_default_length,
)
from agent_r1_trl.generation.sync import sync_weights
from agent_r1_trl.generation.vllm.build import build_vllm, check_vllm
from agent_r1_trl.rollout import (
    RolloutLimits,
    RolloutRequest,
    RolloutRunner,
    context_length,
    derive_seed,
    rollout_requests,
)
from agent_r1_trl.rollout.context_policies import STRIP_POLICY
from agent_r1_trl.rollout.runner import STOP_TIMEOUT_S
from agent_r1_trl.settings import plain_value
from agent_r1_trl.trainers.ahead import RolloutsAhead, age_metrics
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.copies import let_copies_compute
from agent_r1_trl.trainers.input_hooks import keep_one_input_hook
from agent_r1_trl.trainers.rollout_batch import Position, RolloutBatch
from agent_r1_trl.trainers.sharding import sampling_alone
from agent_r1_trl.trajectory import Trajectory

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agent_r1_trl.rollout.runner import Journal
    from agent_r1_trl.trainers.callbacks import Callbacks


logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 15.0
"""Seconds that environments have to close when a run is told to end: launchers kill 30 s after a signal."""
EVALUATION_ORDER = -1
"""The update waits for an evaluation: it comes before the rollouts in flight, whose order is their micro-step."""


class Rollouts:
    """Samples one trajectory per row of a generation batch.

    `policy` is the unwrapped model, `generator` one that the user brought (None makes one from the arguments at the
    first rollout), and `eos_token_ids` end a turn besides the chat template's own. With `is_plain_text` there is no
    template: prompts are continued.

    Raises:
        ImportError: vLLM is asked for and not installed.
        ValueError: the arguments ask for an engine that cannot run this policy.
    """

    features: Callbacks
    """Callbacks of the trainer, which sets them."""

    def __init__(
        self,
        args: MultiTurnConfig,
        accelerator: Accelerator,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        env_factory: Callable[[], Any],
        *,
        generator: object = None,
        eos_token_ids: Sequence[int] = (),
        is_plain_text: bool = False,
    ):
        self.args = args
        self.seed = args.seed
        """Seed of the draws in training; a rollback takes another one (`features/echo_trap/guard.py`)."""
        self.tokenizer = tokenizer
        self.env_factory = env_factory
        self._accelerator = accelerator
        self._is_on_gpu = accelerator.device.type == "cuda"
        if args.use_vllm and generator is None and plain_value(args, "journal.replay") is None:
            check_vllm(args, policy, is_on_gpu=self._is_on_gpu)
        self.chat = (
            PlainText(tokenizer, extra_stop_token_ids=eos_token_ids)
            if is_plain_text
            else ChatFormat(
                tokenizer,
                chat_template=args.chat_template,
                response_template=args.response_template,
                chat_template_kwargs=args.chat_template_kwargs,
                strips_reasoning=args.context.policy == STRIP_POLICY,
                extra_stop_token_ids=eos_token_ids,
            )
        )
        let_copies_compute(policy)  # a generator may sample from one
        keep_one_input_hook(base_causal_lm(policy))
        self._policy_config = policy.config
        self._context_length = context_length(policy.config)
        self._warn_of_settings()
        self._temperature, self._num_ahead = args.temperature, args.rollouts_ahead
        self.ahead = RolloutsAhead(args, self._start, lambda position: self.features.call("void", position))
        """The rollouts of later batches, which are sampled while the update trains on this one."""
        self.is_cancelled = threading.Event()
        """Set while the run is told to end."""
        self.synced_step = -1
        """Number of optimizer steps behind the generator's weights; -1 before the first sync."""
        self._generator = None if generator is None else as_generator(generator)
        self._runner: RolloutRunner | None = None
        self._gate: GatedGenerator | None = None
        """Between trajectories and sampler; None where none of them goes on across a sync."""
        self._is_stuck = False
        self._last: Rollout | None = None

    def _warn_of_settings(self) -> None:
        length = self.args.max_completion_length
        if self._context_length is not None and length is not None and length >= self._context_length:
            logger.warning(
                "max_completion_length=%d does not fit into the %d positions that the model has for prompt and "
                "completion together: trajectories end where these are full. Set it lower, or choose another model.",
                length,
                self._context_length,
            )
        if self.args.repetition_penalty != 1.0:
            logger.warning(
                "repetition_penalty=%g: tokens are sampled from penalised logits, and the loss is that of the model's "
                "own, so its gradient is another distribution's. Set repetition_penalty=1.0.",
                self.args.repetition_penalty,
            )
        if self.args.rollouts_ahead and not self.args.vllm_importance_sampling_correction:
            logger.warning(
                "rollouts_ahead=%d with vllm_importance_sampling_correction=false: nothing corrects for the older "
                "weights, and nothing says how far the policy has moved (failures.min_effective_share). Set "
                "vllm_importance_sampling_correction=true.",
                self.args.rollouts_ahead,
            )

    @property
    def limits(self) -> RolloutLimits:
        """The budget of a trajectory, as the arguments say now."""
        limits = self.args.rollout_limits(self._context_length)
        if self.env_factory is SingleTurnEnv and self.args.rollout_timeout == self.args.default_of("rollout_timeout"):
            limits = replace(limits, rollout_timeout=None)  # as in TRL, tokens alone end a reply
        return limits

    @property
    def longest_row(self) -> int | None:
        """The maximum number of tokens of prompt and completion, as the model and the engine have it; None: no limit.

        Known before there is an engine: where nobody sets vLLM's length, this is its own default.
        """
        length = self.limits.max_model_length
        if not self.args.use_vllm or self.args.vllm_max_model_length is not None:
            return length
        lengths = [length, vllm_default_length(self._policy_config)]
        return min((item for item in lengths if item is not None), default=None)

    def fix_rotary_embeddings_of(self, *models: nn.Module) -> None:
        """Let every row of the run compute with the same frequencies, in each of these models.

        Raises:
            ValueError: the scaling of a model's RoPE is dynamic, and rows may be longer than it holds for.
        """
        for model in models:
            choice = fix_rotary_embeddings(model, self.longest_row)
            switch = longrope_switch(self._policy_config)
            if switch is not None and self._accelerator.is_main_process:
                logger.warning(
                    "%s: all rows of this run compute with the %s factors of LongRoPE, because the maximum length is "
                    "%s, and the long ones begin above %s. Serve what is trained with the same ones: vLLM's "
                    "--max-model-len must be %s %s.",
                    type(model).__name__,
                    choice,
                    self.longest_row,
                    switch,
                    "above" if choice == "long" else "at most",
                    switch,
                )

    # ---------------------------------------------------------------- rollouts

    def generate(self, rows: Sequence[dict[str, Any]], model: nn.Module, position: Position) -> RolloutBatch:
        """Sample one trajectory per row; with `rollouts_ahead` they may be in flight already. `finish` must follow.

        The rows are this rank's; the model is the policy as accelerate wrapped it. A collective call: before weights
        are sent, all ranks wait for the last turn that any of them samples, and ZeRO-3 and FSDP2 gather parameters
        once, around the whole rollout.

        Raises:
            NothingRolledOutError: a feature ends the run for what has failed; lists the causes.
            SyncError: generator and trainer give different log-probabilities after a weight sync.
        """
        start = time.perf_counter()
        if self._has_to_sync(position.optimizer_step):
            self._shut_gate()  # trajectories in flight go on behind the sync
            # Ranks share servers, and the first one sends for all of them: none may still sample with the old weights.
            # The broadcasts of the sync are no barrier for their sender.
            self._accelerator.wait_for_everyone()
        gather = self.args.ds3_gather_for_generation and not self.args.use_vllm
        gather_fsdp2 = contextlib.nullcontext if self.args.use_vllm else gathered_for_sampling
        metrics: dict[str, float] = {}
        self._check_ahead()
        runs_ahead = self._num_ahead > 0 and position.is_training and not position.round
        while True:
            with (
                self.features.around_rollout(),
                torch.no_grad(),
                unwrap_model_for_generation(model, self._accelerator, gather_deepspeed3_params=gather) as policy,
                sampling_alone(model),
                gather_fsdp2(policy),
            ):
                policy = getattr(policy, "_orig_mod", policy)  # compiled: other names, and slow at new lengths
                metrics |= self.sync(policy, position.optimizer_step)  # the second time there is nothing to do
                if not position.round:
                    self.features.call("weights_synced", policy, position)
                with self._open_gate(position.optimizer_step):
                    if runs_ahead:
                        rollout = self.ahead.ended(rows, position)
                    else:
                        rollout = self._start(rows, position.micro_step, position)
                        rollout.wait()
                trajectories = rollout.trajectories
            batch = RolloutBatch(list(rollout.rows), trajectories, rollout.environments, rollout.requests, position)
            if not self.features.voids(batch):
                break  # else it is sampled anew
        batch.metrics = metrics | batch.metrics | {"time/rollout_s": rollout.seconds}
        if runs_ahead:
            batch.metrics["time/wait_s"] = time.perf_counter() - start
            batch.metrics |= age_metrics(trajectories, position.optimizer_step)
        if self._gate is not None:
            batch.metrics |= self._gate.take_metrics()
        return batch

    def _check_ahead(self) -> None:
        if self.args.rollouts_ahead != self._num_ahead:
            raise ValueError(
                f"rollouts_ahead={self.args.rollouts_ahead} was set on a trainer that was made with {self._num_ahead}:"
                " the place in the data, the gate before the sampler and the importance ratio follow from the first "
                "value. Set it back, or make another trainer with it and go on from a checkpoint "
                "(resume_from_checkpoint)."
            )

    @contextlib.contextmanager
    def _open_gate(self, version: int) -> Iterator[None]:
        """Inside it turns are sampled; with a sampler that has weights of its own, behind it as well."""
        if self._gate is not None:
            self._gate.open(version)
        try:
            yield
        finally:
            # The update is about to change the weights that the sampler reads, and needs the device.
            if self._gate is not None and self._gate.reads_policy:
                self._shut_gate()

    def _shut_gate(self) -> None:
        if self._gate is not None:
            self._gate.shut(self.is_cancelled.is_set)

    def finish(self) -> None:
        """The batch is sampled, replacements included: leave memory to the update."""
        if self.features.replaces_sampling:  # there is no sampler to put to sleep
            return
        if self.args.use_vllm and self.args.vllm_enable_sleep_mode:
            self._shut_gate()
            if self.runner.generator.sleep() is not False:
                self.synced_step = -1  # its weights are gone

    def _start(self, rows: Sequence[dict[str, Any]], micro_step: int, position: Position) -> Any:
        if position.is_training and not position.round:
            rows = self.features.fold("choose_rows", rows, micro_step)
        requests = rollout_requests(
            rows,
            first_row=position.first_row + self._accelerator.process_index * len(rows),
            group_size=position.group_size,
            seed=self.seed if position.is_training else self.args.seed,
            step=micro_step if position.is_training else None,
            round_number=position.round,
            places=position.places,
        )
        place = replace(position, micro_step=micro_step)
        replayed = self.features.first("replay", requests, self.limits, place)
        if replayed is not None:
            replayed.rows = rows
            return replayed
        self.runner.limits = self.limits  # callbacks may have changed the arguments since the last rollout
        params = self.args.sampling_params(is_training=position.is_training)
        journal = None
        if position.is_training:
            if params.temperature != self._temperature:
                raise ValueError(
                    f"temperature={params.temperature:g} was set in the middle of a run that began with "
                    f"{self._temperature:g}: TRL divides the logits of the update by the value that the trainer was "
                    "made with. Set it back, or make another trainer with it and go on from a checkpoint "
                    "(resume_from_checkpoint)."
                )
            journal = self.features.first("record", requests, self.runner.limits, params, place, self.synced_step)
        order = micro_step if position.is_training else EVALUATION_ORDER
        rollout = Rollout(self.runner, requests, params, journal=journal, order=order)
        self._last = rollout
        rollout.rows = rows
        if self.is_cancelled.is_set():
            rollout.cancel(CANCEL_TIMEOUT_S)
        return rollout

    def cancel(self) -> None:
        """End the rollout in flight, and every further one until `end_run`; from any thread.

        Whoever waits for a rollout gets a `CancelledError`. The environments are closed when this returns, or have had
        `CANCEL_TIMEOUT_S` for it.
        """
        self.is_cancelled.set()
        in_flight = [self._last, *self.ahead.in_flight]
        has_ended = [rollout.cancel(CANCEL_TIMEOUT_S) for rollout in in_flight if rollout is not None]
        self._is_stuck = not all(has_ended)

    def end_run(self) -> None:
        """Stop the rollouts that no update will train on, and sync again before the next one.

        The policy may now be that of the best checkpoint, and the next run counts its steps from 0 again.
        """
        self.ahead.cancel()
        self.synced_step, self._last = -1, None
        self.is_cancelled.clear()

    @property
    def runner(self) -> RolloutRunner:
        """Samples the trajectories; there is one from the first `sync` on."""
        assert self._runner is not None
        return self._runner

    @property
    def generator(self) -> Generator | None:
        """The generator; None before the first `sync`, and where batches come from elsewhere."""
        return None if self._runner is None else self._runner.generator

    # ---------------------------------------------------------------- weights

    def sync(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        """Bring the weights of optimizer step `step` to the generator, unless it has them, and check them there.

        `policy` is the unwrapped model. A collective call where parameters are sharded. Returns metrics; empty if
        there was nothing to do.

        Raises:
            SyncError: generator and trainer give different log-probabilities.
            ValueError: vLLM takes other factors of LongRoPE than the trainer.
        """
        if self.features.replaces_sampling:
            return {}
        if self._runner is None:
            generator = self._generator if self._generator is not None else self._build(policy)
            generator.is_cancelled = self.is_cancelled
            if self.args.use_vllm:
                engine_length = getattr(generator, "max_model_length", None)
                check_engine_length(policy.config, run_length=self.longest_row, engine_length=engine_length)
            if self.args.rollouts_ahead:
                generator = self._gate = GatedGenerator(generator, cuts_turns=self.args.cut_turns)
            self._runner = RolloutRunner(
                self.env_factory, generator, self.chat, self.limits, retry_failed=self.args.retry_failed
            )
        if not self._has_to_sync(step):
            return {}
        self.synced_step = step
        return sync_weights(
            self._runner.generator,
            policy,
            self.tokenizer,
            max_gap=plain_value(self.args, "servers.max_logprob_gap"),
            is_autocast=self._accelerator.mixed_precision != "no",
        )

    def _has_to_sync(self, step: int) -> bool:
        """Whether the generator has other weights than those of optimizer step `step`; the same on all ranks."""
        return not self.features.replaces_sampling and self.synced_step != step

    def _build(self, policy: PreTrainedModel) -> Generator:
        if self.args.use_vllm:
            return build_vllm(policy, self.args, stop_token_ids=self.chat.stop_token_ids, is_on_gpu=self._is_on_gpu)
        return TransformersGenerator(
            policy,
            pad_token_id=self.tokenizer.pad_token_id,
            stop_token_ids=self.chat.stop_token_ids,
            max_batch_size=self.args.generation_batch_rows,
        )

    def close(self) -> None:
        """End the generator and the rollout's thread; a generator that the user brought stays open."""
        if self._runner is None:
            return
        if self._generator is None:
            self._runner.generator.close()
        if not self._is_stuck:  # else its thread ends with the process
            self._runner.close()
        self._runner = None
        self._gate = None
        self._is_stuck = False
        self.synced_step = -1


class Rollout:
    """Trajectories that are being sampled, or have been.

    The journal, if there is one, is told of every turn. Of several rollouts in flight the one of the smallest `order`
    comes first.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        *,
        journal: Journal | None = None,
        order: int = 0,
    ):
        self.requests = requests
        self.rows: Sequence[dict[str, Any]] = [request.example for request in requests]
        """Rows of the data set, one per trajectory."""
        self.environments: list[Any] | None = None
        """The trajectories' environments once they have ended, as `users_environments` gives them."""
        self.seconds = 0.0
        """Wall time from start to end."""
        start = time.perf_counter()
        # A future keeps its callbacks: one that held this would be a cycle, and environments would outlive their step.
        this = weakref.ref(self)

        def finish(_: object) -> None:
            if (rollout := this()) is not None:
                rollout.seconds = time.perf_counter() - start
                rollout.environments = users_environments(rollout._future.environments, runner.env_factory)
                rollout._has_ended.set()

        self._has_ended = threading.Event()
        self._runner = runner
        self._future = runner.start(requests, params=params, journal=journal, order=order)
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
            CancelledError: the rollout was cancelled.
        """
        return self._future.result()

    @property
    def is_lost(self) -> bool:
        """Whether it has ended without any trajectory, because a call held the event loop."""
        return self._future.is_lost and self._has_ended.is_set()

    def cancel(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop all trajectories in flight; returns when their environments are closed, or False when time is up."""
        return self._runner.stop(timeout_s) or not self._future.cancel()  # whoever waits goes on

    def cancel_alone(self) -> None:
        """Stop the trajectories of this rollout, and leave others in flight alone."""
        self._runner.stop(only=self._future)


def training_order(num_rows: int, *, seed: int, step: int, is_seeded: bool) -> torch.Tensor:
    """(B,) the trajectories of a rollout in the order in which they are trained on, from micro-step `step` on.

    Seeded, since a rollout that runs at the same time may draw from torch's global random numbers, which are taken
    otherwise, as in TRL.
    """
    if not is_seeded:
        return torch.randperm(num_rows)
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(derive_seed(seed, "rows", step)))
