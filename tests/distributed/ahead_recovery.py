"""Two ranks that run ahead go back, or meet an outage: `python -m tests.distributed.ahead_recovery OUTPUT_DIR`.

The main rank alone sees the collapse, and the tool of rank 1 alone is down. Rank r writes to `OUTPUT_DIR/rank_r.json`.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from tests.features.echo_trap.echo_helpers import guarded
from tests.features.echo_trap.test_rollback import AfterRollback
from tests.features.reliability.test_tool_watch import AHEAD, DownForLater, begun_rollouts, failed_calls, trainer_on
from tests.trainers.versions import SAMPLED, gaps_to_named_weights

NUM_BEFORE = 6


def gone_back(folder, rank):
    """What was trained on before and after a rollback, and how far it is from the weights that it names."""
    kept = AfterRollback()
    options = {"rollouts_ahead": 2, "max_steps": 7, "save_steps": 1, "callbacks": [kept]}
    verdicts = {NUM_BEFORE: "collapsed"} if rank == 0 else {}
    kept.trainer = guarded(folder, verdicts, "rollback", **{**SAMPLED, **options})
    kept.trainer.train()
    model = kept.trainer.accelerator.unwrap_model(kept.trainer.model)
    kept.of_step = {
        step: {name.removeprefix("module."): value for name, value in weights.items()}
        for step, weights in kept.of_step.items()
    }
    stamps = [
        [sorted({v for item in batch for turn in item.turns for v, _ in turn.versions}) for batch in batches]
        for batches in (kept.before, kept.batches)
    ]
    events = [event["text"] for event in kept.trainer.features["echo_guard"].state.events]
    seeds = [[item.seed for batch in batches for item in batch] for batches in (kept.before, kept.batches)]
    return {
        "stamps": stamps,
        "seeds": seeds,
        "events": events,
        "gap": max(gap for _, gap, _ in gaps_to_named_weights(kept, model)),
        "ages": [entry["sampling/staleness_max"] for entry in kept.trainer.state.log_history if "loss" in entry],
    }


def waited_for(folder, rank):
    """The rollouts in the order of their beginning, and whether the run ends as one without an outage."""
    ended = []
    for what in ("healthy", "outage"):
        backend = DownForLater()
        backend.is_down = what == "outage" and rank == 1
        trainer = trainer_on(backend, folder / what, **AHEAD)
        trainer.features["tools"].sleep, begun = backend.mend, begun_rollouts(trainer)
        trainer.train()
        ended.append([value.clone() for value in trainer.model.parameters()])
    return {
        "begun": begun,
        "num_failed": backend.num_failed,
        "is_equal": all(map(torch.equal, *ended)),
        "recorded": failed_calls(folder / "outage", rank),
        "replayed": [entry.get("tools/replayed_rollouts") for entry in trainer.state.log_history[:5]],
    }


def main(output_dir):
    rank = PartialState(cpu=True).process_index
    found = {"rollback": gone_back(output_dir / "rollback", rank), "outage": waited_for(output_dir, rank)}
    (output_dir / f"rank_{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
