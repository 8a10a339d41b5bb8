"""`MultiTurnGRPOTrainer`: group-relative advantages over whole multi-turn trajectories.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> batch -> [advantages] -> loss -> step -> sync weights -> next rollout
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from accelerate.utils import gather

from agent_r1_trl.advantages import compute_group_advantages, compute_rloo_advantages
from agent_r1_trl.trainers.config import MultiTurnGRPOConfig
from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer
from agent_r1_trl.trajectory import Trajectory


class MultiTurnGRPOTrainer(MultiTurnTrainer):
    """GRPO for agents (Agent-R1, arXiv 2511.14460; GRPO, arXiv 2402.03300).

    The return of a trajectory is the sum of its turn rewards and its outcome. Its advantage, relative to the other
    trajectories of the same prompt, is spread over the tokens that the policy sampled.

    Example:
        trainer = MultiTurnGRPOTrainer(
            model="Qwen/Qwen2.5-1.5B-Instruct", args=MultiTurnGRPOConfig(output_dir="out"), env=MyEnv,
            train_dataset=dataset, peft_config=LoraConfig(),
        )
        trainer.train()
    """

    config_class = MultiTurnGRPOConfig
    _name = "MultiTurnGRPO"
    _paper: ClassVar[dict[str, str]] = {
        "title": "Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning",
        "id": "2511.14460",
    }

    def _credit(self, output: dict[str, Any], trajectories: list[Trajectory]) -> dict[str, torch.Tensor]:
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        returns = gather(self._returns(trajectories))  # (N,) rows of all ranks in data order
        group_ids = torch.arange(len(returns), device=returns.device) // group_size  # (N,)
        if self.args.advantage_estimator == "rloo":
            advantages = compute_rloo_advantages(returns, group_ids)
        else:
            scale = "none" if self.args.advantage_estimator == "dr_grpo" else self.args.scale_rewards
            advantages = compute_group_advantages(returns, group_ids, scale=scale)
        first = self.accelerator.process_index * len(trajectories)
        local = advantages[first : first + len(trajectories)].unsqueeze(1)  # (B, 1)
        mask = self._credit_mask(output, trajectories)
        return {"advantages": torch.where(mask.bool(), local, torch.zeros_like(local))}  # (B, T)
