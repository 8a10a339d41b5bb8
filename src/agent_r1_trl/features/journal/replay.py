"""A rollout from its journal alone: no sampler, no tools, no environment. For debugging rewards and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agent_r1_trl.errors import RunError
from agent_r1_trl.features.journal.log import EVAL_FILE, FOLDER, rollout_file
from agent_r1_trl.features.journal.reader import RecordedRollout, describe_request, read_rollout, read_trajectory
from agent_r1_trl.features.journal.records import VERSION
from agent_r1_trl.rollout import RolloutRequest
from agent_r1_trl.rollout.failures import failure_of
from agent_r1_trl.trajectory import Trajectory


class ReplayError(RunError, ValueError):
    """The journal does not hold what the run asks for; the message names the first thing that differs."""

    exit_code = 2


class JournalReplay:
    """Replays recorded rollouts.

    Args:
        path: `output_dir` of the recorded run, its folder `journal`, or one file of it.
        rank: of this process.

    Raises:
        ReplayError: there is no journal at this place.
    """

    def __init__(self, path: str | Path, *, rank: int = 0) -> None:
        self.path = Path(path).absolute()
        self._name = f"journal.replay={str(path)!r}"
        folder = self.path / FOLDER if (self.path / FOLDER).is_dir() else self.path
        self._folder = folder / f"rank{rank}" if (folder / "rank0").is_dir() else folder
        self._files = [self.path] if self.path.is_file() else sorted(self._folder.glob("*.journal"))
        if (folder / EVAL_FILE).is_file() and folder / EVAL_FILE not in self._files:
            self._files.append(folder / EVAL_FILE)
        if not self._files:
            self._refuse(
                f"no journal of process {rank} there. Pass the output_dir of a run that was recorded with "
                "journal=True, its folder `journal`, or one of the files in it."
            )

    def _refuse(self, text: str) -> NoReturn:
        raise ReplayError(f"{self._name}: {text}")

    @property
    def micro_steps(self) -> list[int]:
        """The micro-steps of the recorded rollouts of a training run, in order."""
        names = [path.stem.rpartition("_")[2] for path in self._files]
        return sorted(int(name) for name in names if name.isdigit())

    def replay(
        self,
        requests: Sequence[RolloutRequest],
        micro_step: int | None = None,
        round_number: int = 0,
        limits: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """The recorded trajectories, in the order of the requests.

        Args:
            requests: as a rollout would take them.
            micro_step: of a training run; None for an evaluation.
            round_number: of a rollout that replaces groups of the micro-step's first one, from 1 on.
            limits: those of the present run, and in a training how it samples, by name; None if they are not compared.

        Raises:
            ReplayError: there is no such rollout, it is not complete, or a limit or one of the requests differs.
        """
        rollout = self._read(micro_step, round_number)
        where = "" if micro_step is None else f"the rollout of micro-step {micro_step}: "
        recorded_limits = rollout.header.get("limits", {}) | rollout.header.get("params", {})
        for name, value in (limits or {}).items():
            if "endpoint" in rollout.header and name.startswith("context."):
                continue  # a hosted model reads every turn so far, whatever the recipe says
            if name in recorded_limits and recorded_limits[name] != value:
                self._refuse(
                    f"{where}{name}={recorded_limits[name]!r} was recorded, and the run has {name}={value!r}: the "
                    f"trajectories would be others. Set {name} to {recorded_limits[name]!r}."
                )
        recorded = {str(item.request): item for item in rollout.trajectories}
        first_wave = [item.request for item in rollout.trajectories if not item.request["attempt"]]
        trajectories = []
        for index, request in enumerate(requests):
            wanted = describe_request(request)
            found, failed = recorded.get(str(wanted)), []
            while again := recorded.get(str(wanted | {"attempt": wanted["attempt"] + 1})):  # the last try counts
                failed += [failure_of(read_trajectory(found.end))] if found and found.end else []
                wanted, found = again.request, again
            if found is None or found.end is None:
                self._refuse(f"{where}trajectory {index} " + _difference(wanted, first_wave[index : index + 1], found))
            trajectories.append(read_trajectory(found.end))
            trajectories[-1].failed_tries = [f"{cause.stop_reason}: {cause.error}" for cause in failed if cause]
        return trajectories

    def _read(self, micro_step: int | None, round_number: int) -> RecordedRollout:
        path = self._files[-1] if micro_step is None else self._folder / rollout_file(micro_step, round_number)
        if micro_step is None and path.name != EVAL_FILE and not self.path.is_file():
            self._refuse("the journal holds no evaluation. Pass the output_dir of `agent-r1-trl eval`.")
        if path not in self._files:
            held = ", ".join(map(str, self.micro_steps))
            self._refuse(
                f"the journal holds no rollout of micro-step {micro_step}, but those of micro-steps {held or 'none'}. "
                "Start from the checkpoint before them (resume_from_checkpoint), or record with a larger journal.keep."
            )
        rollout = read_rollout(path)
        if rollout is None:
            self._refuse(f"{path} is not a journal. Pass the output_dir of a recorded run.")
        if (version := rollout.header.get("version")) != VERSION:
            self._refuse(
                f"{path} is a journal of version {version}, and this release reads version {VERSION}. Replay it with "
                "the release of agent-r1-trl that recorded it."
            )
        return rollout


def _difference(wanted: dict[str, Any], recorded: Sequence[dict[str, Any]], found: object) -> str:
    """Why there is no trajectory for a request; `recorded`: the request in its place, if there is one."""
    if found is not None:
        return (
            f"(example {wanted['example_id']!r}) has no end, because the run was stopped there. Resume that run, "
            "which finishes it, or replay only what comes before."
        )
    if not recorded:
        return "was never begun. Use the data set, the batch size and the group size of the recorded run."
    (before,) = recorded
    name = next(name for name in wanted if wanted[name] != before[name])
    fix = "Pass the data and the settings of the recorded run."
    if name == "seed":
        fix += (
            " If its echo guard went back to a checkpoint, set resume_from_checkpoint to that one, and echo.actions "
            "to another one than rollback: the guard reads there that the draws are others."
        )
    return f"differs first in {name}: {before[name]!r} was recorded, the run asks for {wanted[name]!r}. {fix}"
