"""What a terminal shows while a run goes on, looked at on a screen; and the lines where there is none."""

import io
import logging
import sys
import threading
from functools import partial

import pytest
from peft import LoraConfig
from transformers import TrainerState, TrainingArguments

from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.features.progress.causes import Causes
from agent_r1_trl.features.progress.training import TrainingProgress
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.construction import trl_dataset
from agent_r1_trl.trainers.plan import plan_of
from agent_r1_trl.trainers.ppo import MultiTurnPPOTrainer
from tests.trainers.helpers import answering, make_trainer, questions

WIDTHS = (60, 80, 120, 200)
LABELS = "step  reward  exact match  entropy"
WIDE_LABELS = "turns  call errors  taught  s/step"


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
    trainer.features["progress"].console = terminal.console
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
                wide = f"  {WIDE_LABELS}".removesuffix("  s/step" if width == 60 else "")
                wide = wide.removesuffix("  taught" if width == 60 and score == "exact match" else "")
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
    assert first[0].split()[-5:] == ["entropy", "turns", "call", "errors", "s/step"]  # not `taught`
    assert "step 2/3" in first[-2] and "eta -:--:--" in first[-2]


def test_without_an_environment_the_block_says_steps(terminal, tmp_path):
    shown = terminal(80)
    reward = [lambda completions, **kwargs: [float(len(text)) for text in completions]]
    trainer = make_trainer(
        tmp_path, env=None, script=None, reward_funcs=reward, max_completion_length=8, disable_tqdm=False
    )
    trainer.features["progress"].console = shown.console
    trainer.train()
    assert any(line.startswith("step 1/1 ") for line in shown.lines()) and shown.lines()[-1] == "  ended"


def test_no_color_has_no_colours(terminal, tmp_path):
    raw = {}
    for environment in ({}, {"NO_COLOR": "1"}):
        shown = terminal(80, **environment)
        trainer = make_trainer(tmp_path, disable_tqdm=False)
        trainer.features["progress"].console = shown.console
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
        tmp_path,
        env=Env,
        script=script,
        max_steps=2,
        num_generations=2,
        train_dataset=questions(4),
        disable_tqdm=False,
    )
    trainer.features["progress"].console = shown.console
    trainer.train()
    lines = [line for line in shown.block() if " x, last in step " in line]
    assert len(lines) == 2, shown.block()
    assert all(line.split()[0] == "4" and "step 2" in line for line in lines[:1])
    assert any("environment_error: Env.reset raised OSError: no disk at" in line for line in lines)
    text = "\n".join(shown.lines())
    assert text.count("Trajectories were lost for no fault of the policy") == 1


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


def test_without_a_terminal_a_step_is_a_line_with_what_it_taught_and_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    file = io.StringIO()
    trainer = answering(tmp_path, ["5", "lost", "55", "5"], max_steps=2)
    trainer.features["progress"].console = PlainConsole(file=file, width=400)
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
        progress = trainer.features["progress"]
        progress.console, progress.is_verbose = PlainConsole(file=file, width=400), is_verbose
        trainer.train()
        texts[is_verbose] = file.getvalue()
    for name in ("tokens/environment", "grad_norm", "stop/done"):
        assert f"  {name} " in texts[True] and name not in texts[False]


def test_processes_other_than_the_first_say_nothing():
    file = io.StringIO()
    progress = TrainingProgress()
    progress.console = PlainConsole(file=file)
    state = TrainerState(is_world_process_zero=False, max_steps=3)
    progress.on_train_begin(None, state, None)
    progress.on_log(None, state, None, logs={"reward": 1.0})
    progress.on_train_end(None, state, None)
    assert file.getvalue() == ""


def test_each_of_several_evaluation_sets_has_a_line_with_its_name_and_numbers():
    file = io.StringIO()
    progress, state = TrainingProgress(), TrainerState(max_steps=3)
    progress.console = PlainConsole(file=file, width=200)
    args = TrainingArguments()
    progress.on_train_begin(args, state, None)
    for prefix in ("eval", "eval_very_hard"):
        logs = {f"{prefix}_loss": 0.1, f"{prefix}_runtime": 2.0, f"{prefix}_reward": 0.5, f"{prefix}_env/em": 0.25}
        progress.on_log(args, state, None, logs=logs)
    progress.on_train_end(args, state, None)
    first, second = file.getvalue().splitlines()
    assert first == "step 0, evaluation: reward 0.5  exact match 0.25"
    assert second == "step 0, evaluation of very_hard: reward 0.5  exact match 0.25"


# -------------------------------------------------------------------- what is shown


