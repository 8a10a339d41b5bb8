"""`pytest -p tests.durations --durations-file FILE` writes what each test costs; `make durations` keeps the file.

Two numbers each: processor seconds, of the process and of those that it waited for, and seconds that passed.
What a fixture costs is counted for the first test that asks for it.
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path

import pytest

TARGETS = {"test": "make test", "release": "make test-release", "matrix": "make nightly"}
"""The marker of a test (`test`: neither of the others), and which target runs it."""
NAMED_FROM_S = 5.0
"""Cheaper tests are not in the file by name, and files of cheaper tests are in one sum."""


def clock():
    """Processor seconds, and the time."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system, time.monotonic()


class Clock:
    """Says in each report what has passed since the one before; in each process that runs tests."""

    last = clock()

    def pytest_collection_finish(self):
        self.last = clock()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = clock()
        report.spent = [after - before for before, after in zip(self.last, now, strict=True)]
        self.last = now
        return report


class Ledger:
    """Adds the reports up and writes the file."""

    def __init__(self, path):
        self.path = path
        self.tests = {marker: defaultdict(lambda: [0.0, 0.0]) for marker in TARGETS}

    def pytest_runtest_logreport(self, report):
        marker = next((name for name in ("matrix", "release") if name in report.keywords), "test")
        name = report.nodeid
        if hasattr(report, "node"):  # of a process of pytest-xdist, which adds the test's group
            name = name.rpartition("@")[0]
        seconds = self.tests[marker][name]
        seconds[:] = [total + spent for total, spent in zip(seconds, report.spent, strict=True)]

    def pytest_sessionfinish(self):
        found = {TARGETS[marker]: summary(tests) for marker, tests in self.tests.items() if tests}
        self.path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def summary(tests):
    """What a target costs, and which files and tests cost most of it."""
    files = defaultdict(list)
    for name, seconds in tests.items():
        files[name.partition("::")[0]].append(seconds)
    sums = {name: add(seconds) for name, seconds in files.items()}
    large = {name: seconds for name, seconds in sums.items() if max(seconds) >= NAMED_FROM_S}
    named = {name: seconds for name, seconds in tests.items() if max(seconds) >= NAMED_FROM_S}
    return {
        "number of tests": len(tests),
        "all": rounded(add(tests.values())),
        "files": {name: rounded(large[name]) for name in sorted(large)},
        "smaller files": rounded(add(seconds for name, seconds in sums.items() if name not in large)),
        "tests": {name: rounded(named[name]) for name in sorted(named)},
    }


def add(pairs):
    pairs = [*pairs]
    return [sum(pair[place] for pair in pairs) for place in (0, 1)]


def rounded(seconds):
    """One line of the file: `processor, passed`."""
    return ", ".join(f"{number:.1f}" for number in seconds)


def pytest_addoption(parser):
    parser.addoption("--durations-file", help="Write there what each test costs.")


def pytest_configure(config):
    path = config.getoption("--durations-file")
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Clock())
    if path and not is_worker:
        config.pluginmanager.register(Ledger(Path(path)))
