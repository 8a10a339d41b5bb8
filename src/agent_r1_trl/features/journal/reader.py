"""The trajectories of a rollout, read from its records.

Records of a file, by their `kind`; all but the first name their trajectory by its number `t`:

    rollout   whose rollout this is: micro-step, weights, sampling settings, number of trajectories
    start     a trajectory begins: example, place in its group, seeds
    turn      the policy spoke: ids, log-probabilities, message; and what the request was (seed, limit, context)
    step      the environment answered: messages, reward, whether it is over, info with tool calls and results
    end       the finished trajectory, whole, with the tokens that template and environment wrote

A trajectory that a resumed run continued may have a turn twice: the later record counts, and with it all that follows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from pathlib import Path

from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.features.journal.records import (
    VERSION,
    Record,
    dump,
    pack_floats,
    pack_ids,
    read_file,
    unpack_floats,
    unpack_ids,
)
from agent_r1_trl.generation.base import Generation
from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.rollout.requests import RolloutRequest, row_digest
from agent_r1_trl.trajectory import Author, ToolResult, Trajectory

_AUTHORS = tuple(Author)
_DIGIT_OF = {author: str(digit) for digit, author in enumerate(_AUTHORS)}


@dataclass(kw_only=True)
class RecordedTurn:
    """A turn of an unfinished trajectory."""

    sampled: Record
    step: Record | None = None
    """None for a summary, and if the run ended before the environment had answered."""

    @property
    def generation(self) -> Generation:
        """The sampler's result."""
        ids = unpack_ids(self.sampled["ids"])
        logprobs = unpack_floats(self.sampled["logprobs"])
        kept = self.sampled.get("kept_ids")
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            stop=self.sampled["stop"],
            kept_ids=kept and KeptIds.from_dict(kept),
            versions=self.versions,
        )

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Which weights sampled it; see `Turn`."""
        return [(version, num) for version, num in self.sampled.get("versions", ())]


@dataclass(kw_only=True)
class RecordedTrajectory:
    """The records of one trajectory."""

    request: Record
    turns: list[RecordedTurn] = field(default_factory=list)
    end: Record | None = None
    """The finished trajectory; None if the run ended before."""
    cut_at: int | None = None
    """The first turn that must not be used again; None: all may be."""


@dataclass(kw_only=True)
class RecordedRollout:
    """The records of one rollout."""

    header: Record
    trajectories: list[RecordedTrajectory]
    """In the order of their requests."""
    num_bytes: int
    """Size of the records that were read."""

    @property
    def is_complete(self) -> bool:
        """Whether every trajectory has ended."""
        has_all = len(self.trajectories) >= self.header["size"]
        return has_all and all(item.end is not None for item in self.trajectories)


def read_rollout(path: Path) -> RecordedRollout | None:
    """The rollout in a file; None if there is no such file or not even its first record is whole.

    Of a file of another version only the header is read.
    """
    if not path.is_file():
        return None
    records, num_bytes = read_file(path)
    if not records or records[0].get("kind") != "rollout":
        return None
    trajectories: list[RecordedTrajectory] = []
    for record in records[1:] if records[0].get("version") == VERSION else ():
        if record["kind"] == "start":
            trajectories.append(RecordedTrajectory(request=record["request"]))
            continue
        trajectory, turn = trajectories[record["t"]], record.get("turn", 0)
        trajectory.end = record.get("trajectory")
        if record["kind"] == "turn":
            trajectory.turns[turn:] = [RecordedTurn(sampled=record)]
        elif record["kind"] == "cut":
            del trajectory.turns[turn:]
        elif record["kind"] == "step":
            trajectory.turns[turn].step = record
            del trajectory.turns[turn + 1 :]
    return RecordedRollout(header=records[0], trajectories=trajectories, num_bytes=num_bytes)


# ---------------------------------------------------------------- requests


def describe_request(request: RolloutRequest) -> Record:
    """The identity of a trajectory: two runs that ask for the same one give the same record."""
    return {
        "example_id": request.example_id,
        "row": row_digest(request.example),
        "generation": request.generation,
        "seed": request.seed,
        "reset_seed": request.reset_seed,
        "attempt": getattr(request, "attempt", 0),
    }


# ---------------------------------------------------------------- steps


def step_record(result: StepResult) -> Record:
    """The environment's answer as JSON."""
    results = result.info.get("tool_results") or []
    info = {**result.info, "tool_results": [_result_record(item) for item in results if isinstance(item, ToolResult)]}
    return {"observations": result.observations, "reward": result.reward, "done": result.done, "info": info}


