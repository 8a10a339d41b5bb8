"""Secrets in a record: masked in its texts and, as ids can be decoded, in the ids of the part they stand in."""

from __future__ import annotations

import json
from typing import Any

from agent_r1_trl import safe_text
from agent_r1_trl.recording.plain_json import dump_json

MASKED_ID = 0
"""Stands for every id of a prompt, turn or observation in which a secret was found."""
_TEXTS = ("prompt_messages", "turns", "messages", "info", "error", "example_id")


def mask_record(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record with secrets masked; the record itself if it holds none.

    Lengths, masks, log-probabilities and rewards stay. A record that was changed has `is_masked: true`.

    Args:
        record: fields as they are written, ids included.
    """
    rules = safe_text.rules()
    texts = json.loads(dump_json({name: record[name] for name in _TEXTS}))  # an environment may put anything into info
    named = rules.values_in(texts)  # what stands under a secret's name in this one
    if rules.is_idle and not named:
        return record
    masked = rules.mask_all(texts, named)
    if dump_json(masked) == dump_json(texts):
        return record
    prompt_ids, completion_ids = list(record["prompt_ids"]), list(record["completion_ids"])
    if masked["prompt_messages"] != texts["prompt_messages"]:
        prompt_ids = [MASKED_ID] * len(prompt_ids)
    starts = [turn["start"] for turn in texts["turns"]]
    for before, after, end in zip(texts["turns"], masked["turns"], [*starts[1:], len(completion_ids)], strict=True):
        before, after = _parts(before), _parts(after)
        if before["sampled"] != after["sampled"]:
            _overwrite(completion_ids, before["start"], before["end"])
        if before["answered"] != after["answered"]:
            _overwrite(completion_ids, before["end"], end)
    record = {**record, **masked, "prompt_ids": prompt_ids, "completion_ids": completion_ids, "is_masked": True}
    if "segments" in record:  # a rewritten context may repeat any part of the conversation
        record["segments"] = [
            {**segment, "prompt_ids": segment["prompt_ids"] and [MASKED_ID] * len(segment["prompt_ids"])}
            for segment in record["segments"]
        ]
    return record


def _parts(turn: dict[str, Any]) -> dict[str, Any]:
    """The texts of a turn that its sampled tokens spell, and those that the tokens after them spell."""
    results = turn["tool_results"]
    return {
        "start": turn["start"],
        "end": turn["end"],
        "sampled": [turn["message"], *(result["call"] for result in results)],
        "answered": [turn["observations"], *(result["content"] for result in results)],
    }


def _overwrite(ids: list[int], start: int, end: int) -> None:
    ids[start:end] = [MASKED_ID] * (end - start)
