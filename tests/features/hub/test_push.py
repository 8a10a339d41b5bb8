"""`agent-r1-trl push` against a stand-in for the Hub: the same bytes arrive, and what the Hub refuses is said."""

import json
import re

import pytest
import yaml

from agent_r1_trl.cli import main
from agent_r1_trl.features.hub.card import split_card
from tests.features.hub.conftest import write_history
from tests.features.hub.secrets import secret_like
from tests.hub import READ_TOKEN, TOKEN

MODEL_FILES = {
    "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "recipe.yaml", "evaluation.json",
}  # fmt: skip
PRIVATE_KEY = secret_like("-----BEGIN {pem}PRIVATE KEY-----")


def push(*arguments):
    return main(["push", *map(str, arguments)])


def refusal(capsys, *arguments, code=2):
    assert push(*arguments) == code
    return capsys.readouterr().err


def test_the_bytes_that_arrive_are_those_of_the_files(hub, run_folder):
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    assert push(run_folder, "--repo_id", "ada/adder") == 0
    files = hub.files("ada/adder")
    assert set(files) == MODEL_FILES | {"README.md"}
    assert {name: files[name] for name in MODEL_FILES} == {name: before[run_folder / name] for name in MODEL_FILES}
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == before
    assert hub.private == set()
    assert push(run_folder, "--repo_id", "ada/adder") == 0, "a repository that is there is written again"


def test_a_private_repository_a_namespace_of_ones_own_and_a_critic(hub, run_folder):
    assert push(run_folder, "--repo_id", "adder", "--private", "--critic") == 0
    assert hub.private == {"ada/adder"}
    assert hub.files("ada/adder")["critic/critic.safetensors"] == (run_folder / "model.safetensors").read_bytes()


def test_nothing_private_goes_to_a_public_repository(hub, run_folder, capsys):
    hub.repos[("model", "ada/adder")] = {}
    message = refusal(capsys, run_folder, "--repo_id", "ada/adder", "--private")
    assert "private: ada/adder is there already, and is public" in message
    assert hub.files("ada/adder") == {}
    hub.private.add("ada/adder")
    assert push(run_folder, "--repo_id", "ada/adder", "--private") == 0


def test_a_card_of_the_users_keeps_its_words_and_gets_the_results_once(hub, run_folder):
    header = "---\nlicense: mit\ndatasets: data/train.jsonl\ntags: mine\n---\n\n"
    body = "# Mine\n\nWords.\n\n## Results\n\nold\n\n## Thanks\n\nAll.\n"
    (run_folder / "README.md").write_text(header + body)
    assert push(run_folder, "--repo_id", "ada/adder") == 0
    (run_folder / "README.md").write_bytes(hub.files("ada/adder")["README.md"])
    assert push(run_folder, "--repo_id", "ada/adder") == 0
    metadata, body = split_card(hub.files("ada/adder")["README.md"].decode())
    assert (metadata["license"], metadata["tags"][0]) == ("mit", "mine")
    assert "Words." in body and "All." in body and "\nold" not in body
    headings = re.findall(r"^## (.+)$", body, re.MULTILINE)
    assert len(headings) == len(set(headings)) and headings.index("Results") < headings.index("Thanks")


def test_a_dry_run_lists_the_files_and_reaches_nobody(hub, run_folder, capsys):
    write_history(run_folder)
    assert push(run_folder, "--repo_id", "ada/adder", "--dry_run") == 0
    out = capsys.readouterr().out
    for name in (*MODEL_FILES, "README.md"):
        assert re.search(rf"^  {re.escape(name)} +\d", out, re.MULTILINE), name
    assert "not sent: checkpoint-1/, critic/, journal/, optimizer.pt, trainer_state.json, training_args.bin" in out
    assert hub.requests == []


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("recipe.yaml", "a: 1\nkey: hf_" + "Q" * 34 + "\n", "recipe.yaml, line 2: Hugging Face token"),
        ("evaluation.json", '{\n"password": "correct horse"}', "under the name 'password'"),
        ("chat_template.jinja", f"x\ny\n{PRIVATE_KEY}", "chat_template.jinja, line 3: private key"),
        ("generation_config.json", '{"x": "' + TOKEN + '"}', "the value of HF_TOKEN"),
    ],
    ids=["a token", "a value under a name", "a private key", "a value of the environment"],
)
def test_nothing_leaves_with_a_secret_inside_until_its_file_is_allowed(hub, run_folder, capsys, name, text, kind):
    (run_folder / name).write_text(text)
    said = refusal(capsys, run_folder, "--repo_id", "ada/adder")
    assert kind in said and "Nothing was sent" in said and f"--allow_secrets {name}" in said
    assert "Q" * 34 not in said and "correct horse" not in said and TOKEN not in said
    assert hub.requests == [] and hub.repos == {}
    assert push(run_folder, "--repo_id", "ada/adder", "--allow_secrets", name) == 0
    assert hub.files("ada/adder")[name] == text.encode()


def test_a_secret_in_a_trajectory_stops_the_data_set(hub, run_folder, capsys):
    path = run_folder / "trajectories" / "step_000001.jsonl"
    path.write_text(path.read_text().replace("Hauptstadt?", f"use {secret_like('AKIA{16 upper}')}"))
    said = refusal(capsys, run_folder, "--repo_id", "ada/runs", "--trajectories")
    assert "data/train-00000.parquet, row 1: AWS access key" in said
    assert hub.repos == {}
    assert push(run_folder, "--repo_id", "ada/adder") == 0, "the model is another matter"
    assert push(run_folder, "--repo_id", "ada/runs", "--trajectories", "--allow_secrets", "data/*") == 0


