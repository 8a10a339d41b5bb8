"""What counts as signal is what is trained on: weights and schedules applied, "taught" read from advantages."""

import pytest
import torch

from agent_r1_trl.display.lines import row_of
from agent_r1_trl.features.sampling.rules import group_scores, has_signal, select_groups
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trainers.metrics import spread
from tests.trainers.helpers import make_trainer, scored_batch

FILTER = {"sampling.filter_groups": "top_p", "sampling.filter_value": 1.0}
"""Every group that has a score."""


def two_calls(rng, turn):
    return call(a=rng.randrange(9), b=1) if turn < 2 else say("x" * rng.randrange(1, 9))


class Paid(AddEnv):
    """What its two turns and the end pay: a function of the example and the member of the group."""

    pays = staticmethod(lambda example, member: ((0.0, 0.0), 0.0))

    def process_reward(self, call, result):
        return 0.0

    def outcome_reward(self, trajectory):
        turns, outcome = self.pays(trajectory.example_id, trajectory.generation)
        for turn, reward in zip(trajectory.turns, turns, strict=False):
            turn.reward = reward
            turn.reward_parts = {"paid": reward}
        return outcome


def paying(pays):
    return type("PaidAs", (Paid,), {"pays": staticmethod(pays)})


def process_alone(example, member):
    """Members differ in what their first turn earned, in every group."""
    return (float(member), 0.0), 1.0


def outcome_in_one_group(example, member):
    """Turns differ in every group, outcomes in the first one."""
    return (float(member), 0.0), float(member % 2) if example == FIRST else 1.0


def moved(example, member):
    """Every member earns 1, in its first or in its second turn."""
    return ((1.0, 0.0) if member % 2 else (0.0, 1.0)), 0.0


def split(example, member):
    """Every member earns 1, for a turn or in the end."""
    return ((1.0, 0.0), 0.0) if member % 2 else ((0.0, 0.0), 1.0)


FIRST = "q7"
"""The example of the first group, with the seed of these runs."""


def trainer_of(tmp_path, pays, **options):
    return make_trainer(tmp_path, script=two_calls, env=paying(pays), max_turns=4, **options)


def last(trainer, name):
    return trainer._metrics["train"][name][-1]


def trained_in(batch):
    """Which rows have an advantage other than 0."""
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    return ((batch["advantages"] != 0) & mask).any(dim=1).tolist()


# -------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("pays", "options"),
    [
        (process_alone, {"process_reward_weight": 0.0}),
        (lambda example, member: ((1.0, 0.0), float(member)), {"outcome_reward_weight": 0.0}),
        (process_alone, {"process_reward_weight": 0.0, "separate_process_advantages": True}),
        (process_alone, {"process_reward_weight": 0.0, "normalize_process_rewards": True}),
        (process_alone, {"process_reward_weight": 0.0, "advantage_estimator": "turn_grpo"}),
    ],
    ids=["process", "outcome", "separate", "normalised", "turn_grpo"],
)
def test_a_run_whose_rewards_have_no_weight_says_that_it_learns_nothing(tmp_path, pays, options, caplog):
    trainer = trainer_of(tmp_path, pays, **options)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["group/taught_share"] == 0 and entry["group/zero_variance_share"] == 1
    assert entry["group/reward_std"] == 0 and entry["reward_std"] > 0, "TRL's is of the rewards as they are given"
    assert row_of(entry)["taught"] == 0
    summary = trainer.features["learning"].summary()
    assert "taught nothing  1 of 1 rollouts" in summary and "the model has learned nothing" in summary
    assert "No trajectory of the 2 groups has an advantage other than 0" in caplog.text


def test_a_schedule_that_ends_takes_the_signal_with_it(tmp_path):
    trainer = trainer_of(tmp_path, process_alone, process_reward_schedule="linear", process_reward_weight=2.0)
    scored_batch(trainer)
    item = trainer.last_trajectories[1]
    assert item.process_reward == 1
    at = {share: trainer.credit.compared_returns([item], share, with_penalty=True) for share in (0.0, 0.25, 1.0)}
    assert at == {0.0: [[3.0]], 0.25: [[2.5]], 1.0: [[1.0]]}
    trainer.state.global_step = trainer.state.max_steps = 4
    scored_batch(trainer)
    assert last(trainer, "group/zero_variance_share") == 1 and last(trainer, "group/taught_share") == 0