def read_step(record: Record) -> StepResult:
    """The inverse of `step_record`, for what the rollout reads of an answer."""
    info = {**record["info"], "tool_results": [ToolResult.from_dict(item) for item in record["info"]["tool_results"]]}
    observations = [dict(message) for message in record["observations"]]
    return StepResult(observations, record["reward"], record["done"], info)


def is_same_answer(result: StepResult, record: Record) -> bool:
    """Whether an answer has the messages, reward and end of the recorded one, and the next context if it has any."""
    now = {"observations": result.observations, "reward": result.reward, "done": result.done}
    before = {name: record[name] for name in now}
    now["next_context"], before["next_context"] = (info.get("next_context") for info in (result.info, record["info"]))
    return json.loads(dump(now)) == before


def _result_record(result: ToolResult) -> Record:
    record = {**vars(result), "call": vars(result.call)}
    return record | {"error": result.error.value if result.error else None}


# ---------------------------------------------------------------- finished trajectories


def trajectory_record(trajectory: Trajectory) -> Record:
    """A finished trajectory as JSON, its token lists packed."""
    record = vars(trajectory).copy()  # it is written at once, so nothing in it need be copied
    for name in ("action_mask", "turn_ids"):  # follow from the turns
        del record[name]
    return record | {
        "turns": [
            {
                **vars(turn),
                "tool_results": [_result_record(result) for result in turn.tool_results],
                "kept_ids": None if turn.kept_ids is None else turn.kept_ids.to_dict(),
            }
            for turn in trajectory.turns
        ],
        "segments": [
            {**vars(segment), "prompt_ids": segment.prompt_ids and pack_ids(segment.prompt_ids)}
            for segment in trajectory.segments
        ],
        "prompt_ids": pack_ids(trajectory.prompt_ids),
        "completion_ids": pack_ids(trajectory.completion_ids),
        "logprobs": pack_floats(_sampled(trajectory)),
        "authors": "".join(map(_DIGIT_OF.__getitem__, trajectory.authors)),
    }


def _sampled(trajectory: Trajectory) -> list[float]:
    """The log-probabilities of the action tokens, if those of all others are zero; else all."""
    if any(compress(trajectory.logprobs, map(not_, trajectory.action_mask))):
        return trajectory.logprobs
    return list(compress(trajectory.logprobs, trajectory.action_mask))


def read_trajectory(record: Record) -> Trajectory:
    """The inverse of `trajectory_record`."""
    ids = unpack_ids(record["completion_ids"])
    turn_ids = [-1] * len(ids)
    for index, turn in enumerate(record["turns"]):
        turn_ids[turn["start"] : turn["end"]] = [index] * (turn["end"] - turn["start"])
    logprobs = unpack_floats(record["logprobs"])
    if len(logprobs) < len(ids):
        sampled = iter(logprobs)
        logprobs = [next(sampled) if turn_id >= 0 else 0.0 for turn_id in turn_ids]
    return Trajectory.from_dict(
        record
        | {
            "prompt_ids": unpack_ids(record["prompt_ids"]),
            "completion_ids": ids,
            "logprobs": logprobs,
            "authors": [_AUTHORS[int(digit)] for digit in record["authors"]],
            "turns": [
                {**turn, "kept_ids": (kept := turn.get("kept_ids")) and KeptIds.from_dict(kept)}
                for turn in record["turns"]
            ],
            "segments": [
                {**segment, "prompt_ids": segment["prompt_ids"] and unpack_ids(segment["prompt_ids"])}
                for segment in record["segments"]
            ],
            "turn_ids": turn_ids,
            "action_mask": [int(turn_id >= 0) for turn_id in turn_ids],
        }
    )
