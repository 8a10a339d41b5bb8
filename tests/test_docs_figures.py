"""The figures of the README are those of benchmarks/RESULTS.md, in the section that each one links to.

Not covered: the output shown in code blocks, and the lines of each package (tests/test_docs.py counts them).
"""

import re
from pathlib import Path

import pytest

from tests.test_docs import heading_anchor

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
NOT_FIGURES = {"3.11", "95%", "0", "1"}
"""Python's version and the level of every interval; 0 and 1 are values of a mask, a learning rate, a temperature."""
LINK = re.compile(r"\]\([^)\s]*\)")
TO_RESULTS = re.compile(r"\]\(benchmarks/RESULTS\.md#([\w-]+)\)")
NUMBER = re.compile(r"[+-]?(\d[\d,]*)?\.?\d+%?")


def numbers(text: str) -> set[str]:
    """The words of a text that are numbers; names such as `7B` or `Qwen2.5-1.5B` are not.

    >>> sorted(numbers("**0.950** of 6,534 tokens [+0.100, +0.210] at 7B, in 15.2 s ([code](a/1.py)), .040."))
    ['+0.100', '+0.210', '.040', '0.950', '15.2', '6,534']
    """
    words = re.split(r"[\s|\[\]()*]+", LINK.sub("] ", text))
    stripped = (word.rstrip(".,;:") for word in words)
    return {word for word in stripped if NUMBER.fullmatch(word)}


def claims(page: str) -> list[str]:
    """Paragraphs, lists, and tables with the paragraph above them; a row of a table with its own link alone."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        if not block.startswith("|"):
            found.append(block)
            continue
        rows = block.splitlines()
        by_themselves = [row for row in rows if TO_RESULTS.search(row)]
        others = [row for row in rows if not TO_RESULTS.search(row)]
        found[-1] = "\n".join([found[-1], *others])
        found += by_themselves
    return found


def sections() -> dict[str, str]:
    """Anchor of a heading of RESULTS.md -> the text under it, up to the next heading."""
    parts = re.split(r"^#+ (.+)$", RESULTS, flags=re.MULTILINE)
    return {heading_anchor(heading): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


CLAIMS = [claim for claim in claims(README.split("\n## The tree\n")[0]) if numbers(claim) - NOT_FIGURES]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.split("\n")[0][:50])
def test_every_figure_of_the_readme_stands_in_the_results_that_it_links_to(claim):
    linked = TO_RESULTS.findall(claim)
    assert linked, f"no link to a section of benchmarks/RESULTS.md beside {sorted(numbers(claim))}"
    measured = set().union(*(numbers(sections()[anchor]) for anchor in linked))
    missing = numbers(claim) - measured - NOT_FIGURES
    assert not missing, f"{sorted(missing)} stand in none of {linked}"


def test_the_tables_of_the_results_are_among_the_claims():
    """A reader of tables that saw none of them would find no wrong figure."""
    seen = set().union(*(numbers(claim) for claim in CLAIMS))
    assert {"0.520", "0.953", ".895", "0.15", "40.4", "16.3", "6,534", "+0.020"} <= seen
