"""The settings `failures` and `outages`: what a run does about faults that are not the policy's."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1_trl.settings import Count, Flag, NotNegative, SettingsGroup, Share, setting


@dataclass(kw_only=True)
class FailureSettings(SettingsGroup):
    """Failing trajectories, numbers that are not finite, and the end of a run from outside."""

    max_share: Share = setting(
        0.5,
        "End the run when a larger share of the last trajectories were lost for no fault of the policy "
        "(environment_error, generation_error, tool_failure, prompt_too_long), or a required reward function did not "
        "score them. 1.0: only if nothing can be sampled.",
    )
    window: Count = setting(32, "Number of prompts over which `max_share` is judged; fewer are not judged.")
    max_nonfinite_steps: Count = setting(
        3,
        "End the run after this many optimizer steps in a row whose loss or gradients are not finite. Such steps are "
        "skipped: they change neither weights nor optimizer.",
    )
    min_effective_share: Share = setting(
        0.9,
        "With rollouts_ahead, begin nothing ahead while the effective share of a batch's tokens (1: the policy is the "
        "one that sampled them) is smaller, and do not train on such a batch. 0: off.",
    )
    save_on_signal: Flag = setting(
        True,
        "Write a checkpoint when SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1 ends the run. Environments and engines "
        "are closed either way.",
    )


@dataclass(kw_only=True)
class OutageSettings(SettingsGroup):
    """Tools that are down."""

    max_failure_rise: Share = setting(
        0.3,
        "A tool is asked whether it is down when its share of failed calls has risen by more than this above its "
        "past. The model's own mistakes do not count. 1.0 disables the check.",
    )
    min_calls: Count = setting(8, "Number of calls, on all processes, over which a tool is judged at least.")
    max_wait: NotNegative = setting(
        1800.0,
        "Seconds to wait for a tool that is down, before the run ends. What was sampled in the meantime is not "
        "trained on. 0: it ends at once.",
    )


GROUPS = {"failures": FailureSettings, "outages": OutageSettings}
