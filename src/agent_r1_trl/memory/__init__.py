"""An estimate of the memory that a training run needs, line by line, before anything is loaded.

`read_shape` counts the model, `MemorySetup` says how it is trained, `estimate_memory` adds up, and `find_savings`
tries changes that make the run smaller.
"""

from agent_r1_trl.memory.contexts import RowBounds, row_bounds
from agent_r1_trl.memory.estimate import Estimate, Line, estimate_memory
from agent_r1_trl.memory.savings import Saving, find_savings
from agent_r1_trl.memory.setup import MemorySetup
from agent_r1_trl.memory.shape import ModelShape, read_shape

__all__ = [
    "Estimate",
    "Line",
    "MemorySetup",
    "ModelShape",
    "RowBounds",
    "Saving",
    "estimate_memory",
    "find_savings",
    "read_shape",
    "row_bounds",
]
