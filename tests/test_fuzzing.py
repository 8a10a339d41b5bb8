"""Every property test asks `tests/effort.py` how much it tries, so that `make fuzz` reaches it."""

import ast
import random
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
        assert examples(70) == 28 and len(list(random_rounds(30))) == 12 and examples(1) == 1
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
        return [rng.random() for rng in random_rounds(8)]

    plain = draw()
    assert plain == draw() and len(set(plain)) == len(plain)
    monkeypatch.setenv("FUZZ_SEED", "5")
    other = draw()
    assert other[0] == random.Random("5 0").random() and not set(other) & set(plain)
    assert "round 2 of FUZZ_SEED=5" in capsys.readouterr().out
