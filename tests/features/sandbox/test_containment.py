"""Which backend stops which attack, tried for real; docs/sandbox.md counts them."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from agent_r1_trl.features.sandbox.tools import find_problems
from tests.features.sandbox.attacks import ACCIDENTS, ATTACKS, NO, TRIED, YES, try_all, try_all_as

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sandbox.md"
COLUMNS = ("sandlock", "limits", "monty")
NOBODY = 65534

pytestmark = pytest.mark.slow


def why_not_sandlock() -> str:
    """Why sandlock cannot run here, if it cannot."""
    return next(find_problems("sandlock", "python"), "")


def expected(backend: str) -> dict[str, str]:
    return {name: cells[backend] for name, cells in ATTACKS.items()}


def test_the_page_counts_the_attacks_by_what_stops_them():
    cells = f"(?:{'|'.join(map(re.escape, (YES, ACCIDENTS, NO)))})"
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(rf"^\| ({cells}) \| ({cells}) \| ({cells}) \| (\d+): .+ \|$", text, re.MULTILINE)
    said = {tuple(results): int(count) for *results, count in rows}
    assert said == Counter(tuple(verdicts[name] for name in COLUMNS) for verdicts in ATTACKS.values())
    assert f"tries {len(ATTACKS)} attacks" in text and len(ATTACKS) >= 50


@pytest.mark.parametrize("backend", ["sandlock", "monty"])
def test_it_stops_what_the_page_says(backend):
    if backend == "sandlock" and (reason := why_not_sandlock()):
        pytest.skip(reason)
    assert try_all(backend) == expected(backend)


def test_limits_stop_what_the_page_says_and_no_more_than_the_system_itself_does():
    unprotected = try_all("none")
    wanted = {name: YES if unprotected.get(name) == YES else cell for name, cell in expected("limits").items()}
    assert try_all("limits") == wanted
    # Else the tests above would prove nothing; a container may stop some of them itself.
    by_the_kernel = [name for name in TRIED if expected("limits")[name] == YES]
    by_the_system = [name for name, cell in unprotected.items() if cell == YES]
    assert len(by_the_system) <= len(by_the_kernel) + 15, by_the_system


@pytest.mark.parametrize("backend", ["sandlock", "limits"])
def test_root_and_another_user_are_stopped_alike(backend):
    if os.getuid() != 0:
        pytest.skip("the tests above ran as a user without privileges already")
    if backend == "sandlock" and (reason := why_not_sandlock()):
        pytest.skip(reason)
    found = try_all_as(NOBODY, backend)
    if found is None:
        pytest.skip("no other user can run Python here")
    stopped = {name: cell for name, cell in expected(backend).items() if cell != NO}
    assert {name: found[name] for name in stopped} == stopped
