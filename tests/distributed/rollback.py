"""A guarded run in any number of processes, of which the main one alone sees the collapse.

DeepSpeed cannot load a checkpoint into a running engine, and FSDP2 has not been tried: there the run ends, and another
one goes on.
"""

import os

from accelerate.utils import gather_object

from agent_r1_trl.features.echo_trap.guard import RestartError
from agent_r1_trl.features.journal.training import fingerprint
from tests.distributed.critics import POLICY_FOLDER, num_processes
from tests.features.echo_trap.echo_helpers import Watch, guarded


def gone_back(output_dir):
    """Per rank: the steps begun with digests of its weights, the seed of the draws, the guard's events, the losses."""
    is_main = int(os.environ.get("RANK", 0)) == 0
    options = {"model": str(output_dir / POLICY_FOLDER), "max_steps": 5}
    options["echo.patience"] = 4  # more healthy steps than follow the rollback: nothing is undone yet
    options |= {"per_device_train_batch_size": 8 // num_processes(), "beta": 0.1}
    seen, ended = [], None
    for verdicts in ({4: "collapsed"} if is_main else {}, {}):
        trainer = guarded(output_dir / "gone_back", verdicts, "clip", "rollback", **options)
        Watch(trainer, lambda trainer: fingerprint(trainer.model.named_parameters())).seen = seen
        try:
            trainer.train(resume_from_checkpoint=ended is not None)
            break
        except RestartError as error:
            ended = str(error)
    events = [
        (event["step"], event["action"], event["state"]) for event in trainer.features["echo_guard"].state.events
    ]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {"seen": seen, "ended": ended, "seed": trainer.rollouts.seed, "events": events, "losses": losses}
    return gather_object([found | {"beta": trainer.beta}])
