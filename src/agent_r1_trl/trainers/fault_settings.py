"""Settings of a training run that meets faults: failing environments, tools and servers, broken numbers, signals.

Each belongs to the collaborator that its comment names. All have defaults under which a run survives what passes and
ends, with the cause, at what does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_r1_trl.rollout.limits import check_share, check_whole_number

MIN_RANK_TIMEOUT_S = 5.0


@dataclass(kw_only=True)
class FaultSettings:
    """What a run does about faults that are not the policy's; `MultiTurnConfig` inherits it."""

    # ---- trajectories that fail (`failures.py`)
    max_failure_share: float = field(
        default=0.5,
        metadata={
            "help": "End the run when a larger share of the last trajectories failed for no fault of the policy "
            "(environment_error, generation_error, prompt_too_long). 1.0: only if nothing can be played at all."
        },
    )
    failure_window: int = field(
        default=32,
        metadata={"help": "Number of prompts over which `max_failure_share` is judged; fewer are not judged."},
    )

    # ---- the end of a run from outside (`signals.py`, `ranks.py`)
    save_on_signal: bool = field(
        default=True,
        metadata={
            "help": "Write a checkpoint when SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1 ends the run. Environments "
            "and engines are closed either way."
        },
    )
    rank_timeout: float = field(
        default=120.0,
        metadata={
            "help": "Seconds without a sign of life from a rank after which the others end the run with a message "
            "that names it. A killed rank of the same machine is noticed within 2 seconds."
        },
    )

    def check_faults(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_whole_number("failure_window", self.failure_window)
        check_share("max_failure_share", self.max_failure_share)
        is_number = isinstance(self.rank_timeout, int | float) and not isinstance(self.rank_timeout, bool)
        if not is_number or not self.rank_timeout >= MIN_RANK_TIMEOUT_S:
            raise ValueError(
                f"rank_timeout={self.rank_timeout!r}: must be a number >= {MIN_RANK_TIMEOUT_S:g} (seconds), because "
                "signs of life are a second apart. Set it to 120, say."
            )
