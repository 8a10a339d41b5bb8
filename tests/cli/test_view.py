"""`agent-r1-trl view` on the terminal: which trajectories of a run are shown, and what is said where there are none.

Covered: choice of step, split and kind, the tokenizer, mistakes. Not covered: how a trajectory looks
(tests/recording/test_terminal.py), the page (tests/features/inspector).
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.testing import make_tokenizer
from agent_r1_trl.trajectory import StopReason
from tests.recording.examples import empty, two_turns


def short(name, **changes):
    return two_turns(example_id=name, **changes)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run: one trajectory after step 1, four after step 2, one of an evaluation."""
    folder = tmp_path_factory.mktemp("run")
    store = TrajectoryStore(folder)
    store.write(1, [short("early")])
    last = [
        short("right", info={"em": 1.0}),
        short("wrong", info={"em": 0.0}),
        short("cut", info={"em": 0.0}, stop_reason=StopReason.MAX_TURNS),
        empty(),
    ]
    store.write(2, last)
    store.write(2, [short("judged")], split="eval")
    make_tokenizer("qwen2_5").save_pretrained(folder)
    return folder


@pytest.fixture
def view(capsys):
    def run(*arguments):
        capsys.readouterr()
        assert main(["view", "--terminal", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


def test_by_default_the_first_three_of_the_last_step_are_shown(run_folder, view):
    shown = view(run_folder)
    assert [f"step 2, index {index}, " in shown for index in range(4)] == [True, True, True, False]
    assert "step 1" not in shown and "judged" not in shown
    assert "3 of 4 shown; --num, --index, --filter and --list choose others." in shown


def test_a_step_a_number_and_an_index_are_obeyed(run_folder, view):
    assert "early" in view(run_folder, "--step", 1)
    assert "step 2, index 3, " in view(run_folder, "--num", 4)
    listed = view(run_folder, "--list", "--num", 2, "--width", 150)
    assert "right" in listed and "cut" not in listed and "2 of 4 listed." in listed
    assert "\x1b[" not in view(run_folder, "--index", 0)
    assert "\x1b[38;5;32m" in view(run_folder, "--index", 0, "--color", "always")
    chosen = view(run_folder, "--index", 1)
    assert "wrong" in chosen and "right" not in chosen and "shown;" not in chosen


def test_an_evaluation_is_shown_on_request_and_where_there_is_nothing_else(run_folder, view, tmp_path):
    assert view(run_folder, "--split", "eval").startswith("evaluation, step 2, index 0, ")
    TrajectoryStore(tmp_path).write(0, [short("judged")], split="eval")
    assert "judged" in view(tmp_path)


@pytest.mark.parametrize("source", [".", "trajectories", "trajectories/step_000002.jsonl"])
def test_a_run_its_folder_and_a_file_show_the_same(run_folder, view, source):
    assert view(run_folder / source, "--width", 100) == view(run_folder, "--width", 100)


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "unsolved": ["wrong", "cut"],
        "solved": ["right"],
        "truncated": ["cut"],
        "call_errors": ["right", "wrong", "cut"],
        "invalid": ["right", "wrong", "cut"],
        "lost": ["-"],
    }.items(),
)
def test_a_filter_leaves_what_its_name_says(run_folder, view, name, expected):
    shown = view(run_folder, "--list", "--filter", name, "--width", 150)
    assert [word for word in ("right", "wrong", "cut") if word in shown] == [word for word in expected if word != "-"]
    assert ("prompt_too_long" in shown) == ("-" in expected)


def test_a_run_without_a_tokenizer_shows_messages_and_says_so(view, tmp_path):
    TrajectoryStore(tmp_path).write(0, [short("alone")])
    shown = view(tmp_path)
    assert "Hauptstadt?" in shown and "Pass --tokenizer, a directory or a Hub id." in shown


def test_the_tokenizer_of_a_checkpoint_or_of_the_evaluated_model_serves(run_folder, view, tmp_path):
    hint = "Pass --tokenizer"
    trained = tmp_path / "trained"
    TrajectoryStore(trained).write(0, [short("alone")])
    assert hint in view(trained)
    make_tokenizer("qwen2_5").save_pretrained(trained / "checkpoint-1")
    assert hint not in view(trained)
    evaluated = tmp_path / "evaluated"
    TrajectoryStore(evaluated).write(0, [short("alone")], split="eval")
    (evaluated / "evaluation.json").write_text("[half a fi")
    assert hint in view(evaluated)
    (evaluated / "evaluation.json").write_text(json.dumps({"settings": {"model": str(run_folder)}}))
    assert hint not in view(evaluated)


def test_a_real_run_is_shown_with_the_question_the_tokens_and_the_cause_of_the_advantage(finished_run, view):
    shown = view(finished_run / "out", "--index", 0, "--width", 80)
    assert re.search(r"(?m)^group of \d+: .+; grpo, scale_rewards group$", shown), shown
    assert re.search(r"(?m)^  = +\S+  advantage$", shown) and "recorded otherwise" not in shown, shown
    assert "What is" in shown and "<|im_start|>" in shown and "Pass --tokenizer" not in shown
    assert view(finished_run / "out", "--list", "--width", "150").count("max_") == 4


