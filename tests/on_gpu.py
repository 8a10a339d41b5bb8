"""`pytest -p tests.on_gpu`: trainings that ask for the CPU run on the GPU; collective calls take its tensors alone.

NCCL moves tensors of GPUs only. With one process nothing is moved, so what is handed to accelerate is looked at here.
The `auto`s of the update stay what they are on a CPU: tests count the micro-batches and rows that they asked for.
"""

import accelerate
import torch
from transformers import TrainingArguments

from agent_r1_trl.update import layout


def _tensors(value):
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, torch.Tensor):
        yield value


def _on_gpu(name):
    inner = getattr(accelerate.Accelerator, name)

    def collective(self, tensor, *args, **kwargs):
        for leaf in _tensors(tensor):
            if leaf.device.type != self.device.type:
                raise RuntimeError(f"Accelerator.{name}: a tensor on {leaf.device}, the process is on {self.device}")
        return inner(self, tensor, *args, **kwargs)

    return collective


def _train_on_gpu(self):
    self.use_cpu = False
    _prepare(self)


if not torch.cuda.is_available():
    raise RuntimeError("tests.on_gpu: no CUDA device was found.")
layout.is_on_cuda = lambda args: False
_prepare, TrainingArguments.__post_init__ = TrainingArguments.__post_init__, _train_on_gpu
for _name in ("gather", "reduce", "pad_across_processes", "gather_for_metrics"):
    setattr(accelerate.Accelerator, _name, _on_gpu(_name))
