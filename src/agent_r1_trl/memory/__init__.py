"""How much memory a training run needs, line by line, before anything is loaded."""

from agent_r1_trl.memory.estimate import Estimate, Line, estimate_memory
from agent_r1_trl.memory.savings import Saving, find_savings
from agent_r1_trl.memory.setup import MemorySetup
from agent_r1_trl.memory.shape import ModelShape, read_shape

__all__ = ["Estimate", "Line", "MemorySetup", "ModelShape", "Saving", "estimate_memory", "find_savings", "read_shape"]
