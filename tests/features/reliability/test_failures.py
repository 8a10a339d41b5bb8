"""Infrastructure failures: one bad row never ends a run, and an outage does, with its reasons."""

import itertools
import logging
import math

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.features.reliability.failures import MAX_WARNINGS, FailureBudget
from agent_r1_trl.rewards import required
from agent_r1_trl.rollout import NothingRolledOutError
from agent_r1_trl.rollout.failures import FailureCause, count_causes, describe_causes, what_to_do
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.trainers.helpers import make_trainer, questions, scored_batch

# -------------------------------------------------------------------- causes


def failed(error="the server is down", *, example_id="q1", stop_reason="environment_error"):
    return FailureCause(stop_reason=stop_reason, error=error, example_id=example_id)


def test_each_cause_is_counted_once_whatever_numbers_its_error_holds():
    causes = count_causes(
        [None, failed("no answer after 1.2 s at 0x7f3a"), failed("lost", example_id="q2"), None]
        + [failed("no answer after 31.7 s at 0x11", example_id="q3")] * 2
    )
    assert describe_causes(causes) == (
        "3 x environment_error: no answer after 1.2 s at 0x7f3a (first in example 'q1'); "
        "1 x environment_error: lost (first in example 'q2')"
    )


def test_a_message_lists_five_causes_and_counts_the_others():
    causes = count_causes([failed(letter) for letter in "aabcdefff"])
    assert [(cause.error, cause.count) for cause in causes[:2]] == [("f", 3), ("a", 2)]
    assert describe_causes(causes).endswith("; 1 x 1 other causes")


# -------------------------------------------------------------------- the watch


def watch(rollouts, *, max_share=0.5, window=4, group_size=2):
    """Judge rollouts written as strings (`x` failed, `.` was sampled); returns the number of the one that ends it."""
    watch = FailureBudget(max_share, window)
    for number, rollout in enumerate(rollouts, start=1):
        if watch.judge([failed() if letter == "x" else None for letter in rollout], group_size=group_size):
            return number
    return None


@pytest.mark.parametrize(
    ("rollouts", "ends_in"),
    [
        (["xxxx"], 1),  # a whole first rollout of two prompts
        (["xx"], None),  # a single prompt: it may be that row alone
        (["xx", "xx"], 2),  # two different ones
        (["xx", "..", "..", ".."], None),
        (["..", "xx", "xx", "xx"], 4),  # 6 of 8; before, the window was not full
        ([".." "..", "xx" "xx"], None),  # 4 of 8 are not more than half
        ([".." "..", "x." "xx", "xx" "x."], 3),  # 6 of the last 8
        (["........", "xxxxxxxx"], 2),  # the last rollout alone holds four prompts
        (["........", "xxxx...."], None),
    ],
)  # fmt: skip
def test_a_run_ends_where_more_than_the_share_of_the_last_prompts_failed(rollouts, ends_in):
    assert watch(rollouts) == ends_in


def test_share_and_window_are_the_users():
    assert watch(["....", "x..."], max_share=0.1) == 2
    assert watch(["....", "xxxx", "xxxx"], max_share=1.0) is None
    assert watch(["xxxx"], max_share=1.0) == 1, "nothing was ever sampled"
    assert watch(["..", "xx"], window=1) == 2
    assert watch(["..", *["xx"] * 5], window=8) is None


def test_the_error_names_the_causes_the_setting_and_the_fix():
    watch = FailureBudget(0.25, 2)
    assert watch.judge([failed("lost"), failed(), failed(example_id="q2"), None], group_size=2) == (
        "3 of the last 4 trajectories were lost, a larger share than failures.max_share=0.25 allows: "
        "2 x environment_error: the server is down (first in example 'q1'); "
        "1 x environment_error: lost (first in example 'q1'). Correct the environment or the data, or raise "
        "failures.max_share. Run `agent-r1-trl doctor` on this environment and data set."
    )


