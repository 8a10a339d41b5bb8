"""Dynamic sampling: groups without signal are replaced by groups of fresh prompts."""

import math

import pytest
import torch
from datasets import Dataset, IterableDataset

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.sampling.resampling import choose_fresh
from agent_r1_trl.recording.store import read_records
from agent_r1_trl.rollout.requests import rollout_requests
from agent_r1_trl.testing import say
from tests.features.journal.test_training_journal import is_same, train
from tests.trainers.helpers import make_trainer, questions, scored_batch


class Taught(ToolEnv):
    """One turn. The first member of a group passes, but only on the prompts that can be learned."""

    learnable = frozenset()
    failing = frozenset()

    def reset(self, example):
        if example["id"] in self.failing:
            raise RuntimeError("no such level")
        return super().reset(example)

    def outcome_reward(self, trajectory):
        return float(trajectory.example_id in self.learnable and trajectory.generation == 0)


def taught(*learnable, failing=()):
    return type("Env", (Taught,), {"learnable": frozenset(learnable), "failing": frozenset(failing)})


def speak(rng, turn):
    return say("word")


TOKENS = 8
"""Sampled tokens of `speak`."""


def make(folder, env, *, num_prompts=32, groups=4, size=2, **options):
    options = {"sampling.resample_rounds": 3, "script": speak, "train_dataset": questions(num_prompts)} | options
    return make_trainer(
        folder,
        env=env,
        num_generations=size,
        per_device_train_batch_size=groups * size,
        shuffle_dataset=False,
        **options,
    )


def logged(trainer):
    return {name: values[-1] for name, values in trainer._metrics["train"].items() if values}


def prompts_of(trajectories):
    return [item.example_id for item in trajectories]


# ---------------------------------------------------------------- what it is for


def rarely_right(rng, turn):
    return say("yes" if rng.random() < 0.05 else "no")


class SaysYes(ToolEnv):
    def outcome_reward(self, trajectory):
        return float(trajectory.final_text == "yes")


def test_at_a_pass_rate_of_5_percent_nine_of_ten_groups_teach_at_a_stated_cost(tmp_path):
    trainer = make(
        tmp_path,
        SaysYes,
        num_prompts=200,
        groups=16,
        size=8,
        script=rarely_right,
        sampling={"resample_rounds": 10},
        report_to=[],
    )
    batch = scored_batch(trainer)
    found = logged(trainer)
    chance = 1 - 0.95**8 - 0.05**8  # 0.34
    assert abs(found["sampling/groups_with_signal_before"] - chance) < 3 * math.sqrt(chance * (1 - chance) / 16)
    assert found["sampling/groups_with_signal"] >= 0.9
    assert 1 - found["group/zero_variance_share"] == pytest.approx(found["sampling/groups_with_signal"])
    rolled_out = [*trainer.last_trajectories, *trainer.last_batch.replaced]
    assert found["sampling/generated_tokens"] == sum(item.num_action_tokens for item in rolled_out)
    assert len(rolled_out) == 8 * (16 + found["sampling/resampled_groups"])
    # Over everything that was sampled; the survivors would say three times as much.
    assert found["sampling/pass_rate"] == sum(item.final_text == "yes" for item in rolled_out) / len(rolled_out)
    assert abs(found["sampling/pass_rate"] - 0.05) < 0.02 < found["reward"] - 0.05
    assert (batch["advantages"].abs().amax(dim=1).view(16, 8).amax(dim=1) > 0).float().mean() >= 0.9


# ---------------------------------------------------------------- one batch, by hand


