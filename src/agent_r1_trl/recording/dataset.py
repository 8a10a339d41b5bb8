"""Recorded trajectories as a data set that `datasets.load_dataset` reads: Parquet for each split, and a card.

A row is a trajectory. Its ids, masks and rewards are those of the record. Texts and ids in which a secret was masked
stay masked (`is_masked`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from agent_r1_trl.recording.lines import check_is_new
from agent_r1_trl.recording.store import SPLITS, Record, read_records
from agent_r1_trl.safe_text import dump_json
from agent_r1_trl.trajectory import Trajectory

COLUMNS = {
    "id": ("text", "of the example in the data set"),
    "generation": ("int", "index of the trajectory among those of its example"),
    "step": ("int", "of the training under which it is logged"),
    "rank": ("int", "the process of its rollout"),
    "stop_reason": ("text", "why it ended"),
    "reward": ("number", "turn rewards and outcome reward"),
    "outcome_reward": ("number", "of the finished trajectory"),
    "in_baseline": ("bool", "whether its reward counts: not after infrastructure failures, nor if nothing scored it"),
    "group": ("int", "number of its group in its step; null if none was recorded, as in an evaluation"),
    "in_loss": ("bool", "whether any of its tokens may have got a gradient; null if it was not recorded"),
    "messages": ("messages", "the conversation; `arguments` of tool calls as JSON"),
    "prompt_ids": ("ints", "token ids of the prompt"),
    "completion_ids": ("ints", "every token after the prompt, in the order of time"),
    "action_mask": ("ints", "1 where the policy sampled the token"),
    "logprobs": ("numbers", "of the sampler; 0 where the mask is 0"),
    "turn_ids": ("ints", "the turn of a sampled token, else -1"),
    "authors": ("texts", "who wrote the token: policy, template or environment"),
    "token_rewards": ("numbers", "each reward on the last sampled token of what earned it"),
    "advantages": ("numbers", "that it was trained with; null if none was recorded"),
    "turns": ("turns", "start and end among the completion tokens, reward"),
    "rows": ("rows", "the training rows (one, unless the context was rewritten): the ids of the context, and which "
             "completion tokens follow it"),
    "reward_parts": ("text", "the outcome reward by source, as JSON"),
    "info": ("text", "what the environment said of it, as JSON"),
    "is_masked": ("bool", "whether a secret was masked; ids of such parts are 0"),
}  # fmt: skip
"""Column -> kind of value, and what it holds."""
_TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id", "malformed_tool_call")
_ROWS_AT_ONCE = 64


def write_dataset(run: str | Path, folder: str | Path, *, title: str = "") -> dict[str, int]:
    """Write the recorded trajectories of a run as a data set, with a card.

    Args:
        run: its output directory, its folder `trajectories`, or a file in that.
        folder: a directory that does not exist yet, or is empty.
        title: of the card. Empty: the name of the directory.

    Returns:
        Split -> number of its trajectories.

    Raises:
        FileNotFoundError: `run` does not exist.
        ValueError: nothing was recorded, `folder` is not empty, or a line is not a trajectory.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = Path(folder)
    check_is_new("output", target)
    schema, counts = _schema(), dict.fromkeys(SPLITS, 0)
    records = read_records(run)
    with ExitStack() as stack:
        writers: dict[str, Any] = {}
        while batch := list(islice(records, _ROWS_AT_ONCE)):
            for split in SPLITS:
                rows = [_row(record) for record in batch if record.split == split]
                if rows and split not in writers:
                    (target / "data").mkdir(parents=True, exist_ok=True)
                    path = target / "data" / f"{split}-00000.parquet"
                    writers[split] = stack.enter_context(pq.ParquetWriter(path, schema, compression="zstd"))
                if rows:
                    writers[split].write_table(pa.Table.from_pylist(rows, schema))
                    counts[split] += len(rows)
    counts = {split: count for split, count in counts.items() if count}
    if not counts:
        raise ValueError(
            f"{str(run)!r}: no trajectories are recorded there. Train or evaluate with record_trajectories: jsonl."
        )
    sizes = {split: (target / "data" / f"{split}-00000.parquet").stat().st_size for split in counts}
    (target / "README.md").write_text(_card(counts, sizes, title or target.name), encoding="utf-8")
    return counts


