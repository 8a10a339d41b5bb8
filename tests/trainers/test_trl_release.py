"""The tables of what we need of TRL are what the source uses, and another release is judged by them in one message."""

import ast
import functools
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trl
from trl import GRPOTrainer

import agent_r1_trl
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers import trl_release as release

SRC = Path(agent_r1_trl.__file__).parent
TRLS = [kind for kind in GRPOTrainer.__mro__ if kind.__module__.startswith("trl.")]
OURS = {
    kind
    for trainer in (MultiTurnGRPOTrainer, MultiTurnPPOTrainer)
    for kind in trainer.__mro__
    if kind.__module__.startswith("agent_r1_trl.")
}


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")}


def attributes_of(tree, *names):
    """Attributes that are read of, or set on, these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
            if name in names:
                yield node.attr


@functools.cache
def used_of_trainers():
    """Attributes of `self` in our trainers, and of what is called a trainer anywhere."""
    used, names = set(), {kind.__name__ for kind in OURS}
    for tree in TREES.values():
        used.update(attributes_of(tree, "trainer", "_trainer"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in names:
                used.update(attributes_of(node, "self"))
    return used


def test_the_overrides_in_the_table_are_those_of_our_trainers():
    of_trl = {name for kind in TRLS for name, value in vars(kind).items() if inspect.isfunction(value)}
    ours = {name for kind in OURS for name in vars(kind)}
    called = used_of_trainers() & of_trl - ours - set(release.ATTRIBUTES.split())
    assert set(release.METHODS) == (ours & of_trl) | called


@pytest.mark.parametrize("name", release.METHODS)
def test_the_arguments_in_the_table_are_those_that_our_overrides_name(name):
    named, is_open = [], True
    for kind in OURS:
        if name in vars(kind):
            parameters = [*inspect.signature(vars(kind)[name]).parameters.values()][1:]
            kinds = {item.kind for item in parameters}
            is_open &= inspect.Parameter.VAR_KEYWORD in kinds
            own = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
            named = max(named, own, key=len)
    assert release.METHODS[name].split() == [*named, *["*"] * is_open]


def test_the_attributes_in_the_table_are_those_of_trls_that_are_used():
    code = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer.__init__)))
    set_by_trl = {
        node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    of_classes = {name for kind in TRLS for name, value in vars(kind).items() if isinstance(value, str)}
    own = {"__module__", "__doc__"}
    assert set(release.ATTRIBUTES.split()) == used_of_trainers() & (set_by_trl | of_classes) - own


def test_the_imports_in_the_table_are_those_of_the_source():
    found = {}
    for path, tree in TREES.items():
        module = "trl.chat_template_utils" if path.parent.name == "chat" else "trl"  # what `trl` is there
        found.setdefault(module, set()).update(set(attributes_of(tree, "trl")) - {"__file__", "__version__"})
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and re.fullmatch(r"trl(\..+)?", node.module or ""):
                found.setdefault(node.module, set()).update(item.name for item in node.names)
    assert {module: set(names.split()) for module, names in release.IMPORTS.items()} == found


def test_the_release_that_is_called_tested_is_the_one_of_the_constraints():
    constraints = SRC.parents[1] / "requirements" / "constraints.txt"
    assert f"trl=={release.TESTED}\n" in constraints.read_text(encoding="utf-8")


# ---------------------------------------------------------------- other releases


@pytest.mark.slow
def test_another_release_is_refused_in_one_message(tmp_path):
    copy = shutil.copytree(Path(trl.__file__).parent, tmp_path / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "trainer" / "grpo_trainer.py"
    source = file.read_text(encoding="utf-8").replace("_calculate_rewards", "score")
    changed = source.replace(
        "def _compute_loss(self, model, inputs)", "def _compute_loss(self, model, inputs, budget)"
    )
    assert changed != source
    file.write_text(changed, encoding="utf-8")
    code = "import agent_r1_trl.trainers; from agent_r1_trl import MultiTurnGRPOTrainer, MultiTurnPPOTrainer"
    paths = os.pathsep.join([str(tmp_path), str(SRC.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 1, done.stderr
    (message,) = re.findall(r"^.*differs from.*$", done.stderr, re.MULTILINE)
    assert message.startswith("ImportError: trl ") and f"pip install trl=={release.TESTED}" in message
    for text in ("_calculate_rewards is gone", "_compute_loss needs 'budget'"):
        assert f"GRPOTrainer.{text}" in message
    assert done.stderr.rstrip().endswith(message)


def test_an_attribute_that_no_method_of_trls_mentions_is_gone(monkeypatch):
    monkeypatch.setattr(release, "ATTRIBUTES", "_metrics _name _pending_outtakes")
    with pytest.raises(ImportError, match=r"what it builds on: GRPOTrainer._pending_outtakes is gone\."):
        release.check_trl.__wrapped__()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (None, ["is gone"]),
        (lambda self, a: 0, ["takes no 'b'"]),
        (lambda self, b, a: 0, ["takes 'b', 'a' in this order"]),
        (lambda self, a, b, c: 0, ["needs 'c'"]),
        (lambda self, a, b, *, c: 0, ["needs 'c'"]),
        (lambda self, a, b, c=0, **kwargs: 0, []),
    ],
)
def test_arguments_are_compared_by_name_and_order(method, expected):
    assert release.compare_arguments(method, ["a", "b"]) == expected
    assert release.compare_arguments(lambda self, a, b, c, d=0: 0, ["a", "b", "*"]) == []


def test_a_release_without_a_module_lacks_all_that_is_imported_from_it(monkeypatch):
    def imported(name):
        if name == "trl.models":
            raise ModuleNotFoundError(name)
        return sys.modules[name]

    monkeypatch.setattr(importlib, "import_module", imported)
    assert [*release._lacking_imports()] == ["trl.models.unwrap_model_for_generation is gone"]


# ---------------------------------------------------------------- another package in TRL's place


UNSLOTHS = """
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer as _Base

