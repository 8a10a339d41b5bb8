"""The journal of one rollout of one process: written while it runs, read again after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_r1_trl.features.journal.reader import (
    RecordedRollout,
    RecordedTrajectory,
    describe_request,
    read_trajectory,
    trajectory_record,
)
from agent_r1_trl.features.journal.recorders import (
    JournaledDraft,
    JournaledEndpoint,
    JournaledGenerator,
    JournaledSession,
    TrajectoryLog,
)
from agent_r1_trl.features.journal.records import VERSION, Appender, Record, dump
from agent_r1_trl.generation.base import Generator
from agent_r1_trl.generation.endpoint import Endpoint
from agent_r1_trl.rollout import Draft, EnvSession, RolloutRequest
from agent_r1_trl.trajectory import Trajectory

FOLDER = "journal"
"""In `output_dir`."""
EVAL_FILE = "eval.journal"


def eval_journal(output_dir: str | Path) -> Path:
    """The journal of `agent-r1-trl eval`."""
    return Path(output_dir).absolute() / FOLDER / EVAL_FILE


def rollout_file(micro_step: int, round_number: int = 0) -> str:
    """Name of the file of the rollout that a micro-step begins to train on, or of one that replaces groups of it."""
    return f"rollout_{micro_step:09d}{f'.{round_number}' if round_number else ''}.journal"


class RolloutLog:
    """Writes the trajectories of one rollout and hands out what an earlier start of the run has recorded of them.

    Args:
        path: of the file.
        header: what the rollout depends on besides its requests; `size` is the number of its trajectories.
        recorded: of an earlier start, if it may be used; the file is continued. None begins a new file.
        repeats_finished: sample finished trajectories again, for reward functions that look at the environments. What
            the policy said is still taken from the journal.
        repeats_failed: sample trajectories again whose last try failed for no fault of the policy.
    """

    def __init__(
        self,
        path: Path,
        header: Record,
        *,
        recorded: RecordedRollout | None = None,
        repeats_finished: bool = False,
        repeats_failed: bool = False,
    ) -> None:
        self.path = path
        self._recorded: dict[str, RecordedTrajectory] = {}
        self._numbers: dict[str, int] = {}
        self._is_complete = recorded is not None and recorded.is_complete and not repeats_failed
        self._repeats_finished = repeats_finished
        self._ended: set[int] = set()
        """Numbers of trajectories of which nothing more is written, though the loop that was given up may go on."""
        self._appender = Appender(path, size=recorded.num_bytes if recorded else 0)
        if recorded is None:
            self._appender.append({"kind": "rollout", "version": VERSION, **header})
        for number, item in enumerate(recorded.trajectories if recorded else ()):
            key = dump(item.request)
            self._recorded[key], self._numbers[key] = item, number
            if item.cut_at is not None:  # else a run that is killed before it samples them would find them again
                self._append(number, {"kind": "cut", "turn": item.cut_at})

    @property
    def has_failed(self) -> bool:
        """Whether something could not be written."""
        return self._appender.has_failed

    def close(self) -> None:
        """Close the file."""
        self._appender.close()

    # ---------------------------------------------------------------- for the runner

    def finished(self, request: RolloutRequest) -> Trajectory | None:
        """The recorded trajectory, if it has ended.

        A failure that was not the policy's fault counts only if the rollout went on to its end or to another try
        (`retry_failed`): one that came with the kill is sampled again, and with `repeats_failed` every one.
        """
        recorded = self._recorded.get(self._key(request))
        if recorded is None or recorded.end is None or self._repeats_finished:
            return None
        trajectory = read_trajectory(recorded.end)
        has_gone_on = self._is_complete or self._key(replace(request, attempt=request.attempt + 1)) in self._recorded
        if trajectory.stop_reason.is_infrastructure_failure and not has_gone_on:
            return None
        return trajectory

    def open(
        self,
        request: RolloutRequest,
        factory: Callable[[], Any],
        truncate: Callable[[str, int], str],
        generator: Generator | Endpoint,
    ) -> tuple[Draft, EnvSession, Any]:
        """Draft, session and generator of a trajectory: they repeat what is recorded and write what comes after it."""
        key = self._key(request)
        recorded = self._recorded.get(key)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._append(self._numbers[key], {"kind": "start", "request": json.loads(key)})
        number = self._numbers[key]
        turns = list(recorded.turns) if recorded else []
        log = TrajectoryLog(lambda record: self._append(number, record), turns)
        draft = JournaledDraft(request=request, log=log)
        session = JournaledSession(factory, truncate=truncate, log=log, draft=draft)
        kind: Any = JournaledEndpoint if isinstance(generator, Endpoint) else JournaledGenerator
        return draft, session, kind(generator, log=log, draft=draft)

    def end(self, request: RolloutRequest, trajectory: Trajectory) -> None:
        """Write down that a trajectory has ended."""
        number = self._numbers[self._key(request)]
        self._append(number, {"kind": "end", "trajectory": trajectory_record(trajectory)})
        self._ended.add(number)

    def _append(self, number: int, record: Record) -> None:
        if number not in self._ended:
            self._appender.append({"t": number, **record})

    def _key(self, request: RolloutRequest) -> str:
        return dump(describe_request(request))
