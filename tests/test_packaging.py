"""The package as a user meets it: lazy imports, metadata, console script."""

import ast
import configparser
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import agent_r1_trl
from agent_r1_trl.cli import find_commands
from agent_r1_trl.evaluation import EvaluationResult, EvaluationTable, TableRow
from tests.setup_cfg import declared, plain
from tests.without_vllm import search_path

ROOT = Path(__file__).resolve().parents[1]
INSTALLED_BY_HAND = {"verifiers": "verifiers 0.4.0 pins mcp 2.0.0 and openai below 3"}
"""What no extra can bring, as its pins conflict with ours, and the sentence of docs/doors.md that says so."""
HEAVY = ["torch", "transformers", "trl", "vllm", "accelerate", "datasets", "peft", "pandas"]


def loaded_after(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys, json\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    with_vllm = os.environ | {"PYTHONPATH": search_path(is_hidden=False)}
    output = subprocess.run(
        [sys.executable, "-c", script], env=with_vllm, capture_output=True, text=True, check=True, timeout=300
    )
    return set(json.loads(output.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import agent_r1_trl",
        "from agent_r1_trl import tool, Tool, Trajectory, StopReason, ToolCall, ToolResult",
        "from agent_r1_trl import ToolEnv, SearchQAEnv, Environment, StepResult, check_env",
        "import agent_r1_trl.rewards, agent_r1_trl.tools, agent_r1_trl.environments",
        "from agent_r1_trl import tool\n@tool\n"
        "def f(x: int) -> int:\n    '''Add one.\n\n    Args:\n        x: A number.\n    '''\n    return x + 1\nf(1)",
    ],
)
def test_an_environment_server_loads_nothing_heavy(code):
    assert loaded_after(code) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"{name} --help" for name in find_commands() if name != "train"),
        "eval compare one two",
        "eval compare one.json two.json",
        "view nowhere",
    ],
)
def test_help_and_comparisons_load_nothing_heavy(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_evaluation(tmp_path / name)
        Path(f"{name}.json").write_text("{}")
    run = f"from agent_r1_trl.cli import main\ntry:\n    main({arguments.split()!r})\nexcept SystemExit:\n    pass"
    assert loaded_after(run) == set()


def write_evaluation(folder: Path) -> None:
    result = EvaluationResult.from_rows([{"f1": (1.0, 1.0)}], example_ids=["a"], reset_seeds=[1])
    EvaluationTable(rows=[TableRow(method="model", dataset="test", result=result)]).write(folder)


@pytest.mark.slow
def test_asking_for_the_trainer_is_what_loads_torch():
    assert {"torch", "trl"} <= loaded_after("from agent_r1_trl import MultiTurnGRPOTrainer")


def test_every_exported_name_can_be_imported():
    assert set(agent_r1_trl.__all__) <= set(dir(agent_r1_trl))
    assert [name for name in agent_r1_trl.__all__ if getattr(agent_r1_trl, name, None) is None] == []


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = agent_r1_trl.no_such_name


def test_the_installed_metadata_is_what_setup_cfg_says():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    installed = metadata.metadata("agent-r1-trl")
    assert installed["Version"] == agent_r1_trl.__version__
    assert installed["License"] == "Apache-2.0"
    assert installed["Requires-Python"] == config["options"]["python_requires"]
    scripts = {item.name: item.value for item in metadata.distribution("agent-r1-trl").entry_points}
    assert scripts["agent-r1-trl"] == "agent_r1_trl.cli:main"


def test_the_constraints_satisfy_the_declared_requirements():
    ranges = {name: item for packages in declared().values() for name, item in packages.items()}
    pinned = dict(
        line.split("==")
        for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert {"torch", "trl", "transformers"} <= set(pinned)
    wrong = [name for name, version in pinned.items() if name in ranges and version not in ranges[name]]
    assert not wrong


def test_everything_that_the_package_imports_is_declared():
    """What comes only because another package needs it today is gone when that one stops."""
    for_users = set().union(*(names for extra, names in declared().items() if extra not in ("test", "dev")))
    package = ROOT / "src" / "agent_r1_trl"
    imported = {}
    for path in package.rglob("*.py"):
        if "recipes" in path.relative_to(package).parts:  # a link; scripts there import their neighbours
            continue
        for name in third_party_imports(path.read_text(encoding="utf-8")):
            imported.setdefault({"yaml": "pyyaml"}.get(name, plain(name)), path.relative_to(ROOT))
    assert {"torch", "numpy", "huggingface-hub", "sandlock", "vllm"} <= set(imported)
    assert {name: path for name, path in imported.items() if name not in for_users | set(INSTALLED_BY_HAND)} == {}
    doors = (ROOT / "docs" / "doors.md").read_text(encoding="utf-8")
    assert all(name in imported and sentence in doors for name, sentence in INSTALLED_BY_HAND.items())


def third_party_imports(source: str) -> set[str]:
    """Top names of the absolute imports, those inside functions too.

    >>> sorted(third_party_imports("import os, numpy.random\ndef f():\n    from yaml import load"))
    ['numpy', 'yaml']
    """
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"agent_r1_trl"}


def test_no_output_of_a_run_is_in_the_repository():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("no clone")
    names = {"training_args.bin", "trainer_state.json", "optimizer.pt", "_run.lock"}
    assert [path for path in listed.stdout.splitlines() if Path(path).name in names] == []
