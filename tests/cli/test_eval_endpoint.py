"""`agent-r1-trl eval --endpoint`: a hosted model in the table, beside baselines; its key; broken endpoints.

Covered: the command. Not covered: requests (tests/generation/test_endpoint.py), rollouts
(tests/rollout/test_hosted.py).
"""

import json
from pathlib import Path

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.recording import read_records
from tests.hosted import called, error, hosted, said, whole

KEY = "sk-very-secret-4711"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def read_table(folder="scores"):
    content = json.loads(Path(folder, "evaluation.json").read_text())
    return content.get("rows", [content])


def answer(body):
    """A model that searches if it can, and else answers at once."""
    has_searched = any(message["role"] == "tool" for message in body["messages"])
    message = said("4") if has_searched or not body.get("tools") else called(("search", {"query": "sum"}))
    return whole(message, num_messages=len(body["messages"]))


@pytest.fixture
def search_recipe(write_search_task, recipe):
    path = recipe(env="task.py:ShelfEnv", output_dir="scores", max_completion_length=200)
    write_search_task(test=4)
    return path


def test_a_hosted_model_stands_in_the_table_beside_its_baselines_and_a_model_of_ours(
    search_recipe, model_folder, capsys
):
    flags = ["--baselines", "base", "naive_rag", "closed_book"]
    with hosted([answer]) as (url, seen, _):
        assert main(["eval", "--config", search_recipe, "--endpoint", url, "--model", "gpt", *flags]) == 0
    rows = {row["method"]: row for row in read_table()}
    assert list(rows) == ["base", "naive_rag", "closed_book", "model"]
    assert rows["base"]["settings"]["model"] == str(model_folder)
    assert {row["settings"]["model"] for name, row in rows.items() if name != "base"} == {f"gpt at {url}/v1"}
    hosted_rows = [rows[name] for name in ("naive_rag", "closed_book", "model")]
    assert [(row["exact_match"], row["turns"], row["tool_calls"]) for row in hosted_rows] == [
        (0.25, 1, 1), (0.25, 1, 0), (0.25, 2, 1),
    ]  # fmt: skip
    # Two messages (100 + 10 tokens), then four; 7 tokens are sampled in each turn.
    assert [(row["input_tokens"], row["sampled_tokens"]) for row in hosted_rows[1:]] == [(110, 7), (240, 14)]
    assert [row["settings"]["requests"] for row in hosted_rows] == [{"requests": 4}, {"requests": 4}, {"requests": 8}]
    assert {headers["Authorization"] for headers in seen.headers} == {f"Bearer {KEY}"}
    assert f"- model: gpt at {url}/v1, greedy, 1 attempt" in Path("scores/evaluation.md").read_text()
    capsys.readouterr()
    assert main(["eval", "compare", "scores/test/base", "scores/test/model", "--metric", "exact_match"]) == 0
    assert main(["view", "scores/test/model", "--terminal", "--index", "2"]) == 0
    printed = capsys.readouterr().out
    assert "exact_match" in printed and "search({'query': 'sum'})" in printed and "test2" in printed
    everything = b"".join(path.read_bytes() for path in Path().rglob("*") if path.is_file())
    assert KEY.encode() not in everything


def test_neither_recipe_nor_files_are_needed_and_the_key_may_be_named_or_missing(recipe, monkeypatch, caplog):
    recipe()
    flags = ["--env", "task.py:AddEnv", "--dataset", "test.jsonl", "--model", "gpt"]
    caplog.set_level("DEBUG")
    with hosted() as (url, seen, _):
        assert main(["eval", "--endpoint", url, *flags, "--endpoint_options", "{top_k: 5}"]) == 0
        monkeypatch.setenv("OTHER_KEY", "other-secret")
        assert main(["eval", "--endpoint", url, *flags, "--api_key_env", "OTHER_KEY"]) == 0
        monkeypatch.delenv("OPENAI_API_KEY")
        assert main(["eval", "--endpoint", url, *flags]) == 0
    sent = [headers.get("Authorization") for headers in seen.headers]
    assert sent == [*[f"Bearer {KEY}"] * 2, *["Bearer other-secret"] * 2, None, None]
    assert [body.get("top_k") for body in seen.bodies] == [5, 5, None, None, None, None]
    assert KEY not in caplog.text and "other-secret" not in caplog.text


