"""What a finished run must have left behind, and what it must not."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.features.journal.records import checksum_ids
from agent_r1_trl.recording import read_records
from tests.soak.plan import MAX_STEPS, Plan
from tests.soak.recompute import wrong_batches

MAX_GAP = 1e-2
"""Log-probabilities of sampler and trainer, both in float32, with the same weights."""


def problems_of(plan: Plan, folder: Path) -> list[str]:
    """Everything that is wrong with a run that has ended; empty if nothing is."""
    batches = wrong_batches(folder, _log(folder), has_critic=plan.trainer == "ppo")
    found = [
        *_corrupted(plan, folder),
        *batches,
        *_lost(plan, folder),
        *_weights(folder),
        *_orphans(folder),
        *_left_open(plan, folder),
    ]
    if plan.must_fail:
        found += [] if "SoakEnv.outcome_reward" in _log(folder) else ["the reward that is not finite was not named"]
    return found


# -------------------------------------------------------------------- nothing wrong enters the batch


def _corrupted(plan: Plan, folder: Path) -> Iterator[str]:
    """Turns that were trained on and that the sampler did not answer after exactly these ids."""
    answers: dict[int, list[Any]] = defaultdict(list)
    for path in folder.glob("samples_rank*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                prompt_ids, token_ids, logprobs = json.loads(line)
            except ValueError:  # the process was killed while it wrote
                continue
            answers[checksum_ids(prompt_ids)].append((token_ids, logprobs))
    for record in _records(folder):
        item = record.trajectory
        for index, turn in enumerate(item.turns):
            sampled = (item.completion_ids[turn.start : turn.end], item.logprobs[turn.start : turn.end])
            known = answers[checksum_ids([*item.prompt_ids, *item.completion_ids[: turn.start]])]
            if not _is_known(sampled, known):
                yield f"step {record.step}, trajectory {record.index}, turn {index}: the sampler never said this"
    for path in folder.glob("journal/rank*/*.journal"):
        rollout = read_rollout(path)
        for number, trajectory in enumerate(rollout.trajectories if rollout else ()):
            for index, turn in enumerate(trajectory.turns):
                sampled = (turn.generation.token_ids, turn.generation.logprobs)
                if not _is_known(sampled, answers[turn.sampled["context"]]):
                    where = f"{path.relative_to(folder)}, trajectory {number}, turn {index}"
                    yield f"{where}: the sampler never said this"
    is_made_up = plan.sampler == "scripted" and plan.rollouts_ahead > 0  # only then a script's log-probs are compared
    for entry in () if is_made_up else _steps(folder):
        gap = entry.get("sampling/sampling_logp_difference/max") or 0.0  # null where no token was trained on
        if gap > MAX_GAP and not entry.get("sampling/staleness"):  # ahead of the update the sampler is behind it
            yield f"step {entry['step']}: sampler and trainer differ by {gap:g}"


def _is_known(sampled: tuple[list[int], list[float]], answers: list[Any]) -> bool:
    return any(sampled[0] == ids and _close(sampled[1], logprobs) for ids, logprobs in answers)


def _close(found: list[float], expected: list[float]) -> bool:
    return all(math.isclose(one, other, abs_tol=1e-6) for one, other in zip(found, expected, strict=True))


# -------------------------------------------------------------------- nothing is lost in silence


def _lost(plan: Plan, folder: Path) -> Iterator[str]:
    """Steps that were not made, and trajectories that are neither recorded nor said to be missing."""
    if plan.must_fail:
        return
    entries = {entry["step"]: entry for entry in _steps(folder)}
    if sorted(entries) != list(range(1, MAX_STEPS + 1)):
        yield f"logged steps: {sorted(entries)}"
    if "gradient is not finite" in plan.faults and not any(e.get("nonfinite/skipped_steps") for e in entries.values()):
        yield "the step whose gradient was not finite is not counted as skipped"
    failed: dict[int, list[bool]] = defaultdict(list)
    for record in _records(folder):
        failed[record.step].append(record.trajectory.stop_reason.is_infrastructure_failure)
    for step, entry in entries.items():
        expected = 4 * plan.num_ranks
        if len(failed[step]) != expected and "could not be recorded" not in _log(folder):
            yield f"step {step}: {len(failed[step])} of {expected} trajectories recorded, and nothing said of it"
        elif failed[step]:
            share = sum(failed[step]) / len(failed[step])
            logged = entry["rollout/lost_share"]
            if len(failed[step]) == expected and not math.isclose(share, logged, abs_tol=1e-6):
                yield f"step {step}: {share:g} of the trajectories were lost, {logged:g} is logged"


def _weights(folder: Path) -> Iterator[str]:
    """Saved weights are finite."""
    for path in folder.rglob("*.safetensors"):
        if path.parent.name.startswith("checkpoint-") or path.parent.name == "final":
            try:
                broken = [name for name, tensor in load_file(path).items() if not tensor.isfinite().all()]
            except Exception as error:
                yield f"{path.relative_to(folder)} cannot be read: {error}"
                continue
            if broken:
                yield f"{path.relative_to(folder)}: {len(broken)} tensors are not finite"


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the files in a folder, by file and name."""
    files = {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}
    return {f"{file}: {name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


# -------------------------------------------------------------------- nothing is left running or open


def _orphans(folder: Path) -> Iterator[str]:
    """Processes that a run started and left."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("SOAK_RUN") == str(folder):
                yield f"still running: {process.pid} {' '.join(process.cmdline())[:80]}"
                process.kill()
        except psutil.Error:
            continue


def _left_open(plan: Plan, folder: Path) -> Iterator[str]:
    """Environments that were reset and never closed in a run that ended well, but for those that hang to its end."""
    path = folder / "left_open.jsonl"
    if not path.exists():
        return
    has_hanging = {"environment hangs in reset", "scoring hangs"} & set(plan.faults)
    hanging = f"q{plan.seed % 8}" if has_hanging else None
    for line in path.read_text(encoding="utf-8").splitlines():
        found = [example for example in json.loads(line or "[]") if example != hanging]
        if found:
            yield f"{len(found)} environments were never closed, of {', '.join(sorted(set(found)))}"


def _records(folder: Path) -> Iterator[Any]:
    if (folder / "trajectories").is_dir():
        yield from read_records(folder)


def _steps(folder: Path) -> list[dict[str, Any]]:
    """What was logged of each step; a step that was made again replaces its first line."""
    path = folder / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return list({entry["step"]: entry for entry in map(json.loads, filter(None, lines))}.values())


def _log(folder: Path) -> str:
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("rank*.log"))
