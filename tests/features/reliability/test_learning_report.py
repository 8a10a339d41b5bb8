"""A run that learns nothing says so: what, at which step, and with which exit code."""

import logging
import re
import time

import pytest

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.reliability.learning import LearningReport
from agent_r1_trl.features.reliability.tool_watch import ToolOutageError
from agent_r1_trl.rewards import required
from agent_r1_trl.testing import AddEnv, calls, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trajectory import StopReason
from tests.trainers.helpers import make_trainer


class Constant(AddEnv):  # which pays 0.5 for the call
    def outcome_reward(self, trajectory):
        return 0.0


class PerQuestion(AddEnv):
    def outcome_reward(self, trajectory):
        return float(self.example["id"][1:])


def looking(how):
    """An environment with a tool that raises, is too slow, or says nothing."""

    @tool(attempts=1, timeout_s=0.05)
    def look(word: str) -> str:
        """Look.

        Args:
            word: What to look for.
        """
        if how == "raises":
            raise OSError("no index")
        if how == "slow":
            time.sleep(0.3)
        return {"empty": "", "same": "Nothing found."}.get(how, word)

    return type("Looking", (AddEnv,), {"tools": (look,)})


def look(rng, turn):
    return calls(("look", {"word": str(rng.random())})) if turn == 0 else say("x" * rng.randrange(1, 9))


@pytest.mark.parametrize(
    ("env", "said", "rule"),
    [
        (Constant, "Step 1: All 8 trajectories earned exactly 0.5: nothing can be learned from them.", "top_p"),
        (PerQuestion, "Step 1: The trajectories of each of the 2 groups earned the same", None),
    ],
)
def test_the_first_rollout_without_a_difference_is_named_once(tmp_path, env, said, rule, caplog):
    trainer = make_trainer(tmp_path, env=env, max_steps=4, sampling={"filter_groups": rule})
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count("nothing can be learned") == 1
    assert said in caplog.text
    messages = [record.getMessage() for record in caplog.records]
    first = next(index for index, text in enumerate(messages) if "nothing can be learned" in text)
    assert not [text for text in messages[:first] if "skipped" in text], "the cause comes first"
    summary = trainer.features["learning"].summary()
    assert "4 of 4 rollouts (100%)" in summary and "the model has learned nothing" in summary


def test_a_rollout_that_nobody_scored_says_nothing_of_the_one_before_it(tmp_path):
    verdicts = iter([0.0, None])

    @required
    def judged(completions, **columns):
        return [next(verdicts)] * len(completions)

    trainer = make_trainer(tmp_path, reward_funcs=[judged], max_steps=2, sampling={"filter_groups": "top_p"})
    trainer.train()
    assert "0 of 1 rollouts" in trainer.features["learning"].summary()


def test_rewards_that_differ_are_no_news(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    assert "nothing can be learned" not in caplog.text
    assert "0 of 2 rollouts" in trainer.features["learning"].summary()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("empty", "Step 1: All 8 answers of the tool 'look' were empty."),
        ("same", "Step 1: All 8 answers of the tool 'look' were the same ('Nothing found.')."),
        ("well", None),
    ],
)
def test_a_tool_that_says_nothing_is_named(tmp_path, how, said, caplog):
    trainer = make_trainer(tmp_path, script=look, env=looking(how), max_steps=2)
    trainer.train()
    assert (said or "") in caplog.text and caplog.text.count("answers of the tool") == bool(said)
    assert ("All 16 answers of the tool 'look'" in trainer.features["learning"].summary()) is bool(said)


def test_a_tool_that_ends_the_episode_may_always_say_the_same(tmp_path, caplog):
    class Submit(ToolEnv):
        @tool
        def submit(self, answer: str) -> str:
            """Submit an answer.

            Args:
                answer: Any text.
            """
            return "Submitted."

        def is_done(self, message):
            return True

    make_trainer(
        tmp_path, env=Submit, script=lambda rng, turn: calls(("submit", {"answer": str(rng.random())}))
    ).train()
    assert "answers of the tool" not in caplog.text


def test_the_summary_names_a_tool_that_failed_in_every_call_and_no_call_that_reached_none(tmp_path):
    def script(rng, turn):
        broken = say("<tool_call>\n{oops\n</tool_call>")
        made = calls(("nope", {}), ("look", {"word": 1.5}), ("look", {"word": str(rng.random())}))
        return [broken, made, say("x" * rng.randrange(1, 9))][turn]

    def broken(word: str) -> str:
        """Look up a word.

        Args:
            word: Any.
        """
        raise KeyError("index")

    broken.__name__ = "look"
    env = type("Looking", (AddEnv,), {"tools": (tool(broken),)})
    trainer = make_trainer(tmp_path, script=script, env=env, max_steps=1, max_turns=5, max_completion_length=500)
    trainer.train()
    summary = trainer.features["learning"].summary()
    assert re.findall("All .* calls .*", summary) == ["All 8 calls of the tool 'look' failed."], summary


