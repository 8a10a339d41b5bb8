"""Dynamic sampling on several ranks: `python -m tests.distributed.resampling OUTPUT_DIR`.

Each rank writes what it holds of three batches to `OUTPUT_DIR/rank<n>.pt`.
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState

from agent_r1_trl.environments import ToolEnv
from tests.distributed.critics import num_processes
from tests.toys import say
from tests.trainers.helpers import make_trainer, questions, scored_batch

METRICS = (
    "sampling/groups_with_signal_before", "sampling/groups_with_signal", "sampling/resampled_groups",
    "sampling/resample_rounds", "sampling/pass_rate", "sampling/reward", "sampling/generated_tokens",
    "curriculum/seen_share", "curriculum/pass_rate", "curriculum/effective_prompts",
)  # fmt: skip


class Coin(ToolEnv):
    def outcome_reward(self, trajectory):
        return float(len(trajectory.final_text) % 3 == 0)


def talk(rng, turn):
    return say("x" * rng.randrange(1, 9))


async def judge(trajectory, log_extra, **kwargs):
    log_extra("name", [item.example_id for item in trajectory])
    return [0.5] * len(trajectory)


def compute(folder, num_rows):
    """What this rank holds of three batches, of `num_rows` rows on all ranks."""
    trainer = make_trainer(
        folder,
        env=Coin,
        script=talk,
        train_dataset=questions(30),
        num_generations=2,
        per_device_train_batch_size=num_rows // num_processes(),
        resample_rounds=3,
        curriculum=True,
        reward_funcs=[judge],
        log_completions=True,
    )
    found = {"trained": [], "replaced": [], "metrics": [], "advantages": []}
    for trainer._step in range(3):
        output = scored_batch(trainer)
        for name, items in (("trained", trainer.last_trajectories), ("replaced", trainer.resampling.replaced)):
            found[name] += [(trainer._step, t.example_id, t.generation, t.seed, t.total_reward) for t in items]
        found["advantages"].append(output["advantages"].sum(dim=1))
        found["metrics"] += [trainer._metrics["train"][name][-1] for name in METRICS]
    return found | {
        "advantages": torch.cat(found["advantages"]),
        "num_replaced": len(found["replaced"]),
        "shares": trainer.resampling.curriculum.pass_rates.tolist(),
        "extra": list(trainer._logs["extra"]["name"]),
    }


if __name__ == "__main__":
    output_dir = Path(sys.argv[1])
    results = compute(output_dir / "run", num_rows=6)
    torch.save(results, output_dir / f"rank{PartialState().process_index}.pt")
