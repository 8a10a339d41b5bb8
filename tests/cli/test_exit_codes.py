"""Exit codes of commands that end early; docs/when-things-fail.md lists them. 2, mistakes: each command's tests."""

import io
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from agent_r1_trl.cli import errors, main, train
from agent_r1_trl.features.reliability import signal_handlers
from agent_r1_trl.features.reliability.ranks import RankLostError
from agent_r1_trl.rollout.watchdog import LoopLostError
from tests.own_process import signal_this_process

HANGING = '''

class HangingEnv(AddEnv):
    """Waits in its step as long as there is a file `hang`."""

    def reset(self, example):
        Path(f"open-{id(self)}").touch()
        return super().reset(example)

    async def step(self, message):
        Path("stepping").touch()
        while Path("hang").exists():
            await asyncio.sleep(0.01)
        return await super().step(message)

    def close(self):
        Path(f"open-{id(self)}").unlink()
'''


@pytest.fixture
def interrupted(recipe):
    """`interrupted(signum, command, ...)`: the exit code of a command that gets a signal in its first rollout."""

    def run(signum, command, *flags):
        path = recipe(max_steps=1)
        task = Path("task.py")
        task.write_text("import asyncio\nfrom pathlib import Path\n" + task.read_text() + HANGING)
        Path("hang").touch()

        def interrupt():
            deadline = time.monotonic() + 60
            while not Path("stepping").exists():
                if time.monotonic() > deadline or ended.is_set():
                    return
                time.sleep(0.01)
            time.sleep(0.2)
            if not ended.is_set():
                signal_this_process(signum)

        ended = threading.Event()
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            return main([command, "--config", path, "--env", "task.py:HangingEnv", *flags])
        except SystemExit as end:
            return end.code
        finally:
            ended.set()

    return run


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.matrix)])
def test_an_interrupted_evaluation_closes_its_environments_and_says_what_was_finished(interrupted, capsys, signum):
    assert interrupted(signum, "eval", "--output_dir", "scores") == 128 + signum
    assert "interrupted: 0 of 2 trajectories finished" in capsys.readouterr().out
    assert not list(Path().glob("open-*"))
    assert not Path("scores/evaluation.json").exists()


def test_an_interrupted_chat_takes_the_message_back_and_goes_on(interrupted, capsys, monkeypatch):
    def press(signum, frame):  # as Python's own handler, with which `signal_this_process` sends nothing
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/mask\n"))
    before = signal.signal(signal.SIGINT, press)
    try:
        assert interrupted(signal.SIGINT, "chat") == 0
    finally:
        signal.signal(signal.SIGINT, before)
    out = capsys.readouterr().out
    assert out.index("(interrupted; the message is taken back)") < out.index("(nothing has been said)")
    assert not [*Path().glob("open-*")]


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.matrix), signal.SIGTERM])
def test_an_interrupted_training_closes_its_environments(interrupted, signum):
    assert interrupted(signum, "train") == 128 + signum
    assert not list(Path().glob("open-*"))


@pytest.mark.parametrize(("command", "lock"), [("train", "_run"), ("eval", "_eval")])
def test_a_run_that_begins_while_another_one_still_saves_may_be_tried_again(recipe, refusal, command, lock):
    path = recipe(max_steps=1, output_dir="out")
    hold = (
        "import sys, time; from pathlib import Path; from agent_r1_trl.trainers.checkpoints import output_lock\n"
        f"with output_lock(Path('out'), '{lock}.lock'):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            message = refusal(command, "--config", path, "--output_dir", "out", code=errors.EXIT_INFRASTRUCTURE)
        finally:
            other.kill()
    assert f"is in use by process {other.pid}" in message and "which has worked there since" in message


def test_an_environment_that_breaks_the_protocol_is_a_mistake_in_a_line(recipe, refusal):
    path = recipe(eval_dataset_name=None, env="task.py:Forgetful")
    with Path("task.py").open("a", encoding="utf-8") as task:
        task.write("\n\nclass Forgetful(AddEnv):\n    def step(self, message):\n        pass\n")
    message = refusal("train", "--config", path)
    assert message.startswith(
        "Forgetful.step returned None. Return a StepResult, or (observations, reward, done, info)."
    )
    assert "It was in example 'train" in message


def test_a_surprise_ends_with_a_traceback_which_python_gives_the_code_1(recipe, monkeypatch):
    def surprise(*arguments, **given):
        raise LookupError("oh")

    monkeypatch.setattr(train, "make_trainer", surprise)
    with pytest.raises(LookupError, match="oh"):
        main(["train", "--config", recipe(eval_dataset_name=None)])


@pytest.mark.parametrize("event", ["on_init_end", "on_train_begin", "on_step_end", "on_train_end"])
def test_an_error_in_a_callback_of_transformers_ends_with_its_class_event_and_line(recipe, refusal, event):
    path = recipe(eval_dataset_name=None, max_steps=1)
    with Path("task.py").open("a", encoding="utf-8") as task:
        task.write(
            "\n\nfrom transformers import TrainerCallback\n\n\nclass Wrong(TrainerCallback):\n"
            f"    def {event}(self, *arguments, **given):\n        raise LookupError('oh')\n"
        )
    line = Path("task.py").read_text(encoding="utf-8").count("\n")
    message = refusal("train", "--config", path, "--callbacks", "task.py:Wrong")
    assert message.startswith(
        f"callbacks: Wrong.{event} raised LookupError: oh ({Path('task.py').resolve()}, line {line})"
    )


def test_the_codes_are_those_of_the_documentation():
    assert (errors.EXIT_USAGE, errors.EXIT_INFRASTRUCTURE, RankLostError.exit_code) == (2, 3, 3)
    assert [signal_handlers.exit_code(signum) for signum in (signal.SIGTERM, signal.SIGINT)] == [143, 130]
    text = (Path(__file__).resolve().parents[2] / "docs" / "when-things-fail.md").read_text(encoding="utf-8")
    for code in (0, 1, 2, 3, 130, 138, 143):
        assert f"| {code} |" in text


def test_a_failure_to_close_hides_neither_the_exit_code_nor_the_cause(capsys):
    def fail(words):
        def run(**kwargs):
            raise LoopLostError(words) if kwargs else OSError(words)

        return run

    rollouts = types.SimpleNamespace(close=fail("engine is gone"))
    trainer = types.SimpleNamespace(train=fail("the loop ended"), env_factory=object, rollouts=rollouts)
    with pytest.raises(LoopLostError, match="the loop ended") as ended:
        train._train(trainer, None)
    assert ended.value.exit_code == errors.EXIT_INFRASTRUCTURE
    assert "could not be closed: OSError: engine is gone" in capsys.readouterr().err
