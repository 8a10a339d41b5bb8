"""Settings of a training run that meets faults: failing environments, tools and servers, broken numbers, signals.

Each belongs to the collaborator that its comment names. All have defaults under which a run survives what passes and
ends, with the cause, at what does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agent_r1_trl.rollout.limits import check_share, check_whole_number


@dataclass(kw_only=True)
class FaultSettings:
    """What a run does about faults that are not the policy's; `MultiTurnConfig` inherits it."""

    # ---- trajectories that fail (`failures.py`)
    max_failure_share: float = field(
        default=0.5,
        metadata={
            "help": "End the run when a larger share of the last trajectories failed for no fault of the policy "
            "(environment_error, generation_error, tool_failure, prompt_too_long). 1.0: only if nothing can be played "
            "at all."
        },
    )
    failure_window: int = field(
        default=32,
        metadata={"help": "Number of prompts over which `max_failure_share` is judged; fewer are not judged."},
    )

    # ---- tools that are down (`tool_watch.py`)
    max_tool_failure_rise: float = field(
        default=0.3,
        metadata={
            "help": "How much the share of a tool's calls that fail may rise above that of its past, before the tool "
            "is asked whether it is down. The model's own mistakes do not count. 1.0: as much as it likes."
        },
    )
    min_tool_calls: int = field(
        default=8, metadata={"help": "Number of calls, on all processes, over which a tool is judged at least."}
    )
    max_outage_wait: float = field(
        default=1800.0,
        metadata={
            "help": "Seconds that the run waits for a tool that is down, before it ends. What was played in the "
            "meantime is not trained on. 0: it ends at once."
        },
    )

    def check_faults(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_whole_number("failure_window", self.failure_window)
        check_share("max_failure_share", self.max_failure_share)
        check_share("max_tool_failure_rise", self.max_tool_failure_rise)
        check_whole_number("min_tool_calls", self.min_tool_calls)
        wait = self.max_outage_wait
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
            raise ValueError(
                f"max_outage_wait={wait!r} must be a number of seconds >= 0. Set max_outage_wait to such a value."
            )
