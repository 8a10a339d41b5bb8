"""The policy as a player of environments: how it is asked, with which limits, and with whose weights.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> [sync weights] -> next rollout
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation import SamplingParams, TransformersGenerator
from agent_r1_trl.generation.base import Generator, as_generator
from agent_r1_trl.generation.sync import sync_weights
from agent_r1_trl.generation.vllm.build import build_vllm
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trajectory import Trajectory


class Rollout:
    """Trajectories that are being played.

    Args:
        runner: plays them.
        requests: one per trajectory.
        params: how tokens are drawn.
        synced_step: number of optimizer steps behind the generator's weights.
    """

    def __init__(
        self, runner: RolloutRunner, requests: Sequence[RolloutRequest], params: SamplingParams, *, synced_step: int
    ):
        self.synced_step = synced_step
        self.environments: list[Any] = []
        """The trajectories' environments once they have ended; the user's own instances where TRL's are adapted."""
        self.seconds = 0.0
        """Wall time from start to end."""
        start = time.perf_counter()

        def finish(_: Any) -> None:
            self.seconds = time.perf_counter() - start
            self.environments = [getattr(item, "environment", item) for item in runner.environments]
            self._has_ended.set()

        self._has_ended = threading.Event()
        self._future = runner.start(requests, params=params)
        self._future.add_done_callback(finish)

    def wait(self) -> None:
        """Until all trajectories have ended, well or not."""
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


class PolicySampler:
    """Plays trajectories with the policy's weights of the last optimizer step.

    Args:
        args: of the trainer.
        tokenizer: of the policy.
        env_factory: makes a fresh environment for each trajectory.
        generator: a `Generator` to sample with; None makes one from the arguments, when the first rollout needs it.
        eos_token_ids: ids that end a turn besides those of the chat template.
        is_on_gpu: whether this process trains on a GPU, which an engine in it then shares.
        is_autocast: whether the trainer computes in mixed precision.
        context_length: positions of the policy; a trajectory that reaches them is cut, prompt included.
    """

    def __init__(
        self,
        args: MultiTurnConfig,
        tokenizer: Any,
        env_factory: Callable[[], Any],
        *,
        generator: Any = None,
        eos_token_ids: Sequence[int] = (),
        is_on_gpu: bool = False,
        is_autocast: bool = False,
        context_length: int | None = None,
    ):
        self.args = args
        self.tokenizer = tokenizer
        self.env_factory = env_factory
        self.chat = ChatFormat(
            tokenizer,
            chat_template_kwargs=args.chat_template_kwargs,
            thinking=args.thinking,
            extra_stop_token_ids=eos_token_ids,
        )
        max_turns = args.max_turns
        if args.max_tool_calling_iterations is not None:
            max_turns = min(max_turns, args.max_tool_calling_iterations + 1)
        lengths = [context_length, args.vllm_max_model_length if args.use_vllm else None]
        self.limits = RolloutLimits(
            max_turns=max_turns,
            max_tokens_per_turn=args.max_tokens_per_turn,
            max_completion_length=args.max_completion_length,
            max_observation_tokens=args.max_observation_tokens,
            max_invalid_calls=args.max_invalid_calls,
            max_concurrency=args.max_concurrency,
            rollout_timeout=args.rollout_timeout,
            max_model_length=min((length for length in lengths if length is not None), default=None),
        )
        self.params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )
        self._generator = None if generator is None else as_generator(generator)
        self._is_on_gpu = is_on_gpu
        self._is_autocast = is_autocast
        self._runner: RolloutRunner | None = None
        self.synced_step = -1
        """Number of optimizer steps behind the generator's weights; -1 before the first sync."""

    # ---------------------------------------------------------------- rollouts

    def start(self, requests: Sequence[RolloutRequest], *, is_training: bool = True) -> Rollout:
        """Begin to play one trajectory per request; they go on while the caller does other things.

        `sync` comes first.
        """
        params = self.params
        if not is_training and self.args.eval_temperature is not None:
            params = SamplingParams(temperature=self.args.eval_temperature)
        return Rollout(self.runner, requests, params, synced_step=self.synced_step)

    @property
    def runner(self) -> RolloutRunner:
        """Plays the trajectories; there is one from the first `sync` on."""
        assert self._runner is not None
        return self._runner

    # ---------------------------------------------------------------- weights

    def sync(self, model: Any, step: int) -> dict[str, float]:
        """Bring the weights of optimizer step `step` to the generator, unless it has them, and check them there.

        A collective call where parameters are sharded.

        Args:
            model: the policy, unwrapped.
            step: number of optimizer steps behind its weights.

        Returns:
            Metrics of the sync; empty if there was nothing to do.

        Raises:
            SyncError: generator and trainer give different log-probabilities.
        """
        if self._runner is None:
            generator = self._generator if self._generator is not None else self._build(model)
            self._runner = RolloutRunner(self.env_factory, generator, self.chat, self.limits, self.params)
        if self.synced_step == step:
            return {}
        self.synced_step = step
        return sync_weights(
            self._runner.generator,
            model,
            self.tokenizer,
            max_gap=self.args.max_sync_logprob_gap,
            is_autocast=self._is_autocast,
        )

    def _build(self, model: Any) -> Generator:
        if self.args.use_vllm:
            return build_vllm(model, self.args, stop_token_ids=self.chat.stop_token_ids, is_on_gpu=self._is_on_gpu)
        return TransformersGenerator(
            model,
            pad_token_id=self.tokenizer.pad_token_id,
            stop_token_ids=self.chat.stop_token_ids,
            max_batch_size=self.args.generation_batch_rows,
        )

    def rest(self) -> None:
        """Give a resting engine's memory to the update (`vllm_enable_sleep_mode`)."""
        if self.args.use_vllm and self.args.vllm_enable_sleep_mode:
            self.runner.generator.sleep()
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