def in_a_script(tmp_path, monkeypatch, file, **options):
    """What a script's `trainer.train()` prints: everything goes to `file`."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, file)
    trainer = make_trainer(tmp_path, max_steps=2, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("options", "has_block", "has_lines", "has_dict"),
    [
        ({}, True, False, False),
        ({"disable_tqdm": True}, False, True, False),
        ({"progress": "lines"}, False, True, False),
        ({"progress": "transformers", "disable_tqdm": True}, False, False, True),
        ({"progress": "none"}, False, False, False),
        ({"progress": "none", "disable_tqdm": True}, False, False, False),
    ],
)
def test_a_script_in_a_terminal_shows_the_block_unless_a_setting_says_otherwise(
    terminal, tmp_path, monkeypatch, options, has_block, has_lines, has_dict
):
    shown = terminal(200)
    monkeypatch.setenv("TERM", "xterm-256color")
    trainer = in_a_script(tmp_path, monkeypatch, shown.file, **{"disable_tqdm": False, **options})
    text = "\n".join(shown.lines())
    assert ("\nstep 2/2 ━" in text) is has_block, text
    assert ("step 1/2, " in text and "step 2/2, " in text) is has_lines, text
    assert ("environment  AddEnv\ndata         8 rows\nmethod       grpo, " in text) is (has_block or has_lines), text
    assert ("{'loss':" in text) is has_dict, text
    assert "it/s]" not in text
    assert "grad_norm" in trainer.state.log_history[0]  # as trackers get it


def test_a_script_prints_its_plan_once_and_says_what_it_trains_on_what_and_where_it_writes(tmp_path, monkeypatch):
    file = io.StringIO()
    trainer = in_a_script(tmp_path, monkeypatch, file, disable_tqdm=False, eval_dataset=questions(3), max_turns=3)
    trainer.train()
    assert file.getvalue().startswith(
        "model        Qwen2ForCausalLM on cpu, 1 process(es)\n"
        "environment  AddEnv\n"
        "data         8 rows; evaluation on 3 rows\n"
        "method       grpo, learning rate 0.001\n"
        "rollout      2 prompts x 4 trajectories, at most 3 turns and 160 tokens each, by transformers\n"
        "updates      1 per rollout, of 8 trajectories each; 2 steps in all\n"
        f"output       {tmp_path}\n\nstep 1/2, "
    )
    assert file.getvalue().count("environment  ") == 1


def test_a_plan_names_an_adapter_and_says_where_rows_come_from(tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path, env=partial(AddEnv), peft_config=lora)
    trainer.train_dataset = trl_dataset(None, trainer.args)
    plan = plan_of(trainer)
    assert (
        "Qwen2ForCausalLM, LoRA r=4 on cpu" in plan
        and "\nenvironment  AddEnv\ndata         made by the environment\n" in plan
    )
    stream = questions().to_iterable_dataset()
    both = {"easy": questions(2), "hard": questions(3)}
    plan = plan_of(make_trainer(tmp_path, env=None, train_dataset=stream, eval_dataset=both, reward_funcs=len_reward))
    assert "\nenvironment  none\ndata         a stream of rows; evaluation on 2 rows of easy, 3 rows of hard\n" in plan


def len_reward(completions, **columns):
    return [float(len(str(item))) for item in completions]


def test_a_script_elsewhere_has_a_line_a_step_and_the_bar_of_transformers_is_gone(tmp_path, monkeypatch):
    file = io.StringIO()
    in_a_script(tmp_path, monkeypatch, file, disable_tqdm=False)
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step ")]
    assert [line.partition(",")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert "it/s]" not in file.getvalue() and "{" not in file.getvalue()


def test_the_bar_of_transformers_stays_where_it_is_asked_for(tmp_path, monkeypatch):
    file = io.StringIO()
    in_a_script(tmp_path, monkeypatch, file, disable_tqdm=False, progress="transformers")
    assert "2/2 [" in file.getvalue() and "{'loss':" in file.getvalue()


def test_an_evaluation_outside_a_run_is_shown_while_it_samples_and_leaves_its_numbers(terminal, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    shown, seen = terminal(200), []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, shown.file)

    class Env(AddEnv):
        def reset(self, example):
            shown.draw()
            seen.append(shown.lines()[-1])
            return super().reset(example)

    trainer = make_trainer(tmp_path, env=Env, disable_tqdm=False, eval_dataset=questions(2), max_concurrency=1)
    trainer.features["progress"].console = shown.console
    trainer.evaluate()
    assert any(line.startswith("evaluation, batch 1: ") for line in seen), seen
    lines = shown.lines()
    assert not any("evaluation, batch" in line for line in lines) and sys.stdout is shown.file
    assert lines[-1].startswith("step 0, evaluation (") and "reward " in lines[-1]


def test_a_run_that_fails_gives_the_terminal_back(terminal, tmp_path):
    shown = terminal(80)

    class Env(AddEnv):
        def outcome_reward(self, trajectory):
            raise KeyError("label")

    trainer = make_trainer(tmp_path, env=Env, disable_tqdm=False)
    trainer.features["progress"].console = shown.console
    with pytest.raises(Exception, match="label"):
        trainer.train()
    num_threads = sum(thread.name == "terminal" for thread in threading.enumerate())
    assert num_threads == 0 and sum("step 0/1" in line for line in shown.lines()) == 1
