"""Secrets in files: found in every form and every kind of file by line, and what is none is left alone."""

import base64
import itertools
import json
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from agent_r1_trl import safe_text
from agent_r1_trl.features.hub.secret_files import MAX_BINARY_BYTES
from agent_r1_trl.features.hub.secret_forms import FORMS, find_forms
from agent_r1_trl.features.hub.secret_scan import SecretFoundError, check_files, scan_file
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.testing import make_tokenizer
from tests.features.hub.secrets import KEY, NUMBER, WORDS, secret_like
from tests.recording.examples import two_turns

ROOT = Path(__file__).parents[3]
EXAMPLES = [(form.name, example) for form in FORMS for example in form.examples]
GITHUB, SLACK, AWS = secret_like("ghp_{36}"), secret_like("xoxb-{12 digits}-{24}"), secret_like("AKIA{16 upper}")


@pytest.fixture(autouse=True)
def fresh_rules(monkeypatch):
    """None of the values that other tests noted."""
    monkeypatch.setattr(safe_text, "_rules", safe_text.SecretRules())


def kinds(path):
    return [(finding.line, finding.kind) for finding in scan_file(path)]


def under(name):
    return f"a value under the name {name!r}"


# -------------------------------------------------------------------- forms


@pytest.mark.parametrize(("kind", "example"), EXAMPLES, ids=[example[:30] for _, example in EXAMPLES])
def test_a_form_is_found_in_text_json_parquet_and_bytes(tmp_path, kind, example):
    secret = secret_like(example)
    (tmp_path / "a.md").write_text(f"first\n{secret}\nlast\n")
    (tmp_path / "a.jsonl").write_text("{}\n" + json.dumps({"ids": [1], "x": [{"y": secret}]}) + "\n")
    (tmp_path / "a.bin").write_bytes(b"\x80\0\n" + secret.encode() + b"\n\0")
    pq.write_table(pa.table({"n": [1, 2], "x": [["a"], [secret]]}), tmp_path / "a.parquet")
    for name in ("a.md", "a.jsonl", "a.parquet"):
        found = kinds(tmp_path / name)
        assert (2, kind) in found and {line for line, _ in found} == {2}, name
    assert (0, kind) in kinds(tmp_path / "a.bin")


