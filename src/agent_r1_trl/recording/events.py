"""What happened to a run besides its trajectories: a line of JSON each, in `RUN/trajectories/events.jsonl`.

The echo guard writes its actions there. An event has `time` (UTC), `step`, `action` and `text`, and what else its
writer knows. A resumed run appends.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from agent_r1_trl.recording.store import FOLDER, read_lines
from agent_r1_trl.safe_text import dump_json

logger = logging.getLogger(__name__)

FILE = "events.jsonl"


def write_event(output_dir: str | os.PathLike[str], event: dict[str, Any]) -> None:
    """Append an event of a run; what cannot be written, as on a full disk, is said in the log."""
    path = Path(output_dir) / FOLDER / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(dump_json(event) + "\n")
    except OSError as error:
        logger.error("An event could not be written to %s: %s. Free some space. It was: %s", path, error, event)


def read_events(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a run, in the order in which they happened; none if it has no such file.

    Args:
        run: its output directory, its folder `trajectories`, or a file in that.

    Raises:
        ValueError: a line is not an event; the message names file and line.
    """
    source = Path(run)
    folder = source.parent if source.is_file() else source
    path = next((place for place in (folder / FOLDER / FILE, folder / FILE) if place.is_file()), None)
    return [] if path is None else list(read_lines(path, "an event"))


def describe_event(event: dict[str, Any]) -> str:
    """One line for a reader.

    >>> describe_event({"step": 5, "state": "collapsed", "action": "clip", "outcome": "taken", "text": "wider"})
    'step 5, collapsed: clip (taken): wider'
    """
    causes = "; ".join(str(text) for text in dict(event.get("signals") or {}).values())
    known = [f"step {event.get('step')}", event.get("state"), event.get("action"), event.get("outcome")]
    step, state, action, outcome = (str(value) for value in known)
    return f"{step}, {state}: {action} ({outcome}): {event.get('text')}{causes and f'. Because {causes}'}"
