"""The card of a model, from facts alone: its results, and the lines that start the agent."""

import json
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from agent_r1_trl.advantages.estimators import ESTIMATORS
from agent_r1_trl.features.hub.card import CardFacts, licence_of, make_card, metrics, read_facts, read_scores
from agent_r1_trl.features.serve.chat_command import COMMAND
from agent_r1_trl.features.serve.command_agent import environment_of, read_conversation_arguments
from agent_r1_trl.settings import plain
from agent_r1_trl.tools import as_tool


def row(method, name, value, *, settings=None, **more):
    """A row of an `evaluation.json`, whose settings name the data set if `settings` say so."""
    return {
        "method": method, "dataset": name, "exact_match": value, "f1": value / 2, "num_examples": 40,
        "intervals": {"exact_match": [value - 0.125, value + 0.125], "f1": [None, None]}, "duration_s": 1.0,
        "settings": {"temperature": 0.0} | (settings or {}),
    }  # fmt: skip


HOTPOT = {"dataset_name": "hotpotqa/hotpot_qa", "dataset_config": "distractor", "dataset_split": "validation"}
LOCAL = {"dataset_name": "/home/ada/data/musique.jsonl"}
TABLE = {
    "rows": [
        row("base", "hotpotqa_hotpot_qa", 0.25, settings=HOTPOT),
        row("naive_rag", "hotpotqa_hotpot_qa", 0.375, settings=HOTPOT),
        row("model", "hotpotqa_hotpot_qa", 0.625, settings=HOTPOT),
        row("base", "musique", 0.125, settings=LOCAL),
        row("model", "musique", 0.5, settings=LOCAL) | {"pass@4": 0.75},
    ]
}


def card(*, evaluation=None, **facts):
    made = CardFacts(model_id="ada/adder", **facts)
    made.scores = read_scores(evaluation or {}, made.data)
    return ModelCard(make_card(made))


def section(text, heading):
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


# ---------------------------------------------------------------- results


def test_baselines_stand_beside_the_model_in_the_text():
    text = section(card(evaluation=TABLE).text, "Results")
    assert (
        text.count(
            "40 examples of `hotpotqa/hotpot_qa`, greedy; 95% intervals (bootstrap; Wilson's where each is 0 or 1)."
        )
        == 1
    )
    assert "| metric | base | naive\\_rag | model |" in text and "| metric | base | model |" in text
    assert "| exact\\_match | 0.25 (0.125 to 0.375) | 0.375 (0.25 to 0.5) | 0.625 (0.5 to 0.75) |" in text
    assert "| pass@4 |  | 0.75 |" in text and "| f1 | 0.125 | 0.1875 | 0.3125 |" in text
    assert text.index("### hotpotqa/hotpot\\_qa") < text.index("### data/musique.jsonl")
    assert "- naive\\_rag: one search" in text and "- closed" not in text and "/home/ada" not in text


def test_a_single_row_names_its_own_data_set_rather_than_that_of_the_training():
    facts = {"evaluation": row("model", "test", 0.5, settings=LOCAL | {"temperature": 0.7})}
    made = card(**facts, recipe={"eval_dataset_name": "other/data"})
    text = section(made.text, "Results")
    assert "40 examples of `data/musique.jsonl`, sampled at temperature 0.7;" in text
    assert "| exact\\_match | 0.5 (0.375 to 0.625) |" in text and "###" not in text


def test_what_is_no_finite_number_is_no_result():
    assert read_scores({"exact_match": float("nan"), "f1": float("inf"), "em": "0.5", "success": True}, {}) == []


@pytest.mark.parametrize("text", ['{"rows": 3}', '{"rows": ["x"]}', '{"f1": 0.5, "intervals": [1]}', "[]", "{"])
def test_a_file_that_is_no_evaluation_is_named(tmp_path, text):
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ValueError, match=r"evaluation.json: (holds no evaluation|cannot be read)"):
        read_facts(tmp_path, "ada/adder")


# ---------------------------------------------------------------- quick start


def started(**facts):
    """What the lines of the card start: the arguments of `chat`, and an environment."""
    text = section(card(**facts).text, "Quick start")
    install, line = re.search(r"```bash\n(.*?)\n```", text, re.DOTALL)[1].split("\n", 1)
    assert install == "pip install agent-r1-trl"
    program, command, *rest = shlex.split(line)
    assert f"{program} {command}" == COMMAND
    arguments = read_conversation_arguments("chat", rest)
    assert arguments.model_name_or_path == "ada/adder"
    return arguments, environment_of(arguments)()


def test_the_metrics_of_several_evaluation_sets_stand_beside_those_of_the_training():
    logged = {"reward": 0.25, "eval_hard_reward": 0.5, "eval_hard_env/em": 0.75, "eval_hard_loss": 1.0, "env/em": 0.0}
    assert list(metrics([logged])) == [
        "env/em",
        "eval_hard_env/em",
        "eval_hard_reward",
        "reward",
    ]


def test_the_quick_start_stands_in_front_of_all_other_sections_and_keeps_its_place():
    facts = {"recipe": {"env": "search_qa", "advantage_estimator": "grpo", "dataset_name": "a/b"}, "evaluation": TABLE}
    text = card(**facts).text
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Quick start" and headings.index("Method") > headings.index("Training settings") > 0
    assert headings[-3:] == ["Data", "Results", "Citations"]
    known = CardFacts(model_id="ada/adder", env="search_qa", recipe=facts["recipe"])
    mine = make_card(known, "# Mine\n\n## About\n\nx\n\n## Quick start\n\nold\n")
    assert re.findall(r"^## (.*)$", mine, re.MULTILINE)[:2] == ["About", "Quick start"] and "old" not in mine


