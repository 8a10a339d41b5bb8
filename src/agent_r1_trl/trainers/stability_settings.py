"""Settings of StarPO-S: what a run does about groups without signal, and about its own collapse.

Each belongs to the collaborator that its comment names. All are off by default; then nothing is changed.

Source: RAGEN (arXiv 2504.20073, section 4) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class StabilitySettings:
    """What keeps a run stable; `MultiTurnConfig` inherits it."""

    # ---- filtering of groups (`group_filter.py`)

    # ---- dynamic sampling and curriculum (`resampling.py`, `curriculum.py`)

    # ---- signals of collapse (`echo_signals.py`)

    # ---- what is done about them (`echo_guard.py`)

    # ---- rollout shaping

    def check_stability(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
