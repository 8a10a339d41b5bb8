"""The examples in docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
FILES = [path.relative_to(SRC) for path in sorted(SRC.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_examples_of_a_module_give_what_they_say(path):
    results = doctest.testmod(importlib.import_module(".".join(path.with_suffix("").parts)))
    assert results.attempted > 0 and results.failed == 0
