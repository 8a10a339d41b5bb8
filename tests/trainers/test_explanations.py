"""Every explained advantage equals the recorded one, and the sums of its explanation give it too."""

import pytest
import torch

from agent_r1_trl.advantages.estimators import ESTIMATORS
from agent_r1_trl.recording import read_records, read_steps, store
from agent_r1_trl.recording.explain import explain
from agent_r1_trl.testing import AddEnv, call, make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trajectory import Author
from tests.distributed.resampling import Coin, talk
from tests.effort import nightly, short
from tests.trainers.helpers import make_trainer, questions

WINDOW = {"context.policy": "window", "context.turns": 1}
KL = {"beta": 0.3, "kl_placement": "reward", "learning_rate": 1e-2}
PPO = {"trainer": MultiTurnPPOTrainer, "critic": "head", "gamma": 0.97, "lam": 0.8, "num_generations": 2}
APART = {"separate_process_advantages": True}
EVEN = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 4}


class Env(AddEnv):
    """Calls earn different amounts, which have names; one in eight trajectories cannot start."""

    tried = 0

    def reset(self, example):
        type(self).tried += 1
        if type(self).tried % 8 == 3:
            raise OSError("the server is down")
        return super().reset(example)

    async def step(self, message):
        observations, reward, done, info = await super().step(message)
        size = 0.1 * (len(str(observations)) % 7)
        return observations, reward + size, done, {**info, "reward_parts": {**info["reward_parts"], "size": size}}

    def outcome_reward(self, trajectory):
        return float(len(trajectory.completion_ids) % 3)


def ragged(rng, turn):
    """Up to three calls of which some fail, then a text; some trajectories reach the limit of turns."""
    if rng.random() < 0.6:
        return call(**rng.choice([{"a": 1, "b": rng.randrange(3)}, {"a": 10**12, "b": 2}, {"a": "one"}]))
    return say("x" * rng.randrange(1, 30))


