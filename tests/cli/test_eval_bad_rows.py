"""`agent-r1-trl eval` on data sets and environments that are broken in part: the rest is scored, what failed is named.

Covered: rows, tags, names of data sets, what the command leaves and says. Not covered: files that cannot be read
(test_rows_of_files.py).
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE

ENVS = """
from agent_r1_trl import SearchQAEnv


class Shelf:
    def search(self, query, top_k):
        return []


class ShelfEnv(SearchQAEnv):
    def __init__(self):
        super().__init__(Shelf(), answer_tag=False)


class BuggyEnv(ShelfEnv):
    def reset(self, example):
        return "no list" if example["id"] == "q4" else super().reset(example)

    def step(self, message):
        if self.example["id"].startswith("b"):
            raise OSError("the game is over")
        return super().step(message)

    def outcome_reward(self, trajectory):
        if self.example["id"] == "q1":
            return self.example["column"]
        if self.example["id"] == "q2":
            raise SystemExit(3)
        return float("nan") if self.example["id"] == "q3" else super().outcome_reward(trajectory)
"""


def row(index, **columns):
    return {"id": f"q{index}", "question": f"What is {index} + {index}?", "answer": [str(2 * index)]} | columns


def write(path, *rows):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in rows), encoding="utf-8")


@pytest.fixture
def flags(recipe):
    """The arguments of an evaluation whose data sets are `test.jsonl` unless `--datasets` follows."""
    path = recipe(env="task.py:ShelfEnv", output_dir="scores", max_completion_length=200)
    Path("task.py").write_text(ENVS)
    return ["eval", "--config", path]


def read_result(folder="scores"):
    return json.loads(Path(folder, "evaluation.json").read_text(encoding="utf-8"))


def without(name, **columns):
    return {key: value for key, value in row(9, **columns).items() if key != name}


def test_rows_that_the_environment_refuses_are_counted_and_named_and_the_others_scored(flags):
    bad = [
        without("question", id="no-question"),
        row(1, id="empty", answer=[]),
        row(2, id="blank", answer=None),
        row(3, id="prompt", question=None, prompt=[{"role": "alien", "content": "x"}]),
        row(4, id="of-blanks", answer=[None]),
    ]
    write("test.jsonl", row(0), *bad, {**bad[0], "id": "also-no-question"}, row(5))
    assert main(flags) == 0
    result = read_result()
    assert (result["num_examples"], result["lost_rate"]) == (8, 6 / 8)
    causes = result["failures"].split("; ")
    assert causes[0].startswith("2 x ") and "'prompt' nor 'question'" in causes[0] and "'no-question'" in causes[0]
    assert len(causes) == 5
    for name, words in {
        "empty": "golds=[]",
        "blank": "no gold answer",
        "prompt": "alien",
        "of-blanks": "[None]",
    }.items():
        (cause,) = [cause for cause in causes if f"first in example {name!r}" in cause]
        assert words in cause
    assert result["turns"] == 2
    note = Path("scores/evaluation.md").read_text().splitlines()[-1]
    assert note.startswith("- test, model: 75.0% of the trajectories were lost") and "2 x environment_error" in note
    assert "| lost |" in Path("scores/evaluation.md").read_text().splitlines()[0]


def test_bugs_of_the_environment_end_their_rows_alone(flags):
    write("test.jsonl", *(row(index) for index in range(6)))
    assert main([*flags, "--env", "task.py:BuggyEnv"]) == 0
    result = read_result()
    assert result["lost_rate"] == 4 / 6 and result["reward"] == -1.0
    for words in (
        r"BuggyEnv.outcome_reward raised KeyError: 'column' \(.*task.py, line 26\) \(first in example 'q1'\)",
        "SystemExit 3",
        "outcome_reward returned nan: must be a finite number",
        "BuggyEnv.reset returned 'no list'",
    ):
        assert re.search(words, result["failures"]), words


def test_a_set_of_which_nothing_can_be_rolled_out_leaves_the_figures_of_the_others(flags, capsys):
    write("test.jsonl", row(0))
    write("bad.jsonl", row(0, id="b0"), row(1, id="b1"))
    flags += ["--env", "task.py:BuggyEnv", "--datasets", "bad.jsonl", "test.jsonl"]
    assert main(flags) == EXIT_INFRASTRUCTURE
    printed = capsys.readouterr()
    assert "error: nothing could be sampled of: bad, model." in printed.err
    assert (
        "bad, model: 100.0% of the trajectories were lost" in printed.out
        and "the game is over (first in example 'b0')" in printed.out
    )
    bad, good = read_result()["rows"]
    assert "exact_match" not in bad and good["exact_match"] == 0.0
    assert main([*flags, "--journal.replay", "scores", "--output_dir", "again"]) == EXIT_INFRASTRUCTURE
    assert [item.get("exact_match") for item in read_result("again")["rows"]] == [None, 0.0]


def test_one_of_the_first_rows_must_start_before_the_model_is_loaded(flags, refusal):
    bad = [without("question", id=f"b{index}") for index in range(5)]
    write("some.jsonl", *bad[:4], row(0))
    assert main([*flags, "--datasets", "some.jsonl"]) == 0
    assert read_result()["lost_rate"] == 4 / 5
    write("some.jsonl", *bad, row(0))
    message = refusal(*flags, "--datasets", "some.jsonl", "--model", "./nowhere")
    assert "first rows of eval_dataset_name='some.jsonl'" in message and "neither 'prompt' nor 'question'" in message


def test_sets_of_one_name_are_kept_apart_and_one_set_twice_is_refused(flags, refusal):
    for folder, answer in (("a/b", "1"), ("a_b", "2")):
        write(f"{folder}/test.jsonl", row(0, id=answer))
    names = ["a/b/test.jsonl", "a_b/test.jsonl"]
    assert main([*flags, "--datasets", *names]) == 0
    folders = sorted(path.parent.name for path in Path("scores").glob("*/model"))
    assert folders == ["a_b_test", "b_test"]
    ids = [json.loads(Path("scores", name, "model/examples.jsonl").read_text())["example_id"] for name in folders]
    assert ids == ["2", "1"]
    assert "is given twice" in refusal(*flags, "--datasets", names[0], f"./{names[0]}")


def test_names_with_blanks_and_letters_of_all_kinds_are_printed_as_a_shell_reads_them(flags, capsys):
    name = "questions d'été 日本"
    write(f"{name}.jsonl", row(0, id="№ 1"))
    write("test.jsonl", row(0))
    assert main([*flags, "--datasets", f"{name}.jsonl", "test.jsonl", "--output_dir", "my scores"]) == 0
    hint = re.search(r"agent-r1-trl (view .*日本.*)", capsys.readouterr().out)[1]
    assert main(shlex.split(hint)) == 0
    assert "№ 1" in capsys.readouterr().out


def test_one_row_has_an_interval_of_one_point_and_ids_may_repeat_unless_rows_are_paired_by_them(flags, refusal):
    write("test.jsonl", row(0))
    assert main(flags) == 0
    assert read_result()["intervals"]["turns"] == [2.0, 2.0]
    write("test.jsonl", row(0), row(0, question="And?"), row(1))
    assert main([*flags, "--output_dir", "first"]) == 0
    assert main(["eval", "compare", "first", "first"]) == 0
    write("test.jsonl", row(1), row(0), row(0, question="And?"))
    assert main([*flags, "--output_dir", "second"]) == 0
    message = refusal("eval", "compare", "first", "second")
    assert "row 1 is 'q0' in the first and 'q1' in the second" in message


def test_rows_that_changed_under_their_id_are_named_when_evaluations_are_compared(flags, capsys):
    for folder, question in (("first", "Why?"), ("second", "Why not?")):
        write("test.jsonl", row(0), row(1, question=question))
        assert main([*flags, "--output_dir", folder]) == 0
    capsys.readouterr()
    assert main(["eval", "compare", "first", "first"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["eval", "compare", "first", "second"]) == 0
    assert "warning: first and second: the rows of 1 examples have the same id and another content ('q1' first)" in (
        capsys.readouterr().err
    )
    path = Path("second/examples.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"row": None}).replace(', "row": null', "") + "\n" for line in lines))
    assert main(["eval", "compare", "first", "second"]) == 0
    assert "warning" not in capsys.readouterr().err, "an older file does not say"
