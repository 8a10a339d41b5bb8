"""The list of all settings: `train --help`, docs/options.md, and the answer of every command to --help."""

import dataclasses
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from agent_r1_trl.cli import COMMANDS, main
from agent_r1_trl.cli.options import PAGE, make_options, page_text, read_options

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_is_that_of_the_dataclasses():
    kept, made = read_options(), make_options()
    if version("transformers") != _pinned_transformers():  # theirs differ between versions
        kept, made = ([group for group in groups if "(t" not in group["title"].lower()] for groups in (kept, made))
    assert kept == made, "run `make options`"
    assert (ROOT / PAGE).read_text() == page_text(), "run `make options`"


def test_where_ppo_has_another_default_both_stand_there():
    """The page named PPO's alone, as if a GRPO run began with them."""
    both = {
        item["name"]: (item["default"], item["default_ppo"])
        for group in read_options()
        for item in group["options"]
        if "default_ppo" in item
    }
    assert both == {"advantage_estimator": ("grpo", "gae"), "num_generations": ("8", "1")}


def test_the_page_shows_no_backslashes_between_backticks():
    spans = re.findall(r"`[^`\n]*`", (ROOT / PAGE).read_text())
    assert len(spans) > 200
    assert [span for span in spans if "\\" in span.replace("\\|", "")] == []


@pytest.mark.parametrize("command", ["eval", "chat"])
def test_the_help_of_a_command_has_its_own_defaults(command, capsys):
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--max_completion_length .*?\[default: (\w+)\]", text)[1] == "512", "RolloutSettings has 2048"


def test_every_setting_of_our_own_has_a_meaning():
    ours = [group for group in read_options() if "(t" not in group["title"].lower()]
    assert len(ours) > 15
    assert [item["name"] for group in ours for item in group["options"] if len(item["help"]) < 8] == []


def test_the_help_of_training_names_every_flag_that_the_parser_takes(capsys):
    from transformers import TrainingArguments

    from agent_r1_trl.cli.arguments import TrainArguments
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.trainers import MultiTurnPPOConfig
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    shown = set(re.findall(r"(?<![\w-])--(\w+)", text))
    parser = RecipeParser((TrainArguments, MultiTurnPPOConfig, ModelConfig), command="train")
    flags = {action.option_strings[0].removeprefix("--") for action in parser._actions}
    missing = flags - {"-h"} - shown - {"help"}
    if missing and version("transformers") != _pinned_transformers():
        assert "newer releases of TRL and transformers" in text
        missing -= {item.name for item in dataclasses.fields(TrainingArguments)}
    assert not missing


def _pinned_transformers():
    pinned = (ROOT / "requirements" / "constraints.txt").read_text()
    return re.search(r"^transformers==(\S+)$", pinned, re.MULTILINE)[1]


def test_our_settings_come_before_those_of_the_libraries(capsys):
    main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.index("--max_turns") < text.index("--lora_r") < text.index("--vllm_mode") < text.index("--adam_beta1")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_heavy(command):
    began = time.perf_counter()
    script = (
        "import sys\nfrom agent_r1_trl.cli import main\n"
        f"try:\n    code = main([{command!r}, '--help'])\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = ('torch', 'transformers', 'trl', 'datasets', 'vllm')\n"
        "print('HEAVY', [name for name in heavy if name in sys.modules])\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: agent-r1-trl " + command in done.stdout
    assert done.stdout.splitlines()[-1] == "HEAVY []", f"after {time.perf_counter() - began:.1f} s"