CASES = {
    "grpo": {},
    "grpo, scale none": {"scale_rewards": "none"},
    "grpo, scale batch": {"scale_rewards": "batch"},
    "grpo, parts": {**APART, "process_reward_weight": 0.3, "outcome_reward_weight": 2.0},
    "grpo, parts, scale batch": {**APART, "scale_rewards": "batch", "process_reward_schedule": "linear"},
    "grpo, weights and scales": {
        "process_reward_weight": 0.5, "outcome_reward_weight": 2.0, "normalize_process_rewards": True,
        "process_reward_schedule": "cosine",
    },
    "grpo, masked truncation": {"truncated_trajectories": "mask"},
    "grpo, group filter": {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5},
    "grpo, resampling": {"sampling.resample_rounds": 2, "env": Coin, "script": talk, "num_generations": 2},
    "grpo, rows": WINDOW,
    "grpo, two rollouts in a step": EVEN,
    "grpo, no loss mask": {"loss_mask": False},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_pp": {"gamma": 0.95},
    "reinforce_pp, kl": {"gamma": 0.9, **KL},
    "reinforce_pp, filter": {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5},
    "reinforce_pp, no advantage mask": {"gamma": 0.99, "advantage_mask": False},
    "reinforce_pp, parts, kl, rows": {**APART, **KL, **WINDOW, "process_reward_weight": 0.4},
    "reinforce_pp, two rollouts in a step": EVEN,
    "reinforce_pp_baseline": {},
    "reinforce_pp_baseline, kl": {"gamma": 0.9, **KL},
    "turn_grpo": {},
    "turn_grpo, weights": {"gamma_turn": 0.7, "process_reward_weight": 0.6, "normalize_process_rewards": True},
    "gigpo": {},
    "gigpo, rows": {**WINDOW, "gamma_turn": 0.8, "step_weight": 0.5},
    "gae": PPO,
    "gae, not whitened": {**PPO, "whiten_advantages": False, "bootstrap_truncated": True},
    "gae, kl": {**PPO, **KL},
    "gae, rows, filter": {**PPO, **WINDOW, "sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5},
}  # fmt: skip


def recorded(folder, name):
    """Records and steps of a run of two steps."""
    estimator = name.partition(",")[0]
    options = {"script": ragged, "env": type("Own", (Env,), {}), "max_turns": 3, "max_completion_length": 400}
    options |= {"advantage_estimator": estimator, "max_steps": 2, **CASES[name]}
    for unread in {"gamma", "lam"} - {*ESTIMATORS[estimator].options}:
        options.pop(unread, None)
    if "beta" in options:  # TRL loads the reference by its name
        options["model"] = str(folder / "policy")
        make_policy(make_tokenizer("qwen3")).save_pretrained(options["model"])
    trainer = make_trainer(folder, record_trajectories="jsonl", train_dataset=questions(32), **options)
    for parameter_name, parameter in trainer.model.named_parameters():
        if "value_head" in parameter_name:  # a critic with something to say: heads start at zero
            torch.nn.init.normal_(parameter, std=0.5)
    trainer.train()
    return [*read_records(folder, split="train", columns=True)], read_steps(folder)


SHORT = (
    "grpo, parts, scale batch", "grpo, weights and scales", "grpo, group filter", "grpo, resampling",
    "grpo, no loss mask", "dr_grpo", "rloo", "reinforce_pp, parts, kl, rows", "reinforce_pp, two rollouts in a step",
    "reinforce_pp_baseline, kl", "turn_grpo, weights", "gigpo, rows", "gae, not whitened",
    "gae, kl", "gae, rows, filter",
)  # fmt: skip


@pytest.mark.parametrize("name", short(CASES, *SHORT))
def test_every_explained_advantage_is_the_recorded_one(tmp_path, name, monkeypatch):
    monkeypatch.setattr(store, "MAX_FLOAT16", 0.0)  # nothing is rounded
    records, steps = recorded(tmp_path, name)
    assert {record.step for record in records} == {1, 2}
    trained = [record for record in records if not record.trajectory.is_replaced]
    advantages = []
    for record in trained:
        found = explain(record, records, steps[record.step])
        assert found.max_gap <= 1e-5, (record.index, found)
        assert found.advantages == pytest.approx(worked_out(found, record), abs=1e-5)
        recorded_ones = record.trajectory.advantages
        for position, author in enumerate(record.trajectory.authors):
            if author is Author.POLICY:
                assert found.advantages[position] == pytest.approx(recorded_ones[position], abs=1e-5)
        advantages += recorded_ones
    assert sum(abs(number) > 0.01 for number in advantages) > 20, "something was to be explained"
    assert (len(records) > len(trained)) == ("resampling" in name)


@pytest.mark.parametrize("name", ["gae, kl", *nightly("reinforce_pp, kl")])
def test_rounded_columns_stay_within_the_tolerance(tmp_path, name):
    records, steps = recorded(tmp_path, name)
    found = [explain(record, records, steps[record.step]) for record in records]
    assert all(item.max_gap <= item.tolerance < 0.05 for item in found)
    assert max(item.max_gap for item in found) > 1e-5, "they are rounded"


def worked_out(found, record):
    """What a reader gets who follows the sums of each token with a pencil."""
    signs = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
    results = []
    for position in range(len(record.trajectory.completion_ids)):
        total = 0.0
        for label, value in [*found.lines, *found.at(position)] if found.mask[position] else []:
            sign = label.split(" ")[0]
            if sign == "=":
                assert value == pytest.approx(total, abs=1e-9), label
            total = value if sign not in signs else signs[sign](total, value)
        results.append(total)
    return results


def test_all_estimators_with_an_explanation_are_among_the_runs():
    for names in (CASES, SHORT):
        assert {name.partition(",")[0] for name in names} == {row.name for row in ESTIMATORS.values() if row.explain}
