"""Recorded runs in any number of processes, whose rows are trained on by other ranks than sampled them.

The rollout has three groups of four; the second is on both ranks.
"""

from agent_r1_trl.recording import read_metrics, read_records, read_steps
from agent_r1_trl.recording.explain import explain
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.distributed.critics import POLICY_FOLDER, num_processes
from tests.distributed.resampling import Coin, talk
from tests.distributed.rows import BY_TOKENS, HALF
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.test_rows import three_turns

ROWS = {"context.policy": "window", "context.turns": 1, "max_turns": 4, "script": three_turns, "env": AddEnv}
CASES = {
    "rows": {**ROWS, "update_layout": "shared", **BY_TOKENS},
    "critic": {**ROWS, "trainer": MultiTurnPPOTrainer, "critic": "head", "update_layout": "packed", **BY_TOKENS},
    "resampled": {"env": Coin, "script": talk, **HALF, "sampling.resample_rounds": 3, "steps_per_generation": 2},
}


def recorded(case, folder):
    """What the record says of one rollout, by example and generation; and the names of the run's files."""
    folder = folder / "recorded" / case.replace(" ", "_")
    trainer = make_trainer(
        folder,
        model=str(folder.parents[1] / POLICY_FOLDER),
        train_dataset=questions(30),
        num_generations=4,
        per_device_train_batch_size=12 // num_processes() // CASES[case].get("steps_per_generation", 1),
        gradient_accumulation_steps=1,
        record_trajectories="jsonl",
        learning_rate=0.0,
        max_steps=2 if case == "resampled" else 1,
        **CASES[case],
    )
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    records = {
        (record.trajectory.example_id, record.trajectory.generation, record.trajectory.is_replaced): {
            "marks": (record.group, record.is_kept, record.in_loss),
            "columns": {name: values.tolist() for name, values in record.columns.items()},
        }
        for record in read_records(folder, columns=True)
    }
    steps, of_step = read_steps(folder), [*read_records(folder, step=1, columns=True)]
    explained = [explain(record, of_step, steps[1]) for record in of_step if not record.trajectory.is_replaced]
    files = sorted(path.name for path in (folder / "trajectories").iterdir())
    return {"records": records, "files": files, "steps": steps, "num_logs": len(read_metrics(folder))} | {
        "is_explained": [item.max_gap <= item.tolerance for item in explained]
    }