@pytest.mark.parametrize("kind", sorted({form.name for form in FORMS} - {"password on a line of its own"}))
def test_a_form_is_found_in_the_middle_of_a_sentence_and_behind_an_escaped_newline(tmp_path, kind):
    for name, example in EXAMPLES:
        if name == kind:
            (tmp_path / "a.md").write_text(f"see '{secret_like(example)}' there")
            (tmp_path / "a.py").write_text(rf'x = "a\n{secret_like(example)}"')
            assert (1, kind) in kinds(tmp_path / "a.md") and (1, kind) in kinds(tmp_path / "a.py"), example


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_no_text_makes_the_search_for_a_form_long(form):
    beginnings = {example.partition("{")[0] for example in form.examples} | {form.beginnings.partition("|")[0]}
    for unit in (beginning + end for beginning in beginnings for end in ("-", "=a-")):
        started = time.thread_time()
        list(find_forms(unit * (200_000 // len(unit))))
        assert time.thread_time() - started < 2, unit


HARD_UNITS = [
    "a=", 'a="', "a='", "token ", "a.", "a=\n b\n", "\n", "[", "{", '"a":', "a=b\n  ", "token['", "KEY=A_A_",
    "password=a-", "=a1b2c3", 'password="\n', "<", "a(",
]  # fmt: skip


@pytest.mark.parametrize("name", ["a.txt", ".env", "a.yaml", "a.toml", "a.json", "a.jsonl", "a.csv", ".netrc"])
def test_no_text_makes_the_search_for_names_long(tmp_path, name):
    for unit in HARD_UNITS:
        (tmp_path / name).write_text(unit * (50_000 // len(unit)))
        started = time.thread_time()
        scan_file(tmp_path / name)
        assert time.thread_time() - started < 2, unit


@pytest.mark.parametrize("indent", [1, None])
def test_the_lines_of_many_secrets_are_found_in_one_pass(tmp_path, indent):
    rows = [{"x": number, "password": f"{WORDS} {number}"} for number in range(20_000)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=indent))
    started = time.thread_time()
    found = kinds(tmp_path / "a.json")
    assert time.thread_time() - started < 5
    assert [line for line, _ in found] == ([4 + 4 * number for number in range(20_000)] if indent else [1])


# -------------------------------------------------------------------- names

NAMES = [
    "token", "TOKEN", "hf_token", "HF_TOKEN", "accessToken", "github-token", "push_to_hub_token", "api_token",
    "Authorization", "authorization", "Proxy-Authorization", "clientSecret", "client_secret", "CLIENT_SECRET",
    "client-secret", "password", "dbPassword", "db_password", "DB-PASSWORD", "api_key", "apikey", "apiKey",
    "X-API-Key",
    "API_KEY", "OPENAI_API_KEY_2", "openaiApiKey", "secret", "app_secret", "webhookSecret", "access_key", "accessKey",
    "aws_secret_access_key", "AWS_SECRET_ACCESS_KEY", "SecretAccessKey", "private_key", "privateKey", "PRIVATE-KEY",
    "wandb_api_key", "WANDB_API_KEY", "account_key", "signingKey", "passphrase", "credentials",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_key_under_a_name_is_found_wherever_names_stand(tmp_path, name):
    files = {
        "a.json": json.dumps({"a": 1, "b": {name: KEY}}, indent=1).replace("\n", "", 1),
        "a.jsonl": "{}\n" + json.dumps({"a": [{name: [KEY]}]}),
        "a.yaml": f"a: 1\n{name}: {KEY}\n",
        "a.toml": f'[a]\n{name} = "{KEY}"\n',
        "a.ini": f"[a]\n{name} = {KEY}\n",
        ".env": f"A=1\nexport {name}='{KEY}'\n",
        "a.csv": f"id,{name}\n7,{KEY}\n",
        "a.py": f'import os\nconnect({name}="{KEY}")\n',
        "a.md": f"# A\nSet `{name}: {KEY}` first.\n",
    }
    for file, text in files.items():
        (tmp_path / file).write_text(text)
        found = [
            kind for line, kind in kinds(tmp_path / file) if line == (3 if file == "a.json" else 2) or file == "a.json"
        ]
        assert under(name) in found, file
    pq.write_table(pa.table({"n": [1, 2], name: ["", KEY]}), tmp_path / "a.parquet")
    assert kinds(tmp_path / "a.parquet") == [(2, under(name))]


@pytest.mark.parametrize("name", ["password", "apiKey", "client-secret", "hf_token", "push_to_hub_token", "api_token"])
def test_under_names_of_secrets_alone_any_words_are_a_secret(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", name: WORDS}, indent=1))
    assert kinds(tmp_path / "config.json") == [(3, under(name))]


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("Authorization", "Basic {user and password}"),
        ("authorization", "Bearer {8 lower}-{4 digits}"),
        ("connection_string", "Server=a;Uid=b;Pwd={8 lower};"),
        ("connectionString", "amqp://me:{8 lower}@host"),
    ],
)
def test_headers_and_connection_strings_under_their_names(tmp_path, name, example):
    (tmp_path / "a.json").write_text(json.dumps({name: secret_like(example)}))
    assert (1, under(name)) in kinds(tmp_path / "a.json")


def test_a_token_in_the_log_in_of_netrc_is_found(tmp_path):
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {secret_like('{40 hex}')}\n")
    assert kinds(tmp_path / ".netrc") == [(3, under("password"))]


# -------------------------------------------------------------------- kinds of files

IN_JSON = json.dumps({"rest": json.dumps({"deep": json.dumps({"api_key": WORDS})})})
CONTAINERS = {
    "utf-16 with a mark": ("a.txt", f"first\n{GITHUB}\n".encode("utf-16"), 2, "GitHub token"),
    "utf-16, little end first": ("a.txt", f"first\n{GITHUB}\n".encode("utf-16-le"), 2, "GitHub token"),
    "utf-16, big end first": ("a.json", f'{{\n"password": "{WORDS}"}}'.encode("utf-16-be"), 2, under("password")),
    "utf-32": ("a.txt", f"first\n{GITHUB}".encode("utf-32"), 2, "GitHub token"),
    "utf-8 with a mark": ("a.yaml", f"password: {WORDS}".encode("utf-8-sig"), 1, under("password")),
    "utf-16 rows": ("a.jsonl", f'{{}}\n{{"password": "{WORDS}"}}'.encode("utf-16"), 2, under("password")),
    "folded YAML": ("a.yaml", f"a: 1\napi_key: >-\n  {WORDS}\n  battery\n".encode(), 3, under("api_key")),
    "literal YAML": ("a.yml", f"a: 1\nprivate_key: |\n  {KEY}\n  {KEY}\n".encode(), 3, under("private_key")),
    "YAML on the next line": ("a.yaml", f"a:\n- password:\n    {WORDS}\n".encode(), 3, under("password")),
    "YAML with a break inside": ("a.yaml", f'x: "{GITHUB[:20]}\\\n  {GITHUB[20:]}"'.encode(), 1, "GitHub token"),
    "YAML with a tag": ("a.yaml", f"a: !env b\npassword: {WORDS}\n".encode(), 2, under("password")),
    "second document of YAML": ("a.yaml", f"a: 1\n---\npassword: {WORDS}\n".encode(), 3, under("password")),
    "JSON in YAML": ("a.yaml", f'a: 1\nb: \'{{"password": "{WORDS}"}}\'\n'.encode(), 2, under("password")),
    "number as a password": ("a.yaml", f"a: 1\npassword: {NUMBER}\n".encode(), 2, under("password")),
    "JSON in a text in JSON": ("a.json", IN_JSON.encode(), 1, under("api_key")),
    "JSON in a text in rows": ("a.jsonl", f"{{}}\n{IN_JSON}".encode(), 2, under("api_key")),
    "escaped JSON": ("a.json", json.dumps({"a": GITHUB}).replace("_", "\\u005f").encode(), 1, "GitHub token"),
    "broken JSON": ("a.json", f'{{"a": [1,\n"password": "{WORDS}"'.encode(), 2, under("password")),
    "broken YAML": ("a.yaml", f"a: [1\npassword: {WORDS}\n".encode(), 2, under("password")),
    "a list under the name": ("a.json", json.dumps({"api_keys": ["", WORDS]}).encode(), 1, under("api_keys")),
    "a key of an object": ("a.jsonl", json.dumps({GITHUB: 1}).encode(), 1, "GitHub token"),
    "CSV": ("a.csv", f'id,"clientSecret"\n1,\n2,"{WORDS}"\n'.encode(), 3, under("clientSecret")),
    "CSV with semicolons": ("a.csv", f"id;password;x\n1;{WORDS};2\n".encode(), 2, under("password")),
    "CSV with lines in cells": ("a.csv", f'id,api_key\n"a\nb",\n2,{WORDS}\n'.encode(), 4, under("api_key")),
    "JSON in CSV": ("a.csv", f'id,x\n1,"{{""password"": ""{WORDS}""}}"\n'.encode(), 2, under("password")),
    "TSV": ("a.tsv", f"id\tapi-key\n1\t{WORDS}\n".encode(), 2, under("api-key")),
    "TOML": ("a.toml", f'[a.b]\npassword = """\n{WORDS}"""\n'.encode(), 3, under("password")),
    "broken TOML": ("a.toml", f'[a\npassword = "{WORDS}"\n'.encode(), 2, under("password")),
    "INI": ("a.ini", f"[a]\npassword = {WORDS} ; of the cat\n".encode(), 2, under("password")),
    "INI over two lines": ("a.cfg", b"[a]\npassword =\n  correct\n  horse\n", 2, under("password")),
    ".env": (".env.local", b'A=1\nPASSWORD="correct\nhorse"\n', 2, under("PASSWORD")),
    ".env with commas": ("prod.env", b"A=1\nPASSWORD=ab,cd[ef]\n", 2, under("PASSWORD")),
    "properties": ("a.properties", f"a=1\ndb.password={WORDS}\n".encode(), 2, under("db.password")),
    "notebook": ("a.ipynb", json.dumps({"source": ["login(\n", f'token="{KEY}")']}).encode(), 1, under("token")),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_secret_is_found_in_every_kind_of_file_at_its_line(tmp_path, container):
    name, content, line, kind = CONTAINERS[container]
    (tmp_path / name).write_bytes(content)
    found = kinds(tmp_path / name)
    assert (line, kind) in found and {line for line, _ in found} == {line}


def test_the_line_of_a_secret_is_not_that_of_words_like_its_beginning(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": "Bearer of news", "b": f"Bearer {KEY}"}, indent=1))
    assert kinds(tmp_path / "a.json") == [(3, "bearer token")]


def test_what_a_parquet_file_says_of_itself_is_searched(tmp_path):
    field = pa.field("x", pa.string(), metadata={"token": KEY})
    schema = pa.schema([field], metadata={"made_by": json.dumps({"password": WORDS}), "note": GITHUB})
    pq.write_table(pa.table({"x": ["a"]}, schema=schema), tmp_path / "a.parquet")
    assert set(kinds(tmp_path / "a.parquet")) == {
        (0, "GitHub token"), (0, under("password")), (0, under("token")),
    }  # fmt: skip


@pytest.mark.parametrize(
    "type_", [pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()], ids=str
)
def test_columns_of_every_type_of_text_are_searched(tmp_path, type_):
    column = pa.array([None, WORDS.encode() if type_ == pa.binary() else WORDS]).cast(type_)
    pq.write_table(pa.table({"password": column, "n": [1, 2]}), tmp_path / "a.parquet")
    assert kinds(tmp_path / "a.parquet") == [(2, under("password"))]


def test_the_header_of_weights_is_searched_and_their_bytes_are_not(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors", metadata={"by": GITHUB, "password": WORDS})
    assert set(kinds(tmp_path / "a.safetensors")) == {(0, "GitHub token"), (0, under("password"))}
    content = torch.frombuffer(bytearray(GITHUB.encode().ljust(80)), dtype=torch.uint8)
    save_file({"x": content}, tmp_path / "b.safetensors")
    with (tmp_path / "large.bin").open("wb") as file:
        file.write(b"\0" + GITHUB.encode())
        file.truncate(MAX_BINARY_BYTES + 1)
    assert kinds(tmp_path / "b.safetensors") == kinds(tmp_path / "large.bin") == []


def test_files_that_are_broken_are_searched_as_bytes(tmp_path):
    for name in ("a.parquet", "a.json", "a.yaml", "a.jsonl", "a.safetensors", "a.toml", "a.csv"):
        (tmp_path / name).write_bytes(b"\xff{[: " + AWS.encode())
        assert [kind for _, kind in kinds(tmp_path / name)] == ["AWS access key"], name


@pytest.mark.parametrize("depth", [50, 100_000])
def test_objects_of_any_depth_are_read_or_searched_as_text(tmp_path, depth):
    (tmp_path / "a.json").write_text("[" * depth + f'"{GITHUB}"' + "]" * depth)
    assert kinds(tmp_path / "a.json") == [(1, "GitHub token")]


def test_yaml_whose_aliases_multiply_is_read_once(tmp_path):
    names = [f"a{number}" for number in range(30)]
    lines = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in itertools.pairwise(names)]
    (tmp_path / "a.yaml").write_text("\n".join(["a0: &a0 x", *lines, f"password: {WORDS}"]))
    assert kinds(tmp_path / "a.yaml") == [(31, under("password"))]


# -------------------------------------------------------------------- what is no secret

NOT_SECRET = [
    # prefixes and words
    "hf_hub_download(repo)", "sk-learn", "sk-contrib-is-a-package-of-old", "sk-contrib-package-of-version-2024",
    "risk-averse-decision-making-under-doubt", "AKIA", "the task-force-of-the-people", "glpat-", "task_live_",
    "eyJhbGciOi", "npm_config", "pypi-server", "pypi-server-of-the-team-2",
    "SG.some_module_of_ours.and_another_one_here",
    "xoxb-", "Basic training of models", "bearer of bad news", "a bearer token authenticates", "r8_", "gsk_",
    "-----BEGIN PUBLIC KEY-----", "-----BEGIN CERTIFICATE-----", "password-protected", "git@github.com:me/repo",
    # placeholders
    "hf_...", "hf_" + "x" * 34, "sk-" + "X" * 48, "sk-your-own-key-goes-here-1234", "ghp_" + "*" * 36,
    "AKIA" + "IOSFODNN7" + "EXAMPLE", "token=<your token>", 'token = os.environ["HF_TOKEN_1"]',
    "api_key=${API_KEY_123456}",
    "HF_TOKEN=hf_...", "api_key: YOUR_API_KEY_1234567890", "Authorization: Bearer $TOKEN",
    "Authorization: Bearer <token>",
    'headers = {"Authorization": f"Bearer {token}"}', "_authToken=${NPM_TOKEN}", "https://u:${TOKEN}@host/",
    "https://user:password@host/", "https://user:<password>@host", "[secret: HF_TOKEN]",
    "password: [secret: password]",
    'password = os.environ["DB_PASSWORD_2"]', "password=xxxxxxxx1xxxxxx", "password: changeme123",
    # code and prose
    "password: str = field()", "password=password", "your password: please", "password = sha256(text)",
    "password = get_password(1)", "    password = proxy_auth", '{"password": auth[1]}', "password: Optional[str]",
    "token = tokenizer.convert_ids_to_tokens(ids)[0]", "token = hidden_states_2", "max_token = 4096",
    "pad_token: <|pad|>",
    "secret_santa = sorted(names)", "api_key: str | None = None", "InvalidPassword: min_length=12, got 7",
    "password: ", "http://[::1]:8000/v1", "https://huggingface.co:443/me", "a://b:c", "PWD=/home/me/agents",
    # digests and data
    "sha256: " + "9f86d081884c7d659a2feaa0c55ad015" * 2, "commit 384db1a5840ab8cde91c0b49b4c4258a8eebeed2",
    "id: 550e8400-e29b-41d4-a716-446655440000", "etag=9f86d081884c7d659a2feaa0c55ad015",
    "wandb/run-20251129_103000-k3j9x2ab", "public_key: " + "aB3" * 14, "data:image/png;base64," + "iVBORw0KGgo" * 20,
    secret_like("{30}-hf_{60}-{30}"), secret_like("{30}_gsk_{60}_{30}"),
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_SECRET)
def test_what_is_no_secret_is_left_alone(tmp_path, text):
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "a.py").write_text(f"first\n{text}\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "tool", "content": f"see {text}"}]}))
    (tmp_path / "a.json").write_text(json.dumps([text], indent=1))
    pq.write_table(pa.table({"x": [text]}), tmp_path / "a.parquet")
    assert [(path.name, *finding) for path in tmp_path.iterdir() for finding in scan_file(path)] == []


NOT_SECRET_VALUES = {
    "max_token": "unlimited", "pad_token": "end of text", "image_token": "IMG_CONTEXT", "token": "Hauptstadt",
    "token_ids": KEY,
    "tokens": KEY, "secret_santa": KEY, "key": KEY, "public_key": KEY, "sha256": KEY, "token_str": KEY,
    "cache_key": KEY,
    "secretary": WORDS, "passwordless": WORDS, "authorization": "is required here",
    "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct",
    "password": "<your password>", "api_key": "${OPENAI_API_KEY}", "apikey": 'os.environ["X_KEY"]',
    "secret": "xxxxx" * 4,
    "hf_token": "hf_...", "access_key": "YOUR_ACCESS_KEY", "private_key": "", "api-key": "EMPTY",
    "apiKey": "OPENAI_API_KEY",
    "client_secret": "client_secret", "db_password": "{{ password }}", "secret_key": "env:SECRET_KEY",
    "passwd": "string",
    "user_password": "The password of the user.", "secretKey": "/run/secrets/key",
    "access_token": "https://a.org/token",
    "credentials": "~/.config/credentials", "connection_string": "sqlite:///records.db",
    "auth_token": "[secret: auth_token]",
    "api_keys": ["<key>", None], "passphrase": "********", "npm_token": "$NPM_TOKEN", "app_secret": "not-needed",
    "signing_key": f"see {KEY}", "publicKeyToken": KEY,
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SECRET_VALUES)
def test_names_and_values_that_are_no_secret_are_left_alone(tmp_path, name):
    value = NOT_SECRET_VALUES[name]
    for file in ("a.jsonl", "config.json", "a.yaml"):
        (tmp_path / file).write_text(json.dumps({"a": 1, name: value}))
    pq.write_table(pa.table({"a": [1], name: [value]}), tmp_path / "a.parquet")
    if isinstance(value, str):
        (tmp_path / ".env").write_text(f"{name}='{value}'\n")
        (tmp_path / "a.csv").write_text(f"id\t{name}\n1\t{value}\n")
    assert [(path.name, *finding) for path in tmp_path.iterdir() for finding in scan_file(path)] == []


def test_schemas_of_tools_and_settings_about_secrets_hold_none(tmp_path):
    schema = {
        "type": "object",
        "properties": {"password": {"type": "string", "description": "What the user types in."}},
    }
    (tmp_path / "a.jsonl").write_text(json.dumps({"tools": [schema], "text": json.dumps(schema)}))
    (tmp_path / "recipe.yaml").write_text(
        "secrets:\n  names: '(?:^|_)(?:password|api_key)$'\n  patterns:\n  - '\\d{4}-\\d{4}'\nmax_tokens: 4\n"
    )
    logprobs = [
        {"token": " Hauptstadt", "logprob": -0.1, "bytes": [32, 72]},
        {"token": "Grundgesetz2", "logprob": -1.0},
    ]
    (tmp_path / "b.jsonl").write_text(json.dumps({"logprobs": logprobs, "top_token": "0.123456789"}))
    assert [(path.name, *finding) for path in tmp_path.iterdir() for finding in scan_file(path)] == []


def test_random_bytes_in_any_encoding_raise_no_alarm(tmp_path):
    data = random.Random(0).randbytes(1_000_000)
    texts = {
        "plain": base64.b64encode(data),
        "for URLs": base64.urlsafe_b64encode(data),
        "hex": data[:500_000].hex().encode(),
    }
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"image": text.decode()}) for text in texts.values()))
    (tmp_path / "a.bin").write_bytes(data)
    pq.write_table(pa.table({"x": list(texts.values())}), tmp_path / "a.parquet")
    assert [(path.name, *finding) for path in tmp_path.iterdir() for finding in scan_file(path)] == []


def test_what_a_trainer_saves_raises_no_alarm(tmp_path):
    (tmp_path / "notes.txt").write_text("password: Optional[str]\n")
    logs = [{"loss": 0.1, "tokens": 4096.0, "reward": 1.0, "step": step} for step in range(3)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": logs, "best_metric": None}, indent=2))
    vocabulary = ["[PAD]", "password", "##token", "sk-", "hf_", "secret", "api_key", "bearer", "://", "token", "akia"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(vocabulary)}))
    weights = {f"model.layers.{index}.mlp.token_mixer.key_proj.weight": "model-1.safetensors" for index in range(40)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\npass word\nto ken :\n= pass word1\n")
    adapter = {
        "base_model_name_or_path": "Qwen/Qwen3-0.6B",
        "revision": "c1899de289a04d12100db370d81485cdf75e47ca",
        "r": 8,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter, indent=1))
    make_tokenizer("qwen3").save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        '{"image_token": "<|image_pad|>", "api_token": "end of the API"}'
    )
    TrajectoryStore(tmp_path).write(1, [two_turns(), two_turns()])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10 and [finding for path in files for finding in scan_file(path)] == []