def test_an_example_is_listed_over_all_steps_and_shown_in_one(view, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-long-name/of-an-example/that-fills-the-line"
    store = TrajectoryStore(tmp_path)
    for step, reward in ((1, -1.0), (2, 0.5), (9, 1.0)):
        store.write(step, [short("other"), short(name, outcome_reward=reward)])
    store.write(2, [short(name, stop_reason=StopReason.MAX_COMPLETION_LENGTH)], split="eval")
    lines = view(tmp_path, "--example", name).splitlines()
    assert lines[0].strip() == name and max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[4:-1]]
    assert [(row[-7:-4], row[-2]) for row in rows] == [
        (["1", "1", "#3"], "-1.100"),
        (["2", "1", "#3"], "+0.400"),
        (["2", "0", "#3"], "+1.000"),
        (["9", "1", "#3"], "+0.900"),
    ]
    assert rows[2][0] == "eval" and "max_completion_length" in rows[2]
    assert len(view(tmp_path, "--example", name, "--split", "train").splitlines()) == 8
    shown = view(tmp_path, "--example", name, "--step", 2)
    assert "step 2, index 1, " in shown and "Hauptstadt?" in shown and "other" not in shown


MISTAKES = {
    "no run": ([], "required: RUN"),
    "a run that is not there": (["{run}/nope"], "/nope: no such"),
    "two runs": (["{run}", "other"], "'other'"),
    "a file of another kind": (["{run}/note.txt"], "note.txt"),
    "rows of something else": (["{run}/rows.jsonl"], "rows.jsonl, line 1"),
    "a row that lacks most": (["{run}/half.jsonl"], "half.jsonl.*prompt_ids"),
    "an empty file": (["{run}/none.jsonl"], "none.jsonl"),
    "an empty folder": (["{run}/empty"], "empty.*record_trajectories"),
    "a step that was not recorded": (["{run}", "--step", "9"], "--step 9.* 1 to 2"),
    "an index past the end": (["{run}", "--index", "9"], "--index 9.* 4 trajectories of step 2"),
    "a misspelt example": (["{run}", "--example", "earli"], "--example 'earli'.*6 examples.* mean 'early'"),
    "an unknown example": (["{run}", "--example", "?"], "--example '\\?'.*such as 'wrong'"),
    "an example of another step": (["{run}", "--example", "early", "--step", "2"], "4 examples of step 2"),
    "a filter without a match": (
        ["{run}", "--step", "1", "--filter", "lost"],
        "--filter lost.* 1 trajectories of step 1",
    ),
    "a filter that does not exist": (["{run}", "--filter", "bad"], "--filter: invalid choice: 'bad'.*unsolved"),
    "a filter's earlier name": (["{run}", "--filter", "failed"], "--filter: 'failed' .*Did you mean 'unsolved'"),
    "a split that does not exist": (["{run}", "--split", "test"], "--split: invalid choice: 'test'.*train.*eval"),
    "a word for a step": (["{run}", "--step", "x"], "--step: invalid int value: 'x'"),
    "no trajectories": (["{run}", "--num", "0"], "--num=0"),
    "no columns": (["{run}", "--width", "-3"], "--width=-3"),
    "a misspelt option": (["{run}", "--steps", "1"], "--steps.* mean '--step'"),
    "a file beside an option of the terminal": (["{run}", "--html", "a.html"], "--html: .*--terminal"),
    "another run beside an option of the terminal": (["{run}", "--list", "--against", "{run}"], "--against: .*--"),
    "a server beside an option of the terminal": (["{run}", "--serve"], "--serve: .*--terminal"),
    "a port beside an option of the terminal": (["{run}", "--port", "0"], "--port: .*--terminal"),
    "a tokenizer that is not there": (["{run}", "--tokenizer", "./nowhere"], "--tokenizer ./nowhere"),
}


@pytest.mark.parametrize(("arguments", "names"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_refused(run_folder, refusal, arguments, names):
    (run_folder / "note.txt").write_text("hello")
    (run_folder / "rows.jsonl").write_text('{"question": "Who?"}\n')
    (run_folder / "half.jsonl").write_text('{"completion_ids": [1], "turns": []}\n')
    (run_folder / "none.jsonl").write_text("")
    (run_folder / "empty").mkdir(exist_ok=True)
    message = refusal("view", "--terminal", *(argument.replace("{run}", str(run_folder)) for argument in arguments))
    assert re.search(names, message), message


def test_a_folder_for_the_page_is_refused(run_folder, refusal):
    message = refusal("view", run_folder, "--html", run_folder)
    assert message.startswith(f"--html {run_folder}: is a directory. Pass the name of a file")


REMOTE_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()
class Own(PreTrainedTokenizerFast):
    pass
"""


def test_code_that_comes_with_a_tokenizer_runs_only_if_it_is_trusted(run_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "own", tmp_path / "it_ran"
    make_tokenizer("qwen2_5").save_pretrained(folder)
    (folder / "own.py").write_text(REMOTE_CODE.format(marker=str(marker)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for command in (
        ["view", str(run_folder), "--terminal", "--tokenizer", str(folder)],
        ["doctor", "--model", str(folder), "--env", "agent_r1_trl.testing.toys.AddEnv"],
    ):
        assert main(command) != 0
        said = "".join(capsys.readouterr())
        assert "trust_remote_code" in said and not marker.exists()
        main([*command, "--trust_remote_code", *(["true"] if command[0] == "doctor" else [])])
        assert marker.exists()
        marker.unlink()
        for name in [name for name in sys.modules if name.startswith("transformers_modules.own")]:
            del sys.modules[name]


@pytest.mark.parametrize(("number", "code"), [(28, 3), (13, 2)])
def test_a_page_that_cannot_be_written_is_a_line(run_folder, monkeypatch, capsys, number, code):
    def write_page(run, path, *arguments, **given):
        raise OSError(number, "as the disk says", str(path))

    monkeypatch.setattr("agent_r1_trl.features.inspector.write_page", write_page)
    assert main(["view", str(run_folder)]) == code
    message = capsys.readouterr().err
    assert "as the disk says" in message and "inspector.html" in message
    assert ("Free space there, or pass --html with another file." in message) == (number == 28)
