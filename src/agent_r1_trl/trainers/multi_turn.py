"""`MultiTurnTrainer`: TRL's GRPO trainer, whose generation step is a rollout of agents. Both trainers build on it.

The methods override TRL's and stand in the order in which TRL calls them. Each is a few lines that hand over to a
collaborator which can be read and tested alone; no TRL method body is copied.

What they need of TRL stands in the tables of `trl_release.py`, which are compared with the installed release;
`tests/trainers/test_trl_contract.py` checks what the methods do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from trl import GRPOConfig

from agent_r1_trl.advantages.credit import Credit
from agent_r1_trl.advantages.scan import carry_forward
from agent_r1_trl.environments.factory import EnvFactory, read_form, resolve_env_factory
from agent_r1_trl.environments.trl_adapters import SingleTurnEnv
from agent_r1_trl.generation.adapters import check_adapters, warn_of_dropout
from agent_r1_trl.rollout.watchdog import reported
from agent_r1_trl.trainers.config import MultiTurnConfig, MultiTurnGRPOConfig
from agent_r1_trl.trainers.construction import (
    RowCheck,
    as_list,
    as_trl_sees,
    by_name,
    check_overrides,
    check_rollout_func,
    check_tokenizer,
    default_output_dir,
    single_turn_factory,
    trajectory_store,
    trl_dataset,
    trl_rewards,
    use_gpu_in_threads,
)
from agent_r1_trl.trainers.credit import CreditEstimator
from agent_r1_trl.trainers.echo_guard import EchoGuardedTrainer
from agent_r1_trl.trainers.echo_signals import make_echo_signals
from agent_r1_trl.trainers.evaluation import EvaluatingTrainer
from agent_r1_trl.trainers.group_filter import IS_KEPT, GroupFilter
from agent_r1_trl.trainers.learning_report import LearningReport
from agent_r1_trl.trainers.lookahead import ROW_INDEX, in_seeded_order
from agent_r1_trl.trainers.loss import LossTrainer
from agent_r1_trl.trainers.metrics import gather_metrics
from agent_r1_trl.trainers.nonfinite import NumberWatch
from agent_r1_trl.trainers.played import PlayedBatch, trl_generation
from agent_r1_trl.trainers.precision import RoundingWarning
from agent_r1_trl.trainers.publishing import Publishing, rows_not_logged
from agent_r1_trl.trainers.resampling import Resampling, check_can_draw
from agent_r1_trl.trainers.resume import EpochOrder, RolloutCheckpoint
from agent_r1_trl.trainers.reward_calls import RewardCalls, check_finite, check_reward_values
from agent_r1_trl.trainers.rewards import Rewards
from agent_r1_trl.trainers.rollouts import Rollouts
from agent_r1_trl.trainers.row_batches import RowBatches
from agent_r1_trl.trainers.saving import Saving
from agent_r1_trl.trainers.signals import RunGuard
from agent_r1_trl.trainers.training_rows import TrainingRows, weigh_mismatch_of_rows
from agent_r1_trl.trainers.trl_logs import correct_trl_logs
from agent_r1_trl.trainers.trl_release import check_trl
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batching import batch_trajectories, settle_masks, whole_rows
from agent_r1_trl.update.layout import UpdateLayout

check_trl()


class MultiTurnTrainer(Saving, Publishing, EvaluatingTrainer, EchoGuardedTrainer, LossTrainer):
    """Base of the multi-turn trainers: rollouts, rewards, masks, metrics, recording, checkpoints.

    One training step, with the method below and the file that does the work:

    1. The Trainer draws rows of the data set, each `num_generations` times (`_get_train_sampler`: `resume.py`).
    2. `_prepare_inputs` asks for a new rollout where the last one is used up, and otherwise goes on at step 8.
    3. `_generate_and_score_completions`: the generator receives the weights of this step (`generation/sync.py`), and
       one trajectory per row is played (`rollouts.py`, then `rollout/loop.py`); groups that have nothing to teach are
       replaced, if the settings ask for it (`resampling.py`).
    4. Turn rewards are placed (`rewards.py`). TRL pads the trajectories into a batch (`_generate` hands them over),
       calls the reward functions (`_calculate_rewards`) and computes old and reference log-probs.
    5. The functions' values become part of the outcomes, which decides which rows are in the baseline (`rewards.py`).
    6. The estimator turns rewards into advantages, (B, T), over the rows of all ranks (`credit.py`, `advantages/`).
    7. Metrics are logged (`metrics.py`) and trajectories recorded (`recording/`).
    8. Groups that teach nothing leave the update (`group_filter.py`), micro-batches are laid out (`update/layout.py`),
       and `_compute_loss` computes TRL's loss over the masked tokens (`loss.py`).
    9. The Trainer makes the optimizer step; a checkpoint holds the rollout under way (`saving.py`).

    Args:
        env: environment class or zero-argument factory; each trajectory gets a fresh one.
        tools: TRL's plain functions (instead of `env`).
        environment_factory: TRL's environment classes (instead of `env`).
        generator: a `Generator`, or any object with an async `generate`, to sample with; None makes one from the
            arguments.
        turn_reward_funcs: functions of TRL's shape that return, per trajectory, one number (or None) for each turn.
        model: as for `trl.GRPOTrainer`, like every argument not named here.

    With none of `env`, `tools` and `environment_factory` the trainer is `trl.GRPOTrainer`, bit for bit; unless an
    argument asks for more (`MultiTurnConfig.asked_features`): then our rollout answers each prompt in one turn.
    """

    config_class: type[MultiTurnConfig] = MultiTurnGRPOConfig
    default_env: Any = None  # what is played without env=, tools= and environment_factory=
    _tag_names: ClassVar[list[str]] = ["trl", "agent-r1-trl", "multi-turn"]

    env_factory: EnvFactory | None = None
    """Makes the environment of each trajectory; None leaves everything to TRL."""
    _played: PlayedBatch | None = None
    """The batch that TRL is being handed, while `_generate_and_score_completions` runs."""
    # TRL's own, declared because it is set here for a while.
    _buffered_inputs: list[dict[str, Any]] | None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *positional: Any,
        env: Any = None,
        tools: Sequence[Callable] | None = None,
        environment_factory: Any = None,
        generator: Any = None,
        turn_reward_funcs: Any = None,
        **kwargs: Any,
    ):
        args = self.config_class(output_dir=default_output_dir(model, self._name)) if args is None else args
        config = self.config_class.from_grpo_config(args)
        kwargs = by_name(positional, {**kwargs, "tools": tools, "environment_factory": environment_factory})
        self.env_factory = resolve_env_factory(env, kwargs.pop("tools"), kwargs.pop("environment_factory"))
        self.env_factory = self.env_factory or self.default_env
        if self.env_factory is None:
            self.env_factory = single_turn_factory(config, train_dataset, generator, turn_reward_funcs)
        self.turn_reward_funcs = as_list(turn_reward_funcs)
        self.last_trajectories: list[Trajectory] = []
        """This rank's trajectories of the last rollout, or of the last evaluation, for callbacks."""
        self._rollout_s = 0.0
        """Seconds that the current training step has spent on its rollout."""
        self.layout = UpdateLayout(None if self.env_factory is None else config)
        if self.env_factory is None:
            super().__init__(model, reward_funcs, config, train_dataset, eval_dataset, **kwargs)
            self.add_callback(RoundingWarning())
            return
        config.output_dir = str(Path(config.output_dir).absolute())  # a tool may change the process's directory
        config.check_supported(has_generator=generator is not None)
        check_rollout_func(kwargs.get("rollout_func"))
        check_overrides(self)
        form = read_form(self.env_factory)
        self.row_check = RowCheck(form, train_dataset, eval_dataset)
        self.rewards = Rewards(config, self.turn_reward_funcs, form)
        kwargs |= trl_rewards(as_list(reward_funcs), self.rewards.columns, form, config, kwargs)
        check_can_draw(train_dataset, config)
        train_dataset = trl_dataset(train_dataset, config, eval_dataset)
        with as_trl_sees(config, len(self.rewards.columns)):
            super().__init__(model, args=config, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self.tools = form.tools
        check_tokenizer(self.processing_class, is_vlm=self._is_vlm)
        check_adapters(self.model, is_merged=config.use_vllm)
        warn_of_dropout(self.model)
        self.add_callback(RoundingWarning())
        self.use_vllm = config.use_vllm
        self._make_collaborators(generator)

    def _make_collaborators(self, generator: Any) -> None:
        """Once model and tokenizer are loaded."""
        use_gpu_in_threads(self.accelerator.device, getattr(self, "async_loop", None))
        policy, rank = self.accelerator.unwrap_model(self.model), self.accelerator.process_index
        parts: Any = (self.args, self.accelerator, policy, self._tokenizer, self.env_factory)
        self.rollouts = Rollouts(*parts, generator=generator, eos_token_ids=self.eos_token_ids)
        self.resampling = Resampling(self)
        self._calculate_rewards = self._outermost_rewards  # type: ignore[method-assign]
        self.guard = RunGuard(self)
        self.group_filter = GroupFilter(self.args, self.accelerator)
        self.echo_signals = make_echo_signals(self)
        self._make_echo_guard()
        self.rollouts.journal.attach(self)
        self.chat = self.rollouts.chat
        self.chat.write_to(self._tokenizer)  # what is trained with is saved
        self.credit = CreditEstimator(self.args, self.accelerator)
        watches = {"tools": self.rollouts.tools, "failures": self.rollouts.failures}
        self.checkpoint = RolloutCheckpoint(self.args, self.accelerator, watches)
        self.store = trajectory_store(self.args, rank)
        self.learning = LearningReport(self.args.output_dir, records=self.store is not None)
        self.numbers = NumberWatch(self.args.max_nonfinite_steps, self.args.output_dir)
        self.row_batches = RowBatches(self.group_filter, self.args, self.accelerator)
        reference = [] if self.ref_model is None else [self.accelerator.unwrap_model(self.ref_model)]
        self.layout.prepare(self.model, *reference, has_router_loss=self.aux_loss_enabled)

    # ---------------------------------------------------------------- the run begins

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.env_factory is not None and self.train_dataset is not None:
            columns = self.train_dataset.column_names or []
            self._signature_columns: list[str] = [*{*self._signature_columns, *columns}]

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        is_trls = self.env_factory is None
        return sampler if is_trls else EpochOrder(sampler, lambda: int(self.state.epoch or 0))

    def _run(self, train: Callable[[], Any]) -> Any:
        """The Trainer's loop, under guard: what a signal or a lost rank does is in `signals.py`."""
        if self.env_factory is None:
            return super()._run(train)
        watches: Any = (self.rollouts.failures, self.rollouts.tools, self.numbers, self.group_filter, self.learning)
        for watch in watches:
            watch.begin_run()
        try:
            result = self.guard.run(train if self.echo_guard is None else partial(self.echo_guard.run, train))
        finally:
            self.rollouts.end_run()
        if self.echo_guard is not None:
            self.echo_guard.raise_if_ended()
        self.rollouts.failures.check_some_played()
        if self.is_world_process_zero() and not self.args.disable_tqdm and (text := self.learning.summary()):
            print(f"\n{text}")
        return result

    # ---------------------------------------------------------------- a micro-batch

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        """The Trainer's next batches; `overlap_rollout` looks further ahead in them."""
        if self.env_factory is not None:
            epoch_iterator = self.rollouts.look_ahead(epoch_iterator, self._step)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's step; its time without the rollout is logged as `time/update_s`."""
        if self.env_factory is None:
            return super().training_step(model, inputs, num_items_in_batch)
        self._rollout_s = 0.0
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        update_s = time.perf_counter() - start - self._rollout_s
        self._metrics["train"]["time/update_s"].append(update_s)
        self.learning.update_s += update_s
        self.learning.rollout_s += self._rollout_s
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's next micro-batch, from a new rollout where the last one is used up, in this run's layout."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self._buffered_inputs is not None and self._buffered_inputs is not before:
            rows = in_seeded_order(self._buffered_inputs, self.args.seed, self._step)
            rows = rows if self.env_factory is None else self.group_filter.apply(self.row_batches.deal(rows))
            self._buffered_inputs = self.layout.arrange(rows, self.accelerator)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return self.layout.trim(inputs)

    # ---------------------------------------------------------------- rollout, rewards, advantages

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.env_factory is None:
            return super()._generate_and_score_completions(inputs)
        check_overrides(self)  # attributes may have been set since the construction
        self.max_completion_length = self.args.max_completion_length  # of Dr. GRPO's loss
        self.row_check.check_batch(inputs)
        start = time.perf_counter()
        played = self._played = self.resampling.play(inputs, self._position())
        trajectories = self.last_trajectories = played.trajectories
        rows = played.training_rows
        self.environments = None  # TRL would reset them
        try:
            output = super()._generate_and_score_completions(played.rows_with_prompts)
        finally:
            self._played = None
        group_size = self._group_size if self.model.training else 1
        self.rewards.settle(played, **self._reward_table, group_size=group_size)
        if "importance_sampling_ratio" in output:
            self._add_metrics(weigh_mismatch_of_rows(output, rows, self.args))
        baseline, in_loss = rows.expand(played.in_baseline), rows.expand(played.in_loss)
        settle_masks(output, rows.rows, baseline, in_loss, self.args, self.accelerator)
        if self.model.training:  # before the advantages, which are whitened over the rows that are kept
            kept, metrics = self.group_filter.chosen(played, self._group_size)
            output |= kept
            self._add_metrics(metrics)
        output |= self._advantages(output, played)
        if self.args.overlap_rollout:
            output[ROW_INDEX] = torch.arange(len(trajectories))
        self._number_rows(trajectories, output)
        self._rollout_s += time.perf_counter() - start
        of_trajectories = {"in_baseline": played.in_baseline, IS_KEPT: output.get(IS_KEPT)}
        self._log_and_record(trajectories, rows.by_trajectory(output, of_trajectories))
        return self.row_batches.hold(output, rows, is_training=self.model.training)

    def _generate(self, prompts: list[Any]) -> tuple:
        """TRL's generation step: hands over the trajectories that were just played, in TRL's 8-tuple."""
        if self._played is None:
            return super()._generate(prompts)
        self.environments = self._played.environments  # type: ignore[assignment]
        parts: Any = {"tokenizer": self._tokenizer, "in_loss": self.rewards.in_loss, "has_logprobs": self.use_vllm}
        return trl_generation(self._played, **parts, is_single_turn=self.env_factory is SingleTurnEnv)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        if self._played is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        completion_ids_list = self._played.completion_ids(completion_ids_list, self._tokenizer.pad_token_id)
        calls = self._played.reward_calls = RewardCalls(self._played.trajectories, len(inputs))
        interval = self.args.watchdog_interval and 6 * self.args.watchdog_interval  # judges take their time
        waiting = reported("The reward functions have been running", interval)
        with rows_not_logged(), waiting, calls.checked(self):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _outermost_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """What TRL calls for `_calculate_rewards`: that of the class, whose values count, (N, F) of all ranks.

        So a subclass may change what the functions returned, or compute all of it.
        """
        calculate = type(self)._calculate_rewards
        if self._played is None:
            return calculate(self, inputs, prompts, completions, completion_ids_list)
        if self._played.all_reward_values is not None:  # `resampling.py` has scored them
            return self._played.all_reward_values
        values = calculate(self, inputs, prompts, completions, completion_ids_list)
        check_reward_values(values, calculate, (len(inputs) * self.accelerator.num_processes, len(self.reward_funcs)))
        failed = [item.stop_reason.is_infrastructure_failure for item in self._played.trajectories]
        failed += [True] * (len(inputs) - len(failed))
        values[self.accelerator.gather(torch.tensor(failed, device=values.device))] = torch.nan  # earned nothing
        if not self.model.training:
            self.evaluation.take_rewards(values)
        first = self.accelerator.process_index * len(inputs)
        self._played.reward_values = values[first : first + len(self._played.trajectories)]
        if self._played.reward_calls is not None:  # else a subclass has computed them without the functions
            self._played.reward_calls.settle(self._played.reward_values, self.reward_funcs, self.reward_func_names)
        check_finite(values, calculate)
        return values

    def _advantages(self, output: dict[str, Any], played: PlayedBatch) -> dict[str, torch.Tensor]:
        """Tensors to put into TRL's batch: `advantages`, (R, T), 0 outside the estimator's mask."""
        credit, mask = self._estimate(output, played)
        advantages, mask = (played.training_rows.to_rows(x, output["tool_mask"]) for x in (credit.advantages, mask))
        if not self.args.loss_mask:  # observation tokens have the advantage of the action token before them
            advantages = carry_forward(advantages, mask) * output["tool_mask"]
        return {"advantages": advantages}

    def _estimate(
        self, output: dict[str, Any], played: PlayedBatch, **critic: torch.Tensor | None
    ) -> tuple[Credit, torch.Tensor]:
        """This rank's part of the estimator's result, over time (`training_rows.py`), and the (B, T) mask that it saw.

        Args:
            output: TRL's batch.
            played: B trajectories.
            critic: `values` (B, T) and `bootstrap_values` (B,), for estimators with a critic.
        """
        mask = played.training_rows.to_time(output["completion_mask"])
        if self.args.advantage_mask:
            mask = batch_trajectories(played.trajectories, length=mask.shape[1]).to(mask.device).action_mask
        mask = mask.bool() & played.in_loss.unsqueeze(1)  # (B, T)
        credit, metrics = self.credit.estimate(
            played.trajectories,
            mask=mask,
            in_baseline=played.in_baseline,
            group_size=self._group_size,
            progress=self.state.global_step / max(1, self.state.max_steps),
            kl_rewards=self._kl_rewards(output, mask, played.training_rows),
            is_kept=output.get(IS_KEPT),
            **critic,
        )
        self._add_metrics(metrics)
        return credit, mask

    def _kl_rewards(self, output: dict[str, Any], mask: torch.Tensor, rows: TrainingRows) -> torch.Tensor | None:
        """(B, T) -beta * k1 on the estimator's positions; None with the KL term in the loss."""
        if self.args.kl_placement == "loss" or self.beta == 0.0:
            return None
        if output.get("old_per_token_logps") is None:  # TRL leaves them out where its own loss can do without
            with torch.no_grad():
                num_tokens = output["completion_mask"].shape[1]
                output["old_per_token_logps"], *_ = self._get_per_token_logps_and_entropies(
                    self.model, *whole_rows(output), num_tokens, batch_size=self.args.per_device_train_batch_size
                )
        old, reference = (rows.to_time(output[f"{name}_per_token_logps"]) for name in ("old", "ref"))
        penalties, mean_kl = self.credit.kl_penalties(old, reference, mask, beta=self.beta)
        self._add_metrics({"kl": mean_kl})
        return penalties

    # ---------------------------------------------------------------- metrics, records

    def _log_and_record(self, trajectories: list[Trajectory], output: dict[str, Any]) -> None:
        mode, size = self._mode, self._group_size
        correct_trl_logs(self._metrics[mode], self._logs, trajectories, output, self.args, self.accelerator, size)
        if self.model.training:
            metrics, num_tokens = gather_metrics(trajectories, group_size=size)
            self.state.num_input_tokens_seen += num_tokens
            self._add_metrics(metrics)
            self.learning.take(trajectories, step=self.state.global_step + 1, group_size=size)
            if self.echo_signals is not None:
                self.echo_signals.take(trajectories, size, self.resampling.replaced, output.get(IS_KEPT))
        else:
            trajectories = self.evaluation.take(trajectories, rank=self.accelerator.process_index)
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        if self.store is None:
            return
        for trajectory, row in zip(trajectories, output["advantages"].tolist(), strict=False):
            trajectory.advantages = row[: len(trajectory.completion_ids)]
        # A rollout has the number of the first step that trains on it, under which its metrics are logged.
        step = self.state.global_step + (1 if self.model.training else 0)
        self.store.write(step, [*trajectories, *self.resampling.replaced], split=mode)
        if self.store.num_lost:
            self._metrics[mode]["recording/lost_trajectories"] = [self.store.num_lost]
