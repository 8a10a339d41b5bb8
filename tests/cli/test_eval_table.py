"""`agent-r1-trl eval` as a table: several data sets, baselines, files, and what is refused.

Covered: which rows there are, who samples them, what is written. Not covered: baselines (tests/test_baselines.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.cli.eval import planned_models
from agent_r1_trl.evaluation.result import EvaluationResult
from agent_r1_trl.evaluation.table import EvaluationTable, TableRow
from agent_r1_trl.recording import read_records


@pytest.fixture
def search_recipe(write_search_task, recipe):
    """A recipe with a search environment, and a second data set `more.jsonl`."""
    path = recipe(env="task.py:ShelfEnv", output_dir="scores", max_observation_tokens=64, max_completion_length=200)
    write_search_task(train=2, test=2, more=2)
    return path


@pytest.fixture
def other_model(model_folder, tmp_path):
    """A second directory with the same model."""
    folder = tmp_path / "trained"
    folder.symlink_to(model_folder)
    return str(folder)


def test_methods_and_data_sets_make_the_rows_of_one_table(search_recipe, model_folder, other_model, capsys):
    flags = ["--model", other_model, "--datasets", "test.jsonl", "more.jsonl"]
    assert main(["eval", "--config", search_recipe, *flags, "--baselines", "base", "naive_rag", "closed_book"]) == 0
    rows = json.loads(Path("scores/evaluation.json").read_text())["rows"]
    methods = ["base", "naive_rag", "closed_book", "model"]
    assert [(row["dataset"], row["method"]) for row in rows] == [(d, m) for d in ("test", "more") for m in methods]
    assert [row["settings"]["model"] for row in rows[:4]] == [*[str(model_folder)] * 3, other_model]
    assert [row["settings"]["limits"]["max_turns"] for row in rows[:4]] == [2, 1, 1, 2]
    assert rows[1]["tool_calls"] == 1 and rows[2]["tool_calls"] == 0
    markdown = Path("scores/evaluation.md").read_text().splitlines()
    assert markdown[0].startswith("| data set | method | examples | EM | F1 | reward | turns | calls | tokens |")
    assert markdown[3].startswith("| test | naive_rag | 2 | 0.000 [0.000, 0.658] |")
    assert any(line.startswith(f"- base: {model_folder}, greedy, 1 attempt per example") for line in markdown)
    questions = [record.trajectory.prompt_messages[-1]["content"] for record in read_records("scores/test/naive_rag")]
    assert all("Four is the sum." in text and "Question: What is" in text for text in questions)
    printed = capsys.readouterr().out
    assert "agent-r1-trl view scores/more/model --terminal --split eval --step 0" in printed


@pytest.fixture
def copies(model_folder, tmp_path):
    """Two models in directories of the same name."""
    folders = [tmp_path / name / "checkpoint-8" for name in ("grpo", "ppo")]
    for folder in folders:
        shutil.copytree(model_folder, folder)
    return list(map(str, folders))


def test_several_models_stand_in_one_table_under_names_of_their_own(search_recipe, model_folder, copies, capsys):
    assert main(["eval", "--config", search_recipe, "--models", *copies, "--baselines", "base", "naive_rag"]) == 0
    rows = json.loads(Path("scores/evaluation.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["base", "naive_rag", "grpo_checkpoint-8", "ppo_checkpoint-8"]
    assert [row["settings"]["model"] for row in rows] == [*[str(model_folder)] * 2, *copies]
    assert [row["tool_calls"] for row in rows[2:]] == [rows[0]["tool_calls"]] * 2  # the same weights
    capsys.readouterr()
    assert main(["eval", "compare", "scores/test/grpo_checkpoint-8", "scores/test/ppo_checkpoint-8"]) == 0
    assert "+0.000" in capsys.readouterr().out


def test_of_several_models_none_has_the_name_that_a_card_takes_for_its_own_models():
    arguments = SimpleNamespace(model_name_or_path=["old/model", "new/grpo"], baselines=None)
    assert list(planned_models(arguments)) == ["old_model", "new_grpo"]


def test_a_table_is_replayed_from_its_journals(search_recipe, other_model):
    flags = ["--config", search_recipe, "--model", other_model, "--baselines", "naive_rag"]
    assert main(["eval", *flags]) == 0
    assert main(["eval", *flags, "--journal.replay", "scores", "--output_dir", "again"]) == 0
    first, second = (
        [
            {name: value for name, value in row.items() if name not in ("settings", "duration_s")}
            for row in json.loads(Path(folder, "evaluation.json").read_text())["rows"]
        ]
        for folder in ("scores", "again")
    )
    assert first == second


def test_numbers_of_the_users_own_have_columns_with_intervals():
    rows = [
        {"right": (float(index % 2), 1.0), "reward": (1.0, 1.0), "valid_answer_rate": (1.0, 1.0)} for index in range(8)
    ]
    result = EvaluationResult.from_rows(rows, example_ids=[str(index) for index in range(8)])
    headings, ((*_, right),) = EvaluationTable(rows=[TableRow(method="a", dataset="b", result=result)]).cells()
    assert headings == ["data set", "method", "examples", "reward", "right"]
    assert right.startswith("0.500 [")


def test_attempts_and_tags_add_columns_and_lines(recipe, capsys):
    path = recipe()
    rows = [{"id": f"q{i}", "prompt": f"What is {i}?", "level": "easy" if i else "hard"} for i in range(3)]
    Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--num_generations", "2", "--temperature", "1", "--by", "level"]
    assert main(["eval", "--config", path, "--output_dir", "scores", *flags]) == 0
    result = json.loads(Path("scores/evaluation.json").read_text())
    assert {"pass@1", "pass@2", "pass^2", "solved_always", "solved_never"} <= set(result)
    by = result["by"]["level"]
    assert (by["hard"]["num_examples"], by["easy"]["num_examples"]) == (1, 2)
    assert (by["hard"]["pass@2"] + 2 * by["easy"]["pass@2"]) / 3 == pytest.approx(result["pass@2"])
    printed = capsys.readouterr().out
    assert "- level=hard" in printed and "sampled at temperature 1, 2 attempts per example" in printed
    examples = [json.loads(line) for line in Path("scores/examples.jsonl").read_text().splitlines()]
    assert [(item["example_id"], len(item["attempts"])) for item in examples] == [("q0", 2), ("q1", 2), ("q2", 2)]


def test_two_evaluations_are_compared_row_by_row(search_recipe, other_model, refusal, capsys):
    flags = ["--config", search_recipe, "--model", other_model]
    assert main(["eval", *flags, "--baselines", "closed_book"]) == 0
    assert main(["eval", *flags, "--baselines", "closed_book", "naive_rag", "--output_dir", "more"]) == 0
    capsys.readouterr()
    assert main(["eval", "compare", "scores", "more", "--metric", "exact_match", "turns"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("exact_match") == 2 and "reward" not in printed
    assert main(["eval", "compare", "scores/test/closed_book", "scores/test/model", "--metric", "turns"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "turns" in line)
    assert line.split() == ["turns", "1.000", "2.000", "+1.000", "[+1.000,", "+1.000]", "2", "0", "0"]
    both = ["scores/test/closed_book", "scores/test/model", "--metric", "turns", "--list"]
    assert main(["eval", "compare", *both, "higher"]) == 0
    printed = capsys.readouterr().out
    assert "turns is higher on 2 of 2 examples" in printed
    listed = [line.split() for line in printed.splitlines() if line.split()[:1] in (["test0"], ["test1"])]
    assert listed == [[name, "1.000", "2.000"] for name in ("test0", "test1")]
    assert main(["eval", "compare", *both, "lower"]) == 0 and "0 of 2 examples" in capsys.readouterr().out
    assert "--list: invalid choice: 'most'" in refusal("eval", "compare", *both, "most")
    one = [*flags, "--baselines", "closed_book", "--num_examples", "1"]
    assert main(["eval", *one, "--output_dir", "one"]) == 0
    assert "row 2 is 'test1' in the first and missing in the second" in refusal("eval", "compare", "scores", "one")
    page = ["view", "scores/test/model", "--html", "both.html", "--against"]
    assert main([*page, "more/test/closed_book"]) == 0
    assert "the panels differ" in refusal(*page, "one/test/model")
    assert "no row is in both" in refusal("eval", "compare", "scores", "more/test/naive_rag")
    assert "nowhere: holds no evaluation" in refusal("eval", "compare", "scores", "nowhere")
    assert "--metric emm" in refusal("eval", "compare", "scores", "more", "--metric", "emm")
    assert "required: B" in refusal("eval", "compare", "scores")


@pytest.mark.parametrize("examples", [None, b"\xff"])
def test_a_comparison_without_examples_or_of_what_is_no_evaluation_is_refused(tmp_path, refusal, examples):
    (tmp_path / "evaluation.json").write_text('{"method": "model", "dataset": "test", "f1": 1.0}')
    if examples is not None:
        (tmp_path / "examples.jsonl").write_bytes(examples)
    assert "examples.jsonl cannot be read" in refusal("eval", "compare", tmp_path, tmp_path)
    (tmp_path / "evaluation.json").write_text("[]")
    assert "holds no evaluation" in refusal("eval", "compare", tmp_path, tmp_path)
