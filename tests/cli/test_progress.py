"""What a terminal shows while a run goes on, looked at on a screen; and the lines where there is none."""

import io
import logging
import sys
import time

import numpy as np
import pytest
import torch
import tqdm
from rich.text import Text
from transformers import TrainerState, TrainingArguments

from agent_r1_trl.cli.console import PlainConsole
from agent_r1_trl.cli.live import LiveBlock, has_terminal
from agent_r1_trl.cli.progress import (
    Causes,
    TrainingProgress,
    headline_of,
    row_of,
    seconds_left,
    shown_metrics,
    sparks,
    table,
    trajectory_progress,
)
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.ppo import MultiTurnPPOTrainer
from agent_r1_trl.trajectory import StopReason
from tests.cli.terminals import Terminal
from tests.environments.helpers import finished
from tests.trainers.helpers import answering, make_trainer, questions

WIDTHS = (60, 80, 120, 200)
LABELS = "step  reward  exact match  entropy"
WIDE_LABELS = "turns  failed  taught  s/step"


@pytest.fixture
def terminal(request):
    def make(*size, **environment):
        made = Terminal(*size, **environment)
        request.addfinalizer(made.close)
        return made

    return make


class Look(RolloutCallback):
    """Looks at the terminal at every width, in every phase."""

    def __init__(self, terminal):
        self.terminal, self.seen = terminal, {}

    def look(self, phase):
        for width in WIDTHS:
            self.terminal.resize(width)
            self.terminal.draw()
            self.seen.setdefault(phase, {}).setdefault(width, []).append(self.terminal.block())

    def on_train_begin(self, *args, **kwargs):
        self.look("starting")

    def around_rollout(self):
        self.look("weight sync")
        return super().around_rollout()

    def after_rollout(self, batch):
        self.look("scoring")

    def rollout_end(self, batch, output):
        self.look("update")

    def on_substep_end(self, *args, **kwargs):
        self.look("update, micro-step 2 of 2")

    def on_prediction_step(self, *args, **kwargs):
        self.look("evaluation, batch 2 of 2")

    def before_save(self, folder):
        self.look("saving")


