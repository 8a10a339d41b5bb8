"""The bar of a training run fits its terminal: step, elapsed time and ETA are whole, and only the note is cut."""

import io
import re

import pytest

from agent_r1_trl.cli.console import PlainConsole
from agent_r1_trl.cli.progress import make_progress

NOTE = "reward 0.512  pass rate 0.125  exact match 0.25  turns 3.4  calls 2.1  failed calls 0.031  entropy 1.2"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_step_times_and_eta_are_whole_at_every_width_and_the_note_is_cut(width):
    console = PlainConsole(file=io.StringIO(), force_terminal=True, width=width)
    progress = make_progress(console)
    progress.add_task("training", total=1000, completed=250, note=NOTE)
    progress.add_task("evaluation", total=300, completed=3, note="")
    with console.capture() as capture:
        console.print(progress.get_renderable())
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capture.get().splitlines() if line.strip()]
    assert len(lines) == 2 and all(len(line) <= width for line in lines)
    assert re.match(r"training +\S+ +250/1000 0:00:00 eta +-:--:--", lines[0])
    note = lines[0].partition("-:--:--")[2].strip()
    assert note == NOTE if width == 200 else note.endswith("…") and NOTE.startswith(note[:-1])
    assert width == 60 or "reward 0.512" in note


def test_the_eta_of_steps_that_take_minutes_is_known_from_the_second_one_on():
    clock = [0.0]
    console = PlainConsole(file=io.StringIO(), force_terminal=True, width=80, get_time=lambda: clock[0])
    progress = make_progress(console)
    task = progress.add_task("training", total=10, note="")
    for seconds in (300, 600, 900):
        clock[0] = seconds
        progress.update(task, advance=1)
    assert progress.tasks[0].time_remaining == 7 * 300