def test_settings_of_the_recipe_that_a_hosted_model_does_not_know_stay_with_the_trained_one(recipe):
    path = recipe(context={"policy": "window", "turns": 1}, top_k=7, repetition_penalty=1.1, dtype="float32")
    with hosted() as (url, seen, _):
        assert main(["eval", "--config", path, "--endpoint", url, "--model", "gpt", "--output_dir", "scores"]) == 0
    assert set(seen.bodies[0]) == {"model", "messages", "max_tokens", "temperature", "tools"}
    (row,) = read_table()
    assert row["settings"]["limits"]["context"]["policy"] == "keep"
    assert row["settings"]["played"].startswith("greedy, 1 attempt")


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (error(401, f"bad key {KEY}"), 2, "cannot be asked (HTTP 401: bad key [secret"),
        (error(404, "no model"), 2, "cannot be asked (HTTP 404: no model)"),
        (error(402, "pay"), 3, "no credit left (HTTP 402: pay)"),
    ],
    ids=str,
)
def test_an_endpoint_that_will_not_answer_ends_the_evaluation_at_once(recipe, refusal, fault, code, words):
    flags = ["--config", recipe(), "--model", "gpt", "--endpoint_concurrency", "1", "--output_dir", "scores"]
    with hosted(faults=[fault] * 9) as (url, seen, model):
        message = refusal("eval", *flags, "--endpoint", url, code=code)
        assert len(seen.bodies) == 1 and words in message and KEY not in message
        model.faults.clear()
        assert main(["eval", *flags, "--endpoint", url]) == 0  # the same command goes on


def test_what_failed_is_said_and_the_same_command_rolls_it_out_again_and_nothing_else(recipe, refusal, capsys):
    rows = [{"id": f"q{i}", "prompt": f"What is {i}?"} for i in range(3)]
    flags = ["--config", recipe(), "--model", "gpt", "--endpoint_concurrency", "1", "--output_dir", "scores"]
    Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with hosted([said("five")], [error(400, "strange")]) as (url, seen, model):
        flags += ["--endpoint", url]
        assert main(["eval", *flags]) == 0
        printed = capsys.readouterr().out
        assert (
            "1 of 3 trajectories were lost for no fault of the model. The same command samples those again" in printed
        )
        assert read_table()[0]["lost_rate"] == pytest.approx(1 / 3)
        assert "endpoint_options was" in refusal("eval", *flags, "--endpoint_options", "{seed: 1}")
        seen.bodies.clear()
        assert main(["eval", *flags]) == 0
        assert [body["messages"][-1]["content"] for body in seen.bodies] == ["What is 0?"]
        assert read_table()[0]["lost_rate"] == 0
        assert len(list(read_records("scores", split="eval"))) == 3
        seen.bodies.clear()
        assert main(["eval", *flags]) == 0  # it had ended: all of it, once more
        assert len(seen.bodies) == 3
        model.faults = [error(400, "strange")] * 3
        message = refusal("eval", *flags, code=3)
        assert "3 x generation_error: RefusedRequestError: HTTP 400: strange" in message
        assert main(["eval", *flags]) == 0


def test_of_several_hosted_models_it_is_not_known_which_rolls_out_a_baseline(search_recipe, refusal):
    with hosted([answer]) as (url, seen, server):
        server.models.append("org/small")
        flags = ["eval", "--config", search_recipe, "--endpoint", url, "--models", "gpt", "org/small"]
        assert "which of the hosted models gpt, org/small" in refusal(*flags, "--baselines", "closed_book")
        assert not seen.bodies
        assert main(flags) == 0
    rows = read_table()
    assert [row["method"] for row in rows] == ["gpt", "small"]
    assert [row["settings"]["model"] for row in rows] == [f"gpt at {url}/v1", f"org/small at {url}/v1"]
