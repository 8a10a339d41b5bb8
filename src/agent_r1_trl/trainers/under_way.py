"""One rollout under way, and where the run stands when it is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.environments.factory import users_environments
from agent_r1_trl.generation import SamplingParams
from agent_r1_trl.journal import RolloutLog
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.rollout.runner import STOP_TIMEOUT_S
from agent_r1_trl.trajectory import Trajectory


@dataclass(kw_only=True, frozen=True)
class Position:
    """Where the run stands when a rollout is asked for."""

    micro_step: int
    """Number of micro-batches trained on so far: TRL's `_step`. It seeds the draws."""
    optimizer_step: int
    """Number of optimizer steps behind the policy's weights."""
    num_micro_steps: int
    """Number of micro-batches of the whole run."""
    group_size: int
    """Trajectories of one prompt; they are consecutive rows."""
    is_training: bool
    first_row: int = 0
    """Index in the evaluation of the first row of all ranks; 0 in training."""
    round: int = 0
    """0 for a generation batch; 1, 2, ... for the rollouts that replace groups of it (`resampling.py`)."""
    places: Sequence[int] | None = None
    """In such a round, of each row of this rank its place among the rows of all ranks."""


class Rollout:
    """Trajectories that are being played, or have been.

    Args:
        runner: plays them.
        requests: one per trajectory.
        params: how tokens are drawn.
        synced_step: number of optimizer steps behind the oldest weights that turns are sampled from.
        journal: keeps it on disk.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        *,
        synced_step: int,
        journal: RolloutLog | None = None,
    ):
        self.synced_step = synced_step
        self.requests = requests
        self.rows: Sequence[dict[str, Any]] = [request.example for request in requests]
        """Of the data set, one per trajectory."""
        self.environments: list[Any] | None = None
        """The trajectories' environments once they have ended, as `users_environments` gives them."""
        self.seconds = 0.0
        """Wall time from start to end."""
        start = time.perf_counter()

        def finish(_: Any) -> None:
            self.seconds = time.perf_counter() - start
            self.environments = users_environments(runner.environments, runner.env_factory)
            self._has_ended.set()

        self._has_ended = threading.Event()
        self._runner = runner
        self._future = runner.start(requests, params=params, journal=journal)
        self._future.add_done_callback(finish)

    def wait(self) -> None:
        """Return when all trajectories have ended, well or not."""
        try:
            self._has_ended.wait()
        except BaseException:  # KeyboardInterrupt: stop what is running
            self.cancel()
            raise

    @property
    def trajectories(self) -> list[Trajectory]:
        """In the order of the requests.

        Raises:
            Exception: what an environment's author or a reward function got wrong; see `run_trajectory`.
            CancelledError: it was cut.
        """
        return self._future.result()

    def cancel(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the trajectories; returns when their environments are closed, or False when time is up."""
        return self._runner.stop(timeout_s) or not self._future.cancel()  # whoever waits goes on
