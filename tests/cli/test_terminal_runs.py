"""Commands in a terminal of their own, which they leave as it should be, whatever ends them."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_exit_codes import HANGING
from tests.display.terminals import Terminal
from tests.effort import for_release


def until(done, shown, process):
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline and process.poll() is None, "\n".join(shown.lines())
        time.sleep(0.1)


@pytest.fixture
def hanging(recipe, request):
    """Starts a command whose environments hang while the file `hang` is there; returns its terminal and process."""

    def start(name, wanted, **changes):
        path = recipe(**changes)
        task = Path("task.py")
        task.write_text("import asyncio\nfrom pathlib import Path\n" + task.read_text() + HANGING)
        Path("hang").touch()
        shown = Terminal(80)
        request.addfinalizer(shown.close)
        command = [sys.executable, "-m", "agent_r1_trl.cli", name, "--config", path, "--env", "task.py:HangingEnv"]
        ours = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        process = shown.start(command, env=ours | {"TERM": "xterm-256color"}, start_new_session=True)
        request.addfinalizer(process.kill)
        text = f"  rollout 0 of {wanted} done, {wanted} waiting for environment step, longest "
        until(lambda: any(text in line for line in shown.lines()), shown, process)
        return shown, process

    return start


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, *for_release(signal.SIGKILL)])
def test_a_training_that_is_ended_in_a_rollout_leaves_its_terminal_clean(hanging, signum):
    shown, process = hanging("train", 4, max_steps=1, failures={"save_on_signal": False})
    columns = ["step", "reward", "success", "entropy", "turns", "call", "errors", "taught", "s/step"]
    assert shown.block()[0].split() == columns
    shown.resize(60)  # of the window alone: the process has to find out
    until(lambda: [*shown.block(), ""][0].split() == columns[:-1], shown, process)
    process.send_signal(signum)
    process.wait(300)
    lines = shown.lines()
    assert not shown.screen.cursor.hidden and shown.screen.cursor.x == 0
    assert sum("step 0/1" in line for line in lines) == 1, "\n".join(lines)
    if signum == signal.SIGINT:
        assert process.returncode == 130 and lines[-1] == "interrupted"
    assert shown.screen.cursor.y == len(lines)


@pytest.mark.release
def test_an_evaluation_says_what_it_waits_for(hanging):
    shown, process = hanging("eval", 2)
    Path("hang").unlink()
    assert process.wait(300) == 0
    lines = shown.lines()
    assert any(line.startswith("evaluation 2/2 ━━━") and "100%" in line for line in lines), "\n".join(lines)
