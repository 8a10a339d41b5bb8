"""docs/versions.md and setup.cfg say the same, and so does the check of versions."""

import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import check_versions
from check_vllm import declared_range
from tests.setup_cfg import declared, declared_pythons, plain

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "versions.md").read_text(encoding="utf-8")
RANGES = {name: item for packages in declared().values() for name, item in packages.items()}


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its first row."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_the_declared_ranges_of_the_page_are_those_of_setup_cfg():
    ranges = RANGES | {"python": declared_pythons()[0]}
    on_the_page = {plain(name): SpecifierSet(text.strip("`")) for name, text, _ in rows("What is declared")}
    assert {"python", "torch", "transformers", "trl", "vllm"} <= set(on_the_page)
    assert on_the_page == {name: ranges[name] for name in on_the_page}


def test_the_page_names_the_lowest_versions_that_are_declared():
    (row,) = (cells for cells in rows("Lowest and newest") if cells[0] == "lowest")
    tested = dict(item.split() for item in row[2].lower().split(", "))
    assert set(tested) == set(check_versions.SHOWN)
    declared_lowest = dict(line.split("==") for line in check_versions.declared_minimums())
    assert {name: Version(tested[name]) for name in tested} == {
        name: Version(declared_lowest[name]) for name in tested
    }


def test_what_is_newest_on_the_page_lies_within_the_declared_ranges():
    for row in rows("Lowest and newest"):
        tested = dict(item.split() for item in row[2].lower().split(", "))
        assert [name for name, version in tested.items() if version not in RANGES[name]] == [], row


def test_the_window_of_trl_on_the_page_is_the_declared_one():
    (window,) = re.findall(r"The window is `([^`]+)`", PAGE)
    assert SpecifierSet(window) == RANGES["trl"]


def test_the_range_of_vllm_on_the_page_is_declared_and_was_looked_at():
    (window,) = re.findall(r"Declared is `([^`]+)`", PAGE)
    assert SpecifierSet(window) == RANGES["vllm"] == declared_range().specifier
    ((lowest, highest),) = re.findall(r"none was missing in vLLM ([\d.]+) to ([\d.]+)\.\s", PAGE)
    assert declared_range().specifier.contains(lowest)
    assert Version(highest) >= max(Version(item.version) for item in declared_range().specifier)


def test_the_pythons_of_the_page_are_those_of_the_classifiers():
    asked, named = declared_pythons()
    tested = [release for release, result in rows("Python") if "classifier" not in result]
    assert {".".join(release.split(".")[:2]) for release in tested} == set(named)
    assert all(release in asked for release in tested)


def test_a_requirement_without_a_minimum_is_refused(tmp_path):
    path = tmp_path / "setup.cfg"
    path.write_text("[options]\ninstall_requires =\n    torch\n[options.extras_require]\n", encoding="utf-8")
    with pytest.raises(ValueError, match="torch has no minimum; declare the oldest version"):
        check_versions.declared_minimums(path)


def test_the_environment_is_kept_where_it_is_asked_for_and_pytest_gets_its_arguments(tmp_path, monkeypatch):
    calls = []

    def resolve(folder, which, python):
        (folder / "locked.txt").write_text("torch==2.8.0\n", encoding="utf-8")
        return folder / "locked.txt"

    monkeypatch.setattr(check_versions, "resolve", resolve)
    monkeypatch.setattr(check_versions, "install", lambda folder, locked, python: Path(sys.executable))
    monkeypatch.setattr(check_versions, "run_tests", lambda python, options: calls.append(options) or ("1 passed", 0))
    assert check_versions.main(["lowest", "--keep", str(tmp_path), "--pytest-args", "-n", "2", "--last-failed"]) == 0
    folder = tmp_path / "lowest-3.11"
    assert (folder / "locked.txt").exists()
    assert calls == [["-o", f"cache_dir={folder / 'pytest'}", "-n", "2", "--last-failed"]]
    assert check_versions.main(["lowest"]) == 0
    assert not Path(calls[1][1].removeprefix("cache_dir=")).parent.exists()
