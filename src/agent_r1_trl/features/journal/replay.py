"""A rollout from its journal alone: no sampler, no tools, no environment. For debugging rewards and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.errors import RunError
from agent_r1_trl.features.journal.log import EVAL_FILE, FOLDER, rollout_file
from agent_r1_trl.features.journal.reader import RecordedRollout, describe_request, read_rollout, read_trajectory
from agent_r1_trl.features.journal.records import VERSION
from agent_r1_trl.rollout import RolloutRequest
from agent_r1_trl.trajectory import Trajectory


class ReplayError(RunError, ValueError):
    """The journal does not hold what the run asks for; the message names the first thing that differs."""

    exit_code = 2


class JournalReplay:
    """Plays back recorded rollouts.

    Args:
        path: `output_dir` of the recorded run, its folder `journal`, or one file of it.
        rank: of this process.

    Raises:
        ReplayError: there is no journal at this place.
    """

    def __init__(self, path: str | Path, *, rank: int = 0) -> None:
        self.path = Path(path).absolute()
        self._name = f"journal.replay={str(path)!r}"
        self._rank = rank
        folder = self.path / FOLDER if (self.path / FOLDER).is_dir() else self.path
        self._folder = folder / f"rank{rank}" if (folder / "rank0").is_dir() else folder
        if self.path.is_file():
            self._files = [self.path]
        else:
            self._files = sorted(self._folder.glob("*.journal")) if self._folder.is_dir() else []
            if (folder / EVAL_FILE).is_file():
                self._files.append(folder / EVAL_FILE)
        if not self._files:
            raise ReplayError(
                f"{self._name}: no journal of process {rank} there. Pass the output_dir of a run that was recorded "
                "with journal=True, its folder `journal`, or one of the files in it."
            )

    @property
    def micro_steps(self) -> list[int]:
        """The micro-steps of the recorded rollouts of a training run, in order."""
        names = [path.stem.rpartition("_")[2] for path in self._files]
        return sorted(int(name) for name in names if name.isdigit())

    def play(
        self,
        requests: Sequence[RolloutRequest],
        micro_step: int | None = None,
        round_number: int = 0,
        limits: Mapping[str, Any] | None = None,
    ) -> list[Trajectory]:
        """The recorded trajectories, in the order of the requests.

        Args:
            requests: as a rollout would play them.
            micro_step: of a training run; None for an evaluation.
            round_number: of a rollout that replaces groups of the micro-step's first one, from 1 on.
            limits: those of the present run, by name; None if they are not compared.

        Raises:
            ReplayError: there is no such rollout, it is not complete, or a limit or one of the requests differs.
        """
        rollout = self._read(micro_step, round_number)
        where = f"{self._name}: " + ("" if micro_step is None else f"the rollout of micro-step {micro_step}: ")
        played = rollout.header.get("limits", {})
        for name, value in (limits or {}).items():
            if "endpoint" in rollout.header and name.startswith("context."):
                continue  # a hosted model reads every turn so far, whatever the recipe says
            if name in played and played[name] != value:
                raise ReplayError(
                    f"{where}{name}={played[name]!r} was recorded, and the run has {name}={value!r}: the trajectories "
                    f"would be others. Set {name} to {played[name]!r}."
                )
        recorded = {str(item.request): item for item in rollout.trajectories}
        first_wave = [item for item in rollout.trajectories if not item.request["attempt"]]
        trajectories = []
        for index, request in enumerate(requests):
            wanted = describe_request(request)
            found = recorded.get(str(wanted))
            while again := recorded.get(str(wanted | {"attempt": wanted["attempt"] + 1})):  # the last try counts
                wanted, found = again.request, again
            if found is None:
                self._refuse(where, index, wanted, first_wave[index].request if index < len(first_wave) else None)
            elif found.end is None:
                raise ReplayError(
                    f"{where}trajectory {index} (example {request.example_id!r}) has no end, because the run was "
                    "stopped there. Resume that run, which finishes it, or replay only what comes before."
                )
            else:
                trajectories.append(read_trajectory(found.end))
        return trajectories

    def _read(self, micro_step: int | None, round_number: int) -> RecordedRollout:
        if micro_step is None:
            path = self._files[-1]
            if path.name != EVAL_FILE and not self.path.is_file():
                raise ReplayError(
                    f"{self._name}: the journal holds no evaluation. Pass the output_dir of `agent-r1-trl eval`."
                )
        else:
            path = self._folder / rollout_file(micro_step, round_number)
            if path not in self._files:
                held = self.micro_steps
                known = f"those of micro-steps {', '.join(map(str, held))}" if held else "none of a training run"
                raise ReplayError(
                    f"{self._name}: the journal holds no rollout of micro-step {micro_step}, but {known}. Start from "
                    "the checkpoint before them (resume_from_checkpoint), or record with a larger journal.keep."
                )
        rollout = read_rollout(path)
        if rollout is None:
            raise ReplayError(f"{self._name}: {path} is not a journal. Pass the output_dir of a recorded run.")
        if (version := rollout.header.get("version")) != VERSION:
            raise ReplayError(
                f"{self._name}: {path} is a journal of version {version}, and this release reads version {VERSION}. "
                "Replay it with the release of agent-r1-trl that recorded it."
            )
        return rollout

    def _refuse(self, where: str, index: int, wanted: dict[str, Any], recorded: dict[str, Any] | None) -> None:
        if recorded is None:
            raise ReplayError(
                f"{where}the run asks for trajectory {index}, which was never begun. Use the data set, the batch size "
                "and the group size of the recorded run."
            )
        name = next(name for name in wanted if wanted[name] != recorded[name])
        meaning = {
            "example_id": "another data set, or another order of its rows",
            "row": "the row has changed",
            "generation": "another group size",
            "seed": "another seed",
            "reset_seed": "another seed",
        }
        raise ReplayError(
            f"{where}trajectory {index} differs first in {name}: {recorded[name]!r} was recorded, the run asks for "
            f"{wanted[name]!r} ({meaning.get(name, 'other settings')}). Pass the data and the settings of the "
            "recorded run."
        )
