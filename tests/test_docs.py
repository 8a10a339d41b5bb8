"""The README and the pages of docs/ say what is true: their code runs, their links, commands and paths exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, source) of the fenced blocks of one language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 2, match.group(1)) for match in found]


@pytest.mark.parametrize("page", [page for page in RUNNABLE if page.name != "README.md"], ids=page_id)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path / "cache"))
    namespace = {"__name__": f"docs_{page.stem}"}
    for line, source in code_blocks(page, "python"):
        padded = "\n" * (line - 1) + source  # so that a traceback names the line of the page
        exec(compile(padded, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|mailto:)([^)#\s]+)(#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target, _ in links if not (page.parent / target).exists()]
    assert not missing, f"{page_id(page)} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_to_headings_find_their_heading(page):
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        anchors = {heading_anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        assert anchor in anchors, f"{page_id(page)} links to {target}#{anchor}"


def heading_anchor(heading: str) -> str:
    """GitHub's anchor of a heading.

    >>> heading_anchor("What each `length` means, and why")
    'what-each-length-means-and-why'
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_make_target_and_file_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ +|\$ )make ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named <= targets, f"{page_id(page)} names make targets that do not exist: {sorted(named - targets)}"
    folders = "src|tests|docs|recipes|benchmarks|notebooks|requirements"
    paths = set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*\w)(?![\w*<{{])", text))
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing, f"{page_id(page)} names files that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_python_file_named_as_a_command_exists(page):
    scripts = re.findall(r"(?:python3?|torchrun [^\n]*?|launch [^\n]*?) ([\w./-]+\.py)", page.read_text(encoding="utf-8"))
    missing = [script for script in scripts if not (ROOT / script).exists() and "/" in script]
    assert not missing, f"{page_id(page)} runs {missing}"