@pytest.mark.parametrize("options", [{}, {"separate_process_advantages": True}, {"advantage_estimator": "turn_grpo"}])
def test_the_filter_keeps_the_groups_that_have_an_advantage(tmp_path, options):
    trainer = trainer_of(tmp_path, outcome_in_one_group, process_reward_weight=0.0, **FILTER, **options)
    batch = scored_batch(trainer)
    assert {item.example_id for item in trainer.last_trajectories[:4]} == {FIRST}
    assert batch["is_kept"].tolist() == trained_in(batch) == [True] * 4 + [False] * 4
    assert last(trainer, "group/taught_share") == 0.5


def test_a_rule_of_ones_own_gets_the_returns_as_they_are_trained_on(tmp_path):
    seen = []

    def rule(groups):
        seen.append(groups)
        return torch.ones(len(groups), dtype=torch.bool)

    weights = {"process_reward_weight": 0.5, "outcome_reward_weight": 2.0}
    trainer = trainer_of(tmp_path, process_alone, **{"sampling.filter_groups": rule}, **weights)
    scored_batch(trainer)
    assert seen[0].tolist() == [[2.0, 2.5, 3.0, 3.5]] * 2


# -------------------------------------------------------------------- equal returns, different turns


@pytest.mark.parametrize(
    ("pays", "options"),
    [
        (moved, {"advantage_estimator": "turn_grpo", "gamma_turn": 0.9}),
        (moved, {"advantage_estimator": "gigpo", "gamma_turn": 0.9}),
        (split, {"separate_process_advantages": True, "process_reward_weight": 0.5}),
        (split, {"advantage_estimator": "turn_grpo"}),
    ],
    ids=["turn_grpo", "gigpo", "separate", "parts"],
)
def test_members_of_equal_returns_teach_an_estimator_that_compares_turns(tmp_path, pays, options):
    trainer = trainer_of(tmp_path, pays, **FILTER, **options)
    batch = scored_batch(trainer)
    assert len({item.total_reward for item in trainer.last_trajectories}) == 1
    assert batch["is_kept"].all() and any(trained_in(batch)[:4]) and any(trained_in(batch)[4:])
    assert last(trainer, "group/taught_share") == 1 and last(trainer, "group/zero_variance_share") == 0
    assert trainer.features["learning"].rollouts[-1].teaches


@pytest.mark.parametrize(("pays", "teaches"), [(moved, True), (lambda *of: ((0.5, 0.5), 1.0), False)])
def test_with_a_critic_rewards_must_differ_in_a_turn_at_least(tmp_path, pays, teaches):
    options = {"trainer": MultiTurnPPOTrainer, "critic": "head", "advantage_estimator": "step_gae"}
    by_example = lambda example, member: pays(example, int(example[1:]))  # noqa: E731
    trainer = trainer_of(tmp_path, by_example, num_generations=1, **options)
    trainer.train()
    assert trainer.features["learning"].rollouts[-1].teaches is teaches


def test_groups_without_signal_are_those_that_training_cannot_use(tmp_path):
    trainer = trainer_of(
        tmp_path, process_alone, process_reward_weight=0.0, **{"sampling.resample_rounds": 1}, echo=True
    )
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["sampling/groups_with_signal_before"] == entry["sampling/groups_with_signal"] == 0
    assert entry["sampling/resampled_groups"] == 2 and entry["echo/zero_std_share"] == 1


def test_variances_of_returns_that_are_compared_apart_are_added_up():
    groups = torch.tensor([[[0.0, 1.0], [2.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [3.0, 4.0]]])
    assert has_signal(groups).tolist() == [True, False, True]
    assert group_scores(groups).tolist() == pytest.approx([2**0.5, 0.0, (4.5 + 8.0) ** 0.5])
    assert select_groups(groups, rule="top_fraction", value=0.4).tolist() == [False, False, True]
    assert spread(groups[2].tolist()) == (pytest.approx(12.5**0.5), True)
    groups[0, 0] = torch.nan
    assert group_scores(groups).isnan().tolist() == [True, False, False]
