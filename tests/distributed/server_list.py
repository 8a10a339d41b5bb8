"""A run whose list of servers changes: `python -m tests.distributed.server_list OUTPUT_DIR`, in several processes.

The first rank alone has the file, `OUTPUT_DIR/servers_0.txt`; `OUTPUT_DIR/lists.json` says what it writes there before
each step. Rank r writes to `OUTPUT_DIR/rank_r.json` which servers it had in each step, and what the weights were then.
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback

from agent_r1_trl.environments import ToolEnv
from tests.distributed.critics import NUM_ROWS, POLICY_FOLDER, num_processes
from tests.distributed.rows import trained_weights
from tests.trainers.helpers import make_trainer

LISTS_FILE = "lists.json"


class Env(ToolEnv):
    """Earns a number that its seed decides, because the stand-in always says the same."""

    def seed(self, *, reset_seed, dynamics_seed):
        self.earned = float(dynamics_seed % 5)

    def outcome_reward(self, trajectory):
        return self.earned


class Steps(TrainerCallback):
    """Writes the list before each step, and keeps what the step had."""

    def __init__(self, file, lists):
        self.trainer = None
        self.servers, self.weights = [], []
        self._file, self._lists = file, lists

    def on_step_begin(self, args, state, control, **kwargs):
        if PartialState().is_main_process:
            self._file.write_text("\n".join(self._lists[state.global_step]), encoding="utf-8")
        PartialState().wait_for_everyone()
        weights = trained_weights(self.trainer)  # what the sync of this step is to send
        self.weights.append({name: float(value.sum()) for name, value in weights.items()})

    def on_step_end(self, args, state, control, **kwargs):
        self.servers.append([*self.trainer.rollouts.generator._fleet.servers])


def main(output_dir):
    rank = PartialState(cpu=True).process_index
    lists = json.loads((output_dir / LISTS_FILE).read_text(encoding="utf-8"))
    file = output_dir / f"servers_{rank}.txt"
    steps = Steps(file, lists)
    steps.trainer = trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        script=None,
        env=Env,
        callbacks=[steps],
        use_vllm=True,
        vllm_mode="server",
        per_device_train_batch_size=NUM_ROWS // num_processes(),
        num_generations=4,
        max_steps=len(lists),
        max_completion_length=8,
        max_turns=1,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        vllm_importance_sampling_correction=False,  # the stand-in is no policy
        **{"servers.urls_file": str(file), "servers.max_logprob_gap": 1e9},
    )
    try:
        trainer.train()
    finally:
        trainer.rollouts.close()
    result = {"servers": steps.servers, "weights": steps.weights}
    (output_dir / f"rank_{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
