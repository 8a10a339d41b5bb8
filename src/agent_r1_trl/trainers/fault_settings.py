"""Settings of a training run that meets faults: failing environments, tools and servers, broken numbers, signals.

Each belongs to the collaborator that its comment names. All have defaults under which a run survives what passes and
ends, with the cause, at what does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_r1_trl.rollout.limits import check_share, check_whole_number

RESUME_PARTS = ("optimizer", "rng", "rollout", "data")


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
    # ---- checkpoints that fail (`saving.py`)
    max_failed_saves: int = field(
        default=3,
        metadata={"help": "End the run when this many checkpoints in a row could not be written (disk full)."},
    )
    resume_without: list[str] | None = field(
        default=None,
        metadata={
            "help": "What a resumed run does without: 'optimizer' (with its learning-rate schedule), 'rng', 'rollout' "
            "(under way) begin anew, 'data' goes on at the same place in other rows or another order."
        },
    )

    def check_faults(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_whole_number("failure_window", self.failure_window)
        check_share("max_failure_share", self.max_failure_share)
        self.check_saving()

    def check_saving(self) -> None:
        """Check the settings that TRL's own rollout has as well.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_whole_number("max_failed_saves", self.max_failed_saves)
        unknown = set(self.resume_without or []) - set(RESUME_PARTS)
        if unknown:
            raise ValueError(
                f"resume_without={self.resume_without}: {sorted(unknown)} are not among {', '.join(RESUME_PARTS)}. "
                "Name some of these, or remove resume_without."
            )
