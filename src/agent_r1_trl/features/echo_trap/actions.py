"""What the guard's milder actions change in a running trainer.

An action is a list of attributes and their new values, and a sentence that says so. A dry run says the sentence and
leaves the attributes alone; `undo` puts back what they were before. No two actions change the same attribute.

TRL 1.16 names that this file touches: `epsilon_low`, `epsilon_high`, `beta`, `entropy_coef` and
`_entropy_bonus_enabled`. TRL reads the first two and `beta` anew in every loss. Where a loss type reads something else
than the clip, it is left alone, and the sentence says that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agent_r1_trl.features.echo_trap.checks import EPSILON, EPSILON_HIGH, clip_matters

FILTER_RULE, FILTER_VALUE = "top_p", 0.9
"""Rule of the action `filter` (RAGEN-2)."""
RESAMPLE_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """What an action does."""

    text: str
    """One sentence."""
    values: tuple[tuple[Any, str, Any], ...] = ()
    """Objects, names of their attributes, and the new values."""


class Remedies:
    """Changes the settings of a running trainer.

    Args:
        trainer: a multi-turn trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: dict[str, list[tuple[Any, str, Any]]] = {}

    def change(self, name: str) -> SettingChange:
        """What an action would do now.

        Args:
            name: `filter`, `clip`, `entropy` or `learning_rate`.
        """
        changes = {
            "filter": self._filter,
            "clip": self._clip,
            "entropy": self._entropy,
            "learning_rate": self._learning_rate,
        }
        return changes[name]()

    def apply(self, name: str) -> str:
        """Do it; returns what was done. What was done already is not done a second time."""
        change = self.change(name)
        for target, attribute, value in change.values:
            self._before.setdefault(name, []).append((target, attribute, getattr(target, attribute)))
            setattr(target, attribute, value)
        return change.text

    def undo(self, *names: str) -> bool:
        """Put back the values that these actions (none named: all) have changed; returns whether there were any."""
        undone = [self._before.pop(name, []) for name in names or list(self._before)]
        for values in undone:
            for target, attribute, value in reversed(values):
                setattr(target, attribute, value)
        return any(undone)

    def _filter(self) -> SettingChange:
        trainer, values, parts = self._trainer, [], []
        settings = trainer.features["group_filter"].settings
        if settings.rule is None:
            values.append(
                (trainer.features["group_filter"], "settings", replace(settings, rule=FILTER_RULE, value=FILTER_VALUE))
            )
            parts.append(f"groups are filtered by {FILTER_RULE} {FILTER_VALUE:g} on their {settings.statistic}")
        if not hasattr(trainer.train_dataset, "__len__"):
            parts.append("groups without signal are not replaced, because a streamed data set has no others to draw")
        elif trainer.features["resampling"].rounds == 0:
            values.append((trainer.features["resampling"], "rounds", RESAMPLE_ROUNDS))
            parts.append(f"groups without signal are replaced in up to {RESAMPLE_ROUNDS} rounds")
        return SettingChange(text="; ".join(parts), values=tuple(values))

    def _clip(self) -> SettingChange:
        trainer, values, parts = self._trainer, [], []
        if clip_matters(trainer.args):
            low, high = max(trainer.epsilon_low, EPSILON), max(trainer.epsilon_high, EPSILON_HIGH)
            values += [(trainer, "epsilon_low", low), (trainer, "epsilon_high", high)]
            parts.append(
                f"the clip goes from ({trainer.epsilon_low:g}, {trainer.epsilon_high:g}) to ({low:g}, {high:g})"
            )
        else:
            parts.append("the clip stays, because widening it would change nothing in this run")
        if trainer.args.beta != 0:
            values.append((trainer, "beta", 0.0))
            parts.append(f"the KL term is switched off (beta from {trainer.beta:g} to 0)")
        return SettingChange(text="; ".join(parts), values=tuple(values))

    def _entropy(self) -> SettingChange:
        trainer, coefficient = self._trainer, self._trainer.args.echo.entropy_coef
        values = ((trainer, "entropy_coef", coefficient), (trainer, "_entropy_bonus_enabled", True))
        text = f"the entropy bonus goes from {trainer.entropy_coef:g} to {coefficient:g} (entropy_coef)"
        return SettingChange(text=text, values=values)

    def _learning_rate(self) -> SettingChange:
        args = self._trainer.args
        rates = "the learning rates of policy and critic are" if args.has_critic else "the learning rate is"
        return SettingChange(text=f"{rates} multiplied by {args.echo.rate_factor:g} for {args.echo.rate_steps} steps")
