"""Rollouts ahead on several ranks: `python -m tests.distributed.named_weights OUTPUT_DIR`.

Each rank scores its turns again by the weights that they name, and writes what it found to `OUTPUT_DIR/rank_r.json`.
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState

from agent_r1_trl.testing import make_policy, make_tokenizer
from tests.distributed.rows import trained_weights
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.versions import SAMPLED, Weights, gaps_to_named_weights

NUM_STEPS = 5


class WholeWeights(Weights):
    """Weights that are gathered from all ranks."""

    def weights(self):
        return trained_weights(self.trainer)


def main(output_dir):
    kept = WholeWeights()
    kept.trainer = trainer = make_trainer(
        output_dir,
        callbacks=[kept],
        train_dataset=questions(32),
        **{**SAMPLED, "max_steps": NUM_STEPS, "rollouts_ahead": 2, "per_device_train_batch_size": 4},
    )
    trainer.train()
    trainer.rollouts.close()
    tokenizer = make_tokenizer("qwen3")
    for weights in kept.of_step.values():
        weights["lm_head.weight"] = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    found = list(gaps_to_named_weights(kept, model=make_policy(tokenizer)))
    result = {
        "gaps": [gap for _, gap, _ in found],
        "others": [other for version, _, other in found if version],
        "ages": [entry["sampling/staleness_max"] for entry in trainer.state.log_history if "loss" in entry],
        "num_batches": len(kept.batches),
    }
    rank = PartialState().process_index
    (output_dir / f"rank_{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
