"""The trainers and their arguments."""

from agent_r1_trl.trainers.config import MultiTurnConfig, MultiTurnGRPOConfig
from agent_r1_trl.trainers.grpo import MultiTurnGRPOTrainer
from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

__all__ = ["MultiTurnConfig", "MultiTurnGRPOConfig", "MultiTurnGRPOTrainer", "MultiTurnTrainer"]
