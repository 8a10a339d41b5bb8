"""The settings `failures` and `outages`: what a run does about faults that are not the policy's."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1_trl.settings import Count, Flag, NotNegative, SettingsGroup, Share, setting


@dataclass(kw_only=True)
class FailureSettings(SettingsGroup):
    """Failing trajectories, numbers that are not finite, and the end of a run from outside."""

    max_share: Share = setting(
        0.5,
        "Share of lost or unscored trajectories, among the last prompts, above which the run ends. 1.0: only if "
        "nothing can be sampled.",
    )
    window: Count = setting(32, "Number of prompts over which `max_share` is judged; fewer are not judged.")
    max_nonfinite_steps: Count = setting(
        3,
        "Optimizer steps in a row with a loss or gradients that are not finite, after which the run ends. Such steps "
        "are skipped.",
    )
    min_effective_share: Share = setting(
        0.9,
        "With rollouts_ahead, do not train on a batch whose effective share of tokens (1: the policy is the one that "
        "sampled them) is smaller. A rollout begins ahead only while its batch is expected to lose a fifth of that "
        "at most: 0.02 of 0.1. 0: off.",
    )
    save_on_signal: Flag = setting(
        True,
        "Write a checkpoint when SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1 ends the run.",
    )


@dataclass(kw_only=True)
class OutageSettings(SettingsGroup):
    """Tools that are down."""

    max_failure_rise: Share = setting(
        0.3,
        "Rise of a tool's share of failed calls from which it is asked whether it is down. 1.0 disables the check.",
    )
    min_calls: Count = setting(8, "Minimum number of calls, on all processes, over which a tool is judged.")
    max_wait: NotNegative = setting(
        1800.0,
        "Seconds to wait for a tool that is down, before the run ends. 0: it ends at once.",
    )


GROUPS = {"failures": FailureSettings, "outages": OutageSettings}
