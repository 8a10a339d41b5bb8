"""What commands print ends its lines between words in a terminal, and is whole lines elsewhere."""

import io

import pytest

from agent_r1_trl.display.console import PlainConsole, folded

COMMAND = "agent-r1-trl view outputs/my-agent --filter unsolved"
SUMMARY = f"""
reward          -0.38 at step 1, 0.52 at step 12, best 0.72 at step 11
taught nothing  0 of 12 rollouts (0%)
The reward fell: the model at the end is worse than the one at the start. Set a lower learning_rate.
unsolved        32 of the last rollout: {COMMAND}
  agent-r1-trl eval --config outputs/my-agent/recipe.yaml --model outputs/my-agent --output_dir scores"""


def test_a_summary_is_folded_between_words_under_its_labels_and_a_command_stays_whole():
    assert folded(SUMMARY, 60).split("\n") == [
        "",
        "reward          -0.38 at step 1, 0.52 at step 12, best 0.72",
        "                at step 11",
        "taught nothing  0 of 12 rollouts (0%)",
        "The reward fell: the model at the end is worse than the one",
        "at the start. Set a lower learning_rate.",
        "unsolved        32 of the last rollout:",
        f"  {COMMAND}",
        SUMMARY.rpartition("\n")[2],
    ]
    assert folded(SUMMARY, 120) == SUMMARY


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_word_is_cut_at_the_edge_of_a_terminal(terminal, width):
    shown, prose = terminal(width), SUMMARY.strip().rpartition("\n")[0]
    shown.console.print(prose)
    assert " ".join(word for line in shown.lines() for word in line.split()) == " ".join(prose.split())


def test_elsewhere_lines_are_whole():
    for options in ({}, {"force_terminal": True}):  # FORCE_COLOR in a CI
        console = PlainConsole(file=io.StringIO(), width=40, soft_wrap=True, **options)
        console.print(SUMMARY)
        assert console.file.getvalue() == f"{SUMMARY}\n"


def test_a_word_that_is_too_long_has_a_line_of_its_own():
    path = "/a/very/long/path/of/a/run/that/has/no/blank"
    assert folded(f"output   {path}", 30) == f"output   {path}"
    assert folded(f"The model is in {path}, all of it", 30) == f"The model is in\n{path},\nall of it"