@pytest.mark.parametrize(
    ("reasons", "advice"),
    [
        (["generation_error", "generation_error"], "Correct the model or what it is sampled with, or "),
        (["generation_error", "environment_error"], "Correct the environment or the data. Run `agent-r1-trl doctor`"),
        (["not_scored"], "Correct the reward function, or resume"),
    ],
)
def test_the_advice_is_of_what_failed(reasons, advice):
    assert what_to_do([failed(stop_reason=reason) for reason in reasons]).startswith(advice)


def test_every_cause_is_warned_of_once_and_a_flood_of_them_ends(caplog):
    watch = FailureBudget(1.0, 4)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.judge([None, failed("lost"), failed("lost"), failed("no answer")], group_size=4)
    assert ["2 x environment_error: lost" in caplog.text, caplog.text.count("no answer")] == [True, 1]
    with caplog.at_level(logging.WARNING):
        watch.judge([None, *(failed("z" * length) for length in range(1, 50))], group_size=50)
    assert len(caplog.records) == MAX_WARNINGS
    assert "Further causes are not reported" in caplog.records[-1].getMessage()


# -------------------------------------------------------------------- training


def broken_on(*ids):
    """An environment that cannot start on these rows."""

    class Broken(AddEnv):
        def reset(self, example):
            if example["id"] in ids or not ids:
                raise OSError("the server is down")
            return super().reset(example)

    return Broken


ONE_PROMPT = {"per_device_train_batch_size": 4, "num_generations": 4}


def rewards(trainer):
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


@pytest.mark.parametrize("row", ["q0", "q3"])
def test_one_bad_row_ends_no_run_wherever_it_comes(tmp_path, row, caplog):
    trainer = make_trainer(
        tmp_path,
        env=broken_on(row),
        train_dataset=questions(4),
        max_steps=5,
        failures={"max_share": 0.0},
        **ONE_PROMPT,
    )
    with caplog.at_level(logging.WARNING, logger="agent_r1_trl"):
        trainer.train()
    assert trainer.state.global_step == 5
    assert rewards(trainer).count(None) in (1, 2)
    assert caplog.text.count("Broken.reset raised OSError: the server is down") == 1


@pytest.mark.parametrize(("share", "num_failed", "steps"), [(0.5, 12, 4), (0.8, 16, 5)])
def test_an_outage_ends_the_run_when_the_window_is_full_of_it(tmp_path, share, num_failed, steps):
    class Outage(AddEnv):
        starts = 0

        def reset(self, example):
            Outage.starts += 1
            if Outage.starts > 4 * 2:  # two prompts go well
                raise OSError("the server is down")
            return super().reset(example)

    options = {"failures.window": 4, "failures.max_share": share, **ONE_PROMPT}
    trainer = make_trainer(tmp_path, env=Outage, max_steps=20, **options)
    message = rf"{num_failed} of the last 16 trajectories were lost, .*failures.max_share={share}"
    with pytest.raises(NothingRolledOutError, match=message):
        trainer.train()
    assert trainer.state.global_step == steps


def silent_for(*ids):
    """A required reward function that does not score these rows; without any, none."""

    @required
    def judge(completions, id, trajectory, **columns):
        for item in trajectory:
            item.error = "HTTP 503" if not ids or item.example_id in ids else None
        return [None if item.error else 1.0 for item in trajectory]

    return judge