@pytest.mark.parametrize("how", ["raises", "slow"])
def test_a_tool_that_never_works_ends_the_run_at_its_first_rollout(tmp_path, how):
    trainer = make_trainer(tmp_path, script=look, env=looking(how), max_steps=2)
    start = time.monotonic()
    with pytest.raises(ToolOutageError, match=r"has never worked: 8 of its last 8 calls failed.*by hand.*timeout_s"):
        trainer.train()
    assert trainer.state.global_step == 0 and time.monotonic() - start < 20


class Scored:
    """As much of a trajectory as the report reads."""

    in_baseline, turns = True, ()

    def __init__(self, reward, stop_reason=StopReason.DONE):
        self.total_reward, self.is_solved, self.stop_reason = reward, reward > 0, stop_reason


def test_the_summary_of_a_run_in_which_nothing_was_scored_says_so():
    report, unscored = LearningReport("out", records=True), Scored(0.0)
    assert not report.summary()
    unscored.in_baseline = False
    report.take([unscored] * 8, step=1, group_size=4)
    assert report.summary() == "No trajectory was scored: the model has learned nothing."


def test_the_summary_of_one_rollout_names_its_reward_once_and_a_path_with_a_blank_is_quoted():
    report = LearningReport("my runs/out", records=True)
    report.take([Scored(float(i < 6)) for i in range(8)], step=1, group_size=8)
    assert report.summary().splitlines()[0] == "reward          0.75 at step 1"
    assert "2 of the last rollout: agent-r1-trl view 'my runs/out' --filter unsolved" in report.summary()


def test_a_run_in_which_no_trajectory_was_solved_says_so_although_its_rewards_differ():
    report = LearningReport("out", records=True)
    for step in (1, 2):
        report.take([Scored(-0.1 * (i % 2)) for i in range(8)], step=step, group_size=4)
    report.take([Scored(0.0, StopReason.ENVIRONMENT_ERROR)] * 4 + [Scored(-0.1)] * 4, step=3, group_size=4)
    summary = report.summary()
    assert "solved          0% of the trajectories at step 1, 0% at step 3" in summary
    assert "No trajectory was solved" in summary and "docs/warm-up.md" in summary
    report.take([Scored(0.0, StopReason.ENVIRONMENT_ERROR), *[Scored(1.0)] * 3], step=4, group_size=4)
    summary = report.summary()
    assert ", 100% at step 4" in summary and "No trajectory was solved" not in summary


def test_a_trial_of_few_questions_is_not_said_to_have_made_the_model_worse():
    report = LearningReport("out", records=True)
    for step, reward in enumerate([1.0, 0.0], 1):
        report.take([Scored(reward + 0.1 * (i % 2)) for i in range(28)], step=step, group_size=4)  # 7 questions
    assert "1.05 at step 1, 0.05 at step 2" in report.summary() and "fell" not in report.summary()


@pytest.mark.parametrize("num_cut", [1, 2])
def test_the_summary_names_the_limit_that_ended_most_of_what_was_not_solved(num_cut):
    report = LearningReport("out", records=True)
    cut = [Scored(0.0, StopReason.MAX_COMPLETION_LENGTH)] * num_cut
    report.take([*cut, *[Scored(0.0)] * (4 - num_cut)], step=1, group_size=4)
    summary = report.summary()
    named = "unsolved        4 of the last rollout, 2 of them ended at max_completion_length: agent-r1-trl view"
    assert (named in summary) == (num_cut == 2)
    advice = "ended at max_completion_length: raise it if the model's context allows; else warm the model up"
    assert (advice in summary) == (num_cut == 2) and "docs/warm-up.md" in summary
    report.take([Scored(1.0)] * 4, step=2, group_size=4)
    assert "max_completion_length" not in report.summary()


def test_the_summary_has_first_last_and_best_reward_and_names_a_fall():
    report = LearningReport("out", records=True)
    for step, num_right in enumerate([8, 12, 16, 0], 1):
        share_of = [num_right + 4 * (group % 2) for group in range(8)]  # 12 right: 1 and 2 of 4 in turn
        report.take([Scored(float(i % 4 < share_of[i // 4] // 8)) for i in range(32)], step=step, group_size=4)
    summary = report.summary()
    assert "reward          0.25 at step 1, 0 at step 4, best 0.5 at step 3" in summary
    assert "solved          25% of the trajectories at step 1, 0% at step 4" in summary
    assert "unsolved        32 of the last rollout: agent-r1-trl view out --filter unsolved" in summary
    assert "No trajectory was solved" not in summary
    # Each group of the first rollout has the mean 0.25, of the last 0.
    assert "The reward fell" in summary and "lower learning_rate" in summary
    report.take([Scored(float(i < 6)) for i in range(32)], step=5, group_size=4)
    assert "The reward fell" not in report.summary(), "0.19 +- 0.13 is no certain fall from 0.25"
    report.take([Scored(1.0)] * 31 + [Scored(0.0, StopReason.ENVIRONMENT_ERROR)], step=6, group_size=8)
    assert "unsolved" not in report.summary()
    report.begin_run()
    assert report.summary() == ""
