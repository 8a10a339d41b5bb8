"""`MultiTurnGRPOTrainer`: group-relative advantages over whole multi-turn trajectories."""

from __future__ import annotations

from typing import ClassVar

from agent_r1_trl.trainers.config import MultiTurnGRPOConfig
from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

AGENT_R1 = {
    "title": "Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning",
    "id": "2511.14460",
    "citation": """\
@misc{cheng2025agentr1,
  title         = {{Agent-R1: Training Powerful LLM Agents with End-to-End Reinforcement Learning}},
  author        = {Cheng, Mingyue and Ouyang, Jie and Yu, Shuo and Yan, Ruiran and Luo, Yucong and Liu, Zirui and
                   Wang, Daoyu and Liu, Qi and Chen, Enhong},
  year          = {2025},
  eprint        = {2511.14460},
  archivePrefix = {arXiv},
}""",
}
"""The paper of both trainers, as TRL's `_paper`."""


class MultiTurnGRPOTrainer(MultiTurnTrainer):
    """GRPO for agents (Agent-R1, arXiv 2511.14460; GRPO, arXiv 2402.03300).

    The return of a trajectory is the sum of its turn rewards and its outcome. Its advantage, relative to the other
    trajectories of the same prompt, is spread over the tokens that the policy sampled. Other estimators without a
    critic (`advantage_estimator=`): Dr. GRPO, RLOO, REINFORCE++, REINFORCE++-baseline, turn-level GRPO, GiGPO.

    Example:
        trainer = MultiTurnGRPOTrainer(
            model="Qwen/Qwen2.5-1.5B-Instruct", args=MultiTurnGRPOConfig(output_dir="out"), env=MyEnv,
            train_dataset=dataset, peft_config=LoraConfig(),
        )
        trainer.train()
    """

    config_class = MultiTurnGRPOConfig
    _name = "MultiTurnGRPO"
    _paper: ClassVar[dict[str, str]] = AGENT_R1
