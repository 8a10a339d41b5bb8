"""A run with dynamic sampling, a curriculum and a filter, in any number of processes.

Two of the three groups of a batch are on one rank each, the second is on both.
"""

import torch
from accelerate.utils import gather_object

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.testing import say
from tests.distributed.critics import POLICY_FOLDER, num_processes
from tests.trainers.helpers import make_trainer, questions

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


def resampled(output_dir):
    """What each rank holds of three batches of six rows, and what the run logged."""
    trainer = make_trainer(
        output_dir / "resampled",
        model=str(output_dir / POLICY_FOLDER),
        max_steps=3,
        sampling={"filter_groups": "top_fraction", "filter_value": 0.7, "resample_rounds": 3, "curriculum": True},
        env=Coin,
        script=talk,
        train_dataset=questions(30),
        num_generations=2,
        per_device_train_batch_size=6 // num_processes(),
        reward_funcs=[judge],
        log_completions=True,
    )
    found = {"trained": [], "replaced": [], "metrics": [], "advantages": []}
    score = trainer._generate_and_score_completions

    def seen(inputs):
        output = score(inputs)
        for name, items in (("trained", trainer.last_trajectories), ("replaced", trainer.last_batch.replaced)):
            found[name] += [(trainer._step, t.example_id, t.generation, t.seed, t.total_reward) for t in items]
        found["advantages"].append(output["advantages"].sum(dim=1))
        found["metrics"] += [trainer._metrics["train"][name][-1] for name in METRICS]
        return output

    trainer._generate_and_score_completions = seen
    trainer.train()
    found |= {
        "advantages": torch.stack(found["advantages"]),  # (steps, rows)
        "shares": trainer.features["resampling"].curriculum.pass_rates.tolist(),
        "extra": list(trainer._logs["extra"]["name"]),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    return gather_object([found])