def test_whole_groups_are_replaced_and_everything_is_counted(tmp_path):
    """Of q0 to q3 only q1 can be learned. Each round draws as many prompts as groups are missing."""
    trainer = make(tmp_path, taught("q1"), sampling={"resample_rounds": 1}, record_trajectories="jsonl")
    scored_batch(trainer)
    first_round = prompts_of(trainer.last_trajectories)
    fresh = [first_round[0], first_round[4], first_round[6]]
    assert first_round[2:4] == ["q1", "q1"] and not {*fresh} & {"q0", "q1", "q2", "q3"} and len({*fresh}) == 3
    assert [first_round[row] == first_round[row + 1] for row in (0, 2, 4, 6)] == [True] * 4

    # The same run, in which the first prompt of the first round can be learned: it teaches, two groups are left.
    trainer = make(
        tmp_path / "b", taught("q1", fresh[0]), sampling={"resample_rounds": 2}, record_trajectories="jsonl"
    )
    scored_batch(trainer)
    trained, replaced = trainer.last_trajectories, trainer.last_batch.replaced
    assert prompts_of(trained)[:4] == [fresh[0], fresh[0], "q1", "q1"]
    assert prompts_of(replaced) == ["q0", "q0", "q2", "q2", "q3", "q3", fresh[1], fresh[1], fresh[2], fresh[2]]
    assert [item.generation for item in trained] == [0, 1] * 4
    assert all(item.is_replaced for item in replaced) and not any(item.is_replaced for item in trained)
    assert len({item.seed for item in [*trained, *replaced]}) == 18
    found = logged(trainer)
    expected = {
        "sampling/groups_with_signal_before": 1 / 4,
        "sampling/groups_with_signal": 2 / 4,
        "sampling/resampled_groups": 3 + 2,
        "sampling/resample_rounds": 2,
        "sampling/pass_rate": 2 / 18,  # of 9 groups of 2
        "sampling/reward": 2 / 18,
        "sampling/generated_tokens": 18 * TOKENS,
        "reward": 2 / 8,  # of what is trained on
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    records = [record.trajectory for record in read_records(tmp_path / "b")]
    assert [(item.example_id, item.is_replaced) for item in records] == [
        *((name, False) for name in prompts_of(trained)),
        *((name, True) for name in prompts_of(replaced)),
    ]


def test_where_all_groups_teach_the_batch_is_that_of_a_run_without(tmp_path):
    everything = taught(*(f"q{number}" for number in range(32)))
    expected = make(tmp_path / "a", everything, sampling={"resample_rounds": 0})
    batch = scored_batch(expected)
    trainer = make(tmp_path / "b", everything)
    assert is_same(scored_batch(trainer), batch)
    assert [item.to_dict() | {"duration_s": 0, "turns": 0} for item in trainer.last_trajectories] == [
        item.to_dict() | {"duration_s": 0, "turns": 0} for item in expected.last_trajectories
    ]
    new = {name for name in logged(trainer) if name.startswith("sampling/")} | {"time/resample_s"}
    same = {name: value for name, value in logged(trainer).items() if not name.startswith("time/") and name not in new}
    assert same == {name: value for name, value in logged(expected).items() if not name.startswith("time/")}


def test_reward_functions_are_called_once_for_each_trajectory_and_their_columns_fit_the_rows(tmp_path):
    seen = []

    def length(trajectory, completions, id, log_extra, environments, **kwargs):
        seen.extend(trajectory)
        assert prompts_of(trajectory) == id and len(completions) == len(environments) == len(id)
        log_extra("name", list(id))
        return [float(item.generation) if item.example_id == "q1" else None for item in trajectory]

    def by_turn(trajectory, **kwargs):
        return [[0.25] for _ in trajectory]

    async def judge(trajectory, **kwargs):
        return [0.5] * len(trajectory)

    trainer = make(
        tmp_path, taught("q3"), reward_funcs=[length, judge], turn_reward_funcs=[by_turn], log_completions=True
    )
    batch = scored_batch(trainer)
    trained, replaced = trainer.last_trajectories, trainer.last_batch.replaced
    assert len(seen) == len({id(item) for item in seen}) == 8 + len(replaced) and len(replaced) > 6
    assert prompts_of(trained)[2:4] == ["q1", "q1"] and prompts_of(trained)[6:] == ["q3", "q3"]
    # q1: 0.25 + 0.5, and 1 for the second member; q3: 0.75, and 1 for the first; the others 0.75.
    assert [item.total_reward for item in trained] == [0.75, 0.75, 0.75, 1.75, 0.75, 0.75, 1.75, 0.75]
    assert [sum(turn.reward for turn in item.turns) for item in replaced] == [0.25] * len(replaced)
    assert list(trainer._logs["extra"]["name"]) == prompts_of(trained)
    assert trainer._logs["rewards"]["length"][3] == 1 and math.isnan(trainer._logs["rewards"]["length"][0])
    signs = batch["advantages"].sum(dim=1).sign().tolist()
    assert signs == [0, 0, -1, 1, 0, 0, 1, -1]


# ---------------------------------------------------------------- limits


def test_rounds_that_cannot_be_rolled_out_are_excluded(tmp_path):
    options = {"num_generations": 1, "advantage_estimator": "reinforce_pp", "echo.actions": ["stop"]}
    trainer = make_trainer(tmp_path, env=taught(), script=speak, **options)
    trainer.features["resampling"].rounds = 2
    scored_batch(trainer)
    assert trainer.last_batch.replaced == []


def test_evaluations_roll_out_what_they_are_given(tmp_path):
    trainer = make(tmp_path, taught(), eval_dataset=questions(3), per_device_eval_batch_size=2)
    scored_batch(trainer)
    trainer.evaluate()
    assert trainer.last_batch.replaced == [] and len(trainer.last_trajectories) == 3 * trainer.num_generations_eval


# ---------------------------------------------------------------- fresh prompts


def test_each_round_draws_prompts_that_the_batch_has_not_had(tmp_path):
    trainer = make(tmp_path, taught(), num_prompts=16)
    scored_batch(trainer)
    names = prompts_of([*trainer.last_batch.replaced, *trainer.last_trajectories])[::2]
    assert len(names) == len({*names}) == 16  # 4 of the batch, 3 rounds of 4: the whole data set


def test_each_seed_step_and_round_has_a_draw_of_its_own_and_always_the_same():
    def draw(seed, step, number):
        options = {"group_size": 1, "seed": seed, "step": step, "round_number": number, "places": [5]}
        return rollout_requests([{"id": "a"}], first_row=0, **options)[0].seed

    cases = [(seed, step, number) for seed in (3, 4) for step in (0, 1) for number in (0, 1, 2)]
    seeds = [draw(*case) for case in cases]
    assert len({*seeds}) == 12 and seeds == [draw(*case) for case in cases]


def test_a_small_data_set_gives_its_prompts_again():
    rows = [{"id": "a"}, {"id": "b"}, {"id": "c"}]
    assert choose_fresh(rows, 2, [2, 1, 0], {"c"}) == [1, 0]
    assert choose_fresh(rows, 2, [2, 1, 0], {"a", "b", "c"}) == [2, 1]
    assert choose_fresh([{"id": "a"}, {"id": "a"}, {"id": "b"}], 2, [0, 1, 2], set()) == [0, 2]


def test_where_the_environment_makes_the_prompts_a_fresh_one_has_another_seed(tmp_path):
    seeds = []

    class Levels(ToolEnv):
        def seed(self, reset_seed, dynamics_seed):
            seeds.append(reset_seed)

        def reset(self, example):
            return [{"role": "user", "content": f"level {seeds[-1]}"}]

        def outcome_reward(self, trajectory):
            return 0.0

    no_prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 2})  # as with train_dataset=None
    trainer = make_trainer(
        tmp_path, env=Levels, train_dataset=no_prompts, script=speak, sampling={"resample_rounds": 1}
    )
    scored_batch(trainer)
    assert len(seeds) == 16 and len({*seeds}) == 4