def test_a_card_that_an_editor_on_windows_wrote_keeps_its_metadata():
    made = ModelCard(make_card(CardFacts(model_id="ada/adder"), "\ufeff---\r\nlicense: mit\r\n---\r\n# Mine\r\n"))
    assert made.data.license == "mit" and made.text.strip().startswith("# Mine")


@pytest.mark.parametrize("folder", ["/tmp/my agent", "/tmp/agent"])
def test_the_card_of_a_run_without_a_recipe_is_pushed_with_the_name_of_the_repository(folder):
    trained = make_card(CardFacts(model_id=folder, recipe={"env": "my.Env"}))
    assert f"chat {shlex.quote(folder)} --env my.Env" in trained
    pushed = make_card(CardFacts(model_id="ada/adder"), f"{trained}\nagent-r1-trl chat bob/other\n")
    assert "\nagent-r1-trl chat ada/adder --env my.Env\n" in pushed and folder not in pushed
    assert "\nagent-r1-trl chat bob/other" in pushed, "words of the user's"


def test_the_base_of_an_adapter_is_named_as_in_the_recipe(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/site/recipes/a/model"}))
    assert read_facts(tmp_path, "ada/adder").base_model == "/site/recipes/a/model"
    (tmp_path / "recipe.yaml").write_text("model_name_or_path: recipes/a/model\n")
    assert read_facts(tmp_path, "ada/adder").base_model == "recipes/a/model"


@pytest.mark.parametrize(("name", "found"), [("gae", ESTIMATORS["gae"]), ("own.py:rule", None)])
def test_the_estimator_is_that_of_the_recipe_whatever_the_trainer_is_called(tmp_path, name, found):
    (tmp_path / "recipe.yaml").write_text(f"trainer: own.py:MyPPO\nadvantage_estimator: {name}\n")
    assert read_facts(tmp_path, "ada/adder").estimator is found


def names(env):
    return [as_tool(item).name for item in env.tools]


def test_the_environment_of_a_recipe_is_started_with_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = Path('it\'s a "corpus".jsonl')
    corpus.write_text('{"id": "a", "title": "A", "contents": "b"}\n')
    given = {"retriever": str(corpus), "top_k": 3, "metric": "f1", "system_prompt": "Ä $HOME\n`x` 'y'", "tools": None}
    arguments, env = started(recipe={"env": "search_qa", "env_kwargs": given})
    assert (names(env), env.metric, env.system_prompt) == (["search"], "f1", given["system_prompt"])
    assert arguments.env_kwargs == {name: value for name, value in given.items() if value is not None}


def test_settings_that_the_model_was_trained_with_are_those_of_the_chat():
    recipe = {
        "chat_template_kwargs": {"a": 1e-05}, "max_tokens_per_turn": 48, "max_turns": 5,
        "max_observation_tokens": 64, "context": {"policy": "summarise", "turns": 2, "summary_tokens": 20,
        "summary_prompt": "Sum\nup: ``` it's"}, "max_completion_length": 320,
    }  # fmt: skip
    arguments, env = started(recipe=recipe)
    kept = {name: plain(getattr(arguments, name)) for name in recipe}
    assert kept == recipe | {"max_turns": 100, "max_completion_length": 8192}, "limits of a whole conversation"
    assert names(env) == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"env": "Local"}, "code of the training (`Local`)"),
        ({"recipe": {"max_turns": 3}}, "trained without tools"),
        ({"env": "Plain", "tools": [], "recipe": {"max_turns": 3}}, "trained without tools"),
        ({}, "not recorded here"),
    ],
    ids=["no import path", "no environment", "no tools", "nothing known"],
)
def test_where_no_import_path_is_known_the_card_says_what_is_missing(facts, said):
    _, env = started(**facts)
    assert names(env) == []
    assert said in card(**facts).text


# ---------------------------------------------------------------- licence, local paths


def test_the_licence_is_that_of_the_base_model_unless_the_user_names_one(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: ours\nlanguage: en\n---\n# Base\n")
    known = licence_of(str(tmp_path))
    assert known == {"license": "other", "license_name": "ours"}
    assert licence_of("") == licence_of("nobody/has-this") == licence_of(str(tmp_path / "none")) == {}
    metadata = card(license=known).data.to_dict()
    assert (metadata["license"], metadata["license_name"]) == ("other", "ours")
    metadata = card(license=known, own_license="mit").data.to_dict()
    assert metadata["license"] == "mit" and "license_name" not in metadata
    before = "---\nlicense: gpl-3.0\nlicence: license\n---\n# A\n"
    kept = make_card(CardFacts(model_id="ada/adder", license=known), before)
    assert "license: gpl-3.0" in kept and "licence:" not in kept


def test_a_card_shows_no_path_of_this_machine():
    home = "/home/ada/projects"
    recipe = {
        "env": f"{home}/task.py:MyEnv", "env_kwargs": {"retriever": f"{home}/corpus.jsonl", "more": [f"{home}/b"]},
        "dataset_name": f"{home}/train.jsonl", "model_name_or_path": f"{home}/model",
    }  # fmt: skip
    text = card(recipe=recipe, base_model=f"{home}/model", env=recipe["env"]).text
    assert "projects/corpus.jsonl" in text and "projects/train.jsonl" in text and "projects/model" in text
    assert "/home" not in text
