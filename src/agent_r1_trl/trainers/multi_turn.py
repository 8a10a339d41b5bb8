"""TRL's GRPO trainer with its generation step replaced by our rollout: the base of the multi-turn trainers.

prompt -> environment reset -> [rollout (policy <-> tools)] -> Trajectory -> [rewards on tokens] -> filter
       -> [batch] -> [advantages] -> loss -> step -> [sync weights] -> next rollout

Three files know TRL's insides, one for each side of its trainer: `update.py` what is done with a scored batch,
`rollout_step.py` how trajectories come about, and this one how they are scored, and what a user passes in. No TRL
method body is copied; `super()` does the scoring, the reference log-probs, the loss and the step.

TRL 1.16 names this file touches besides those of its two bases (`tests/trainers/test_trl_contract.py` checks each):

- overridden: `__init__`, `_generate_and_score_completions`, `_calculate_rewards`, `create_model_card`
- read: `_is_vlm`, `reward_funcs`, `reward_weights`, `reward_func_names`, `beta`, `accelerator`, `state`
- set: `use_vllm`
- output of `_generate_and_score_completions`: `advantages`, `tool_mask`, `completion_mask`, `num_items_in_batch`,
  `old_per_token_logps`, `ref_per_token_logps`, `sampling_per_token_logps`, `importance_sampling_ratio`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from trl import GRPOConfig

from agent_r1_trl.advantages.estimators import Credit
from agent_r1_trl.environments.factory import env_name, has_own_reward, resolve_env_factory, tool_schemas
from agent_r1_trl.trainers.config import MultiTurnConfig, MultiTurnGRPOConfig
from agent_r1_trl.trainers.construction import (
    as_list,
    check_rollout_func,
    check_rows,
    check_tokenizer,
    trl_arguments,
    trl_dataset,
    trl_reward_funcs,
)
from agent_r1_trl.trainers.credit import CreditEstimator
from agent_r1_trl.trainers.metrics import rollout_metrics, trajectory_record
from agent_r1_trl.trainers.mismatch import mismatch_metrics, mismatch_ratio
from agent_r1_trl.trainers.model_card import write_model_card
from agent_r1_trl.trainers.rollout_step import RolloutTrainer
from agent_r1_trl.trainers.sampler import Rollout
from agent_r1_trl.trainers.scoring import add_outcome_rewards, lost_rows, penalise_truncated
from agent_r1_trl.trainers.turn_rewards import add_turn_rewards, check_weights
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batching import batch_trajectories


class MultiTurnTrainer(RolloutTrainer):
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
        self.turn_reward_funcs = as_list(turn_reward_funcs)
        self.last_trajectories: list[Trajectory] = []
        """This rank's trajectories of the last rollout, for callbacks."""
        self._user_generator = generator
        if self.env_factory is None:
            super().__init__(model, reward_funcs, config, train_dataset, eval_dataset, *positional, **kwargs)
            return
        config.check_supported()
        check_rollout_func(kwargs.get("rollout_func"))
        reward_funcs = as_list(reward_funcs)
        self._turn_reward_weights = check_weights(config.turn_reward_weights, self.turn_reward_funcs)
        earns_reward = bool(self.turn_reward_funcs) or has_own_reward(self.env_factory)
        trl_args = trl_arguments(config, num_reward_funcs=len(reward_funcs), has_own_reward=earns_reward)
        reward_funcs = trl_reward_funcs(reward_funcs, has_own_reward=earns_reward)
        train_dataset = trl_dataset(train_dataset, config)
        super().__init__(model, reward_funcs, trl_args, train_dataset, eval_dataset, *positional, **kwargs)
        check_tokenizer(self.processing_class, is_vlm=self._is_vlm)
        self.args.use_vllm = self.use_vllm = config.use_vllm
        self.args.mask_truncated_completions = config.mask_truncated_completions
        self.args.reward_weights = config.reward_weights
        self.credit = CreditEstimator(self.args, self.accelerator)
        self._prepare_rollout()
        self._store = _trajectory_store(config, self.accelerator.process_index)
        self._prepare_layout()

    @classmethod
    def _default_args(cls, model: Any) -> MultiTurnConfig:
        name = model if isinstance(model, str) else model.config._name_or_path
        return cls.config_class(output_dir=f"{name.split('/')[-1]}-{cls._name}")

    # ---------------------------------------------------------------- scoring

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.env_factory is None:
            return super()._generate_and_score_completions(inputs)
        check_rows(inputs)
        start = time.perf_counter()
        rollout = self._roll_out(inputs)
        wait_s = time.perf_counter() - start
        trajectories = rollout.trajectories
        if self.args.truncated_trajectories == "penalise":
            penalise_truncated(trajectories, self.args.truncation_penalty)
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
        add_outcome_rewards(
            trajectories,
            self._own_rewards(trajectories),
            self.reward_funcs,
            self.reward_func_names,
            self.reward_weights.tolist(),
        )
        if "importance_sampling_ratio" in output:
            self._weigh_mismatch(output, trajectories)
        output |= self._credit(output, trajectories)
        if not self.args.loss_mask:
            self._open_loss_mask(output, trajectories)
        self._rollout_seconds += time.perf_counter() - start
        self._log_rollout(rollout, wait_s)
        self._record(trajectories, output["advantages"])
        return output

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        self._rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._rewards_per_func  # (N, F), N rows of all ranks

    def _own_rewards(self, trajectories: list[Trajectory]) -> torch.Tensor:
        """(B, F) what each reward function returned for this rank's trajectories."""
        first = self.accelerator.process_index * len(trajectories)
        return self._rewards_per_func[first : first + len(trajectories)]

    def _weigh_mismatch(self, output: dict[str, Any], trajectories: list[Trajectory]) -> None:
        """Log the sampler's mismatch by turn; replace TRL's ratios where our settings ask for another unit."""
        difference = output["old_per_token_logps"] - output["sampling_per_token_logps"]  # (B, T)
        batch = batch_trajectories(trajectories, length=difference.shape[1])
        mask, turn_ids = batch.action_mask.to(difference.device), batch.turn_ids.to(difference.device)
        self._add_metrics(mismatch_metrics(difference, mask, turn_ids))
        ratio = mismatch_ratio(difference, mask, turn_ids, self.args)
        if ratio is not None:
            output["importance_sampling_ratio"] = ratio

    def _open_loss_mask(self, output: dict[str, Any], trajectories: list[Trajectory]) -> None:
        """The ablation without loss mask: observation tokens of trained rows enter the loss and its normaliser."""
        device = output["completion_mask"].device
        live = torch.tensor([self._is_trained_on(t) and bool(t.completion_ids) for t in trajectories], device=device)
        output["tool_mask"] = output["completion_mask"] * live.unsqueeze(1)
        output["num_items_in_batch"] = self.accelerator.gather(output["tool_mask"].sum()).sum()

    # ---------------------------------------------------------------- advantages

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
        in_baseline = ~lost_rows(trajectories, self._own_rewards(trajectories)).to(self.accelerator.device)  # (B,)
        mask = self._credit_mask(output, trajectories).bool() & in_baseline.unsqueeze(1)  # (B, T)
        credit, metrics = self.credit.estimate(
            trajectories,
            mask=mask,
            in_baseline=in_baseline,
            group_size=self._group_size,
            progress=self.state.global_step / max(1, self.state.max_steps),
            kl_rewards=self._kl_rewards(output, mask),
            **critic,
        )
        self._add_metrics(metrics)
        return credit, mask

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

    def _kl_rewards(self, output: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
        """(B, T) -beta * k1 on the estimators' positions; None with the KL term in the loss."""
        if self.args.kl_placement == "loss" or self.beta == 0.0:
            return None
        if output.get("old_per_token_logps") is None:
            output["old_per_token_logps"] = self._old_logps(output)
        penalties, mean_kl = self.credit.kl_penalties(
            output["old_per_token_logps"], output["ref_per_token_logps"], mask, beta=self.beta
        )
        self._add_metrics({"kl": mean_kl})
        return penalties

    # ---------------------------------------------------------------- metrics and records

    def _log_rollout(self, rollout: Rollout, wait_s: float) -> None:
        self._add_metrics({"time/rollout_s": rollout.seconds})
        if self.args.overlap_rollout:
            staleness = self.state.global_step - rollout.synced_step
            self._add_metrics({"time/wait_s": wait_s, "sampling/staleness": staleness})
        records = gather_object([trajectory_record(trajectory) for trajectory in rollout.trajectories])
        self._add_metrics(rollout_metrics(records, num_generations=self._group_size))

    def _record(self, trajectories: list[Trajectory], advantages: torch.Tensor) -> None:
        if self._store is None:
            return
        for trajectory, row in zip(trajectories, advantages.tolist(), strict=True):
            trajectory.advantages = row[: len(trajectory.completion_ids)]
        self._store.write(self.state.global_step, trajectories, split=self._mode)

    # ---------------------------------------------------------------- publishing

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write our own card (TRL looks templates up inside its own package)."""
        if self.is_world_process_zero():
            write_model_card(self, model_name=model_name, dataset_name=dataset_name, tags=tags)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the environment's tools."""
        return tool_schemas(self.env_factory) if self.env_factory is not None else []

    @property
    def env_name(self) -> str | None:
        """Name of the environment; None without one."""
        return env_name(self.env_factory) if self.env_factory is not None else None


def _trajectory_store(config: MultiTurnConfig, rank: int) -> Any:
    """Where this rank's trajectories are written; None where they are not."""
    if config.record_trajectories == "none":
        return None
    from agent_r1_trl.recording import TrajectoryStore

    return TrajectoryStore(config.output_dir, format=config.record_trajectories, rank=rank)
