"""The list of all settings: `train --help`, docs/options.md, and the answer of every command to --help."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from agent_r1_trl.cli import find_commands, main, train
from agent_r1_trl.cli.arguments import TrainArguments
from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.options import help_of, option_groups
from agent_r1_trl.cli.options_page import PAGE, page_text
from agent_r1_trl.cli.parser import RecipeParser
from agent_r1_trl.settings import plain
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
from agent_r1_trl.trainers.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_that_of_the_dataclasses():
    kept, made = (ROOT / PAGE).read_text(), page_text()
    if version("transformers") != _pinned_transformers():  # theirs differ between versions
        kept, made = (text.partition("## Model and adapter (TRL)")[0] for text in (kept, made))
    assert kept == made, "run `make options`"


def test_where_ppo_has_another_default_both_stand_there():
    """The page named PPO's alone, as if a GRPO run began with them."""
    both = dict(re.findall(r"\| `(\w+)` \| (\S+; PPO: \S+) \|", (ROOT / PAGE).read_text()))
    assert both == {"advantage_estimator": "grpo; PPO: gae", "num_generations": "8; PPO: 1"}


def test_the_page_shows_no_backslashes_between_backticks():
    spans = re.findall(r"`[^`\n]*`", (ROOT / PAGE).read_text())
    assert len(spans) > 200
    assert [span for span in spans if "\\" in span.replace("\\|", "")] == []


def test_the_page_has_all_that_we_say_of_a_setting_and_the_first_sentence_of_what_libraries_say():
    """`train --help` prints all of it."""
    ours, theirs = page_text().partition("## Model and adapter (TRL)")[::2]
    assert "| Maximum number of assistant turns per trajectory. Tool calls of the last turn still run" in ours
    assert "| Mode to use for vLLM integration when `use_vllm` is set to `True`. |" in theirs
    assert "(e.g., 'http://localhost:8000'). |" in theirs, "an abbreviation ends no sentence"


@pytest.mark.parametrize("command", ["eval", "chat"])
def test_the_help_of_a_command_has_its_own_defaults(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--max_completion_length .*?\[default: (\w+)\]", text)[1] == "512", "RolloutSettings has 2048"


def test_every_setting_of_our_own_has_a_meaning():
    groups = option_groups(TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig)
    ours = {title: fields for title, fields in groups.items() if "(T" not in title and "(t" not in title}
    assert len(ours) > 15
    assert [item.name for fields in ours.values() for item in fields if len(help_of(item)) < 8] == []


def test_the_help_of_training_names_every_flag_that_the_parser_takes(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--trainer", "ppo", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    shown = set(re.findall(r"(?<![\w-])--(\w+)", text))
    parser = RecipeParser((TrainArguments, MultiTurnPPOConfig, ModelConfig), command="train")
    flags = set(parser.flags)
    assert flags <= shown


def _pinned_transformers():
    pinned = (ROOT / "requirements" / "constraints.txt").read_text()
    return re.search(r"^transformers==(\S+)$", pinned, re.MULTILINE)[1]


def test_our_settings_come_before_those_of_the_libraries(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.index("--max_turns") < text.index("--lora_r") < text.index("--vllm_mode") < text.index("--adam_beta1")


@pytest.mark.parametrize("command", find_commands())
def test_every_command_has_a_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and "usage: agent-r1-trl " + command in capsys.readouterr().out


ACTS = {"patience": 7, "actions": ["clip", "stop"]}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ACTS),
        (["--echo.patience", "5"], ACTS | {"patience": 5}),
        (["--echo.patience=5", "--echo.dry_run"], ACTS | {"patience": 5, "dry_run": True}),
        (["--echo.actions", "learning_rate", "stop", "--seed", "3"], ACTS | {"actions": ["learning_rate", "stop"]}),
        (["--echo.actions", "stop"], ACTS | {"actions": ["stop"]}),
        (["--echo.thresholds", "{window: 5}"], ACTS | {"thresholds": {"window": 5}}),
        (["--echo", '{"dry_run": true}'], ACTS | {"dry_run": True}),
        (["--echo", "{dry_run: true}"], ACTS | {"dry_run": True}),
        (["--echo", "true"], True),
        (["--echo", "false"], None),
    ],
    ids=str,
)
def test_keys_of_a_mapping_on_the_command_line_are_put_over_those_of_the_recipe(recipe, flags, expected):
    path = recipe(num_generations=2, save_strategy="steps", num_iterations=2, epsilon=0.2, echo=ACTS)
    config = train.read_arguments(["--config", path, *flags])[1]
    assert plain(config.echo) == expected


@pytest.mark.parametrize("flag", ("--trainer", "--algo"))
def test_trainer_and_its_other_name_decide_on_the_settings_over_the_recipe(recipe, flag):
    arguments, config, _ = train.read_arguments(["--config", recipe(trainer="ppo"), flag, "grpo"])
    assert arguments.trainer == "grpo" and type(config) is MultiTurnGRPOConfig


def test_a_mapping_needs_no_recipe_and_an_unknown_key_is_named(recipe):
    path = recipe()
    config = train.read_arguments(["--config", path, "--sampling.curriculum", "true", "--outages.max_wait", "1e2"])[1]
    assert config.sampling.curriculum is True and config.outages.max_wait == 100.0
    config = train.read_arguments(["--config", path, "--sampling", "{curriculum: true}"])[1]
    assert config.sampling.curriculum is True
    with pytest.raises(UsageError, match=r"sampling: 'curiculum' is none of its keys. Did you mean 'curriculum'\?"):
        train.read_arguments(["--config", path, "--sampling.curiculum", "true"])
    with pytest.raises(UsageError, match=r"--echo_patience: there is no such option. Did you mean 'echo.patience'\?"):
        train.read_arguments(["--config", path, "--echo_patience", "3"])


def test_a_flag_that_switches_off_takes_no_value(recipe):
    for flags in (["--no_gradient_checkpointing=false"], ["--no-gradient-checkpointing", "true"]):
        with pytest.raises(UsageError, match=r"checkpointing: takes no value.*--gradient_checkpointing true"):
            train.read_arguments(["--config", recipe(), *flags])


def test_a_key_of_a_mapping_that_another_command_has_is_not_called_misspelt(recipe, refusal):
    for flag in ("--echo.patience", "--sampling.curriculum"):
        assert f"{flag}: agent-r1-trl eval does not use it" in refusal("eval", "--config", recipe(), flag, "5")
