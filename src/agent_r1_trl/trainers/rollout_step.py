"""TRL's GRPO trainer on the generation side: whole trajectories are played where TRL samples completions.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> Trajectory -> rewards on tokens -> filter
       -> batch -> advantages -> loss -> step -> [sync weights] -> [next rollout]

TRL 1.16 names this file touches (`tests/trainers/test_trl_contract.py` checks each):

- overridden: `_generate`, `get_batch_samples`, `train`, `_set_signature_columns_if_needed`, `_get_train_sampler` (its
  `seed`, `shuffle` and `generator`)
- read: `_metrics`, `_tokenizer`, `eos_token_ids`, `num_generations`, `num_generations_eval`, `num_iterations`,
  `model_wrapped`, `accelerator`, `state`, `_step`, `use_vllm`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.models import unwrap_model_for_generation

from agent_r1_trl.generation.vllm.build import check_vllm
from agent_r1_trl.rollout import RolloutRequest, check_some_played, context_length, rollout_requests
from agent_r1_trl.trainers.data_order import EpochOrder
from agent_r1_trl.trainers.host_memory import release_free_memory
from agent_r1_trl.trainers.metrics import length_metrics, length_record
from agent_r1_trl.trainers.overlap import Lookahead
from agent_r1_trl.trainers.sampler import PolicySampler, Rollout
from agent_r1_trl.trainers.scoring import is_trained_on
from agent_r1_trl.trainers.update import UpdateTrainer
from agent_r1_trl.trajectory import Trajectory


class RolloutTrainer(UpdateTrainer):
    """How trajectories come about: which rows, under which seeds, with whose weights, now or ahead of time."""

    _user_generator: Any = None
    """A `Generator` that the user brought."""
    _rollout: Rollout | None = None
    """The one that TRL is being handed."""
    _next_rollout: Rollout | None = None
    """The one that is played while the update trains on another."""

    def _prepare_rollout(self) -> None:
        """Once model and tokenizer are loaded."""
        policy = self.accelerator.unwrap_model(self.model)
        is_on_gpu = self.accelerator.device.type == "cuda"
        if self.args.use_vllm and self._user_generator is None:
            check_vllm(self.args, policy, is_on_gpu=is_on_gpu)
        self.sampler = PolicySampler(
            self.args,
            self._tokenizer,
            self.env_factory,  # type: ignore[arg-type]
            generator=self._user_generator,
            eos_token_ids=self.eos_token_ids,
            is_on_gpu=is_on_gpu,
            is_autocast=self.accelerator.mixed_precision != "no",
            context_length=context_length(policy.config),
        )
        self.chat, self.limits = self.sampler.chat, self.sampler.limits
        # What the policy is trained with is what is saved with it.
        self._tokenizer.chat_template = self.chat.chat_template
        self._lookahead = Lookahead()

    # ---------------------------------------------------------------- where the run stands

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        """Rows of one prompt."""
        return self.num_generations if self.model.training else self.num_generations_eval

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)

    # ---------------------------------------------------------------- data

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.env_factory is not None and self.train_dataset is not None:
            columns = self.train_dataset.column_names or []
            self._signature_columns: list[str] = [*{*self._signature_columns, *columns}]

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        """The Trainer's next batches, through a window that `overlap_rollout` can look ahead in."""
        if self.env_factory is not None and self.args.overlap_rollout:
            epoch_iterator = self._lookahead.over(epoch_iterator, self._step)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    # ---------------------------------------------------------------- rollout

    def _roll_out(self, examples: list[dict[str, Any]]) -> Rollout:
        """Play one trajectory per row; with `overlap_rollout` it is under way already, and the next one begins.

        With transformers, ZeRO-3 parameters are gathered once, around the whole rollout.

        Raises:
            RuntimeError: if not a single trajectory could be played, with what the first one said.
        """
        is_training = self.model.training
        rollout = self._next_rollout
        if rollout is not None:
            rollout.wait()  # its generator must not change weights on the way
        with (
            torch.no_grad(),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation and not self.use_vllm,
            ) as model,
        ):
            self._add_metrics(self.sampler.sync(model, self.state.global_step))
            if rollout is None or not is_training:
                rollout = self.sampler.start(self._requests(examples, self._step), is_training=is_training)
                rollout.wait()
            else:
                self._next_rollout = None
            if is_training and self.args.overlap_rollout:
                self._start_next_rollout()
            self.sampler.rest()
        if self.accelerator.device.type == "cpu":
            release_free_memory()
        check_some_played(rollout.trajectories)
        return rollout

    def _start_next_rollout(self) -> None:
        """Play the next generation batch, if the run gets that far, while the update trains on this one."""
        step = self._step + self.args.steps_per_generation * self.num_iterations
        if step >= self.state.max_steps * self.args.gradient_accumulation_steps:
            return
        examples = self._lookahead.at(step)
        if examples is not None:
            self._next_rollout = self.sampler.start(self._requests(examples, step))

    def _requests(self, examples: list[dict[str, Any]], step: int) -> list[RolloutRequest]:
        return rollout_requests(
            examples,
            first_row=self.accelerator.process_index * len(examples),
            group_size=self._group_size,
            seed=self.args.seed,
            step=step if self.model.training else None,
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loop; a rollout that nothing waits for any more ends with it."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.env_factory is not None and self._next_rollout is not None:
                self._next_rollout.cancel()
                self._next_rollout = None

    # ---------------------------------------------------------------- handing over

    def _generate(self, prompts: list[Any]) -> tuple:
        """TRL's generation step: hand over the trajectories that were just rolled out, in TRL's 8-tuple."""
        if self._rollout is None:
            return super()._generate(prompts)
        trajectories = self._rollout.trajectories
        pad = self._tokenizer.pad_token_id
        # TRL crashes on an empty completion: such a row carries one pad id that nothing trains on.
        completion_ids = [trajectory.completion_ids or [pad] for trajectory in trajectories]
        tool_mask = [
            trajectory.action_mask or [0] if self._is_trained_on(trajectory) else [0] * len(ids)
            for trajectory, ids in zip(trajectories, completion_ids, strict=True)
        ]
        logprobs = [trajectory.logprobs or [0.0] for trajectory in trajectories] if self.use_vllm else None
        self._log_completion_lengths(trajectories)
        return (
            [trajectory.prompt_ids or [pad] for trajectory in trajectories],
            completion_ids,
            tool_mask,
            [trajectory.completion_messages for trajectory in trajectories],
            logprobs,
            {"trajectory": trajectories, "environments": self._rollout.environments},
            None,
            [],
        )

    def _is_trained_on(self, trajectory: Trajectory) -> bool:
        return is_trained_on(trajectory, self.args.truncated_trajectories)

    def _log_completion_lengths(self, trajectories: list[Trajectory]) -> None:
        """TRL's `completions/*` and `num_tokens`."""
        rows = gather_object([length_record(trajectory) for trajectory in trajectories])
        if self.model.training:
            self.state.num_input_tokens_seen += sum(row["prompt"] + row["length"] for row in rows)
        self._metrics[self._mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        self._add_metrics(length_metrics(rows))
