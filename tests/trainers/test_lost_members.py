"""Groups that lose members to failures, and failures that are sampled again."""

import pytest
import torch

from agent_r1_trl.rollout import NothingRolledOutError, runner
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trainers.rewards import mark_small_groups
from tests.effort import nightly
from tests.recording.examples import two_turns
from tests.trainers.helpers import make_trainer, questions, scored_batch


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(runner, "RETRY_WAIT_S", 0.0)


def failing(*members, times=99):
    """An environment that raises at reset for these members of the group of q0, `times` times each."""

    class Failing(AddEnv):
        tries, seen = {}, {}  # how often a seed was tried; seeds in the order in which they came

        def seed(self, *, reset_seed, dynamics_seed):
            self.own_seed = dynamics_seed

        def reset(self, example):
            number = self.tries[self.own_seed] = self.tries.get(self.own_seed, 0) + 1
            if example["id"] == "q0":
                member = self.seen.setdefault(self.own_seed, len(self.seen))
                if member % 4 in members and number <= times:
                    raise OSError("the server is down")
            return super().reset(example)

    return Failing


def metrics_of(trainer):
    return {name: values[-1] for name, values in trainer._metrics["train"].items() if values}


@pytest.mark.parametrize(
    ("num_failed", "min_group_size", "left"),
    [(2, None, 2), (3, None, 0), (3, 1, 1), (2, 3, 0), *nightly((1, None, 3), (1, 4, 0), (1, 3, 3))],
)
def test_a_group_of_too_few_counts_nowhere(tmp_path, num_failed, min_group_size, left):
    trainer = make_trainer(
        tmp_path, env=failing(*range(num_failed)), train_dataset=questions(2), min_group_size=min_group_size
    )
    output = scored_batch(trainer)
    is_lossy = torch.tensor([item.example_id == "q0" for item in trainer.last_trajectories])
    assert output["in_baseline"][is_lossy].sum() == left
    assert output["in_baseline"][~is_lossy].all(), "the other group counts as it is"
    assert output["tool_mask"][is_lossy].any(dim=1).sum() == left
    if left == 0:
        assert not output["advantages"][is_lossy].any()
    metrics = metrics_of(trainer)
    assert metrics["group/too_small_share"] == (0.5 if left == 0 else 0.0)
    counted = [item.total_reward for item in trainer.last_trajectories if item.in_baseline]
    assert len(counted) == left + 4
    assert metrics["reward"] == pytest.approx(sum(counted) / len(counted))


def test_without_groups_every_trajectory_counts(tmp_path):
    trainer = make_trainer(
        tmp_path, env=failing(0, 1, 2), train_dataset=questions(2), trainer=MultiTurnPPOTrainer, critic="head"
    )
    assert scored_batch(trainer)["in_baseline"].sum() == 5


def test_groups_are_counted_by_hand():
    trajectories = [two_turns() for _ in range(6)]
    in_baseline = torch.tensor([True, True, True, False, False, False])
    mark_small_groups(trajectories, in_baseline, 2, 1)
    assert not any(item.is_group_too_small for item in trajectories)
    mark_small_groups(trajectories, in_baseline, 2, 2)
    assert [item.is_group_too_small for item in trajectories] == [False, False, True, False, False, False]


def test_an_evaluation_counts_what_is_left_of_a_group(tmp_path):
    trainer = make_trainer(
        tmp_path, env=failing(0, 1, 2), train_dataset=questions(2), eval_dataset=questions(1), num_generations_eval=4
    )
    trainer.evaluate()
    assert [item.in_baseline for item in trainer.last_trajectories].count(True) == 1


# -------------------------------------------------------------------- sampled again


def test_a_replaced_failure_changes_no_bit_of_the_run(tmp_path):
    runs = []
    for name, env, retries in (("whole", AddEnv, 0), ("replaced", failing(0, 2, times=2), 2)):
        trainer = make_trainer(
            tmp_path / name, env=env, train_dataset=questions(2), max_steps=3, retry_failed=retries,
            failures={"max_share": 0.0, "window": 1},
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    whole, replaced = (trainer.model.state_dict() for trainer in runs)
    assert all(torch.equal(tensor, replaced[name]) for name, tensor in whole.items())
    logged = [entry for entry in runs[1].state.log_history if "rollout/tries" in entry]
    assert [entry["rollout/replaced_share"] for entry in logged] == [0.25] * 3
    assert [entry["rollout/tries"] for entry in logged] == [1.5] * 3
    assert [entry["rollout/lost_share"] for entry in logged] == [0.0] * 3


def test_what_still_fails_after_all_tries_counts_as_failed(tmp_path):
    trainer = make_trainer(
        tmp_path, env=failing(0, 1, 2, 3), train_dataset=questions(2), max_steps=3, retry_failed=1,
        failures={"max_share": 0.4, "window": 2},
    )  # fmt: skip
    with pytest.raises(NothingRolledOutError, match=r"4 of the last 8 trajectories were lost.*4 x environment_error"):
        trainer.train()


def test_failures_of_an_evaluation_are_sampled_again(tmp_path):
    trainer = make_trainer(
        tmp_path, env=failing(0, 1, times=1), train_dataset=questions(2), eval_dataset=questions(2), retry_failed=1,
        num_generations_eval=4,
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_rollout/lost_share"] == 0.0
    assert metrics["eval_rollout/replaced_share"] == 0.25
