"""`MultiTurnTrainer`: TRL's GRPO trainer, whose generation step is a rollout of agents. Both trainers build on it.

The methods override TRL's and stand in the order in which TRL calls them. Each hands over to a collaborator that can
be read and tested alone; no TRL method body is copied. What they need of TRL stands in `trl_release.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import gather_object
from trl import GRPOConfig
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from agent_r1_trl.advantages.estimators import Credit
from agent_r1_trl.advantages.masked import carry_forward
from agent_r1_trl.chat.plain_text import PlainText
from agent_r1_trl.environments.factory import EnvFactory, read_form, resolve_env_factory
from agent_r1_trl.environments.trl_adapters import SingleTurnEnv
from agent_r1_trl.generation.weights import check_adapters
from agent_r1_trl.rollout.watchdog import reported
from agent_r1_trl.trainers.ahead import num_micro_steps
from agent_r1_trl.trainers.callbacks import Callbacks, UpdateHooks, named_events
from agent_r1_trl.trainers.config import AGENT_R1, MultiTurnConfig, MultiTurnGRPOConfig
from agent_r1_trl.trainers.config_checks import layout_problem
from agent_r1_trl.trainers.construction import (
    as_list,
    as_trl_sees,
    check_arguments,
    check_best_metric,
    check_overrides,
    check_tokenizer,
    default_output_dir,
    find_backbone,
    trajectory_store,
    trl_dataset,
    trl_rewards,
    use_gpu_in_threads,
)
from agent_r1_trl.trainers.credit import CreditEstimator, kl_rewards
from agent_r1_trl.trainers.dropout import report_noise
from agent_r1_trl.trainers.evaluation import EvaluatingTrainer
from agent_r1_trl.trainers.log_means import weigh_token_means
from agent_r1_trl.trainers.metrics import RoundingWarning, gather_metrics, log_rewards
from agent_r1_trl.trainers.policy_loss import (
    KeptRows,
    LossPass,
    add_columns,
    add_terms,
    advantages_of,
    for_own_loss,
    is_own_loss,
    loss_terms,
    num_loss_tokens,
    trls_loss,
)
from agent_r1_trl.trainers.recorder import Recorder
from agent_r1_trl.trainers.rewards import (
    RewardCalls,
    Rewards,
    RowCheck,
    check_finite,
    check_reward_values,
    rows_not_logged,
)
from agent_r1_trl.trainers.rollout_batch import Position, RolloutBatch, ScoredBatch, UpdateBatch
from agent_r1_trl.trainers.rollouts import Rollouts, training_order
from agent_r1_trl.trainers.saving import EpochOrder, SavingTrainer, following_batches
from agent_r1_trl.trainers.score_check import check_scores
from agent_r1_trl.trainers.scoring import score_rows, with_positions
from agent_r1_trl.trainers.token_limit import choose_token_limit
from agent_r1_trl.trainers.trainable import check_gradient, check_policy
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batches import loss_masks, neutral_outside, whole_rows
from agent_r1_trl.update.dealing import deal
from agent_r1_trl.update.entries import IS_KEPT, KEPT_IDS, MICRO_BATCHES, TRAINING_ROW, TRAJECTORY_ROW, Entries, Inputs
from agent_r1_trl.update.importance import weigh_mismatch
from agent_r1_trl.update.kept_head import with_kept_ids
from agent_r1_trl.update.layout import UpdateLayout
from agent_r1_trl.update.loss_weights import add_masks
from agent_r1_trl.update.micro_batches import run_micro_batches
from agent_r1_trl.update.rows import TrainingRows, pad_tokens, row_tensors
from agent_r1_trl.update.sampling_masks import SamplingMasks

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from agent_r1_trl.trainers.construction import EvalRows, TrainRows


class MultiTurnTrainer(UpdateHooks, SavingTrainer, EvaluatingTrainer):
    """Base of the multi-turn trainers: rollouts, rewards, masks, metrics, recording, checkpoints.

    docs/one-training-step.md follows a step through these methods and the files that do the work.

    Args:
        env: environment class or zero-argument factory; each trajectory gets a fresh one.
        tools: TRL's plain functions (instead of `env`).
        environment_factory: TRL's environment classes (instead of `env`).
        generator: a `Generator`, or any object with an async `generate`, to sample with; None makes one from the
            arguments.
        turn_reward_funcs: functions of TRL's shape that return, per trajectory, one number (or None) for each turn.
        model: as for `trl.GRPOTrainer`, like every argument not named here.

    With none of `env`, `tools` and `environment_factory` each prompt is answered in one turn.
    """

    config_class: type[MultiTurnConfig] = MultiTurnGRPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "agent-r1-trl", "multi-turn"]

    env_factory: EnvFactory
    """Makes the environment of each trajectory."""
    _reward_calls: RewardCalls | None = None
    """Set while the reward functions of a batch are running."""
    last_batch: UpdateBatch | None = None
    """This rank's rollout that is trained on, or its last batch of an evaluation; None before the first one."""
    features: Callbacks
    """The features that take part in the rollout besides the step itself."""
    last_norms: tuple[Any, ...] = ()
    """Gradient norms of the last optimizer step, as in `OptimizerStep`."""
    _loss_pass: LossPass | None = None
    """Set while `_compute_loss` runs."""
    _is_gradient_checked = False  # after the first backward pass
    is_trl_checked = False  # by `trl_canary.py`, at the first training step

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Callable | Sequence[Callable | str | PreTrainedModel] | str | PreTrainedModel | None = None,
        args: GRPOConfig | None = None,
        train_dataset: TrainRows = None,
        eval_dataset: EvalRows = None,
        *,
        env: Callable[[], Any] | None = None,
        tools: Sequence[Callable] | None = None,
        environment_factory: Callable[..., Any] | dict[str, Callable[..., Any]] | None = None,
        generator: object = None,
        turn_reward_funcs: Callable | Sequence[Callable | str | PreTrainedModel] | str | PreTrainedModel | None = None,
        **kwargs: Any,
    ):
        check_arguments(type(self), model, kwargs)
        args = self.config_class(output_dir=default_output_dir(model, self._name)) if args is None else args
        config = self.config_class.from_grpo_config(args)
        self.env_factory = resolve_env_factory(env, tools, environment_factory) or SingleTurnEnv
        self.turn_reward_funcs = as_list(turn_reward_funcs)
        self.last_trajectories: list[Trajectory] = []
        """This rank's trajectories of the last rollout, or of the last evaluation, for callbacks."""
        self._rollout_s = 0.0
        """Seconds that the current training step has spent on its rollout."""
        self.seconds = {"rollout": 0.0, "update": 0.0}
        """Seconds of all training steps in this process, by phase."""
        self._epoch_order: EpochOrder | None = None
        self._is_score_checked = config.score_check == "off"
        """Whether the policy is known to be scored as it is sampled."""
        self.layout = UpdateLayout(config, functools.partial(layout_problem, config))
        config.output_dir = str(Path(config.output_dir).absolute())  # a tool may change the process's directory
        config.check_supported(has_generator=generator is not None)
        check_overrides(self, kwargs.get("rollout_func"))
        form = read_form(self.env_factory)
        self.row_check = RowCheck(form, train_dataset, eval_dataset)
        self.rewards = Rewards(config, self.turn_reward_funcs, form)
        classes = kwargs.get("reward_processing_classes")
        kwargs |= trl_rewards(as_list(reward_funcs), self.rewards.columns, config, classes)
        self.features = Callbacks(config, train_dataset)
        check_best_metric(config, eval_dataset)
        train_dataset = trl_dataset(train_dataset, config, eval_dataset)
        with named_events(), as_trl_sees(config, len(self.rewards.columns)):
            super().__init__(model, args=config, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self.tools = form.tools
        check_tokenizer(self.processing_class, is_vlm=self._is_vlm)
        check_adapters(self.model, is_merged=config.use_vllm)
        report_noise(self.model, is_disabled=config.disable_dropout)
        self.add_callback(RoundingWarning())
        check_policy(self)
        # To TRL's loss this says that the sampler's log-probs are known, and may be those of other weights.
        self.use_vllm = config.use_vllm or config.rollouts_ahead > 0
        self._make_collaborators(generator)

    def _make_collaborators(self, generator: object) -> None:
        """Once model and tokenizer are loaded."""
        use_gpu_in_threads(self.accelerator.device, getattr(self, "async_loop", None))
        policy, rank = self.accelerator.unwrap_model(self.model), self.accelerator.process_index
        parts: Any = (self.args, self.accelerator, policy, self._tokenizer, self.env_factory)
        self.rollouts = Rollouts(
            *parts, generator=generator, eos_token_ids=self.eos_token_ids, is_plain_text=self._has_text_prompts()
        )
        self.chat = self.rollouts.chat
        self.chat.write_to(self._tokenizer)  # what is trained with is saved
        self.credit = CreditEstimator(self.args, self.accelerator)
        self.store = trajectory_store(self.args, rank)
        self.recorder = None if self.store is None else Recorder(self.store)
        spans_rollouts = self.args.steps_per_generation % self.args.gradient_accumulation_steps != 0
        self.kept_rows = KeptRows(self.accelerator, spans_rollouts=spans_rollouts)
        if self.recorder is not None:
            self.add_callback(self.recorder)
        self.rollouts.features = self.features
        self.features.attach(self)
        reference = [] if self.ref_model is None else [self.accelerator.unwrap_model(self.ref_model)]
        for model in (policy, *reference):
            find_backbone(model)
        self.rollouts.fix_rotary_embeddings_of(policy, *reference)
        self.layout.prepare(
            self.model, *reference, has_router_loss=self.aux_loss_enabled, autocast=self.accelerator.autocast
        )

    def _has_text_prompts(self) -> bool:
        """Whether prompts are texts that the policy continues, not conversations; as in TRL the first row decides."""
        row: dict[str, Any] = next(iter(self.train_dataset), {})
        return self.env_factory is SingleTurnEnv and isinstance(row.get("prompt"), str)

    # ---------------------------------------------------------------- the run begins

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        self._epoch_order = EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))
        return self._epoch_order

    def _run(self, train: Callable[[], Any]) -> Any:
        """The Trainer's loop, inside what the features put around it."""
        check_overrides(self)  # attributes may have been set since the construction
        choose_token_limit(self)
        self.kept_rows.begin_run()
        self.features.call("begin_run")
        try:
            result = self.features.run(train)
        finally:
            self.rollouts.end_run()
            self.features.call("close_run")
        self.features.call("end_run")
        return result

    # ---------------------------------------------------------------- a micro-batch

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[dict[str, Any]]], num_batches: int, device: torch.device
    ) -> tuple:
        """The Trainer's next batches; `rollouts_ahead` looks further ahead in them, into the next epochs as well."""
        batches = epoch_iterator
        if self.args.rollouts_ahead:
            following = following_batches(self.callback_handler.train_dataloader, self._epoch_order)
            batches = self.rollouts.ahead.window.over(epoch_iterator, self._step, following)
        return super().get_batch_samples(batches, num_batches, device)

    def training_step(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """TRL's step; its time without the rollout is logged as `time/update_s`."""
        self._rollout_s = 0.0
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            if not self._is_gradient_checked and self.kept_rows.has_computed:
                check_gradient(self)
                self._is_gradient_checked = True
            self.kept_rows.rescale(model)
        update_s = time.perf_counter() - start - self._rollout_s
        self._metrics["train"]["time/update_s"].append(update_s)
        self.seconds["update"] += update_s
        self.seconds["rollout"] += self._rollout_s
        return loss

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> Any:
        """The next micro-batch, in this run's layout; from a new rollout where the last one is used up."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        args = self.args
        is_used_up = self._step % (args.steps_per_generation * self.num_iterations) == 0
        if is_used_up or self._buffered_inputs is None:  # None also in a resumed run
            self.last_batch = None
            output = self._generate_and_score_completions(generation_batch)
            batch = self._rolled_out()
            num = len(batch.trajectories)
            order = training_order(num, seed=args.seed, step=self._step, is_seeded=args.rollouts_ahead > 0)
            dealt = deal(output, batch.training_rows.index, order, args=args, accelerator=self.accelerator)
            self._buffered_inputs = self.layout.arrange(dealt, self.accelerator)
        return self._buffered_inputs[self._step % args.steps_per_generation]

    def _rolled_out(self) -> UpdateBatch:
        """The batch of the rollout that was just made."""
        if self.last_batch is None:
            raise ValueError(
                f"{type(self).__name__}._generate_and_score_completions does not call super()'s, so there is no "
                "rollout. Call it and change what it returns; pass env= or generator= to sample in another way."
            )
        return self.last_batch

    # ---------------------------------------------------------------- rollout, rewards, advantages

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Inputs:
        """TRL's batch, an entry for each training row, from a rollout that is sampled, scored and compared here."""
        self.max_completion_length = self.args.max_completion_length  # of Dr. GRPO's loss
        self.row_check.check_batch(inputs)
        start = time.perf_counter()
        scored = self._generate_and_score(inputs)
        # Chosen before the advantages: some estimators whiten them over the rows that are kept.
        is_kept = self.features.keep(scored) if self.model.training else None
        rows = TrainingRows.of(scored.trajectories, self.args)
        batch = self.last_batch = UpdateBatch(**vars(scored), training_rows=rows, is_kept=is_kept)
        output = self._tensors(batch)
        if self.model.training and not self._is_score_checked:
            self._is_score_checked = check_scores(self, batch)
        self._add_log_probs(output, batch)
        columns = add_columns(output, batch.trajectories, rows, (self, *self.features))
        output |= self._advantages(output, batch, columns)
        for term in loss_terms(self):
            term.mark(output, self.accelerator)
        self._rollout_s += time.perf_counter() - start
        self._log_rollout(batch, output)
        if self.model.training:
            self.features.call("rollout_end", batch, output)
        self._record(batch, output)
        return output

    def _generate_and_score(self, inputs: list[dict[str, Any]]) -> ScoredBatch:
        """One trajectory per row of the data, with its rewards; features may replace some."""
        position = self._position()
        sampled = self.rollouts.generate(inputs, self.model_wrapped, position)
        samples_more = position.is_training and self.features.samples_more
        if not samples_more:
            self.rollouts.finish()
        batch = self.score(sampled)
        self.rewards.resolve_members(batch, self._group_size if position.is_training else 1)
        if position.is_training:
            self.features.call("after_scores", batch)
            self.rewards.resolve_members(batch, self._group_size)  # some may have been replaced
        if samples_more:
            self.rollouts.finish()
        self.last_trajectories, self.environments = batch.trajectories, batch.environments
        self.add_metrics(batch.metrics)
        return batch

    def score(self, batch: RolloutBatch, filler: RolloutBatch | None = None) -> ScoredBatch:
        """Reward turns, call the reward functions, and make their values part of the outcomes. All ranks must call it.

        Where ranks may have different numbers of trajectories, the first one of `filler` fills up those that have
        fewer, since TRL gathers equally many values from all. Groups of which too few are left are still in the
        baseline of the result (`Rewards.resolve_members`).
        """
        # Rows of a stream may have different columns: functions get None where a row lacks what another row has.
        columns = dict.fromkeys(sorted(set().union(*gather_object([{*chain(*batch.rows)}]))))
        self.rewards.place_on_turns(batch.trajectories, [columns | row for row in batch.rows])
        parts: Any = {
            "tokenizer": self._tokenizer,
            "is_single_turn": self.env_factory is SingleTurnEnv,
            "is_plain_text": isinstance(self.chat, PlainText),
        }
        arguments = batch.reward_arguments(**parts)
        completions = [completion for _, _, completion, _ in arguments]
        num, num_missing = len(arguments), 0
        if filler is not None:
            num_missing = max(gather_object([num])) - num
            arguments += [filler.reward_arguments(**parts)[0]] * num_missing
        self.environments = None if batch.environments is None else [*batch.environments, *[None] * num_missing]
        calls = self._reward_calls = RewardCalls(batch.trajectories, len(arguments))
        try:
            examples, *rest = map(list, zip(*arguments, strict=True))
            values = self._calculate_rewards([columns | row for row in examples], *rest)
        finally:
            self._reward_calls = None
        check_reward_values(
            values, self._calculate_rewards, (len(arguments) * self.accelerator.num_processes, len(self.reward_funcs))
        )
        failed = [item.stop_reason.is_infrastructure_failure for item in batch.trajectories] + [True] * num_missing
        values[self.accelerator.gather(torch.tensor(failed, device=values.device))] = torch.nan  # earned nothing
        first = self.accelerator.process_index * len(arguments)
        own = values[first : first + num]
        if calls.has_begun:  # else a subclass has computed them without the functions
            calls.resolve(own, self.reward_funcs, self.reward_func_names)
        check_finite(values, self._calculate_rewards)
        extra = {name: [*column, *[None] * num][:num] for name, column in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        names, weights = self.reward_func_names, self.reward_weights.tolist()
        self.rewards.place_on_outcomes(
            batch.trajectories, own, functions=self.reward_funcs, names=names, weights=weights
        )
        if not self.model.training:  # once they are checked: those of repeated rows become NaN
            self.evaluation.take_rewards(values, batch.trajectories, rank=self.accelerator.process_index)
        in_baseline, in_loss = self.rewards.members(batch.trajectories, own.device)
        return ScoredBatch(
            **vars(batch),
            reward_values=own,
            completions=completions,
            extra_columns=extra,
            in_baseline=in_baseline,
            in_loss=in_loss,
        )

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """TRL's (N, F) values of all ranks, from functions whose values are checked."""
        calls = self._reward_calls
        if calls is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        interval = self.args.watchdog_interval and 6 * self.args.watchdog_interval  # judges take their time
        waiting = reported("The reward functions have been running", interval)
        with rows_not_logged(), waiting, calls.checked(self):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _tensors(self, batch: UpdateBatch) -> Inputs:
        """TRL's batch of R rows: ids, and which of them count where."""
        args, accelerator, rows = self.args, self.accelerator, batch.training_rows
        widths = {"pad_token_id": self._tokenizer.pad_token_id, "multiple_of": self.pad_to_multiple_of}
        output = row_tensors(rows.rows, **widths, has_logprobs=self.use_vllm, device=accelerator.device)
        add_masks(output, rows, batch.in_baseline, batch.in_loss, args=args, accelerator=accelerator)
        if args.sampling_params(is_training=self.model.training).cuts:
            output[KEPT_IDS] = rows.kept_ids(output["completion_ids"])
        earned = torch.tensor([item.total_reward if item.in_baseline else 0.0 for item in batch.trajectories])
        output["trajectory_rewards"] = rows.expand(earned.to(batch.in_loss.device))
        if self.model.training:
            if batch.is_kept is not None:
                output[IS_KEPT] = rows.expand(batch.is_kept)
            places = torch.arange(len(batch.trajectories), device=batch.in_loss.device)
            output[TRAINING_ROW] = torch.arange(len(rows), device=places.device) + accelerator.process_index * len(
                rows
            )
            output[TRAJECTORY_ROW] = rows.expand(places + accelerator.process_index * len(places))
        return output

    def _add_log_probs(self, output: Inputs, batch: UpdateBatch) -> None:
        """Put into TRL's batch what its loss compares the policy with: (R, T) each.

        - `old_per_token_logps`, the policy's own before the update, unless the first pass of the loss gives them,
        - `importance_sampling_ratio` of trainer to sampler, with vLLM,
        - `ref_per_token_logps` of the reference, with a KL term.
        """
        args = self.args
        is_corrected = self.use_vllm and args.vllm_importance_sampling_correction
        is_aligned = args.gradient_accumulation_steps % (args.steps_per_generation * self.num_iterations) == 0
        in_rewards = args.kl_placement == "reward" and self.beta != 0.0  # they are compared before the update
        with torch.no_grad(), disable_gradient_checkpointing(self.model, args.gradient_checkpointing_kwargs):
            if not is_aligned or is_corrected or in_rewards:
                output["old_per_token_logps"] = self._log_probs(self.model, output)
            if is_corrected:
                self.add_metrics(weigh_mismatch(output, batch.training_rows, args, self.accelerator))
            if self.beta == 0.0:
                return
            model, used = self.ref_model, nullcontext()
            if model is None:  # the policy without its adapter, or with the one it began with
                model, policy = self.model, self.accelerator.unwrap_model(self.model)
                used = use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None)
            with used:
                output["ref_per_token_logps"] = self._log_probs(model, output)

    def _log_probs(self, model: Callable[..., Any], output: Inputs) -> torch.Tensor:
        """(R, T) a model's log-probs of the completions."""
        size = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        length = output["completion_ids"].shape[1]
        rows, kept = whole_rows(output), output.get(KEPT_IDS)
        return self._get_per_token_logps_and_entropies(model, *rows, length, batch_size=size, kept_ids=kept)[0]

    def _advantages(self, output: Inputs, batch: UpdateBatch, columns: Inputs) -> Entries:
        """Tensors to put into TRL's batch: `advantages`, (R, T), 0 outside the estimator's mask.

        `columns`: name -> (R, T), what `extra_columns` gave for the tokens of the rows.
        """
        credit, mask = self._estimate(output, batch, columns)
        advantages, mask = (batch.training_rows.to_rows(x, output["tool_mask"]) for x in (credit.advantages, mask))
        if not self.args.loss_mask:  # observation tokens have the advantage of the action token before them
            advantages = carry_forward(advantages, mask) * output["tool_mask"]
        return {"advantages": advantages}

    def _estimate(
        self, output: Inputs, batch: UpdateBatch, columns: Inputs, **critic: torch.Tensor | None
    ) -> tuple[Credit, torch.Tensor]:
        """This rank's part of the estimator's result, over time (`TrainingRows`), and the (B, T) mask that it saw.

        `critic`: `values` (B, T) and `bootstrap_values` (B,), for estimators with a critic.
        """
        mask = batch.training_rows.to_time(output["completion_mask"])
        if self.args.advantage_mask:
            mask = pad_tokens(batch.trajectories, "action_mask", 0, mask.shape[1]).to(mask.device)
        mask = mask.bool() & batch.in_loss.unsqueeze(1)  # (B, T)
        credit, metrics = self.credit.estimate(
            batch.trajectories,
            mask=mask,
            in_baseline=batch.in_baseline,
            group_size=self._group_size,
            progress=self._progress,
            kl_rewards=kl_rewards(self, output, mask, batch.training_rows),
            is_kept=batch.is_kept,
            columns={name: batch.training_rows.to_time(column) for name, column in columns.items()},
            **critic,
        )
        self.add_metrics(metrics)
        return credit, mask

    # ---------------------------------------------------------------- metrics, records

    def _log_rollout(self, batch: UpdateBatch, output: Inputs) -> None:
        log_rewards(self, batch, output)
        if self.model.training:
            compared = self.compared_returns(batch.trajectories, with_penalty=True)
            metrics, num_tokens = gather_metrics(batch, output, compared, group_size=self._group_size)
            self.state.num_input_tokens_seen += num_tokens
            self.add_metrics(metrics)
        self._metrics[self._mode]["num_tokens"] = [self.state.num_input_tokens_seen]

    def _record(self, batch: UpdateBatch, output: Inputs) -> None:
        trajectories = batch.trajectories
        if not self.model.training:
            compared = self.compared_returns(trajectories, with_penalty=True)
            trajectories = self.evaluation.take(trajectories, rank=self.accelerator.process_index, compared=compared)
        if self.recorder is not None:
            self.recorder.write(batch, trajectories, output)

    # ---------------------------------------------------------------- the loss

    def compute_loss(self, model: nn.Module, inputs: Inputs, *args: object, **kwargs: object) -> torch.Tensor:
        """TRL's, over all micro-batches of a micro-step; in training NaN with all gradients if anything is not finite.

        Of several micro-batches (`max_tokens_per_micro_batch`) all but the last are backpropagated when this returns.
        """
        compute_loss = super().compute_loss

        def loss_of(one: Inputs) -> torch.Tensor:
            given = for_own_loss(one, self) if is_own_loss(self._compute_loss) else one
            loss = compute_loss(model, given, *args, **kwargs)
            return (
                self.kept_rows.weigh(self.features.fold("check_loss", loss, one), one) if self.model.training else loss
            )

        if MICRO_BATCHES not in inputs:
            return loss_of(inputs)
        self._metrics["train"]["update/micro_batches"].append(float(len(inputs[MICRO_BATCHES])))
        return run_micro_batches(loss_of, model, inputs[MICRO_BATCHES], self.accelerator)

    def _compute_loss(self, model: Callable[..., Any], inputs: Inputs) -> torch.Tensor:
        """TRL's loss, plus the user's terms; a KL term that stands in the rewards does not enter it a second time."""
        # A loss around this one may have been given other advantages, or given them.
        whole = {**inputs, "advantages": advantages_of(inputs)}
        given = neutral_outside(whole, loss_masks(inputs)[0])
        self._loss_pass = loss_pass = LossPass.of(given, self)
        try:
            with loss_pass.read_by(self), trls_loss(self):
                weighted = {**given, "advantages": given["advantages"] * loss_pass.scale}
                is_own = is_own_loss(super()._compute_loss)
                loss = super()._compute_loss(model, for_own_loss(weighted, self) if is_own else weighted)
            num_tokens = num_loss_tokens(self, loss_pass.plan_given, loss_pass.mask)
            in_rewards = self.args.kl_placement == "reward"
            weigh_token_means(self._metrics[self._mode], num_tokens, in_rewards=in_rewards)
            loss = add_terms(self, loss, given, whole, loss_pass)
            return loss_pass.reaching(loss) if self.kept_rows.must_skip(given) else loss
        finally:
            self._loss_pass = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Callable[..., Any],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        """TRL's log-probs and entropies, (B, T) each; in the loss, 0 outside its mask."""
        loss_pass = self._loss_pass
        kept_ids = kwargs.pop(KEPT_IDS, None if loss_pass is None else loss_pass.kept_ids)
        if self.layout.is_packed:
            size = kwargs.get("batch_size") or len(input_ids)
            both = self.layout.log_probs(
                model,
                input_ids,
                attention_mask,
                attention_mask[:, -logits_to_keep:] if loss_pass is None else loss_pass.scored,
                accelerator=self.accelerator,
                batch_size=self.layout.scoring_size(size) if loss_pass is None else size,
                plan=None if loss_pass is None else loss_pass.plan,
                kept_ids=kept_ids,
            )
            result: tuple = (*both, None)
        else:
            positioned = with_positions(model, self)
            compute = functools.partial(super()._get_per_token_logps_and_entropies, positioned)
            if kept_ids is not None:
                compute = functools.partial(with_kept_ids, compute, kept_ids)
            result = compute(input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if loss_pass is not None:
            result = (*loss_pass.masked(*result[:2]), *result[2:])
            loss_pass.take(*result[:2])
            for name, values in zip(("log_probs", "entropies"), result, strict=False):
                self._watch_values(name, values, loss_pass.mask)
        return result

    def score_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        kept_ids: SamplingMasks | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The policy's log-probs, without gradients, of completions after prompts of your own.

        All ranks must call it, as often as the others; each with as many as it has. A forward pass has as many rows as
        when old log-probs are computed, and keeps to `max_tokens_per_micro_batch`.

        Args:
            prompts: token ids, one list for each of n rows.
            completions: theirs.
            kept_ids: (n, T) what their tokens were drawn from (rows of `KEPT_IDS` of TRL's batch), or a tensor
                (n, T, K) of ids, filled up with -1; None: anything.

        Returns:
            (n, T) as long as the longest completion, 0 behind the others' ends.
        """
        return score_rows(self, prompts, completions, kept_ids)

    def _normaliser(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """The divisor of a micro-batch's sum over tokens, so that an optimizer step is a mean over its tokens.

        `num_tokens` are those of the generation batch, on all ranks.
        """
        normaliser = num_tokens.clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:  # in evaluation the batch is neither split nor accumulated
            normaliser = normaliser * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return normaliser

    def _watch_values(self, name: str, values: torch.Tensor | None, mask: torch.Tensor) -> None:
        """Show the features what a forward pass gave, (B, T) like its mask; None if it gave no such thing."""
        if self.model.training and values is not None:
            self.features.call("on_values", name, values, mask)

    # ---------------------------------------------------------------- the optimizer step

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        return None if self._lacks_gradient(model, norm) else norm

    def _lacks_gradient(self, model: nn.Module, *norms: torch.Tensor | float | None) -> bool:
        """Whether the optimizer step has nothing to train on, so that no norm means anything."""
        self.last_norms = norms
        return self.kept_rows.end_step(self, model, norms)

    def _get_learning_rate(self) -> float:
        """That of the optimizer step just made."""
        return super()._get_learning_rate() * self.features.learning_rate_factor

    # ---------------------------------------------------------------- where the run stands

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        """Rows of one prompt."""
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def _progress(self) -> float:
        """Share of the run that is over."""
        return self.state.global_step / max(1, self.state.max_steps)

    def compared_returns(self, trajectories: Sequence[Trajectory], *, with_penalty: bool = False) -> list[list[float]]:
        """Per trajectory the returns, as they are trained on, by which it is compared (`CreditEstimator`)."""
        return self.credit.compared_returns(trajectories, self._progress, with_penalty=with_penalty)

    def _position(self) -> Position:
        dataloader, per_update = self.callback_handler.train_dataloader, self.args.gradient_accumulation_steps
        return Position(
            micro_step=self._step,
            optimizer_step=self.state.global_step,
            num_micro_steps=num_micro_steps(dataloader, self.state.max_steps, per_update),
            group_size=self._group_size,
            is_training=self.model.training,
            first_row=0 if self.model.training else self.evaluation.first_row,
        )

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log the mean of each metric over what is added until the next log; that of `TokenMean`s is over tokens."""
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)


class MultiTurnGRPOTrainer(MultiTurnTrainer):
    """GRPO for agents (Agent-R1, arXiv 2511.14460; GRPO, arXiv 2402.03300).

    The return of a trajectory is the sum of its turn rewards and its outcome. Its advantage, relative to the other
    trajectories of the same prompt, is spread over the tokens that the policy sampled. Other estimators without a
    critic (`advantage_estimator=`): Dr. GRPO, RLOO, REINFORCE++, REINFORCE++-baseline, turn-level GRPO, GiGPO.
    """

    config_class = MultiTurnGRPOConfig
    _name = "MultiTurnGRPO"
    _paper: ClassVar[dict[str, str]] = AGENT_R1
