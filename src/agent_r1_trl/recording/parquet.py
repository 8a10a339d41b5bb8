"""Trajectories as Parquet: token lists in typed columns, the rest as JSON; a sixth of the size of JSONL.

Columns: `step`, `split`, `rank`, `example_id`, `generation`, `stop_reason`, `total_reward`, `outcome_reward`; per
token `prompt_ids`, `completion_ids`, `action_mask`, `logprobs`, `turn_ids`, `authors`, `token_rewards`, `advantages`;
`messages` (JSON) and `rest` (JSON: every field without a column of its own).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.recording.plain_json import dump_json
from agent_r1_trl.recording.store import FIX, record_dict
from agent_r1_trl.trajectory import Author, Trajectory

_SCALARS = {
    "step": "int64",
    "split": "string",
    "rank": "int32",
    "generation": "int32",
    "stop_reason": "string",
    "total_reward": "double",
    "outcome_reward": "double",
}
# A float64 holds both a float32 log-probability and a float64 one without loss.
_LISTS = {
    "prompt_ids": "int32",
    "completion_ids": "int32",
    "action_mask": "int8",
    "logprobs": "double",
    "turn_ids": "int32",
    "authors": "int8",
    "token_rewards": "double",
    "advantages": "double",
}
_AUTHORS = tuple(Author)
_ROWS_AT_ONCE = 16
"""How many trajectories are in memory a second time while they are written."""


def write_parquet(path: Path, trajectories: Sequence[Trajectory], extra: dict[str, Any]) -> None:
    """Write a file completely or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {name: pa.type_for_alias(alias) for name, alias in _SCALARS.items()} | {"example_id": pa.string()}
    types |= {name: pa.list_(pa.type_for_alias(alias)) for name, alias in _LISTS.items()}
    schema = pa.schema(types | {"messages": pa.string(), "rest": pa.string()})
    temporary = path.with_name(path.name + ".tmp")
    try:
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for start in range(0, len(trajectories), _ROWS_AT_ONCE):
                rows = [_row(item, extra) for item in trajectories[start : start + _ROWS_AT_ONCE]]
                writer.write_table(pa.Table.from_pylist(rows, schema))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _row(trajectory: Trajectory, extra: dict[str, Any]) -> dict[str, Any]:
    values = record_dict(trajectory, extra)
    values["authors"] = [_AUTHORS.index(author) for author in trajectory.authors]
    row = {name: values.pop(name) for name in (*_SCALARS, *_LISTS)}
    # For filters only: `rest` holds the exact id, because JSON can hold a lone surrogate.
    row["example_id"] = str(values["example_id"]).encode("utf-8", "replace").decode("utf-8")
    row["messages"] = dump_json(values.pop("messages"))
    return row | {"rest": dump_json(values)}


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Rows as `Trajectory.from_dict` takes them, with `step`, `split` and `rank`.

    Raises:
        ValueError: the file does not hold trajectories.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a file of recorded trajectories ({error}).{FIX}") from error
    missing = {*_SCALARS, *_LISTS, "rest"} - set(file.schema_arrow.names)
    if missing:
        raise ValueError(
            f"{path}: not a file of recorded trajectories; it has no column {', '.join(sorted(missing))}.{FIX}"
        )
    for batch in file.iter_batches(batch_size=64):
        for row in batch.to_pylist():
            rest = json.loads(row.pop("rest"))
            row["authors"] = [_AUTHORS[number] for number in row["authors"]]
            yield {**row, **rest}
