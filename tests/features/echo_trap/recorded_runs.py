"""Histories of the project's own healthy runs, as the judgement of the echo trap takes them.

    python -m tests.features.echo_trap.recorded_runs outputs/frozen_lake/grpo FOLDER/frozen_lake_grpo.json

writes the history of a run (its `trainer_state.json`) as one list of numbers per signal. A run that was trained with
`--echo_trap true` has all signals; of another one, those are read that every run logs. `--logging_steps 1` is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agent_r1_trl.features.echo_trap.judgement import KEYS

FOLDER = Path(__file__).parent / "recorded"
ALWAYS_LOGGED = {
    "reward": "reward",
    "group/reward_std": "reward_std",
    "group/zero_variance_share": "zero_std_share",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "env/success": "success",
}
"""Metrics of a run that was not watched, and the signals that they are."""


def record(output_dir: str, target: str) -> None:
    """Write the history of a run."""
    log = json.loads(Path(output_dir, "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    lines = [entry for entry in log if "loss" in entry]
    names = {f"echo/{key}": key for key in sorted(KEYS)}
    logged = {name for line in lines for name in line}
    if logged.isdisjoint(names):
        names = ALWAYS_LOGGED
    rows = []
    for name, key in names.items():
        values = [_rounded(line.get(name)) for line in lines]
        if any(value is not None for value in values):
            rows.append(f'"{key}": {json.dumps(values, separators=(",", ":"))}')
    Path(target).write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def read(path: Path) -> list[dict[str, float | None]]:
    """The history of a recorded run: one dictionary per optimizer step."""
    columns = {key: values for key, values in json.loads(path.read_text("utf-8")).items() if key in KEYS}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _rounded(value: Any) -> float | None:
    return None if value is None else float(f"{float(value):.4g}")


if __name__ == "__main__":
    record(*sys.argv[1:])
