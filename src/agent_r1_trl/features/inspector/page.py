"""A run as one HTML file: nothing is fetched, and nothing in it that a model, a tool or a web page wrote can run.

The file is `web/page.html` with its marks replaced and the blocks of data in it. Only what the hashes in its policy
name may run and style, so scripts and styles stand in it byte by byte as they are hashed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from agent_r1_trl.features.inspector.pack import FLAGS, Packer, rounded
from agent_r1_trl.features.inspector.token_bytes import TokenBytes
from agent_r1_trl.recording import read_metrics, read_records, read_steps, trajectory_files
from agent_r1_trl.recording.events import read_events
from agent_r1_trl.recording.lines import run_folder
from agent_r1_trl.recording.store import file_step
from agent_r1_trl.safe_text import dump_json, rules

WEB = Path(__file__).parent / "web"
SCRIPTS = "put data text colours list bookmarks trajectory messages why siblings overview compare main"
"""In the order in which they are put together; a page that is served has `follow` behind them."""
MAX_BYTES = 250_000_000
"""A page that would be larger holds the last steps only."""
RECIPES = ("recipe.yaml", "evaluation.md")


def write_page(
    run: str | os.PathLike[str],
    path: str | os.PathLike[str],
    load_tokenizer: Callable[[str], Any],
    *,
    against: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
    version: str = "",
) -> Path:
    """Write the page of a run.

    Args:
        run: its output directory, its folder `trajectories`, or a file in that.
        path: of the page.
        load_tokenizer: the tokenizer of a run, or None.
        against: another run, that it is compared with.
        max_bytes: a page that would be larger holds the last steps only.
        version: of a page that is served (`LivePage`); empty for a file, which asks nothing of anybody.

    Raises:
        FileNotFoundError: a run does not exist.
        ValueError: a run has no trajectories, or a line is not one.
    """
    packer, runs = Packer(), []
    for number, source in enumerate(item for item in (run, against) if item is not None):
        tokenizer = load_tokenizer(str(source))
        tokens = TokenBytes(tokenizer)
        steps, left_out = _pack(packer, number, Path(source), tokens, max_bytes)
        if not steps:
            raise ValueError(
                f"{source}: holds no recorded trajectories (trajectories/step_*.jsonl). Train with "
                "record_trajectories: jsonl, or pass another run."
            )
        facts = {
            "steps": steps,
            "left_out": left_out,
            "tokenizer": tokenizer is not None,
            "strips": tokens.strips_start,
        }
        runs.append(facts | _about(Path(source)))
    packer.texts.close()
    meta = {
        "version": version,
        "runs": runs,
        "flags": FLAGS,
        "index": packer.index,
        "examples": list(packer.examples),
        "titles": list(packer.titles),
        "tags": list(map(dict, packer.tags)),
        "stops": list(packer.stops),
        "worst_ratio": packer.worst_ratio,
        "scales": packer.scales(),
        "vocabulary": packer.vocabulary.packed(),
        "blocks": len(packer.blocks),
        "text_blocks": len(packer.texts.blocks),
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:  # line ends as they were hashed
        for part in _parts(meta, packer):
            file.write(part)
    os.replace(temporary, target)
    return target


def _pack(packer: Packer, number: int, run: Path, tokens: TokenBytes, max_bytes: int) -> tuple[list[int], list[int]]:
    """Pack the steps of a run from the last one on, as far as they fit; returns them, and those that do not."""
    facts = read_steps(run)
    known = sorted({file_step(path) for path in trajectory_files(run)}, reverse=True)
    packed: list[int] = []
    for step in known:
        if packed and packer.size > max_bytes:
            break
        records = sorted(read_records(run, step=step if run.is_dir() else None, columns=True), key=attrgetter("step"))
        for name, part in groupby(records, key=attrgetter("step")):
            packer.add(number, list(part), tokens, facts.get(name, {}))
            packed.append(name)
        packer.close()
    return sorted(packed), sorted(set(known).difference(packed)) if run.is_dir() else []


def _about(run: Path) -> dict[str, Any]:
    """Name, metrics, events and recipe of a run, secrets masked."""
    folder = run_folder(run)
    recipe = next((path for name in RECIPES if (path := folder / name).is_file()), None)
    about = {
        "name": folder.resolve().name if run.is_dir() else run.name,
        "metrics": columns_of(read_metrics(folder)),
        "events": read_events(run),
        "recipe": recipe.read_text(encoding="utf-8", errors="replace") if recipe else "",
        "recipe_file": recipe.name if recipe else "",
    }
    masked: dict[str, Any] = rules().mask_all(json.loads(dump_json(about)))
    return masked


def columns_of(lines: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Metrics by name, a value for each log; None where a log lacks it or it is not finite.

    >>> columns_of([{"step": 1, "loss": 0.5}, {"step": 2, "loss": float("nan"), "time": "now"}])
    {'loss': [0.5, None], 'step': [1.0, 2.0]}
    """
    names = sorted({name for line in lines for name, value in line.items() if isinstance(value, int | float)})
    return {name: [rounded(line.get(name)) for line in lines] for name in names}


def _parts(meta: dict[str, Any], packer: Packer) -> Iterator[str]:
    """The file, part by part."""
    style = _read("style.css")
    names, connect = (f"{SCRIPTS} follow", "; connect-src 'self'") if meta["version"] else (SCRIPTS, "")
    script = '"use strict";\n' + "".join(_read(f"{name}.js") for name in names.split())
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'{connect}"
    )
    data = dump_json(meta, ensure_ascii=True).replace("<", "\\u003c")
    blocks = {"meta": [data], "block": packer.blocks, "text": packer.texts.blocks}
    page = _read("page.html")
    for mark, content in {"POLICY": policy, "STYLE": style, "SCRIPT": script}.items():
        before, page = page.split(f"[[{mark}]]")
        if mark == "SCRIPT":  # the data first, so that it is there when the script runs
            head, tail = before.split("[[DATA]]")
            yield head
            for kind, contents in blocks.items():
                for position, content_of in enumerate(contents):
                    yield f'<script type="text/plain" id="{kind}{position}">{content_of}</script>\n'
            before = tail
        yield before + content
    yield page


def _read(name: str) -> str:
    return (WEB / name).read_bytes().decode("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"
