"""Secrets in files: found in every form of file by line, and what is none is left alone."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from agent_r1_trl import safe_text
from agent_r1_trl.features.hub.secret_scan import (
    MAX_BINARY_BYTES,
    TOKEN_FORMS,
    SecretFoundError,
    check_files,
    scan_file,
)
from agent_r1_trl.recording import TrajectoryStore
from tests.recording.examples import two_turns
from tests.tokenizers import make_tokenizer

LETTERS = "aB3" * 20
EXAMPLES = {
    "Hugging Face token": ["hf_" + LETTERS[:34], "api_org_" + LETTERS[:34]],
    "API key (sk-...)": ["sk-" + LETTERS[:48], "sk-proj-" + LETTERS[:40], "sk-ant-api03-" + LETTERS[:40]],
    "AWS access key": ["AKIAIOSFODNN7EXAMPLE", "ASIA" + "A1" * 8],
    "AWS secret key": ["aws_secret_access_key = " + LETTERS[:40], 'AWS_SECRET_KEY": "' + LETTERS[:38] + "/+"],
    "GitHub token": ["ghp_" + LETTERS[:36], "github_pat_" + LETTERS[:50]],
    "GitLab token": ["glpat-" + LETTERS[:20]],
    "Google API key": ["AIza" + LETTERS[:35]],
    "Slack token": ["xoxb-12345678901-abcdef"],
    "Stripe key": ["sk_live_" + LETTERS[:24], "rk_live_" + LETTERS[:24]],
    "JSON web token": [f"eyJ{LETTERS[:20]}.eyJ{LETTERS[:20]}.{LETTERS[:20]}"],
    "npm token": ["npm_" + LETTERS[:36], "//registry.npmjs.org/:_authToken=" + LETTERS[:12]],
    "PyPI token": ["pypi-AgEIcHlwaS5vcmc" + LETTERS[:20]],
    "bearer token": ["Authorization: Bearer " + LETTERS[:24], "authorization=bearer " + LETTERS[:20]],
    "password in a URL": ["postgres://me:s3cr3t@db.internal:5432/x", "https://me:hunter2@example.org/a"],
    "password": ["password: hunter2!", "DB_PASSWORD=s3cr3t99", "passphrase = 0pen-sesame"],
    "private key": ["-----BEGIN PRIVATE KEY-----", "-----BEGIN OPENSSH PRIVATE KEY-----"],
}
NONE = [
    "hf_hub_download(repo)", "sk-learn", "sk-contrib-is-a-package-of-old", "risk-averse-decision-making-under-doubt",
    "AKIA", "the task-force-of-the-people", "glpat-", "-----BEGIN PUBLIC KEY-----", "task_live_", "eyJhbGciOi",
    "[secret: HF_TOKEN]", "https://huggingface.co:443/me", "git@github.com:me/repo", "https://u:${TOKEN}@host/",
    "npm_config", "password: str = field()", "password=password", "password: [secret: password]",
    "your password: please", "pypi-server", "Authorization: Bearer $TOKEN", "http://[::1]:8000/v1",
    "_authToken=${NPM_TOKEN}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_rules(monkeypatch):
    """None of the values that other tests noted."""
    monkeypatch.setattr(safe_text, "_rules", safe_text.SecretRules())


def kinds(path):
    return [(finding.line, finding.kind) for finding in scan_file(path)]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind in TOKEN_FORMS for text in EXAMPLES[kind]])
def test_a_token_is_found_in_text_json_parquet_and_bytes(tmp_path, kind, text):
    (tmp_path / "a.md").write_text(f"first\nsee '{text}' there\n")
    (tmp_path / "a.jsonl").write_text("{}\n" + json.dumps({"ids": [1], "x": [{"y": text}]}) + "\n")
    (tmp_path / "a.bin").write_bytes(b"\x80\0" + text.encode() + b"\0")
    pq.write_table(pa.table({"n": [1, 2], "x": [["a"], [f"<{text}>"]]}), tmp_path / "a.parquet")
    assert kinds(tmp_path / "a.md") == kinds(tmp_path / "a.jsonl") == kinds(tmp_path / "a.parquet") == [(2, kind)]
    assert kinds(tmp_path / "a.bin") == [(0, kind)]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_token_is_left_alone(tmp_path, text):
    (tmp_path / "a.md").write_text(text)
    assert scan_file(tmp_path / "a.md") == []


def test_names_decide_in_yaml_json_and_records_but_not_in_a_tokenizer(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "a: 1\nenv_kwargs:\n  password: correct horse\n  api_key: '[secret: api_key]'\n"
    )
    assert kinds(tmp_path / "recipe.yaml") == [(3, "a value under the name 'password'")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"rest": json.dumps({"api_key": "0123456789"})}))
    assert kinds(tmp_path / "a.jsonl") == [(1, "a value under the name 'api_key'")]
    make_tokenizer("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "special_tokens_map.json").write_text('{"image_token": "<|image_pad|>"}')
    assert [finding for path in (tmp_path / "model").iterdir() for finding in scan_file(path)] == []


@pytest.mark.parametrize("name", ["hf_token", "push_to_hub_token", "api_token"])
def test_a_token_of_the_hub_is_none_of_the_tokenizer(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", name: "correct horse"}, indent=1))
    assert kinds(tmp_path / "config.json") == [(3, f"a value under the name {name!r}")]


def test_what_a_trainer_saves_raises_no_alarm(tmp_path):
    (tmp_path / "notes.txt").write_text("password: Optional[str]\n")
    logs = [{"loss": 0.1, "tokens": 4096.0, "reward": 1.0, "step": step} for step in range(3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": logs, "best_metric": None}, indent=2))
    (tmp_path / "vocab.txt").write_text("[PAD]\npassword\n##token\nsk-\nhf_\nsecret\napi_key\nbearer\n://\n")
    weights = {f"model.layers.{index}.mlp.token_mixer.key_proj.weight": "model-1.safetensors" for index in range(40)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\npass word\nto ken :\n= pass word1\n")
    assert [finding for path in tmp_path.iterdir() for finding in scan_file(path)] == []


def test_secrets_are_found_where_they_hide(tmp_path):
    found = "a value under the name 'api_key'"
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": [1, {"api_key": "correct horse"}]}))
    (tmp_path / "config.json").write_text(
        json.dumps({"bos_token": "<begin>", "hub": {"api_key": "correct horse"}}, indent=1)
    )
    (tmp_path / "broken.yaml").write_text("a: [1\napi_key: correct horse\n")
    (tmp_path / ".env").write_text("A=1\napi_key='correct horse'\n")
    lines = {path.name: kinds(path) for path in tmp_path.iterdir()}
    assert {name: where for name, [(where, kind)] in lines.items() if kind == found} == {
        "a.jsonl": 1, "config.json": 4, "broken.yaml": 2, ".env": 2,
    }  # fmt: skip


@pytest.mark.parametrize("folder", ["recipes/quickstart/model", "recipes/quickstart", "recipes/accelerate_configs"])
def test_an_ordinary_folder_has_nothing_that_looks_like_a_secret(folder):
    files = [path for path in (Path(__file__).parents[3] / folder).rglob("*") if path.is_file()]
    assert len(files) > 4 and [finding for path in files for finding in scan_file(path)] == []


def test_a_value_of_the_environment_and_a_pattern_are_found_in_records_written_before_they_were_known(
    tmp_path, monkeypatch
):
    prompt = [{"role": "user", "content": 'say "pass\\word" and 1234-5678'}]
    path = TrajectoryStore(tmp_path).write(1, [two_turns(), two_turns(prompt_messages=prompt)])
    assert kinds(path) == []
    monkeypatch.setenv("MY_PASSWORD", '"pass\\word"')
    safe_text.set_rules(patterns=[r"\d{4}-\d{4}"])
    assert kinds(path) == [(2, "the value of MY_PASSWORD"), (2, "what a pattern of secrets.patterns matches")]


def test_the_header_of_weights_is_searched_and_their_bytes_are_not(tmp_path):
    token = EXAMPLES["GitHub token"][0]
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors", metadata={"by": token})
    assert kinds(tmp_path / "a.safetensors") == [(0, "GitHub token")]
    content = torch.frombuffer(bytearray(token.encode().ljust(80)), dtype=torch.uint8)
    save_file({"x": content}, tmp_path / "b.safetensors")
    with (tmp_path / "large.bin").open("wb") as file:
        file.write(b"\0" + token.encode())
        file.truncate(MAX_BINARY_BYTES + 1)
    assert kinds(tmp_path / "b.safetensors") == kinds(tmp_path / "large.bin") == []


def test_the_refusal_names_the_places_and_never_the_secret(tmp_path):
    token = EXAMPLES["Slack token"][0]
    (tmp_path / "a.txt").write_text("\n".join([token] * 30))
    with pytest.raises(SecretFoundError, match=r"sub/a.txt, line 1: Slack token") as refusal:
        check_files({"sub/a.txt": tmp_path / "a.txt"}, fix="--allow_secrets")
    assert token not in str(refusal.value) and "and 20 more" in str(refusal.value)
    for allowed in (["sub/a.txt"], ["sub/*"]):
        check_files({"sub/a.txt": tmp_path / "a.txt"}, allowed=allowed, fix="--allow_secrets")


def test_files_that_are_broken_are_searched_as_bytes(tmp_path):
    token = EXAMPLES["AWS access key"][0].encode()
    for name in ("a.parquet", "a.json", "a.yaml", "a.jsonl", "a.safetensors"):
        (tmp_path / name).write_bytes(b"\xff{[: " + token)
        assert [kind for _, kind in kinds(tmp_path / name)] == ["AWS access key"], name
