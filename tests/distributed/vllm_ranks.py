"""Two steps with vLLM on each rank: `python -m tests.distributed.vllm_ranks OUTPUT_DIR`, in any number of processes.

`OUTPUT_DIR/cells.json` names the server and the cells; rank r writes what it logged in each, and how long it took, to
`OUTPUT_DIR/rank_r.json`.
"""

import itertools
import json
import sys
import time
from pathlib import Path

from accelerate import PartialState
from peft import LoraConfig

from agent_r1_trl.testing import AddEnv, make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.trainers.helpers import make_trainer

CELLS_FILE = "cells.json"
POLICY_FOLDER = "policy"
CELLS = [
    "-".join(cell) for cell in itertools.product(("grpo", "ppo"), ("full", "lora"), ("in_process", "server"))
]  # fmt: skip
NUM_STEPS = 2


def save_policy(folder, seed):
    """A policy that vLLM can run: its attention on a CPU wants heads of at least 32."""
    tokenizer = make_tokenizer("qwen3")
    make_policy(tokenizer, seed=seed, hidden_size=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(cell, output_dir, url):
    """What this rank logged in a run of two steps."""
    algorithm, policy, sampler = cell.split("-")
    is_ppo = algorithm == "ppo"
    has_lora = policy == "lora"
    options = {"critic": "adapter" if has_lora else "model", "num_generations": 1} if is_ppo else {}
    if sampler == "server":
        options |= {"vllm_mode": "server", "servers.urls": [url]}
    trainer = make_trainer(
        output_dir / cell,
        script=None,
        env=AddEnv,
        trainer=MultiTurnPPOTrainer if is_ppo else MultiTurnGRPOTrainer,
        model=str(output_dir / POLICY_FOLDER),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if has_lora else None,
        use_vllm=True,
        vllm_max_model_length=512,
        max_completion_length=16,
        per_device_train_batch_size=4,
        max_steps=NUM_STEPS,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        **options,
    )
    try:
        trainer.train()
    finally:
        trainer.rollouts.close()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main(output_dir):
    task = json.loads((output_dir / CELLS_FILE).read_text(encoding="utf-8"))
    results = {}
    for cell in task["cells"]:
        start = time.perf_counter()
        steps = train(cell, output_dir, task["url"])
        results[cell] = {"steps": steps, "seconds": time.perf_counter() - start}
        # After every cell: a later one that fails must not take this with it.
        file = output_dir / f"rank_{PartialState().process_index}.json"
        file.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
