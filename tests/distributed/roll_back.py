"""A guarded run on several processes, of which one alone sees the collapse: `python -m ... OUTPUT_DIR`.

Rank 0 writes `OUTPUT_DIR/roll_back.json`: for each rank the steps that it began, digests of the weights that it began
them with, its seed of the draws, and what its guard did.
"""

import json
import os
import sys
from pathlib import Path

from accelerate.utils import gather_object

from agent_r1_trl.trainers.journal import fingerprint
from tests.trainers.echo_helpers import Watch, guarded

RESULTS_FILE = "roll_back.json"


def main(output_dir):
    verdicts = {3: "collapsed"} if os.environ["RANK"] == "1" else {}
    trainer = guarded(output_dir, verdicts, "learning_rate", "roll_back", max_steps=4, ddp_backend="gloo")
    watch = Watch(trainer, lambda trainer: fingerprint(trainer.model.named_parameters()))
    trainer.train()
    events = [(event["step"], event["action"], event["state"]) for event in trainer.echo_guard.state.events]
    results = gather_object([{"seen": watch.seen, "seed": trainer.rollouts.seed, "events": events}])
    if trainer.accelerator.is_main_process:
        (Path(output_dir) / RESULTS_FILE).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