def _schema() -> Any:
    import pyarrow as pa

    text, ints = pa.string(), pa.list_(pa.int32())
    function = pa.struct({"name": text, "arguments": text})
    call = pa.struct({"id": text, "type": text, "function": function})
    kinds = {
        "text": text,
        "texts": pa.list_(text),
        "int": pa.int64(),
        "ints": ints,
        "number": pa.float64(),
        "numbers": pa.list_(pa.float64()),
        "bool": pa.bool_(),
        "messages": pa.list_(pa.struct(dict.fromkeys(_TEXTS, text) | {"tool_calls": pa.list_(call)})),
        "turns": pa.list_(pa.struct({"start": pa.int32(), "end": pa.int32(), "reward": pa.float64()})),
        "rows": pa.list_(pa.struct({"prompt_ids": ints, "starts": ints, "ends": ints})),
    }
    return pa.schema({name: kinds[kind] for name, (kind, _) in COLUMNS.items()})


def _row(record: Record) -> dict[str, Any]:
    item = record.trajectory
    same = ("generation", "outcome_reward", "in_baseline", "prompt_ids", "completion_ids", "action_mask")
    values = {name: getattr(item, name) for name in (*same, "logprobs", "turn_ids", "advantages")}
    spans = [(row.prompt_ids, *zip(*row.spans, strict=True)) for row in item.rows]
    return values | {
        "id": _text(item.example_id),
        "step": record.step,
        "rank": record.rank,
        "group": record.group,
        "in_loss": record.in_loss,
        "stop_reason": item.stop_reason.value,
        "reward": item.total_reward,
        "messages": [_message(message) for message in item.messages],
        "authors": [author.value for author in item.authors],
        "token_rewards": item.token_rewards(),
        "turns": [{"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in item.turns],
        "rows": [{"prompt_ids": prompt, "starts": starts, "ends": ends} for prompt, starts, ends in spans],
        "reward_parts": dump_json(item.reward_parts),
        "info": dump_json(item.info),
        "is_masked": record.is_masked,
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with texts as values; a content of several parts is written as JSON."""
    plain: dict[str, Any] = {name: _text(message[name]) for name in _TEXTS if message.get(name) is not None}
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        named = {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))}
        calls.append({"id": _text(call.get("id") or ""), "type": "function", "function": named})
    return plain | {"tool_calls": calls or None}


def _text(value: object) -> str:
    """A text that Parquet can hold: no lone surrogate, and JSON of what is no text."""
    text = value if isinstance(value, str) else dump_json(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def _card(counts: dict[str, int], sizes: dict[str, int], title: str) -> str:
    """`sizes` are bytes. `datasets` takes a directory with the same metadata for the one that it has in its cache."""
    import yaml

    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in counts]
    metadata = {
        "pretty_name": title,
        "tags": ["agent-r1-trl", "trl", "agent", "tool-use", "reinforcement-learning"],
        "dataset_info": {
            "splits": [{"name": name, "num_bytes": sizes[name], "num_examples": counts[name]} for name in counts]
        },
        "configs": [{"config_name": "default", "data_files": files}],
    }
    splits = ", ".join(f"`{split}`: {count}" for split, count in counts.items())
    rows = "\n".join(f"| `{name}` | {text} |" for name, (_, text) in COLUMNS.items())
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---

# {" ".join(title.split())}

Trajectories of a tool-using agent, recorded by agent-r1-trl while it was trained or evaluated. A row is a trajectory
({splits}).

What models, tools and web pages wrote stands here as it was; treat it as text of strangers.

| column | what it holds |
|---|---|
{rows}
"""


def sft_rows(
    trajectories: Iterable[Trajectory], *, min_reward: float, tools: list[dict[str, Any]] | None = None
) -> Iterator[dict[str, Any]]:
    """Conversations for supervised fine-tuning (`messages`, and `tools` if there are any), in TRL's form.

    Excluded are trajectories that a limit or a failure ended, that nothing scored, and those whose context was
    rewritten: no one conversation is what their model read. Assistant messages of the prompt, which the policy did not
    say, have `weight: 0`.

    Args:
        trajectories: such as `read_trajectories` gives, or `roll_out`.
        min_reward: least total reward.
        tools: JSON schemas.
    """
    for item in trajectories:
        is_whole = item.stop_reason.value == "done" and item.in_baseline and not item.segments
        if not is_whole or item.total_reward < min_reward:
            continue
        prompt = [
            {**message, "weight": 0} if message.get("role") == "assistant" else message
            for message in item.prompt_messages
        ]
        row: dict[str, Any] = {"messages": json.loads(dump_json([*prompt, *item.completion_messages]))}
        yield row | ({"tools": tools} if tools else {})