def watched(terminal, tmp_path, **options):
    """A trainer whose tool looks as well, in the middle of a rollout."""
    look = Look(terminal)

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One number.
            b: The other.
        """
        look.look("rollout")
        return a + b

    class Env(AddEnv):
        tools = (add,)

        def outcome_reward(self, trajectory):
            trajectory.info["em"] = super().outcome_reward(trajectory)
            return float(trajectory.info["em"])

    trainer = make_trainer(tmp_path, env=Env, disable_tqdm=False, max_concurrency=1, **options)
    trainer.add_callback(TrainingProgress(terminal.console))
    trainer.add_callback(look)
    return trainer, look


def test_every_promised_field_is_there_in_every_phase_at_every_width(terminal, tmp_path):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 4}
    saves = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer, look = watched(
        terminal(80), tmp_path, max_steps=2, eval_dataset=questions(2), **sizes, **saves, num_generations_eval=4
    )
    trainer.train()
    phases = ["starting", "weight sync", "rollout", "scoring", "update", "update, micro-step 2 of 2", "saving"]
    assert set(look.seen) == {*phases, "evaluation, batch 2 of 2"}
    for phase, frames in look.seen.items():
        for width, blocks in frames.items():
            for block in blocks:
                text = "\n".join(block)
                place = f"{phase} at {width}:\n{text}"
                assert max(map(len, block)) < width, place
                score = "exact match" if "exact match" in block[0] else "success"  # before there is any
                wide = f"  {WIDE_LABELS}" if width >= 76 else ""
                assert " ".join(block[0].split()) == " ".join(f"{LABELS}{wide}".replace("exact match", score).split())
                *_, reward, curve, entropy, bar, status = block
                assert [line.split()[0] for line in (reward, curve, entropy)] == [
                    "reward",
                    score.split()[0],
                    "entropy",
                ]
                assert bar.startswith("step ") and " eta " in bar and "/2 " in bar and "% " in bar, place
                if phase != "rollout":
                    assert status.startswith(f"  {phase}") or "evaluation, batch" in status, place
        assert len({len(blocks) for blocks in frames.values()}) == 1
    rollouts = [block[-1] for block in look.seen["rollout"][120]]
    assert rollouts[0] == "  rollout 0 of 8 done, 1 waiting for add, 7 not started"
    assert rollouts[7] == "  rollout 7 of 8 done, 1 waiting for add"
    assert "  evaluation, batch 1: 0 of 4 done, 1 waiting for add, 3 not started" in rollouts
    assert "  evaluation, batch 2 of 2: 3 of 4 done, 1 waiting for add" in rollouts
    last = look.seen["saving"][200][-1]
    assert [line.split()[0] for line in last[1:3]] == ["1", "2"]
    logged = next(entry for entry in trainer.state.log_history if "group/zero_variance_share" in entry)
    assert f"{1 - logged['group/zero_variance_share']:.0%}" == last[1].split()[-2]
    assert f"{logged['reward']:+.2f}" == last[1].split()[1]


def test_a_resumed_run_shows_the_steps_before_it_and_a_critic_needs_no_spread(terminal, tmp_path):
    shape = {"save_strategy": "steps", "save_steps": 2, "trainer": MultiTurnPPOTrainer, "num_generations": 1}
    watched(terminal(80), tmp_path, max_steps=2, **shape)[0].train()
    trainer, look = watched(terminal(80), tmp_path, max_steps=3, **shape)
    trainer.train(resume_from_checkpoint=True)
    first = look.seen["weight sync"][80][0]
    assert [line.split()[0] for line in first[1:3]] == ["1", "2"]
    assert first[0].split()[-4:] == ["entropy", "turns", "failed", "s/step"]  # not `taught`
    assert "step 2/3" in first[-2] and "eta -:--:--" in first[-2]


def test_without_an_environment_the_block_says_steps(terminal, tmp_path):
    shown = terminal(80)
    reward = [lambda completions, **kwargs: [float(len(text)) for text in completions]]
    trainer = make_trainer(tmp_path, env=None, script=None, reward_funcs=reward, max_completion_length=8)
    trainer.add_callback(TrainingProgress(shown.console))
    trainer.train()
    assert any(line.startswith("step 1/1 ") for line in shown.lines()) and shown.lines()[-1] == "  ended"


def test_lines_of_others_stand_whole_above_the_block_and_the_streams_are_given_back(terminal, monkeypatch):
    shown = terminal(80)
    monkeypatch.setattr(sys, "stdout", shown.file)
    monkeypatch.setattr(sys, "stderr", shown.file)
    other = logging.getLogger("some.library")
    monkeypatch.setattr(other, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(other, "propagate", False)
    block = LiveBlock(shown.console, lambda width, height: [Text("first of block"), Text("x" * 300)])
    block.start()
    print("printed")
    other.warning("logged, and longer than a line of the terminal: " + "y" * 60)
    sys.stderr.write("an error\n")
    for _ in tqdm.tqdm(range(3), desc="bar"):
        shown.draw()
    print("not ended", end="")
    block.stop()
    block.stop()
    other.warning("logged later")
    print("printed later")
    assert sys.stdout is shown.file and other.handlers[0].stream is shown.file
    lines = shown.lines()
    assert lines[:3] == ["printed", "logged, and longer than a line of the terminal: " + "y" * 32, "y" * 28]
    assert lines[3] == "an error"
    bar = [row for row, line in enumerate(lines) if line.startswith("bar: 100%")]
    assert len(bar) == 1 and lines[bar[0] + 1 :] == [
        "not ended", "first of block", "x" * 78 + "…", "logged later", "printed later",
    ]  # fmt: skip
    assert not shown.screen.cursor.hidden and shown.screen.cursor.x == 0


def test_a_window_that_gets_narrower_has_wrapped_the_block_which_is_taken_away_whole(terminal):
    shown = terminal(120)
    block = LiveBlock(shown.console, lambda width, height: [Text("x" * 100), Text("short"), Text()])
    for width, num_rows in ((120, 0), (60, 4), (30, 4), (200, 4)):  # 100, 59 and 29 columns wide, and an empty line
        shown.console.width = width
        erase = block.process_renderables([])[0]
        assert erase.segment.control.count((1, 1)) == 0
        ups = [code for code in erase.segment.control if len(code) == 2 and code[0].name == "CURSOR_UP"]
        assert len(ups) == (num_rows if width != 30 and width != 200 else 4 if width == 30 else 3)


def test_a_block_is_never_higher_than_the_terminal(terminal):
    shown = terminal(80, 6)
    block = LiveBlock(shown.console, lambda width, height: [Text(f"line {row}") for row in range(20)])
    block.start()
    assert shown.draw() == [f"line {row}" for row in range(15, 20)]
    block.stop()


@pytest.mark.parametrize(
    ("console", "expected"),
    [
        ({"file": io.StringIO(), "force_terminal": True}, False),  # FORCE_COLOR in a CI
        ({"_environ": {"TERM": "dumb"}}, False),
        ({"_environ": {"TERM": "xterm"}}, True),
        ({"_environ": {"TERM": "xterm", "NO_COLOR": "1"}}, True),
    ],
)
def test_a_block_is_drawn_in_terminals_alone(terminal, console, expected):
    assert has_terminal(PlainConsole(**{"file": terminal(80).file, **console})) == expected


def test_no_color_has_no_colours(terminal, tmp_path):
    raw = {}
    for environment in ({}, {"NO_COLOR": "1"}):
        shown = terminal(80, **environment)
        trainer = make_trainer(tmp_path)
        trainer.add_callback(TrainingProgress(shown.console))
        trainer.train()
        assert any("eta" in line for line in shown.lines())
        raw[len(environment)] = shown.raw
    assert b"[38;5;32m" in raw[0] and b"[38" not in raw[1]


# -------------------------------------------------------------------- failures


def test_failures_have_a_line_each_with_cause_and_count(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    shown = terminal(120)

    @tool
    def search(query: str) -> str:
        """Look something up.

        Args:
            query: What.
        """
        if len(query) > 4:
            raise LookupError(f"nothing about {len(query)}")
        return "found"

    class Env(AddEnv):
        tools = (search,)

        def reset(self, example):
            if example["id"] == "q1":
                raise OSError(f"no disk at {id(self)}")
            return super().reset(example)

    def script(rng, turn):
        return call("search", query="x" * rng.randrange(1, 9)) if turn == 0 else say("x" * rng.randrange(1, 9))

    trainer = make_trainer(
        tmp_path, env=Env, script=script, max_steps=2, num_generations=2, train_dataset=questions(4)
    )
    trainer.add_callback(TrainingProgress(shown.console))
    trainer.train()
    lines = [line for line in shown.block() if " x, last in step " in line]
    assert len(lines) == 2, shown.block()
    assert all(line.split()[0] == "4" and "step 2" in line for line in lines[:1])
    assert any("environment_error: Env.reset raised OSError: no disk at" in line for line in lines)
    text = "\n".join(shown.lines())
    assert text.count("Trajectories failed for no fault of the policy") == 1


def test_a_warning_that_repeats_is_counted_and_a_cause_cannot_steer_the_terminal(terminal, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    shown = terminal(120)
    causes = Causes(shown.console)
    logger = logging.getLogger("agent_r1_trl.test")
    monkeypatch.setattr(logger, "handlers", [causes])
    monkeypatch.setattr(logger, "propagate", False)
    for step in range(1, 5):
        causes.step = step
        logger.warning("The vLLM server http://10.0.0.1:%d is excluded from the rollout", 8000 + step)
        logger.info("not a warning")
    logger.warning("Only once.\x1b[2J")
    causes.add("tool search, timeout: \n no answer", 3)
    assert [line.plain for line in causes.lines()] == [
        "4 x, last in step 4: The vLLM server http://10.0.0.1:8004 is excluded from the rollout",
        "3 x, last in step 4: tool search, timeout: no answer",
    ]
    assert shown.lines() == ["The vLLM server http://10.0.0.1:8001 is excluded from the rollout", "Only once.␛[2J"]
    assert len(causes.lines(is_new=True)) == 2 and not causes.lines(is_new=True)
    causes.add("tool search, timeout: \n no answer")
    assert [line.plain[:4] for line in causes.lines(is_new=True)] == ["4 x,"]
    for number in range(300):
        causes.add("cause " + chr(200 + number))
    assert len(causes._found) == 100 and len(causes.lines()) == 3


# -------------------------------------------------------------------- plain lines


def test_without_a_terminal_a_step_is_a_line_with_what_it_taught_and_what_failed(tmp_path, monkeypatch, request):
    monkeypatch.setattr(logging.root, "handlers", [])
    file = io.StringIO()
    trainer = answering(tmp_path, ["5", "lost", "55", "5"], max_steps=2)
    trainer.add_callback(progress := TrainingProgress(PlainConsole(file=file, width=400)))
    request.addfinalizer(progress.stop)
    trainer.train()
    lines = file.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.partition(",")[0] for line in steps] == ["step 1/2", "step 2/2"]
    assert all("  taught 1  " in line for line in steps) and "\x1b" not in file.getvalue()
    causes = [line for line in lines if " x, last in step " in line]
    assert [line.partition(":")[0] for line in causes] == ["2 x, last in step 1", "4 x, last in step 2"]
    assert "generation_error" in causes[0] and "the machine is gone" in causes[0]


def test_every_metric_is_printed_with_verbose_alone(tmp_path):
    texts = {}
    for is_verbose in (False, True):
        file = io.StringIO()
        trainer = make_trainer(tmp_path)
        trainer.add_callback(TrainingProgress(PlainConsole(file=file, width=400), is_verbose=is_verbose))
        trainer.train()
        texts[is_verbose] = file.getvalue()
    for name in ("tokens/environment", "grad_norm", "stop/done"):
        assert f"  {name} " in texts[True] and name not in texts[False]


def test_processes_other_than_the_first_say_nothing():
    file = io.StringIO()
    progress = TrainingProgress(PlainConsole(file=file))
    state = TrainerState(is_world_process_zero=False, max_steps=3)
    progress.on_train_begin(None, state, None)
    progress.on_log(None, state, None, logs={"reward": 1.0})
    progress.on_train_end(None, state, None)
    assert file.getvalue() == ""


def test_an_evaluation_says_how_far_it_is(terminal):
    shown = terminal(80)
    with trajectory_progress(shown.console, "evaluation", 4) as advance:
        assert shown.draw()[0].startswith("evaluation 0/4 ─") and "eta -:--:--" in shown.lines()[0]
        trajectory = finished()
        trajectory.info["em"] = 1.0
        advance(trajectory)
        time.sleep(0.01)
        assert shown.draw()[0].startswith("evaluation 1/4 ━") and "25%" in shown.lines()[0]
        assert shown.lines()[0].endswith("exact match 1.000")
    assert len(shown.lines()) == 2


def test_the_score_of_an_evaluation_so_far_is_that_of_its_table(terminal):
    shown = terminal(80)
    with trajectory_progress(shown.console, "evaluation", 4) as advance:
        for score in (np.bool_(True), torch.tensor(0.5)):
            trajectory = finished()
            trajectory.info["success"] = score
            advance(trajectory)
        advance(finished(stop_reason=StopReason.GENERATION_ERROR))
        advance(finished(stop_reason=StopReason.MAX_TURNS))  # without a score
        time.sleep(0.01)
        assert shown.draw()[0].startswith("evaluation 4/4 ━") and shown.lines()[0].endswith("success 0.750")


def test_each_of_several_evaluation_sets_has_a_line_with_its_name_and_numbers():
    file = io.StringIO()
    progress, state = TrainingProgress(PlainConsole(file=file, width=200)), TrainerState(max_steps=3)
    args = TrainingArguments()
    progress.on_train_begin(args, state, None)
    for prefix in ("eval", "eval_very_hard"):
        logs = {f"{prefix}_loss": 0.1, f"{prefix}_runtime": 2.0, f"{prefix}_reward": 0.5, f"{prefix}_env/em": 0.25}
        progress.on_log(args, state, None, logs=logs)
    progress.on_train_end(args, state, None)
    first, second = file.getvalue().splitlines()
    assert first == "step 0, evaluation: reward 0.5  exact match 0.25"
    assert second == "step 0, evaluation of very_hard: reward 0.5  exact match 0.25"


# -------------------------------------------------------------------- the lines themselves

ROWS = [
    row_of({"step": step, "reward": step / 2, "env/em": 0.5, "entropy": 0.04, "step_time": 3.25}) for step in (1, 2)
]


def test_a_table_is_as_wide_as_its_numbers_and_what_is_unknown_is_a_dash():
    rows = [*ROWS, {"step": 1000.0, "reward": -12345.678, "rollout/turns": float("nan")}]
    assert [line.plain for line in table(rows, shown_metrics(rows, 80))] == [
        "step     reward  exact match  entropy  turns  failed  s/step",
        "   1      +0.50         0.50    0.040      -       -     3.2",
        "   2      +1.00         0.50    0.040      -       -     3.2",
        "1000  -12345.68            -        -      -       -       -",
    ]


def test_numbers_of_the_users_own_stand_behind_the_score():
    """At most three, in the order of their first row; what a feature counts below a name of its own is none."""
    own = {"env/right": 0.25, "env/num_open_orders": 3.0, "env/c": 1.0, "env/d": 1.0, "env/agent/raised": 0.0}
    rows = [row_of({"step": 1, "reward": 0.5, "env/success": 0.5, **own, "entropy": 0.04, "step_time": 3.25})]
    assert [line.plain for line in table(rows, shown_metrics(rows, 80))] == [
        "step  reward  success  right  num_open_or     c  entropy  turns  failed  s/step",
        "   1   +0.50     0.50   0.25         3.00  1.00    0.040      -       -     3.2",
    ]
    assert [metric.label for metric in shown_metrics(rows, 60)] == ["reward", "success", "right", "entropy"]
    assert headline_of({"reward": 0.5, **own}) == "reward 0.5  right 0.25  num_open_orders 3  c 1"


def test_a_curve_stands_between_least_and_most_and_needs_no_unicode():
    assert [line.plain for line in sparks(ROWS, shown_metrics(ROWS, 80), 80)] == [
        "reward       +0.50 ▁█ +1.00",
        "exact match   0.50 ▅▅ 0.50",
        "entropy      0.040 ▅▅ 0.040",
    ]
    assert sparks(ROWS, shown_metrics(ROWS, 80), 80, is_ascii=True)[0].plain == "reward       +0.50 _# +1.00"


def test_groups_taught_what_trl_counts_without_our_rollout_and_nothing_is_said_with_a_critic():
    assert row_of({"frac_reward_zero_std": 0.25}) == {"taught": 0.75}
    assert row_of({"group/zero_variance_share": 0.5, "frac_reward_zero_std": 0.25}) == {"taught": 0.5}
    assert row_of({"group/zero_variance_share": 0.5}, has_critic=True) == {}


def test_the_eta_is_known_from_the_first_step_on_and_an_evaluation_does_not_bring_it_to_zero():
    assert seconds_left(0, 10, 300.0, 300.0) is None
    assert seconds_left(1, 9, 300.0, 0.0) == 9 * 300
    assert seconds_left(1, 9, 350.0, 50.0) == 9 * 300 - 50
    assert seconds_left(1, 9, 9300.0, 9000.0) == 8 * 300