class UnslothGRPOConfig(GRPOConfig):
    pass

class UnslothGRPOTrainer(_Base):
    def _compute_loss(self, model, inputs, budget):
        raise AssertionError("not TRL's")
"""
REPLACE = """
import importlib.util, sys
import trl, trl.trainer, trl.trainer.grpo_config, trl.trainer.grpo_trainer
spec = importlib.util.spec_from_file_location("UnslothGRPOTrainer", FILE)
created = importlib.util.module_from_spec(spec)
sys.modules["UnslothGRPOTrainer"] = created
spec.loader.exec_module(created)
for place in (trl, trl.trainer, trl.trainer.grpo_trainer):
    place.GRPOTrainer, place.GRPOConfig = created.UnslothGRPOTrainer, created.UnslothGRPOConfig
trl.trainer.grpo_config.GRPOConfig = created.UnslothGRPOConfig
"""
IMPORTS_OF_OURS = "from agent_r1_trl import MultiTurnGRPOConfig, MultiTurnGRPOTrainer\n"


def run_beside_unsloth(tmp_path, program):
    """A program in which `REPLACE` does what `import unsloth` does to TRL."""
    file = tmp_path / "unsloth_compiled_cache" / "UnslothGRPOTrainer.py"
    file.parent.mkdir()
    file.write_text(UNSLOTHS, encoding="utf-8")
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(SRC.parent), str(root), os.environ.get("PYTHONPATH", "")])
    code = program.replace("FILE", repr(str(file)))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )


@pytest.mark.release
def test_who_has_replaced_trls_trainer_is_named_with_the_order_of_imports(tmp_path):
    ask = """
import agent_r1_trl
for name in ("MultiTurnGRPOTrainer", "MultiTurnPPOTrainer", "MultiTurnGRPOConfig"):
    try:
        getattr(agent_r1_trl, name)
    except ImportError as error:
        print(error)
"""
    done = run_beside_unsloth(tmp_path, REPLACE + ask)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("trl.GRPO") and "differs from" not in line and "pip install" not in line
        for text in ("Unsloth (import unsloth)", "UnslothGRPOTrainer.py", "before it", IMPORTS_OF_OURS.strip()):
            assert text in line


@pytest.mark.release
def test_imported_first_ours_train_beside_a_replaced_trl(tmp_path):
    train = f"""
from tests.trainers.helpers import make_trainer
trainer = make_trainer({str(tmp_path / "run")!r}, loss_type="dapo")
bases = [kind.__module__ for kind in type(trainer).__mro__]
assert "trl.trainer.grpo_trainer" in bases and "UnslothGRPOTrainer" not in bases
trainer.train()
assert trainer.state.global_step == 1
from agent_r1_trl import MultiTurnPPOTrainer
"""
    done = run_beside_unsloth(tmp_path, IMPORTS_OF_OURS + REPLACE + train)
    assert done.returncode == 0, done.stderr


def test_names_that_only_trl_uses_are_no_warning_of_the_users(tmp_path):
    program = textwrap.dedent(f"""
        import warnings
        from agent_r1_trl.trainers import MultiTurnGRPOConfig
        MultiTurnGRPOConfig(output_dir={str(tmp_path)!r}, use_cpu=True, bf16=False)
        ends = ("", "_kwargs", "_enable", "_disable")
        for name in (*("gradient_checkpointing" + end for end in ends), "is_gradient_checkpointing"):
            warnings.warn(f"`{{name}}` is deprecated and will be removed in v6. Use another.", FutureWarning)
        warnings.warn("anything else", FutureWarning)
    """)  # as transformers 5.23 and 5.24 say it, which may not be the release that is installed
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("FutureWarning") == 1 and "anything else" in done.stderr
