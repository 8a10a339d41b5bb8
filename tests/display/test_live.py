"""A block of lines at the bottom of a terminal, looked at on a screen."""

import io
import logging
import sys

import pytest
import tqdm
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.display.live import LiveBlock, has_terminal


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


def test_a_table_of_another_console_of_rich_stands_above_the_block_of_which_there_is_one_copy(terminal, monkeypatch):
    """As TRL prints completions."""
    shown = terminal(80, 12)
    monkeypatch.setattr(sys, "stdout", shown.file)
    monkeypatch.setattr(sys, "stderr", shown.file)
    block = LiveBlock(PlainConsole(width=80, height=12, _environ={"TERM": "xterm"}), lambda *size: [Text("the block")])
    block.start()
    table = Table("number")
    for number in range(30):
        table.add_row(f"row {number}")
    Console(width=80).print(table)
    block.stop()
    history = ["".join(line[column].data for column in range(80)) for line in shown.history()]
    lines = [line.strip() for line in [*history, *shown.lines()]]
    assert sum(line == "the block" for line in lines) == 1 and lines[-1] == "the block"
    assert [f"row {number}" in "\n".join(lines) for number in range(30)] == [True] * 30


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
