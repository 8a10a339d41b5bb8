"""Events of a run, written besides its trajectories: a line of JSON each.

    RUN/trajectories/events.jsonl   what the echo guard has done: `time` (UTC), `step`, `action`, `text`, and more
    RUN/trajectories/steps.jsonl    what the advantages of a step were worked out with: `step`, `estimator`, and more
    RUN/metrics.jsonl               what is logged, as the run goes on: `step`, `time` (UTC), and the metrics

A resumed run appends, and drops steps and metrics that it repeats.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from agent_r1_trl.recording.lines import FOLDER, append_lines, read_lines, run_folder
from agent_r1_trl.safe_text import dump_json

logger = logging.getLogger(__name__)

FILE = "events.jsonl"
STEPS_FILE = "steps.jsonl"
METRICS_FILE = "metrics.jsonl"


def write_event(output_dir: str | os.PathLike[str], event: dict[str, Any]) -> None:
    """Append an event of a run; what cannot be written, as on a full disk, is said in the log."""
    path = Path(output_dir) / FOLDER / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(path, [dump_json(event).encode() + b"\n"])
    except OSError as error:
        logger.error("An event could not be written to %s: %s. Free some space. It was: %s", path, error, event)


def read_events(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a run, in the order in which they happened; none if it has no such file.

    Args:
        run: its output directory, its folder `trajectories`, or a file in that.

    Raises:
        ValueError: a line is not an event; the message names file and line.
    """
    return _read(run, f"{FOLDER}/{FILE}", "an event")


def read_steps(run: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Step -> what its advantages were worked out with besides the trajectories; arguments as for `read_events`.

    That is the line of its last rollout; `rollouts` has those of all.
    """
    found: dict[int, dict[str, Any]] = {}
    for item in _read(run, f"{FOLDER}/{STEPS_FILE}", "a step", ("step",)):
        before = found.get(int(item["step"]), {}).get("rollouts", [])
        found[int(item["step"])] = {**item, "rollouts": [*before, item]}
    return found


def read_metrics(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The logs of a run, in their order; of an older one, what its trainer_state.json holds.

    Arguments as for `read_events`.
    """
    found = _read(run, METRICS_FILE, "logged metrics", ("step",))
    if found:
        return found
    state = _find(run, "trainer_state.json")
    if state is None:
        return []
    return json.loads(state.read_text(encoding="utf-8")).get("log_history", [])


def _read(run: str | os.PathLike[str], name: str, what: str, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    path = _find(run, name)
    return [] if path is None else list(read_lines(path, what, names))


def _find(run: str | os.PathLike[str], name: str) -> Path | None:
    """A file of a run by its name there; None if it has none."""
    folder = Path(run).parent if Path(run).is_file() else Path(run)
    places = [run_folder(run) / name, folder / Path(name).name]
    return next((place for place in places if place.is_file()), None)


def describe_event(event: dict[str, Any]) -> str:
    """One line for a reader.

    >>> describe_event({"step": 5, "state": "collapsed", "action": "clip", "outcome": "taken", "text": "wider"})
    'step 5, collapsed: clip (taken): wider'
    """
    step, state, action, outcome, text = (event.get(name) for name in ("step", "state", "action", "outcome", "text"))
    line = f"step {step}, {state}: {action} ({outcome}): {text}"
    causes = dict(event.get("signals") or {}).values()
    because = "; ".join(str(cause) for cause in causes)
    return f"{line}. Because {because}" if because else line
