"""Text is shown without its control over what shows it, and secrets are replaced by their names."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1_trl import safe_text
from agent_r1_trl.cli.errors import UsageError, run_command
from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.rollout.failures import check_some_rolled_out
from agent_r1_trl.rollout.requests import rollout_requests
from agent_r1_trl.safe_text import SecretRules, SecretSettings, markdown, mask, shown, visible
from tests.effort import examples
from tests.recording.examples import empty

KEY = "sk-live-0123456789"


@pytest.fixture(autouse=True)
def fresh_rules():
    safe_text._rules = SecretRules()
    yield
    safe_text._rules = SecretRules()


# -------------------------------------------------------------------- control characters and markup


@given(st.text())
@settings(max_examples=examples(300))
def test_nothing_in_shown_text_controls_a_terminal(text):
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]", visible(text))
    visible(text).encode("utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "</details><script>alert(1)</script>",
        "# Heading\n\n## Another\n- list",
        "| cell | cell |",
        "[click](javascript:alert(1)) ![x](http://evil)",
        "`code` **bold** _em_ ~~gone~~ {{ template }}",
        "---\nlicense: mit\n---",
    ],
)
def test_text_in_a_card_is_one_line_whose_markup_is_escaped(text):
    line = markdown(text)
    assert "\n" not in line
    assert not re.search(r"(?<!\\)[<>\[\]`*_#|{}~]", line.replace("\\\\", ""))
    assert not line.startswith("---\n")


def test_a_console_prints_paths_as_they_are():
    out = io.StringIO()
    console = PlainConsole(file=out, width=200, force_terminal=True, color_system=None)
    console.print("runs/[bold]x[/bold] :smile: \x1b]0;owned\x07")
    assert out.getvalue() == "runs/[bold]x[/bold] :smile: ␛]0;owned␇\n"


def test_an_error_of_a_command_controls_no_terminal_and_tells_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", KEY)

    def command(argv):
        raise UsageError(f"env_kwargs={{'key': '{KEY}'}}: \x1b[2J refused")

    assert run_command(command, []) == 2
    assert capsys.readouterr().err == "error: env_kwargs={'key': '[secret: SEARCH_API_KEY]'}: ␛[2J refused\n"


def test_the_cause_of_a_failure_controls_no_terminal_and_tells_no_secret(monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", KEY)
    failed = empty()
    failed.error = f"401 for {KEY}\x1b[31m"
    with pytest.raises(RuntimeError, match=re.escape("401 for [secret: SEARCH_API_KEY]␛[31m")) as caught:
        check_some_rolled_out([failed])
    assert KEY not in str(caught.value)


# -------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True), ("OPENAI_API_KEY", True), ("AWS_SECRET_ACCESS_KEY", True), ("password", True),
        ("apiKey", True), ("db_password", True), ("access-token", True), ("GITHUB_TOKEN", True),
        ("max_tokens", False), ("num_tokens", False), ("token", False), ("eos_token", False), ("pad_token", False),
        ("key", False), ("secretary", False), ("SSH_AUTH_SOCK", False), ("question", False), (3, False),
    ],
)  # fmt: skip
def test_a_name_says_whether_its_value_is_a_secret(name, is_secret):
    assert SecretRules().is_secret(name) is is_secret


def test_values_of_secret_environment_variables_are_masked(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", KEY)
    monkeypatch.setenv("OTHER_PASSWORD", "short")  # 5 characters would be found everywhere
    monkeypatch.setenv("LENGTH_SECRET", "12345678")  # a number is no secret
    assert mask(f"Bearer {KEY}. short 12345678") == "Bearer [secret: HF_TOKEN]. short 12345678"
    monkeypatch.setenv("HF_TOKEN", "another-value")
    assert mask(f"{KEY} another-value") == f"{KEY} [secret: HF_TOKEN]"
    monkeypatch.delenv("HF_TOKEN")
    assert mask("another-value") == "another-value"


def test_the_longer_of_two_secrets_is_masked_as_a_whole(monkeypatch):
    monkeypatch.setenv("A_SECRET", "abcdef")
    monkeypatch.setenv("B_SECRET", "abcdef-ghi")
    assert mask("abcdef-ghi abcdef") == "[secret: B_SECRET] [secret: A_SECRET]"


def test_what_a_row_holds_under_a_secret_name_is_masked_from_then_on():
    row = {"question": "log in", "account": {"user": "ann", "password": "hunter2-hunter2"}, "api_keys": [KEY]}
    rollout_requests([row], first_row=0, group_size=1, seed=0, step=0)
    assert shown(f"ann used hunter2-hunter2 and {KEY}") == "ann used [secret: password] and [secret: api_keys]"


def test_an_argument_of_a_tool_with_a_secret_name_masks_no_words_of_its_schema():
    password = {"type": "string", "description": "Of the account.", "default": "hunter2-hunter2"}
    row = {
        "tools": [{"parameters": {"properties": {"password": password, "token": {"anyOf": [{"type": "integer"}]}}}}]
    }
    assert safe_text.rules().values_in(row) == {"hunter2-hunter2": "password"}
    given = {"credentials": {"type": "object", "private_key": "abc-def-ghi"}}  # no schema
    assert safe_text.rules().values_in(given)["abc-def-ghi"] == "private_key"


def test_a_pattern_of_the_user_is_masked_and_the_names_can_be_changed(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", KEY)
    safe_text.set_rules(r"^pin$", [r"\b\d{4}-\d{4}\b"])
    assert mask(f"1234-5678 {KEY}") == f"[secret] {KEY}"
    assert safe_text.rules().values_in({"pin": "998877", "password": "hunter2-hunter2"}) == {"998877": "pin"}


def test_a_pattern_that_takes_too_long_masks_the_whole_text_and_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr("agent_r1_trl.patterns.LIMIT_S", 0.1)
    safe_text.set_rules(r"^(n|nn)+$", [r"(a|aa)+$"])
    text = "a" * 80 + "!"
    assert [mask(text), mask(text)] == ["[secret: secrets.patterns took too long on this text]"] * 2
    assert safe_text.rules().is_secret("n" * 80 + "!")
    assert mask("harmless") == "harmless" and not safe_text.rules().is_secret("query")
    assert [record.message[:40] for record in caplog.records] == [
        "secrets.patterns: the pattern '(a|aa)+$'",
        "secrets.names: the pattern '^(n|nn)+$' t",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": "("}, r"secrets\.names='\(' must be one regular expression"),
        ({"names": "a*"}, r"secrets\.names='a\*' must be .* that does not match empty text"),
        ({"patterns": ["["]}, r"secrets\.patterns=\['\['\] must be a list, .* one regular expression"),
        ({"patterns": ["a*"]}, r"secrets\.patterns=\['a\*'\] must be a list, .* does not match empty text"),
    ],
)
def test_a_rule_that_is_no_regular_expression_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SecretSettings.read("secrets", options)


def test_the_fix_that_the_refusal_names_masks_nothing_by_name(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", KEY)
    safe_text.set_rules("(?!)")
    assert mask(KEY) == KEY
