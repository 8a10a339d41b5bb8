"""The site of the documentation: what its builder would let through, and what stands on which page."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import agent_r1_trl

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
build_site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_site)

NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
NAMED = re.findall(r"^::: (agent_r1_trl\.[\w.]+)$", API, re.MULTILINE)
MAX_PAGES = 38


def test_every_page_stands_in_the_navigation_once():
    pages = build_site.find_pages()
    assert build_site.check_navigation(pages, NAV) == []
    assert len([*ROOT.glob("docs/*.md")]) <= MAX_PAGES


def test_a_navigation_that_invents_forgets_or_repeats_a_page_is_found():
    pages = {Path("a"): "a.md", Path("b"): "b.md"}
    problems = build_site.check_navigation(pages, [{"A": "a.md"}, {"More": [{"A": "a.md"}, {"C": "c.md"}]}])
    wrong = ("names c.md, which is no page", "lacks b.md", "names a.md twice")
    assert problems == [f"mkdocs.yml: nav {text}" for text in wrong]


LINKS = {
    '<a href="../b/#there">': None,
    '<a href="https://elsewhere.org/#x">': None,
    '<a href="../c/">': "a/index.html links to ../c/, which does not exist",
    '<a href="../b/#gone">': "a/index.html links to ../b/#gone, which has no such anchor",
    '<a href="#gone">': "a/index.html links to #gone, which has no such anchor",
    '<img src="x.png">': "a/index.html links to x.png, which does not exist",
    '<script src="https://cdn.org/x.js">': "a/index.html loads https://cdn.org/x.js",
    '<link rel="preconnect" href="https://fonts.org">': "a/index.html loads https://fonts.org",
    '<a data-md-component="source">': f"a/index.html has {build_site.ASKS_ANOTHER_SERVER}, which asks another server",
}


@pytest.mark.parametrize("tag, problem", LINKS.items())
def test_what_leads_nowhere_or_to_another_server_is_found(tag, problem, tmp_path):
    for name, text in {"a": tag, "b": '<h2 id="there">'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(text, encoding="utf-8")
    assert build_site.check_links(tmp_path) == ([problem] if problem else [])


def test_links_of_a_page_lead_to_pages_or_to_the_repository():
    page, pages = ROOT / "docs" / "games.md", build_site.find_pages()
    links = {
        "ppo.md#x": "ppo.md#x",
        "../recipes/bandit/README.md": "recipes/bandit.md",
        "../src/agent_r1_trl/errors.py": "https://home/blob/main/src/agent_r1_trl/errors.py",
        "../src": "https://home/tree/main/src",
        "https://x.org": "https://x.org",
        "#y": "#y",
    }
    for link, expected in links.items():
        assert build_site._relink(f"[a]({link})", page, pages, "https://home") == f"[a]({expected})"


def test_the_home_page_is_the_readme():
    pages = build_site.find_pages()
    assert pages[ROOT / "README.md"] == "index.md" and pages[ROOT / "docs" / "README.md"] == "pages.md"
    link = build_site._relink("[a](docs/games.md)", ROOT / "README.md", pages, "https://home")
    assert link == "[a](games.md)"


def test_names_of_options_do_not_break_in_running_text():
    page = "<p><code>train --max_steps 3</code></p><pre><code>--raw</code></pre>"
    whole = '<p><code>train <span class="name">--max_steps</span> 3</code></p><pre><code>--raw</code></pre>'
    assert build_site.keep_names_whole(page) == whole
    too_long = f"<code>--{'x' * build_site.MAX_NAME}</code>"
    assert build_site.keep_names_whole(too_long) == too_long


def test_every_public_name_stands_on_the_api_page():
    reached = {name.rpartition(".")[2] for name in NAMED}
    configs = {"MultiTurnGRPOConfig", "MultiTurnPPOConfig"}  # docs/options.md
    assert {*agent_r1_trl.__all__} - reached - configs == {"__version__"}
    for name in NAMED:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute)