# ---------------------------------------------------------------- what the Hub refuses


@pytest.mark.parametrize(
    ("token", "repo_id", "said"),
    [
        (None, "ada/adder", "hf auth login"),
        ("hf_" + "n" * 34, "ada/adder", "hf auth login"),
        (READ_TOKEN, "ada/adder", "a token that may write"),
        (TOKEN, "bob/adder", "a token that may write"),
    ],
    ids=["missing", "unknown", "may only read", "of another account"],
)
def test_a_token_that_is_missing_unknown_or_not_enough_is_said(
    hub, run_folder, capsys, monkeypatch, tmp_path, token, repo_id, said
):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", token or "")
    assert said in refusal(capsys, run_folder, "--repo_id", repo_id)
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("a: [", "metadata at the top of README.md: cannot be read"),
        ("- a\n- b", "metadata at the top of README.md: cannot be read"),
        ("summary: " + "long " * 20_000, "metadata is too long"),
    ],
    ids=["no YAML", "no mapping", "too long"],
)
def test_a_card_that_the_hub_refuses_is_named_and_no_file_arrives(hub, run_folder, capsys, header, said):
    (run_folder / "README.md").write_text(f"---\n{header}\n---\n\n# Mine\n")
    message = refusal(capsys, run_folder, "--repo_id", "ada/adder")
    assert said in message and "README.md" in message
    assert hub.repos.get(("model", "ada/adder"), {}) == {}


def test_a_hub_that_fails_or_cannot_be_reached_is_worth_another_try(hub, run_folder, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.broken = "/commit/"
    for hub.broken_status in (500, 408, 429):
        assert "the Hub failed" in refusal(capsys, run_folder, "--repo_id", "ada/adder", code=3)
        assert hub.files("ada/adder") == {}, "all files or none"
    hub.broken_status = 409
    assert "the Hub refuses this" in refusal(capsys, run_folder, "--repo_id", "ada/adder")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refusal(capsys, run_folder, "--repo_id", "ada/adder", code=3)


# ---------------------------------------------------------------- mistakes


def test_what_cannot_be_sent_is_refused_with_the_fix(hub, run_folder, capsys, tmp_path):
    for repo_id in ("a/b/c", "ada/x--y", "ada/" + "x" * 97):
        assert f"--repo_id {repo_id!r}" in refusal(capsys, run_folder, "--repo_id", repo_id)
    flags = (run_folder, "--repo_id", "ada/adder")
    assert "is no directory with weights" in refusal(capsys, tmp_path / "nowhere", *flags[1:])
    assert "--trajectories" in refusal(capsys, *flags, "--critic", "--trajectories")
    (run_folder / "critic" / "critic.safetensors").unlink()
    assert "(critic)" in refusal(capsys, *flags, "--critic")
    (run_folder / "recipe.yaml").write_text("a: [")
    assert "recipe.yaml: cannot be read" in refusal(capsys, *flags)
    (run_folder / "model.safetensors").unlink()
    (run_folder / "global_step1").mkdir()
    (run_folder / "global_step1" / "zero_pp_rank_0_model_states.pt").touch()
    assert "zero_to_fp32.py" in refusal(capsys, *flags)
    for name in ("checkpoint-8", "checkpoint-12"):  # a script that saved no model
        (run_folder / name).mkdir()
        (run_folder / name / "adapter_config.json").touch()
    assert f"Did you mean {run_folder / 'checkpoint-12'}?" in refusal(capsys, *flags)
    assert hub.requests == []


def test_an_environment_that_cannot_be_made_here_is_said_and_the_model_is_sent(hub, run_folder, capsys):
    (run_folder / "recipe.yaml").write_text(yaml.safe_dump({"env": "no_such_module.Env"}))
    (run_folder / "evaluation.json").write_text(json.dumps({"exact_match": None}))
    assert push(run_folder, "--repo_id", "ada/adder") == 0
    assert "warning" in capsys.readouterr().err
    body = hub.files("ada/adder")["README.md"].decode()
    assert "`no_such_module.Env`" in body and "## Results" not in body


def test_a_card_of_an_odd_form_is_completed_and_one_that_is_no_text_is_named(hub, run_folder, capsys):
    (run_folder / "README.md").write_text("---\ntags: 3\ndatasets: {a: b}\n---\n# Mine\n")
    assert push(run_folder, "--repo_id", "ada/adder") == 0
    assert "# Mine" in hub.files("ada/adder")["README.md"].decode()
    (run_folder / "README.md").write_bytes(b"# \xff")
    assert "README.md: cannot be read" in refusal(capsys, run_folder, "--repo_id", "ada/adder")


# ---------------------------------------------------------------- trajectories


def test_the_pushed_trajectories_are_the_data_set_that_export_writes(hub, run_folder):
    assert push(run_folder, "--repo_id", "ada/runs", "--trajectories", "--private") == 0
    files = hub.files("ada/runs", "dataset")
    assert set(files) == {"README.md", "data/train-00000.parquet", "data/eval-00000.parquet"}
    metadata, _ = split_card(files["README.md"].decode())
    assert metadata["configs"][0]["data_files"][0] == {"split": "train", "path": "data/train-*.parquet"}
    assert hub.private == {"ada/runs"}