def test_a_stream_is_refused_and_the_fix_works(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(questions(8)))
    for name, value in (("sampling.resample_rounds", 2), ("sampling.curriculum", True)):
        with pytest.raises(ValueError, match=rf"\b{name}={value}.*streaming=False"):
            make_trainer(tmp_path, train_dataset=stream, **{name: value})
        make_trainer(tmp_path, train_dataset=questions(8), **{name: value})


# ---------------------------------------------------------------- failures


def test_a_failed_group_is_replaced_and_a_failure_in_a_round_is_a_group_without_signal(tmp_path):
    """q0 cannot be sampled; nor, in the second run, can any fresh prompt."""
    good = ("q1", "q2", "q3")
    trainer = make(tmp_path, taught(*good), sampling={"resample_rounds": 1})
    scored_batch(trainer)
    fresh = trainer.last_trajectories[0].example_id

    trainer = make(tmp_path, taught(*good, fresh, failing=["q0"]))
    scored_batch(trainer)
    assert tally(trainer) == [(8, 2), (2, 0)]
    assert logged(trainer)["sampling/groups_with_signal"] == 1
    assert logged(trainer)["sampling/reward"] == 4 / 8  # the failed group earned nothing and counts nowhere

    trainer = make(tmp_path, taught(*good, failing=["q0", *(f"q{number}" for number in range(4, 32))]))
    scored_batch(trainer)
    assert tally(trainer) == [(8, 2), (2, 2), (2, 2), (2, 2)]
    assert logged(trainer)["sampling/groups_with_signal"] == 3 / 4
    assert logged(trainer)["sampling/reward"] == 3 / 6
    assert [item.in_baseline for item in trainer.last_trajectories] == [False, False, *[True] * 6]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def test_no_pass_rate_is_known_where_nothing_scores_a_trajectory(tmp_path):
    def silent(trajectory, **columns):
        return [None] * len(trajectory)

    trainer = make(tmp_path, None, tools=[add], reward_funcs=[silent], sampling={"resample_rounds": 1})
    scored_batch(trainer)
    assert math.isnan(logged(trainer)["sampling/reward"]) and math.isnan(logged(trainer)["sampling/pass_rate"])


