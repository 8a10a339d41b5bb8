"""Recorded trajectories as documents of ATIF 1.8, the Agent Trajectory Interchange Format (RFC 0001 of Harbor).

A turn is a step of the agent, with what was sampled, after which ids, as its metrics; results of its calls are the
observation of that step, and messages that answer no call are steps of their own. `extra.rows` are the training rows.
Every document passes the validators of the package `atif`. What was masked as a secret stays masked.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.recording.lines import check_is_new, run_folder
from agent_r1_trl.recording.store import Record, read_records
from agent_r1_trl.safe_text import dump_json, whole
from agent_r1_trl.trajectory import Message, Trajectory, Turn

SCHEMA = "ATIF-v1.8"
_OF_RECORD = ("step", "split", "rank", "index", "group", "is_kept", "in_loss", "estimator", "scale", "is_masked")
_OF_TRAJECTORY = ("example_id", "generation", "seed", "in_baseline", "is_solved", "error", "info", "duration_s")
_OF_TURN = ("reward", "reward_parts", "is_truncated", "is_invalid", "is_summary", "generate_s", "env_s")
_OF_RESULT = ("error", "latency_s", "queue_s", "attempts", "is_truncated")


def write_documents(
    run: str | Path, folder: str | Path, agent: dict[str, Any], split: str | None, min_reward: float | None
) -> int:
    """Write a file of JSON for each trajectory that is wanted; returns how many there are.

    Args:
        run: see `write_dataset`.
        folder: a directory that does not exist yet, or is empty.
        agent: the entry `agent` of the documents: name, version and so on.
        split: `train`, `eval`, or None for both.
        min_reward: least total reward; None for any.

    Raises:
        FileNotFoundError: `run` does not exist.
        ValueError: nothing is wanted, `folder` is not empty, or a line is not a trajectory.
    """
    target, count = Path(folder), 0
    check_is_new("output", target)
    for record in read_records(run, split=split):
        if min_reward is None or record.trajectory.total_reward >= min_reward:
            document = make_document(record, agent)
            target.mkdir(parents=True, exist_ok=True)
            path = target / f"{document.trajectory_id}.json"
            path.write_text(document.model_dump_json(exclude_none=True), encoding="utf-8")
            count += 1
    if not count:
        raise ValueError(
            f"{str(run)!r}: no trajectory is recorded there with split={split or 'all'} and min_reward={min_reward}. "
            "Pass another --split or --min_reward, or a run with record_trajectories: jsonl."
        )
    return count


def make_document(record: Record, agent: dict[str, Any]) -> Any:
    """The `atif.Trajectory` of a record."""
    import atif

    item = record.trajectory
    steps = [{**step, "step_id": number} for number, step in enumerate(_steps(item), start=1)]
    asked = [step["metrics"]["prompt_tokens"] for step in steps if "metrics" in step]
    tokens = {"total_prompt_tokens": sum(asked), "total_completion_tokens": item.num_action_tokens} if asked else {}
    rewards = {"reward": item.total_reward, "outcome_reward": item.outcome_reward, "reward_parts": item.reward_parts}
    facts = {name: getattr(record, name) for name in _OF_RECORD}
    facts |= {name: getattr(item, name) for name in _OF_TRAJECTORY}
    document = {
        "schema_version": SCHEMA,
        "session_id": run_folder(record.path.resolve()).name,
        "trajectory_id": f"{record.split}_step_{record.step:06d}_{record.index:04d}",
        "agent": agent,
        "steps": steps,
        "final_metrics": {**tokens, "total_steps": len(steps), "extra": rewards},
        "extra": {**facts, "stop_reason": item.stop_reason.value, "rows": list(_rows(item))},
    }
    return atif.Trajectory.model_validate(whole(document))


def _rows(item: Trajectory) -> Iterator[dict[str, Any]]:
    """The training rows, with a number in each list for each of their completion tokens."""
    if not item.completion_ids:
        return
    columns: dict[str, Sequence[Any] | None] = {
        "completion_ids": item.completion_ids,
        "action_mask": item.action_mask,
        "logprobs": item.logprobs,
        "advantages": item.advantages,
        "token_rewards": item.token_rewards(),
    }
    for row in item.rows:
        part: dict[str, Any] = {"prompt_ids": row.prompt_ids}
        for name, values in columns.items():
            if values:
                part[name] = [value for start, end in row.spans for value in values[start:end]]
        yield part


def _steps(item: Trajectory) -> list[dict[str, Any]]:
    """The steps without their numbers."""
    steps: list[dict[str, Any]] = []
    for message in item.prompt_messages:
        step = _step(message, f"prompt_{len(steps)}")
        last = steps[-1] if steps else {}
        if message.get("role") == "tool" and last.get("source") == "agent":
            call_id = message.get("tool_call_id")
            is_known = call_id in [call["tool_call_id"] for call in last["tool_calls"] or ()]
            result = {"source_call_id": call_id if is_known else None, "content": step["message"]}
            last.setdefault("observation", {"results": []})["results"].append(result)
            continue
        if step["source"] == "agent":  # it was not sampled here
            step["is_copied_context"] = True
        steps.append(step)
    contexts = _contexts(item)
    for index, turn in enumerate(item.turns):
        if turn.summary_request is not None:
            steps.append(_step(turn.summary_request))
        step = _step(turn.message, f"call_{index + 1}")
        step["llm_call_count"] = 1
        step["extra"] = {name: getattr(turn, name) for name in _OF_TURN}
        results = _results(turn)
        if turn.tool_results:
            calls = [result.call for result in turn.tool_results]
            not_made = (step["tool_calls"] or [])[len(calls) :]
            step["tool_calls"] = [*(_call(call.name, call.arguments, call.id) for call in calls), *not_made]
        if results:
            step["observation"] = {"results": results}
        if index in contexts:
            step["metrics"] = _metrics(item, slice(turn.start, turn.end), contexts[index])
        steps.append(step)
        others = [_step(message) for message in turn.observations if message.get("role") != "tool"]
        said = {result["content"] for result in results}
        steps += [other for other in others if other["message"] not in said]
    return steps


def _contexts(item: Trajectory) -> dict[int, list[int]]:
    """Index of a turn -> the ids that it was sampled after."""
    contexts: dict[int, list[int]] = {}
    for row in item.rows:
        for place, index in enumerate(row.turn_ids):
            if index >= 0 and index not in contexts:
                contexts[index] = row.prompt_ids + row.completion_ids[:place]
    return contexts


def _metrics(item: Trajectory, span: slice, context: list[int]) -> dict[str, Any]:
    return {
        "prompt_tokens": len(context),
        "completion_tokens": span.stop - span.start,
        "prompt_token_ids": context,
        "completion_token_ids": item.completion_ids[span],
        "logprobs": item.logprobs[span],
        "extra": item.advantages and {"advantages": item.advantages[span]},
    }


def _step(message: Message, prefix: str = "") -> dict[str, Any]:
    """A message as a step; calls without an id get one with the prefix."""
    source = {"system": "system", "developer": "system", "assistant": "agent"}.get(message.get("role", ""), "user")
    text = message.get("content")
    if text is None:
        text = ""
    elif not isinstance(text, str):
        text = dump_json(text)
    if source != "agent":
        return {"source": source, "message": text}
    calls = [(call, call.get("function", call)) for call in message.get("tool_calls") or []]
    found = [
        _call(function.get("name"), function.get("arguments"), call.get("id") or f"{prefix}_{number}")
        for number, (call, function) in enumerate(calls, start=1)
    ]
    reasoning = message.get("reasoning_content")
    return {"source": source, "message": text, "reasoning_content": reasoning, "tool_calls": found or None}


def _results(turn: Turn) -> list[dict[str, Any]]:
    """The result of each call as the model read it, else as the call returned it."""
    told = [_step(message)["message"] for message in turn.observations if message.get("role") == "tool"]
    found: list[dict[str, Any]] = [{"content": text} for text in told[len(turn.tool_results) :]]
    for place, result in enumerate(turn.tool_results):
        values = {name: getattr(result, name) for name in _OF_RESULT}
        extra = {name: value for name, value in values.items() if value}
        content = told[place] if place < len(told) else result.content
        found.insert(place, {"source_call_id": result.call.id, "content": content, "extra": extra})
    return found


def _call(name: object, arguments: object, call_id: str) -> dict[str, Any]:
    """A call; arguments that are no object stand in its `extra`."""
    found = arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(arguments)
    call: dict[str, Any] = {"tool_call_id": call_id, "function_name": str(name or ""), "arguments": {}}
    if isinstance(found, dict):
        call["arguments"] = found
    else:
        call["extra"] = {"arguments": arguments}
    return call