@pytest.mark.parametrize(
    "folder",
    [
        "recipes/quickstart/model", "recipes/quickstart", "recipes/accelerate_configs", "recipes/error_messages",
        "docs", "src/agent_r1_trl/features/hub", "tests/features/hub",
    ],
)  # fmt: skip
def test_an_ordinary_folder_has_nothing_that_looks_like_a_secret(folder):
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 4
    assert [(path.name, *finding) for path in files for finding in scan_file(path)] == []


# -------------------------------------------------------------------- what the user has set, and the refusal


def test_a_value_of_the_environment_and_a_pattern_are_found_in_records_written_before_they_were_known(
    tmp_path, monkeypatch
):
    prompt = [{"role": "user", "content": 'say "pass\\word" and 1234-5678'}]
    path = TrajectoryStore(tmp_path).write(1, [two_turns(), two_turns(prompt_messages=prompt)])
    assert kinds(path) == []
    monkeypatch.setenv("MY_PASSWORD", '"pass\\word"')
    safe_text.set_rules(patterns=[r"\d{4}-\d{4}"])
    assert kinds(path) == [(2, "the value of MY_PASSWORD"), (2, "what a pattern of secrets.patterns matches")]


def test_names_and_patterns_of_the_user_count_line_by_line(tmp_path):
    safe_text.set_rules(names="^iban$", patterns=["^x+y$"])
    (tmp_path / "a.yaml").write_text(f"a: 1\niban: {WORDS}\npassword: {WORDS}\n")
    (tmp_path / "a.txt").write_text("a\nb\nxxy\n")
    assert kinds(tmp_path / "a.yaml") == [(2, under("iban")), (3, under("password"))]
    assert kinds(tmp_path / "a.txt") == [(3, "what a pattern of secrets.patterns matches")]


def test_the_refusal_names_the_places_and_never_the_secret(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join([SLACK] * 30))
    with pytest.raises(SecretFoundError, match=r"sub/a.txt, line 1: Slack token") as refusal:
        check_files({"sub/a.txt": tmp_path / "a.txt"}, fix="--allow_secrets")
    assert SLACK not in str(refusal.value) and "and 20 more" in str(refusal.value)
    for allowed in (["sub/a.txt"], ["sub/*"]):
        check_files({"sub/a.txt": tmp_path / "a.txt"}, allowed=allowed, fix="--allow_secrets")