def tally(trainer):
    return [(len(found), len(found) - found.count(None)) for _, found in trainer.features["failures"]._rollouts]


# ---------------------------------------------------------------- journal, replay, rollouts ahead


class Coin(ToolEnv):
    """Half of the groups of two teach nothing."""

    def outcome_reward(self, trajectory):
        return float(len(trajectory.final_text) % 2)


def talk(rng, turn):
    return say("x" * rng.randrange(1, 9))


RESAMPLED = {
    "env": Coin, "script": talk, "sampling.resample_rounds": 4, "num_generations": 2, "per_device_train_batch_size": 8,
    "journal.keep": 99,
}  # fmt: skip
KINDS = {
    "plain": {},
    "curriculum": {"sampling.curriculum": True},
    "ahead": {"rollouts_ahead": 1},
    "both": {"rollouts_ahead": 2, "sampling.curriculum": True},
}
ALONE = ("curriculum", "ahead")


def run(folder, kind, **options):
    return train(folder, train_dataset=questions(40), **RESAMPLED | KINDS[kind] | options)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.matrix if kind in ALONE else ()) for kind in KINDS]
)
def test_a_resumed_run_makes_the_same_batches_and_samples_nothing_again(tmp_path, kind, caplog):
    whole = run(tmp_path, kind)
    rounds = [path for path in (tmp_path / "journal" / "rank0").iterdir() if path.name.count(".") == 2]
    assert len(rounds) >= 4
    resumed = run(tmp_path, kind, checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.num_sampled == 0 and all(map(is_same, resumed.batches, whole.batches[2:]))
    assert prompts_of(resumed.last_trajectories) == prompts_of(whole.last_trajectories)
    assert "anew" not in caplog.text
    entries = [entry for entry in whole.state.log_history if "sampling/staleness" in entry]
    assert all(entry["sampling/staleness_max"] <= 2 for entry in entries)


def test_a_run_that_was_killed_in_a_round_goes_on_in_it(tmp_path):
    whole = run(tmp_path, "plain")
    folder = tmp_path / "journal" / "rank0"
    killed_in = folder / "rollout_000000002.1.journal"
    with killed_in.open("r+b") as file:
        file.truncate(killed_in.stat().st_size // 3)
    for path in [*folder.glob("rollout_000000002.[2-9].journal"), *folder.glob("rollout_000000003*")]:
        path.unlink()
    resumed = run(tmp_path, "plain", checkpoint=str(tmp_path / "checkpoint-2"))
    assert 8 < resumed.num_sampled < sum(8 + 2 * n for n in resampled_groups(whole)[2:]) - 7
    assert all(map(is_same, resumed.batches, whole.batches[2:]))
    weights = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in weights)


def test_a_replay_makes_the_same_batches_and_with_other_rewards_replaces_what_it_can(tmp_path, caplog):
    whole = run(tmp_path / "a", "plain", max_steps=2)
    replayed = run(tmp_path / "b", "plain", journal={"replay": str(tmp_path / "a")}, max_steps=2)
    assert replayed.num_sampled == 0 and all(map(is_same, replayed.batches, whole.batches))

    def never(trajectory, **kwargs):
        return [-item.total_reward for item in trajectory]  # all returns are 0

    replayed = run(tmp_path / "c", "plain", journal={"replay": str(tmp_path / "a")}, max_steps=1, reward_funcs=[never])
    assert logged_history(replayed)["sampling/groups_with_signal"] == 0
    assert "the replay replaces no groups" in caplog.text


def resampled_groups(trainer):
    return [int(entry["sampling/resampled_groups"]) for entry in trainer.state.log_history if "loss" in entry]


def logged_history(trainer):
    return next(entry for entry in trainer.state.log_history if "sampling/groups_with_signal" in entry)
