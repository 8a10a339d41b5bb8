"""Build the site of the documentation and check it: `python docs/build_site.py` (`make docs`).

    README.md, docs/*.md, recipes/*/README.md, benchmarks/*.md  ->  build/docs  ->  zensical  ->  build/site

The README is the home page, without its list of headings beside it, so that its pictures have room.

Links between pages of the repository become links between pages of the site; those to other files of the repository
lead to `extra.repository` (a `repo_url` has every page ask GitHub's API for stars). zensical's strict mode passes over
dead links out of a page's folder and pages that the navigation lacks or invents, so the HTML is read once more:
every link and anchor inside the site leads somewhere, and no page loads anything from another server.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIG, SOURCES, SITE = ROOT / "mkdocs.yml", ROOT / "build" / "docs", ROOT / "build" / "site"
BRANCH, HOME = "main", "index.md"
STYLE = """\
.md-typeset td code, .md-typeset th code, .md-typeset .name { white-space: nowrap; }
@media (max-width: 44.9em) {
  .md-typeset table:not([class]) th, .md-typeset table:not([class]) td { min-width: 0; padding: 0.5em; }
  .md-typeset td:first-child code { padding: 0; font-size: 0.6rem; }
}
"""
MAX_NAME = 36
"""Characters that fit in a line of a phone; longer words may break."""
_CODE = re.compile(r"(<pre.*?</pre>)|(<code>)([^<]*)(</code>)", re.DOTALL)
ASKS_ANOTHER_SERVER = 'data-md-component="source"'
"""The theme's link to a repository, whose script asks GitHub or GitLab for its figures."""
WIDE = "---\nhide: [toc]\n---\n"
_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```\s*?$)", re.MULTILINE | re.DOTALL)


class SiteError(Exception):
    """The documentation cannot be built; the message lists why."""


def find_pages() -> dict[Path, str]:
    """File of the repository -> page of the site."""
    pages = {path: path.name for path in ROOT.glob("docs/*.md")}
    pages[ROOT / "docs" / "README.md"] = "pages.md"
    pages[ROOT / "README.md"] = HOME
    pages |= {path: f"recipes/{path.parent.name}.md" for path in ROOT.glob("recipes/*/README.md")}
    pages |= {path: f"benchmarks/{path.name}" for path in ROOT.glob("benchmarks/*.md")}
    return {path: re.sub(r"README\.md$", "index.md", name) for path, name in pages.items()}


def write_sources(pages: dict[Path, str], repo_url: str) -> None:
    """`build/docs`: the pages with their links, and the pictures that they show."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    for path, name in pages.items():
        parts = _FENCE.split(path.read_text(encoding="utf-8"))
        text = "".join(part if part.startswith("```") else _relink(part, path, pages, repo_url) for part in parts)
        (SOURCES / name).parent.mkdir(parents=True, exist_ok=True)
        (SOURCES / name).write_text(WIDE * (name == HOME) + text, encoding="utf-8")
    (SOURCES / "narrow.css").write_text(STYLE, encoding="utf-8")


def _relink(text: str, path: Path, pages: dict[Path, str], repo_url: str) -> str:
    def replace(match: re.Match[str]) -> str:
        start, link, anchor = match[1], match[2], match[3] or ""
        target = (path.parent / link).resolve()
        if target.is_dir() and target / "README.md" in pages:
            target /= "README.md"
        if start.startswith("!"):
            picture = SOURCES / target.relative_to(ROOT)
            picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, picture)
            to = target.relative_to(ROOT).as_posix()
        elif target in pages:
            to = pages[target]
        else:
            kind = "tree" if target.is_dir() else "blob"
            return f"{start}{repo_url}/{kind}/{BRANCH}/{target.relative_to(ROOT).as_posix()}{anchor})"
        return f"{start}{os.path.relpath(to, Path(pages[path]).parent)}{anchor})"

    return _LINK.sub(replace, text)


def keep_names_whole(page: str) -> str:
    """The HTML of a page in which no line of running text breaks after a dash of a name."""

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        words = re.split(r"(\s+)", match[3])
        is_name = ["-" in word and len(word) <= MAX_NAME for word in words]
        marked = [f'<span class="name">{word}</span>' if is_name[i] else word for i, word in enumerate(words)]
        return match[2] + "".join(marked) + match[4]

    return _CODE.sub(replace, page)


def check_navigation(pages: dict[Path, str], nav: list[Any]) -> list[str]:
    """What is wrong with the navigation: each page stands in it once."""
    named = [*_leaves(nav)]
    problems = [f"mkdocs.yml: nav names {name}, which is no page" for name in named if name not in pages.values()]
    problems += [f"mkdocs.yml: nav lacks {name}" for name in sorted({*pages.values()} - {*named})]
    return problems + [f"mkdocs.yml: nav names {name} twice" for name in {*named} if named.count(name) > 1]


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(item)


class _Page(HTMLParser):
    """Anchors and links of a page, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        text = path.read_text(encoding="utf-8")
        self.asks_another_server = ASKS_ANOTHER_SERVER in text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        is_loaded = tag in ("script", "img", "iframe", "source") or values.get("rel") in ("stylesheet", "preconnect")
        self.loads += filter(None, [values.get("src") or values.get("href")] if is_loaded else [])


def check_links(site: Path) -> list[str]:
    """Links and loads of the built pages that lead nowhere, and loads from other servers."""
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        if path.name == "404.html":  # it is served at any address
            continue
        here = path.relative_to(site)
        problems += [f"{here} loads {link}" for link in page.loads if urlsplit(link).netloc]
        if page.asks_another_server:
            problems.append(f"{here} has {ASKS_ANOTHER_SERVER}, which asks another server")
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                problems.append(f"{here} links to {link}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                problems.append(f"{here} links to {link}, which has no such anchor")
    return problems


def build() -> int:
    """Build and check; returns the number of pages.

    Raises:
        SiteError: a page, a link or the navigation is wrong.
        subprocess.CalledProcessError: zensical refused it, and said why.
    """
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    pages = find_pages()
    problems = check_navigation(pages, config["nav"])
    if not problems:
        write_sources(pages, config["extra"]["repository"])
        shutil.rmtree(SITE, ignore_errors=True)
        zensical = Path(sys.executable).parent / "zensical"
        subprocess.run(
            [str(zensical), "build", "--strict", "--clean", "--config-file", str(CONFIG)], check=True, cwd=ROOT
        )
        for path in SITE.rglob("*.html"):
            path.write_text(keep_names_whole(path.read_text(encoding="utf-8")), encoding="utf-8")
        problems = check_links(SITE)
    if problems:
        raise SiteError("\n".join(problems))
    return len(pages)


if __name__ == "__main__":
    try:
        print(f"{build()} pages under {SITE}")
    except (SiteError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
