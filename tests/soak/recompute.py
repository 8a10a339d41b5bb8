"""The batches that reached the loss, worked out again from the journal by arithmetic of our own."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1_trl.features.journal.reader import RecordedTrajectory, read_rollout
from agent_r1_trl.features.journal.records import unpack_ids
from agent_r1_trl.trajectory import StopReason

LAM, GAMMA = 0.95, 1.0
"""What the PPO trainer has by default."""
TOLERANCE = 2e-4


@dataclass
class RolledOut:
    """A trajectory as the journal tells it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    spans: list[tuple[int, int]]
    """[start, end) of each turn."""
    rewards: list[float]
    """Of each turn, as the environment's steps gave them; the last one holds the outcome too."""
    is_failed: bool
    is_truncated: bool
    group: str
    advantage: float = 0.0
    """GRPO's."""
    in_loss: bool = True

    @property
    def mask(self) -> list[int]:
        """1 at every sampled token, if the trajectory is trained on."""
        mask = [0] * len(self.completion_ids)
        for start, end in self.spans if self.in_loss else ():
            mask[start:end] = [1] * (end - start)
        return mask


def wrong_batches(folder: Path, log: str, *, has_critic: bool) -> Iterator[str]:
    """Rows of the loss whose mask or advantages are not what the journal says; and rows that it does not hold."""
    batches = read_batches(folder)
    for step in sorted({step for step, _ in batches}):
        rows = {rank: batches[step, rank] for _, rank in batches if (step, rank) in batches}
        if has_critic:
            yield from _wrong_whitening(step, [row for of_rank in rows.values() for row in of_rank])
        for rank, of_rank in rows.items():
            path = folder / "journal" / f"rank{rank}" / f"rollout_{step - 1:09d}.journal"
            rollout = read_rollout(path)
            rolled_out = [_rolled_out(item) for item in rollout.trajectories if item.end] if rollout else []
            _resolve(rolled_out, needs_group=not has_critic)
            for index, row in enumerate(of_rank):
                where = f"step {step}, rank {rank}, row {index}"
                known = [item for item in rolled_out if _is_of(row, item)]
                if not known and any(row["mask"]) and "cannot be written" not in log:
                    yield f"{where}: trained on what the journal does not hold"
                elif known:
                    found = [_differences(row, item, has_critic=has_critic) for item in known]
                    yield from (f"{where}: {text}" for text in min(found, key=len))


def read_batches(folder: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Rows by step and rank; a step that was made again counts as it was made last."""
    batches = {}
    for path in sorted(folder.glob("batches_rank*.jsonl")):
        rank = int(path.stem.removeprefix("batches_rank"))
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                step, rows = json.loads(line)
            except ValueError:  # the process was killed while it wrote
                continue
            batches[step, rank] = rows
    return batches


def _rolled_out(recorded: RecordedTrajectory) -> RolledOut:
    end: Any = recorded.end
    stop = StopReason(end["stop_reason"])
    rewards = [turn.step["reward"] if turn.step else 0.0 for turn in recorded.turns]
    if recorded.turns and not stop.is_infrastructure_failure:
        rewards[-1] += len(end["turns"][-1]["message"].get("content") or "") % 3  # `SoakEnv.outcome_reward`
    return RolledOut(
        prompt_ids=unpack_ids(end["prompt_ids"]),
        completion_ids=unpack_ids(end["completion_ids"]),
        spans=[(turn["start"], turn["end"]) for turn in end["turns"]],
        rewards=rewards,
        is_failed=stop.is_infrastructure_failure,
        is_truncated=stop.is_truncated,
        group=recorded.request["example_id"],
    )


def _resolve(rolled_out: list[RolledOut], *, needs_group: bool) -> None:
    """Say which rows are trained on, and GRPO's advantages: (R - mean) / (std + 1e-4) of the group."""
    groups: dict[str, list[RolledOut]] = defaultdict(list)
    for item in rolled_out:
        item.in_loss = not item.is_failed
        if item.in_loss:
            groups[item.group].append(item)
    for members in groups.values() if needs_group else ():
        returns = [sum(item.rewards) for item in members]
        if len(members) == 1:
            members[0].in_loss = False
        elif max(returns) - min(returns) > 1e-6:
            for item, value in zip(members, returns, strict=True):
                item.advantage = (value - statistics.mean(returns)) / (statistics.stdev(returns) + 1e-4)


def _is_of(row: dict[str, Any], item: RolledOut) -> bool:
    """Whether a row of the batch is the trajectory's: its ids, and nothing but padding behind them."""
    ids, known = row["completion"], item.completion_ids
    if row["prompt"] != item.prompt_ids:
        return False
    if ids[: len(known)] != known[: len(ids)]:
        return False
    return all(token == row["pad"] for token in ids[len(known) :])


def _differences(row: dict[str, Any], item: RolledOut, *, has_critic: bool) -> list[str]:
    length = len(row["mask"])
    expected = (item.mask + [0] * length)[:length]
    wrong = [place for place in range(length) if row["mask"][place] != expected[place]]
    if wrong:
        return [f"the mask is wrong at {wrong[:4]}"]
    places = [place for place, value in enumerate(expected) if value]
    if not has_critic:
        advantages = [item.advantage * value for value in expected]
        return [] if _close(row["advantages"], advantages) else [f"the advantage is not {item.advantage:g}"]
    if item.is_truncated:  # goes on from a value that is not in the batch
        return []
    rewards = dict.fromkeys(places, 0.0)
    for (_, end), reward in zip(item.spans, item.rewards, strict=True):
        if places:
            rewards[end - 1] += reward
    following = 0.0
    advantage = 0.0
    returns = {}
    for place in reversed(places):
        value = row["values"][place]
        advantage = rewards[place] + GAMMA * following - value + GAMMA * LAM * advantage
        returns[place], following = advantage + value, value
    wrong = [place for place in places if not math.isclose(row["returns"][place], returns[place], abs_tol=TOLERANCE)]
    return [f"the returns are wrong at {wrong[:4]}"] if wrong else []


def _wrong_whitening(step: int, rows: list[dict[str, Any]]) -> Iterator[str]:
    """PPO's advantages are (returns - values), whitened over the action tokens of all ranks."""
    raw: list[list[float]] = []
    counted: list[float] = []
    for row in rows:
        raw.append([])
        for returned, value, is_on in zip(row["returns"], row["values"], row["mask"], strict=True):
            raw[-1].append(returned - value)
            if is_on:
                counted.append(returned - value)
    if len(counted) < 2:
        return
    mean, std = statistics.fmean(counted), math.sqrt(statistics.variance(counted) + 1e-8)
    for index, row in enumerate(rows):
        expected = [(x - mean) / std if is_on else 0.0 for x, is_on in zip(raw[index], row["mask"], strict=True)]
        if not _close(row["advantages"], expected):
            yield f"step {step}, row {index}: the advantages are not the whitened ones"


def _close(found: list[float], expected: list[float]) -> bool:
    return all(math.isclose(one, other, abs_tol=TOLERANCE) for one, other in zip(found, expected, strict=True))
