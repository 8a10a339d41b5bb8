"""Every property test asks `tests/effort.py` how much it tries, so that `make fuzz` reaches it."""

import ast
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.effort import examples, random_rounds

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_*.py"))


def named(node, name):
    return isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_file_asks_how_many_examples_it_may_try(path):
    source = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if named(node, "settings"):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            assert named(given.get("max_examples", node), "examples") or not given, f"line {node.lineno}"
    imports_hypothesis = any(isinstance(node, ast.ImportFrom) and node.module == "hypothesis" for node in nodes)
    if imports_hypothesis and path != Path(__file__):
        assert "examples(" in source
    if any(named(node, "random_rounds") for node in nodes) and path != Path(__file__):
        assert "pytest.mark.fuzz" in source


def test_the_profile_multiplies_what_a_test_asks_for():
    with profile("tests"):
        assert examples(7) == 7 and len(list(random_rounds(3))) == 3
    with profile("fuzz"):
        assert examples(7) == 70 and len(list(random_rounds(3))) == 30
    settings.register_profile("one", max_examples=1)
    with profile("one"):
        assert examples(7) == 1 and examples(300) == 3


class profile:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.before = settings.get_current_profile_name()
        settings.load_profile(self.name)

    def __exit__(self, *_):
        settings.load_profile(self.before)


def test_rounds_repeat_with_their_seed_and_differ_without(monkeypatch, capsys):
    def draw():
        return [rng.random() for rng in random_rounds(3)]

    plain = draw()
    assert plain == draw() and len(set(plain)) == len(plain)
    monkeypatch.setenv("FUZZ_SEED", "5")
    other = draw()
    assert other[0] == random.Random("5 0").random() and not set(other) & set(plain)
    assert "round 2 of FUZZ_SEED=5" in capsys.readouterr().out


FAILING = """
import pytest
from hypothesis import given, settings, strategies as st
from tests.effort import examples, random_rounds

@settings(max_examples=examples(200))
@given(st.integers())
def test_with_hypothesis(number):
    with open("tried.txt", "a") as file:
        print(number, file=file)
    assert number < 1000

def test_by_hand():
    for rng in random_rounds(50):
        assert rng.random() < 0.9
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_failure_prints_what_repeats_it_and_comes_first_in_the_next_run(tmp_path, workers):
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "effort.py", "own_process.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "test_failing.py").write_text(FAILING, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = ["--import-mode=importlib"]\nmarkers = ["fuzz"]\n',
        encoding="utf-8",
    )

    def run():
        (tmp_path / "tried.txt").unlink(missing_ok=True)
        env = {**os.environ, "CI": "true", "PYTHONPATH": "", "FUZZ_SEED": "3"}
        command = [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", "tests"]
        printed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120).stdout
        return printed, [int(line) for line in (tmp_path / "tried.txt").read_text().split()]

    printed, tried = run()
    assert "@reproduce_failure(" in printed and "2 failed" in printed
    assert "of FUZZ_SEED=3" in printed
    assert tried[0] != 1000
    assert run()[1][0] == 1000  # the smallest that fails
