"""The one file that knows TRL's insides: TRL's GRPO trainer with its generation step replaced by our rollout.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> [rewards on tokens] -> filter
       -> [batch] -> [advantages] -> [loss] -> [step] -> sync weights -> next rollout

TRL 1.16 names this file touches (`tests/trainers/test_trl_contract.py` checks each):

- overridden: `__init__`, `_generate`, `_generate_and_score_completions`, `_calculate_rewards`, `_compute_loss`,
  `_prepare_inputs`, `_get_per_token_logps_and_entropies`, `training_step`, `get_batch_samples`, `train`,
  `_save_checkpoint`, `_load_optimizer_and_scheduler`, `_set_signature_columns_if_needed`, `create_model_card`,
  `_get_train_sampler` (its `seed`, `shuffle` and `generator`)
- read: `_metrics`, `_tokenizer`, `_is_vlm`, `eos_token_ids`, `reward_weights`, `reward_func_names`, `num_generations`,
  `num_generations_eval`, `model_wrapped`, `accelerator`, `state`
- called: `_get_per_token_logps_and_entropies`
- read and set: `_step`, `_buffered_inputs`, `use_vllm`, `beta`
- output of `_generate_and_score_completions`: `advantages`, `tool_mask`, `prompt_ids`, `prompt_mask`,
  `completion_ids`, `completion_mask`, `num_items_in_batch`, `old_per_token_logps`, `ref_per_token_logps`,
  `sampling_per_token_logps`, `importance_sampling_ratio`

No TRL method body is copied; `super()` does the scoring, the reference log-probs, the loss and the step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from agent_r1_trl.advantages import masked_mean
from agent_r1_trl.batching import batch_trajectories
from agent_r1_trl.critic import base_causal_lm
from agent_r1_trl.losses import kl_in_reward
from agent_r1_trl.rollout import RolloutRequest, check_some_played, context_length, derive_seed, example_key
from agent_r1_trl.trainers.config import PACKED_LAYOUTS, MultiTurnConfig, MultiTurnGRPOConfig
from agent_r1_trl.trainers.credit import (
    Credit,
    estimate_credit,
    gather_credit_inputs,
    read_credit_inputs,
    source_scales,
    source_values,
    weighs_advantages,
    weighted_turn_rewards,
)
from agent_r1_trl.trainers.data_order import EpochOrder
from agent_r1_trl.trainers.env_source import env_name, has_own_reward, resolve_env_factory
from agent_r1_trl.trainers.importance import ratio_by_turn, sampling_ratio
from agent_r1_trl.trainers.metrics import length_metrics, length_record, rollout_metrics, trajectory_record
from agent_r1_trl.trainers.micro_batches import regroup, trim_padding
from agent_r1_trl.trainers.model_card import write_model_card
from agent_r1_trl.trainers.overlap import Lookahead
from agent_r1_trl.trainers.packing import pack, packed_log_probs, use_packed_attention
from agent_r1_trl.trainers.rollout_state import load_rollout_state, save_rollout_state
from agent_r1_trl.trainers.sampler import PolicySampler, Rollout
from agent_r1_trl.trainers.turn_rewards import add_turn_rewards, check_weights, schedule_factor
from agent_r1_trl.trajectory import Trajectory


class MultiTurnTrainer(GRPOTrainer):
    """Base of the multi-turn trainers: rollouts, rewards, masks, metrics, recording, checkpoints.

    Args:
        env: environment class or zero-argument factory; each trajectory gets a fresh one.
        tools: TRL's plain functions (instead of `env`).
        environment_factory: TRL's environment classes (instead of `env`).
        generator: a `Generator` to sample with; None makes one from the arguments.
        turn_reward_funcs: functions of TRL's shape that return, per trajectory, one number (or None) for each turn.
        model: as for `trl.GRPOTrainer`, like every argument not named here.

    With none of `env`, `tools` and `environment_factory` the trainer behaves as `trl.GRPOTrainer`.
    """

    config_class: type[MultiTurnConfig] = MultiTurnGRPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "agent-r1-trl", "multi-turn"]

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
        args = self._default_args(model) if args is None else args
        config = self.config_class.from_grpo_config(args)
        self.env_factory = resolve_env_factory(env, tools, environment_factory)
        self._user_generator = generator
        self.turn_reward_funcs = _as_list(turn_reward_funcs)
        self._rollout: Rollout | None = None
        self.last_trajectories: list[Trajectory] = []
        """This rank's trajectories of the last rollout, for callbacks."""
        self._rollout_seconds = 0.0
        if self.env_factory is None:
            super().__init__(model, reward_funcs, config, train_dataset, eval_dataset, *positional, **kwargs)
            return
        config.check_supported()
        if kwargs.get("rollout_func") is not None:
            raise ValueError(
                "rollout_func= and env= (or tools=) were both given: both replace generation. Remove one."
            )
        reward_funcs = _as_list(reward_funcs)
        self._turn_reward_weights = check_weights(config.turn_reward_weights, self.turn_reward_funcs)
        trl_args = self._trl_arguments(config, len(reward_funcs))
        if self._has_own_reward:
            reward_funcs = [environment_reward, *reward_funcs]
        if not reward_funcs:
            raise ValueError(
                "No reward source: tools= are plain functions and earn nothing. Pass reward_funcs= (or "
                "turn_reward_funcs=), or env= with an outcome_reward."
            )
        if train_dataset is None:
            train_dataset = _placeholder_dataset(config)
        _check_num_rows(train_dataset, config)
        super().__init__(model, reward_funcs, trl_args, train_dataset, eval_dataset, *positional, **kwargs)
        if self._is_vlm:
            raise ValueError(
                f"processing_class={type(self.processing_class).__name__}: images together with tools are not "
                "supported. Pass a text-only tokenizer as processing_class, or train without env= and tools=."
            )
        self._restore_arguments(config)
        self._prepare_rollout()
        self._prepare_layout()

    @classmethod
    def _default_args(cls, model: Any) -> MultiTurnConfig:
        name = model if isinstance(model, str) else model.config._name_or_path
        return cls.config_class(output_dir=f"{name.split('/')[-1]}-{cls._name}")

    # ---------------------------------------------------------------- set-up

    def _trl_arguments(self, config: MultiTurnConfig, num_reward_funcs: int) -> MultiTurnConfig:
        """The copy of the arguments that TRL sees: without an engine of its own, with a weight for the environment."""
        args = copy.copy(config)
        args.use_vllm = False
        args.mask_truncated_completions = False
        if args.reward_weights is not None:
            if len(args.reward_weights) != num_reward_funcs:
                raise ValueError(
                    f"reward_weights={args.reward_weights} has {len(args.reward_weights)} entries for "
                    f"{num_reward_funcs} reward_funcs: give one weight per function of yours (the environment's own "
                    "reward always counts 1)."
                )
            if self._has_own_reward:
                args.reward_weights = [1.0, *args.reward_weights]
        return args

    @property
    def _has_own_reward(self) -> bool:
        """Whether trajectories earn anything before the user's reward functions see them."""
        return bool(self.turn_reward_funcs) or has_own_reward(self.env_factory)  # type: ignore[arg-type]

    def _restore_arguments(self, config: MultiTurnConfig) -> None:
        self.args.use_vllm = self.use_vllm = config.use_vllm
        self.args.mask_truncated_completions = config.mask_truncated_completions
        self.args.reward_weights = config.reward_weights

    def _prepare_rollout(self) -> None:
        args = self.args
        self.sampler = PolicySampler(
            args,
            self._tokenizer,
            self.env_factory,  # type: ignore[arg-type]
            generator=self._user_generator,
            eos_token_ids=self.eos_token_ids,
            is_on_gpu=self.accelerator.device.type == "cuda",
            context_length=context_length(self.accelerator.unwrap_model(self.model).config),
        )
        self.chat, self.limits = self.sampler.chat, self.sampler.limits
        # What the policy is trained with is what is saved with it.
        self._tokenizer.chat_template = self.chat.chat_template
        self._lookahead = Lookahead()
        self._next_rollout: Rollout | None = None
        self._store = None
        if args.record_trajectories != "none":
            from agent_r1_trl.recording import TrajectoryStore

            self._store = TrajectoryStore(
                args.output_dir, format=args.record_trajectories, rank=self.accelerator.process_index
            )

    def _prepare_layout(self) -> None:
        self._loss_mask: torch.Tensor | None = None
        if self.args.update_layout not in PACKED_LAYOUTS:
            return
        if self.aux_loss_enabled:
            raise ValueError(
                f"update_layout={self.args.update_layout!r}: the router's auxiliary loss is an average over padded "
                "rows. Set router_aux_loss_coef=0.0, or update_layout='grouped'."
            )
        use_packed_attention(base_causal_lm(self.model))
        if self.ref_model is not None:
            use_packed_attention(self.accelerator.unwrap_model(self.ref_model))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.env_factory is not None and self.train_dataset is not None:
            columns = self.train_dataset.column_names or []
            self._signature_columns: list[str] = [*{*self._signature_columns, *columns}]

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

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
            self._sync(model)
            if rollout is None or not is_training:
                rollout = self.sampler.start(self._requests(examples, self._step), is_training=is_training)
                rollout.wait()
            else:
                self._next_rollout = None
            if is_training and self.args.overlap_rollout:
                self._start_next_rollout()
            self.sampler.rest()
        check_some_played(rollout.trajectories)
        return rollout

    def _sync(self, model: Any) -> None:
        """The generator gets the weights of the last optimizer step."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in self.sampler.sync(model, self.state.global_step).items():
            metrics[name].append(value)

    def _start_next_rollout(self) -> None:
        """Play the next generation batch, if the run gets that far, while the update trains on this one."""
        step = self._step + self.args.steps_per_generation * self.num_iterations
        if step >= self.state.max_steps * self.args.gradient_accumulation_steps:
            return
        examples = self._lookahead.at(step)
        if examples is not None:
            self._next_rollout = self.sampler.start(self._requests(examples, step))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        """The Trainer's next batches, through a window that `overlap_rollout` can look ahead in."""
        if self.env_factory is not None and self.args.overlap_rollout:
            epoch_iterator = self._lookahead.over(epoch_iterator, self._step)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loop; a rollout that nothing waits for any more ends with it."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.env_factory is not None and self._next_rollout is not None:
                self._next_rollout.cancel()
                self._next_rollout = None

    def _requests(self, examples: list[dict[str, Any]], step: int) -> list[RolloutRequest]:
        """Row i of this rank is row `rank * B + i` of the generation batch; groups are consecutive rows of that.

        Args:
            examples: B rows.
            step: the micro-step that trains on them; seeds differ from step to step.
        """
        is_training = self.model.training
        group_size = self.num_generations if is_training else self.num_generations_eval
        first_row = self.accelerator.process_index * len(examples)
        requests = []
        for row, example in enumerate(examples, start=first_row):
            group, generation = divmod(row, group_size)
            # Equal rows of a batch (all are, if the environment owns the data) are different draws in training;
            # every evaluation draws alike.
            draw = (step, group) if is_training else (-1,)
            example_id = example_key(example)
            requests.append(
                RolloutRequest(
                    example=dict(example),
                    example_id=example_id,
                    generation=generation,
                    seed=derive_seed(self.args.seed, *draw, example_id, generation),
                    reset_seed=derive_seed(self.args.seed, *draw, example_id),
                )
            )
        return requests

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
        if trajectory.stop_reason.is_infrastructure_failure:
            return False
        return not (trajectory.stop_reason.is_truncated and self.args.truncated_trajectories == "mask")

    # ---------------------------------------------------------------- scoring

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.env_factory is None:
            return super()._generate_and_score_completions(inputs)
        if any(row.get("image") is not None or row.get("images") for row in inputs):
            raise ValueError(
                "The data set has an 'image' or 'images' column with content: images together with tools are not "
                "supported. Remove the column, or train without env= and tools=."
            )
        mode = "train" if self.model.training else "eval"
        start = time.perf_counter()
        rollout = self._roll_out(inputs)
        wait_s = time.perf_counter() - start
        trajectories = rollout.trajectories
        if self.args.truncated_trajectories == "penalise":
            _penalise_truncated(trajectories, self.args.truncation_penalty)
        add_turn_rewards(trajectories, inputs, self.turn_reward_funcs, self._turn_reward_weights)
        self._rollout, self._rollout_rows, self.last_trajectories = rollout, inputs, trajectories
        try:
            rows = [
                {**row, "prompt": trajectory.prompt_messages}
                for row, trajectory in zip(inputs, trajectories, strict=True)
            ]
            output = super()._generate_and_score_completions(rows)
        finally:
            self._rollout = None
        self._add_reward_functions(trajectories)
        if "importance_sampling_ratio" in output:
            self._weigh_mismatch(output, trajectories)
        output |= self._credit(output, trajectories)
        if not self.args.loss_mask:
            self._open_loss_mask(output, trajectories)
        self._rollout_seconds += time.perf_counter() - start
        self._metrics[mode]["time/rollout_s"].append(rollout.seconds)
        if self.args.overlap_rollout:
            self._metrics[mode]["time/wait_s"].append(wait_s)
            self._metrics[mode]["sampling/staleness"].append(self.state.global_step - rollout.synced_step)
        self._log_rollout(trajectories, mode)
        self._record(trajectories, output["advantages"], mode)
        return output

    def _weigh_mismatch(self, output: dict[str, Any], trajectories: list[Trajectory]) -> None:
        """Log the sampler's mismatch by turn; replace TRL's ratios where our settings ask for another unit."""
        args, mode = self.args, "train" if self.model.training else "eval"
        difference = output["old_per_token_logps"] - output["sampling_per_token_logps"]  # (B, T)
        batch = batch_trajectories(trajectories, length=difference.shape[1])
        mask, turn_ids = batch.action_mask.to(difference.device), batch.turn_ids.to(difference.device)
        sums: dict[int, list[float]] = {}
        for local in gather_object([ratio_by_turn(difference, mask, turn_ids)]):
            for turn, (total, count) in local.items():
                entry = sums.setdefault(turn, [0.0, 0])
                entry[0] += total
                entry[1] += count
        for turn, (total, count) in sorted(sums.items()):
            self._metrics[mode][f"sampling/ratio_turn_{turn}"].append(total / count)
        if args.importance_sampling_unit is None and not args.importance_sampling_length_normalized:
            return
        unit, _, constraint = args.vllm_importance_sampling_mode.partition("_")
        output["importance_sampling_ratio"] = sampling_ratio(
            difference,
            mask,
            turn_ids,
            unit=args.importance_sampling_unit or unit,
            length_normalized=args.importance_sampling_length_normalized,
            bounds=(args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max),
            is_masked=constraint == "mask",
        )

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_per_func  # (N, F), N rows of all ranks

    def _add_reward_functions(self, trajectories: list[Trajectory]) -> None:
        """Add the weighted values of the user's reward functions to the outcomes of this rank's trajectories."""
        first = self.accelerator.process_index * len(trajectories)
        local = self._rewards_per_func[first : first + len(trajectories)]  # (B, F)
        for column, name in enumerate(self.reward_func_names):
            if self.reward_funcs[column] is environment_reward:
                continue
            weight = float(self.reward_weights[column])
            for trajectory, value in zip(trajectories, local[:, column].tolist(), strict=True):
                if value == value:  # not NaN: the function scored this row
                    trajectory.outcome_reward += weight * value
                    trajectory.reward_parts[name] = trajectory.reward_parts.get(name, 0.0) + weight * value

    def _credit(self, output: dict[str, Any], trajectories: list[Trajectory]) -> dict[str, torch.Tensor]:
        """Tensors to put into TRL's batch: `advantages`, (B, T), 0 outside the estimators' mask."""
        credit, _ = self._estimate(output, trajectories)
        return {"advantages": credit.advantages}

    def _estimate(
        self, output: dict[str, Any], trajectories: list[Trajectory], **critic: torch.Tensor | None
    ) -> tuple[Credit, torch.Tensor]:
        """This rank's slice of the estimator's result on the rows of all ranks, and the (B, T) mask it saw.

        Args:
            output: TRL's batch.
            trajectories: B of them.
            critic: `values` (B, T) and `bootstrap_values` (B,), for estimators with a critic.
        """
        args, mode = self.args, "train" if self.model.training else "eval"
        process_weight, outcome_weight = self._reward_weights()
        scales: dict[str, float] = {}
        if args.normalize_process_rewards:
            scales = source_scales(gather_object(source_values(trajectories)))
        weighs_rewards = not weighs_advantages(args)
        local = read_credit_inputs(
            trajectories,
            mask=self._credit_mask(output, trajectories),
            lost=self._is_lost(trajectories),
            turn_rewards=weighted_turn_rewards(
                trajectories, weight=process_weight if weighs_rewards else 1.0, source_scales=scales
            ),
            outcome_weight=outcome_weight if weighs_rewards else 1.0,
        )
        local = replace(local, kl_rewards=self._kl_rewards(output, local.mask), **critic)  # type: ignore[arg-type]
        inputs = gather_credit_inputs(local, self.accelerator)
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        group_ids = torch.arange(len(inputs.mask), device=inputs.mask.device) // group_size  # (N,)
        credit, parts = estimate_credit(
            inputs, group_ids, args, process_weight=process_weight, outcome_weight=outcome_weight
        )
        for name, part in parts.items():
            self._metrics[mode][f"credit/{name}_advantage_abs"].append(masked_mean(part.abs(), inputs.mask).item())
        self._metrics[mode]["credit/process_weight"].append(process_weight)
        first = self.accelerator.process_index * len(trajectories)
        rows, length = slice(first, first + len(trajectories)), local.mask.shape[1]
        returns = None if credit.returns is None else credit.returns[rows, :length]
        return Credit(advantages=credit.advantages[rows, :length].float(), returns=returns), local.mask

    def _reward_weights(self) -> tuple[float, float]:
        """Weights of process and outcome rewards now."""
        args = self.args
        progress = self.state.global_step / max(1, self.state.max_steps)
        factor = schedule_factor(args.process_reward_schedule, progress)
        return args.process_reward_weight * factor, args.outcome_reward_weight

    def _kl_rewards(self, output: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
        """(B, T) -beta * k1 on the estimators' positions; None with the KL term in the loss."""
        if self.args.kl_placement == "loss" or self.beta == 0.0:
            return None
        if output.get("old_per_token_logps") is None:
            output["old_per_token_logps"] = self._old_logps(output)
        old, reference = output["old_per_token_logps"], output["ref_per_token_logps"]
        penalties = kl_in_reward(torch.zeros_like(old), old, reference, mask, beta=self.beta)
        mode = "train" if self.model.training else "eval"
        sums = self.accelerator.reduce(torch.stack([penalties.sum(), mask.sum().to(penalties)]), reduction="sum")
        self._metrics[mode]["kl"].append((-sums[0] / self.beta / sums[1].clamp(min=1)).item())
        return penalties

    def _old_logps(self, output: dict[str, Any]) -> torch.Tensor:
        """(B, T) log-probs of the completion tokens under the policy that sampled them."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(
                self.model, ids, mask, output["completion_ids"].shape[1], batch_size=size
            )[0]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss; a KL term that already stands in the rewards does not enter it a second time."""
        beta: float = vars(self)["beta"]
        if self.env_factory is not None and self.args.kl_placement == "reward":
            self.beta = 0.0
        if self.env_factory is not None and self.args.update_layout in PACKED_LAYOUTS:
            self._loss_mask = inputs["completion_mask"] * inputs["tool_mask"]  # (B, T)
            # A token that the loss leaves out gets log-prob 0: so must what it is compared with.
            inputs = {
                name: value * self._loss_mask if name.endswith("per_token_logps") and value is not None else value
                for name, value in inputs.items()
            }
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta, self._loss_mask = beta, None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple:
        """TRL's log-probs and entropies, (B, T) each; with a packed layout from a forward without padding.

        In the loss, tokens outside its mask get 0.
        """
        if self.env_factory is None or self.args.update_layout not in PACKED_LAYOUTS:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        scored = attention_mask[:, -logits_to_keep:] if self._loss_mask is None else self._loss_mask
        backbone = base_causal_lm(self.accelerator.unwrap_model(model)).base_model
        size = kwargs.get("batch_size") or len(input_ids)
        parts = []
        for chunk in zip(*(tensor.split(size) for tensor in (input_ids, attention_mask, scored)), strict=True):
            batch = pack(*chunk, share_prompts=self.args.update_layout == "shared")
            with self.accelerator.autocast():
                parts.append(packed_log_probs(model, backbone, batch))
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if entropies[0] is not None else None, None

    def _is_lost(self, trajectories: list[Trajectory]) -> torch.Tensor:
        """(B,) bool: trajectories that leave every baseline (not the policy's fault, or nobody scored them)."""
        first = self.accelerator.process_index * len(trajectories)
        unscored = self._rewards_per_func[first : first + len(trajectories)].isnan().all(dim=1)
        failed = torch.tensor([t.stop_reason.is_infrastructure_failure for t in trajectories], device=unscored.device)
        return (unscored | failed).to(self.accelerator.device)

    def _credit_mask(self, output: dict[str, Any], trajectories: list[Trajectory]) -> torch.Tensor:
        """(B, T) the positions that estimators see: action tokens, or every completion token in the ablation.

        Rows that are kept out of the loss (`truncated_trajectories="mask"`) keep their positions here: they count in
        baselines.
        """
        completion_mask = output["completion_mask"]
        if not self.args.advantage_mask:
            return completion_mask
        batch = batch_trajectories(trajectories, length=completion_mask.shape[1])
        return batch.action_mask.to(completion_mask.device)

    def _open_loss_mask(self, output: dict[str, Any], trajectories: list[Trajectory]) -> None:
        """The ablation without loss mask: observation tokens of trained rows enter the loss and its normaliser."""
        device = output["completion_mask"].device
        live = torch.tensor([self._is_trained_on(t) and bool(t.completion_ids) for t in trajectories], device=device)
        output["tool_mask"] = output["completion_mask"] * live.unsqueeze(1)
        output["num_items_in_batch"] = self.accelerator.gather(output["tool_mask"].sum()).sum()

    # ---------------------------------------------------------------- metrics and records

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's next micro-batch, its rows chosen and its padding cut as `update_layout` says."""
        before = vars(self)["_buffered_inputs"]
        inputs = super()._prepare_inputs(generation_batch)
        layout, buffer = self.args.update_layout, vars(self)["_buffered_inputs"]
        if self.env_factory is None or layout in ("padded", "packed") or not self.model.training:
            return inputs
        per_generation, per_update = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        stays_in_update = per_generation % per_update == 0 or per_update % per_generation == 0
        if buffer is not before and stays_in_update:
            by_prompt = layout == "shared"
            self._buffered_inputs = regroup(buffer, steps_per_update=per_update, by_prompt=by_prompt)
            inputs = self._buffered_inputs[self._step % per_generation]
        return trim_padding(inputs) if layout == "grouped" else inputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's step; what it takes without the rollout is logged as `time/update_s`."""
        self._rollout_seconds = 0.0
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._metrics["train"]["time/update_s"].append(time.perf_counter() - start - self._rollout_seconds)
        return loss

    def _log_completion_lengths(self, trajectories: list[Trajectory]) -> None:
        """TRL's `completions/*` and `num_tokens`."""
        mode = "train" if self.model.training else "eval"
        rows = gather_object([length_record(trajectory) for trajectory in trajectories])
        if mode == "train":
            self.state.num_input_tokens_seen += sum(row["prompt"] + row["length"] for row in rows)
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, value in length_metrics(rows).items():
            self._metrics[mode][name].append(value)

    def _log_rollout(self, trajectories: list[Trajectory], mode: str) -> None:
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        records = gather_object([trajectory_record(trajectory) for trajectory in trajectories])
        for name, value in rollout_metrics(records, num_generations=group_size).items():
            self._metrics[mode][name].append(value)

    def _record(self, trajectories: list[Trajectory], advantages: torch.Tensor, mode: str) -> None:
        if self._store is None:
            return
        for trajectory, row in zip(trajectories, advantages.tolist(), strict=True):
            trajectory.advantages = row[: len(trajectory.completion_ids)]
        self._store.write(self.state.global_step, trajectories, split=mode)

    # ---------------------------------------------------------------- checkpoints and publishing

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.env_factory is None:
            return
        is_between = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        save_rollout_state(
            Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}",
            self.accelerator.process_index,
            step=self._step,
            buffered_inputs=self._buffered_inputs if is_between else None,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.env_factory is None:
            return
        state = load_rollout_state(Path(checkpoint), self.accelerator.process_index, self.accelerator.device)
        if state is not None:
            self._step, self._buffered_inputs = state["step"], state["buffered_inputs"]

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write our own card (TRL looks templates up inside its own package)."""
        if self.is_world_process_zero():
            write_model_card(self, model_name=model_name, dataset_name=dataset_name, tags=tags)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the environment's tools."""
        if self.env_factory is None:
            return []
        from agent_r1_trl.tools import as_tool

        return [as_tool(item).schema for item in getattr(self.env_factory(), "tools", ())]

    @property
    def env_name(self) -> str | None:
        """Name of the environment; None without one."""
        return env_name(self.env_factory) if self.env_factory is not None else None


def environment_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
    """TRL reward function that carries the environment's return; None for a lost trajectory."""
    return [None if item.stop_reason.is_infrastructure_failure else item.total_reward for item in trajectory]


def _penalise_truncated(trajectories: list[Trajectory], penalty: float) -> None:
    for trajectory in trajectories:
        if trajectory.stop_reason.is_truncated:
            trajectory.outcome_reward += penalty
            trajectory.reward_parts["truncation_penalty"] = penalty


def _as_list(reward_funcs: Any) -> list[Any]:
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def _check_num_rows(train_dataset: Any, config: MultiTurnConfig) -> None:
    """TRL drops what does not fill a batch; of too few rows nothing is left, and the run would end without a step."""
    num_prompts = max(1, config.generation_batch_size // config.num_generations)
    num_rows = len(train_dataset) if hasattr(train_dataset, "__len__") else num_prompts
    if num_rows < num_prompts:
        raise ValueError(
            f"train_dataset has {num_rows} rows, and a rollout takes {num_prompts} of them "
            f"(generation_batch_size={config.generation_batch_size} / num_generations={config.num_generations}), so "
            "no step could be made. Pass more rows, or set per_device_train_batch_size x gradient_accumulation_steps "
            f"x processes to at most {num_rows * config.num_generations}."
        )


def _placeholder_dataset(config: MultiTurnConfig) -> Dataset:
    """Empty rows that drive the loop when the environment owns the data."""
    if config.max_steps <= 0:
        raise ValueError(
            f"train_dataset=None with max_steps={config.max_steps}: without a data set the environment makes its own "
            "prompts and max_steps sets the length of the run. Pass train_dataset=, or set max_steps > 0."
        )
    num_rows = max(1, config.generation_batch_size // config.num_generations)
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * num_rows})
