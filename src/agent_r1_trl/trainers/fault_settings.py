"""Settings of a training run that meets faults: failing environments, tools and servers, broken numbers, signals.

Each belongs to the collaborator that its comment names. All have defaults under which a run survives what passes and
ends, with the cause, at what does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_trl.rollout.limits import check_share, check_whole_number


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

    # ---- the journal (`journal.py`)
    journal: bool = field(
        default=True,
        metadata={
            "help": "Write every turn of a rollout to output_dir/journal as it happens. A run that is killed and "
            "resumed then repeats nothing but the turn that was under way."
        },
    )
    journal_keep: int = field(
        default=4,
        metadata={
            "help": "Number of rollouts whose journal is kept, per process, although a checkpoint has made it "
            "unnecessary. What lies behind the last checkpoint is always kept (nothing, with save_strategy='no')."
        },
    )
    replay: str | None = field(
        default=None,
        metadata={
            "help": "Take the rollouts from the journal of another run (its output_dir, or the folder `journal`) "
            "instead of playing them: no sampler, no tools, no environment. For debugging reward functions and losses."
        },
    )

    def check_faults(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_whole_number("failure_window", self.failure_window)
        check_share("max_failure_share", self.max_failure_share)
        check_whole_number("journal_keep", self.journal_keep, minimum=0)
        check_replay(self)


def check_replay(config: Any) -> None:
    """Check what stands beside `replay`.

    Raises:
        ValueError: names the option, its value, the rule and the cure.
    """
    if config.replay is None:
        return
    if Path(config.replay).absolute().is_relative_to(Path(config.output_dir).absolute()):
        raise ValueError(
            f"replay={config.replay!r} lies in output_dir={config.output_dir!r}, whose checkpoints the replay would "
            "overwrite. Set output_dir to another folder."
        )
    if config.eval_strategy != "no":
        raise ValueError(
            f"replay={config.replay!r} with eval_strategy={str(config.eval_strategy)!r}: the journal of a training "
            "run holds no evaluations. Set eval_strategy to 'no'."
        )
