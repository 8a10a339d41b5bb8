"""Steps that are not finite on one of the ranks, in any number of processes.

The last process has NaN in the advantages of one row: in the second step, and from the fourth on.
"""

import itertools
import logging

import torch
from accelerate.utils import gather_object

from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from agent_r1_trl.trainers.checkpoints import own_part
from tests.distributed.critics import NUM_ROWS, POLICY_FOLDER, num_processes
from tests.trainers.helpers import make_trainer

BAD_STEPS = (1, 3, 4, 5, 6)


class OneBadRank(MultiTurnGRPOTrainer):
    """Keeps what every step found."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.states = []

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.states.append(state_of(self))
        is_last = self.accelerator.process_index == self.accelerator.num_processes - 1
        if self.state.global_step in BAD_STEPS and is_last:
            inputs = {**inputs, "advantages": inputs["advantages"].index_fill(0, torch.tensor([0]), float("nan"))}
        return inputs


def state_of(trainer):
    """This rank's weights, the optimizer's tensors and the learning rates."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    moments = [value for state in optimizer.state.values() for value in state.values()]
    weights = [own_part(parameter) for parameter in trainer.model.parameters()]
    rates = torch.tensor(trainer.lr_scheduler.get_last_lr())
    return [x.detach().clone() for x in [*weights, rates, *moments] if isinstance(x, torch.Tensor)]


def skipped(output_dir):
    """For every rank: which of the steps changed anything, whether all is finite, and how the run ended."""
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("agent_r1_trl.features.reliability.nonfinite")
    logger.addHandler(handler)
    trainer = make_trainer(
        output_dir, model=str(output_dir / POLICY_FOLDER), trainer=OneBadRank, max_steps=9, weight_decay=0.1,
        per_device_train_batch_size=NUM_ROWS // num_processes(), optim="adamw_torch", learning_rate=1e-3,
    )  # fmt: skip
    try:
        trainer.train()
        error = None
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        logger.removeHandler(handler)
    states = [*trainer.states, state_of(trainer)]
    changed = [len(a) != len(b) or not all(map(torch.equal, a, b)) for a, b in itertools.pairwise(states)]
    is_finite = all(torch.isfinite(x).all() for x in states[-1])
    return gather_object([{"changed": changed, "finite": bool(is_finite), "error": error, "warnings": warnings}])
