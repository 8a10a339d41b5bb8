"""FSDP2 on CPUs: accelerate leaves it out there without a word, so `use_fsdp2` tells it by hand.

Everything behind that is accelerate's and PyTorch's own: `Accelerator.prepare` shards the model's layers, its
embeddings and the rest with `fully_shard`, clips DTensors and writes checkpoints.
"""

import functools
import os

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

ASKED = "TESTS_FSDP2"
"""The environment variable with which `launch` asks for it."""


def use_fsdp2():
    """Have every accelerator of this process shard by FSDP2, as `recipes/accelerate_configs/fsdp2.yaml` does."""
    init = AcceleratorState.__init__

    @functools.wraps(init)
    def told(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if getattr(self, "fsdp_plugin", None) is None:
            self.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                state_dict_type="FULL_STATE_DICT",
                cpu_ram_efficient_loading=False,
            )
            if self._mixed_precision != "no":
                self.fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.distributed_type = DistributedType.FSDP  # each call sets it anew

    AcceleratorState.__init__ = told


def is_asked_for():
    """Whether this process trains with FSDP2."""
    return bool(os.environ.get(ASKED))


def whole(tensor):
    """A tensor of which this rank may hold a part. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
