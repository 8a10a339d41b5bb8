"""The table of docs/sandbox.md: which backend contains which attack, tried for real."""

import os
import re
from pathlib import Path

import pytest

from tests.sandbox.attacks import ATTACKS, try_all, try_all_as

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sandbox.md"
COLUMNS = ("subprocess", "subprocess, no namespaces", "sandlock", "monty")
NOBODY = 65534

pytestmark = pytest.mark.slow


def table() -> dict[str, dict[str, bool]]:
    """Column -> attack -> whether the page says that it is contained."""
    rows = re.findall(r"^\| (.+?) \|((?: (?:yes|\*\*no\*\*) \|){4})$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    cells = {name: [cell.strip() == "yes" for cell in row.strip("|").split("|")] for name, row in rows}
    return {column: {name: row[place] for name, row in cells.items()} for place, column in enumerate(COLUMNS)}


def why_not_sandlock() -> str:
    """Why sandlock cannot run here, if it cannot."""
    from agent_r1_trl.sandbox.choose import check_sandlock

    try:
        check_sandlock()
    except ValueError as error:
        return str(error)
    return ""


def test_the_page_has_a_row_for_every_attack():
    assert {column: list(rows) for column, rows in table().items()} == {column: list(ATTACKS) for column in COLUMNS}


def test_sandlock_contains_everything():
    if reason := why_not_sandlock():
        pytest.skip(reason)
    contained = try_all("sandlock")
    assert contained == dict.fromkeys(ATTACKS, True)
    assert contained == table()["sandlock"]


def test_monty_contains_what_the_page_says():
    assert try_all("monty") == table()["monty"]


def test_subprocess_with_namespaces_contains_what_the_page_says():
    from agent_r1_trl.sandbox.local import has_namespaces

    if not has_namespaces():
        pytest.skip("this system allows no namespaces, so only the other column of the table applies")
    assert try_all("subprocess") == table()["subprocess"]


def test_subprocess_without_namespaces_contains_what_the_page_says():
    backend = "subprocess, no namespaces"
    contained = try_all(backend) if os.getuid() else try_all_as(NOBODY, backend)
    if contained is None:
        pytest.skip("this is root, and no other user can run Python here")
    assert contained == table()[backend]


def test_without_a_sandbox_the_attacks_succeed():
    """Else the tests above would prove nothing. Those that would harm the machine are left out."""
    harmful = ("starts a fork bomb", "fills the disk", "takes 10 GB of memory", "loops for ever")
    tried = [name for name in ATTACKS if name not in harmful]
    assert try_all("none", tried) == dict.fromkeys(tried, False)