def test_a_required_reward_that_is_missing_is_in_no_loss_and_counts_as_a_failure(tmp_path, caplog):
    trainer = make_trainer(
        tmp_path, train_dataset=questions(4), max_steps=3, reward_funcs=[silent_for("q0")], failures={"max_share": 0.5}
    )
    with caplog.at_level(logging.WARNING, logger="agent_r1_trl"):
        trainer.train()
    shares = [entry["rollout/unscored_share"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(shares) == 3 and set(shares) == {0.0, 0.5}
    assert caplog.text.count("4 x not_scored: HTTP 503 (first in example 'q0')") == 1

    judging = {"train_dataset": questions(2), "reward_funcs": [silent_for("q0")]}
    batch = scored_batch(trainer := make_trainer(tmp_path / "one", **judging))
    is_judged = torch.tensor([item.example_id != "q0" for item in trainer.last_trajectories])
    assert torch.equal(batch["in_baseline"], is_judged)
    assert torch.equal(batch["tool_mask"].any(dim=1), is_judged)


def test_a_judge_that_is_away_from_the_start_or_stays_away_ends_the_run(tmp_path):
    trainer = make_trainer(tmp_path / "start", max_steps=3, reward_funcs=[silent_for()])
    with pytest.raises(NothingRolledOutError, match="All 8 trajectories were lost: 8 x not_scored: HTTP 503") as error:
        trainer.train()
    assert "Correct the reward function, or resume" in str(error.value)
    assert "doctor" not in str(error.value), "the doctor calls no reward function"
    assert trainer.state.global_step == 0
    options = {"failures": {"max_share": 0.25, "window": 4}, "train_dataset": questions(4), "max_steps": 9}
    trainer = make_trainer(tmp_path / "later", reward_funcs=[silent_for("q0", "q1")], **options)
    with pytest.raises(NothingRolledOutError, match=r"8 of the last 16 .*failures.max_share=0.25.* not_scored: HTTP"):
        trainer.train()


TWO_STEPS = {"steps_per_generation": 2, "per_device_train_batch_size": 2}
LAYOUTS = [(MultiTurnGRPOTrainer, name) for name in ("padded", "grouped", "packed")]
LAYOUTS += [(MultiTurnPPOTrainer, name) for name in ("padded", "grouped")]
EVERYTHING = [(*layout, options) for layout in LAYOUTS for options in ({"beta": 0.0}, {"beta": 0.1, **TWO_STEPS})]


@pytest.mark.parametrize(
    ("trainer_class", "layout", "options"),
    [
        (MultiTurnGRPOTrainer, "shared", {"beta": 0.1, **TWO_STEPS}),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in EVERYTHING),
    ],
    ids=str,
)
def test_an_update_on_failures_alone_changes_nothing(tmp_path, trainer_class, layout, options):
    trainer = make_trainer(
        tmp_path, env=broken_on("q0", "q1", "q2", "q3"), train_dataset=questions(8), max_steps=8,
        trainer=trainer_class, update_layout=layout, failures={"max_share": 1.0}, lr_scheduler_type="constant",
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), optim="sgd",
        **({"critic": "head"} if trainer_class is MultiTurnPPOTrainer else {}), **(ONE_PROMPT | options),
    )  # fmt: skip
    weights, step = [], trainer.training_step

    def watched(*args, **kwargs):
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        return step(*args, **kwargs)

    trainer.training_step = watched
    trainer.train()
    weights.append([parameter.detach() for parameter in trainer.model.parameters()])
    is_changed = [
        any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(weights)
    ]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    share = [entry.get("rollout/lost_share") for entry in logged]
    share = [value if value is not None else share[index - 1] for index, value in enumerate(share)]
    assert set(share) == {0.0, 1.0}
    for entry, value, changed in zip(logged, share, is_changed, strict=True):
        assert math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"])
        if value == 1.0:
            assert (entry["loss"], entry["grad_norm"], changed) == (0.0, 0.0, False)
    assert any(is_changed)


def test_a_second_training_begins_without_the_failures_of_the_first(tmp_path):
    state = {"sampled": 0, "is_down": True}

    class Fragile(AddEnv):
        def reset(self, example):
            state["sampled"] += 1
            if state["is_down"] and state["sampled"] > 8:
                raise RuntimeError("the server is gone")
            return super().reset(example)

    trainer = make_trainer(tmp_path, env=Fragile, max_steps=8, train_dataset=questions(16), failures={"window": 8})
    with pytest.raises(NothingRolledOutError, match="24 of the last 32"):
        trainer.train()
    state["is_down"] = False
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.state.global_step == 2
