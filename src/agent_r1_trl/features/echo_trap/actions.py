"""What the guard's milder actions change in a running trainer.

An action is a sentence that says what it does, and a list of attributes with their new values. A dry run says the
sentence and leaves the attributes alone; `undo` puts back what they were before. No two actions change the same
attribute.

TRL 1.16 names that this file touches: `epsilon_low`, `epsilon_high` and `beta`, which TRL reads anew in every loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent_r1_trl.features.echo_trap.checks import EPSILON, EPSILON_HIGH, clip_matters

FILTER_RULE, FILTER_VALUE = "top_p", 0.9
"""Rule of the action `filter` (RAGEN-2)."""
RESAMPLE_ROUNDS = 2

Change = tuple[str, list[tuple[Any, str, Any]]]
"""One sentence; and objects, names of their attributes, and the new values."""


class Remedies:
    """Changes the settings of a running trainer.

    Args:
        trainer: a multi-turn trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: dict[str, list[tuple[Any, str, Any]]] = {}

    def change(self, name: str) -> Change:
        """What `filter`, `clip` or `learning_rate` would do now."""
        change: Change = getattr(self, f"_{name}")()
        return change

    def apply(self, name: str) -> str:
        """Do it; returns what was done. What was done already is not done a second time."""
        text, values = self.change(name)
        for target, attribute, value in values:
            self._before.setdefault(name, []).append((target, attribute, getattr(target, attribute)))
            setattr(target, attribute, value)
        return text

    def undo(self, *names: str) -> bool:
        """Put back the values that these actions (none named: all) have changed; returns whether there were any."""
        undone = [self._before.pop(name, []) for name in names or list(self._before)]
        for values in undone:
            for target, attribute, value in reversed(values):
                setattr(target, attribute, value)
        return any(undone)

    def _filter(self) -> Change:
        trainer, values, texts = self._trainer, [], []
        groups, resampling = (trainer.features[name] for name in ("group_filter", "resampling"))
        if groups.settings.filter_groups is None:
            filtering = replace(groups.settings, filter_groups=FILTER_RULE, filter_value=FILTER_VALUE)
            values.append((groups, "settings", filtering))
            texts.append(f"groups are filtered by {FILTER_RULE} {FILTER_VALUE:g}")
        if not hasattr(trainer.train_dataset, "__len__"):
            texts.append("groups without signal are not replaced, because a streamed data set has no others to draw")
        elif resampling.rounds == 0:
            values.append((resampling, "rounds", RESAMPLE_ROUNDS))
            texts.append(f"groups without signal are replaced in up to {RESAMPLE_ROUNDS} rounds")
        return "; ".join(texts), values

    def _clip(self) -> Change:
        trainer, values, texts = self._trainer, [], []
        before = trainer.epsilon_low, trainer.epsilon_high
        if clip_matters(trainer.args):
            low, high = max(before[0], EPSILON), max(before[1], EPSILON_HIGH)
            values += [(trainer, "epsilon_low", low), (trainer, "epsilon_high", high)]
            texts.append(f"the clip goes from ({before[0]:g}, {before[1]:g}) to ({low:g}, {high:g})")
        else:  # where a loss reads something else than the clip, it is left alone
            texts.append("the clip stays, because widening it would change nothing in this run")
        if trainer.args.beta != 0:
            values.append((trainer, "beta", 0.0))
            texts.append(f"the KL term is switched off (beta from {trainer.beta:g} to 0)")
        return "; ".join(texts), values

    def _learning_rate(self) -> Change:
        args = self._trainer.args
        rates = "the learning rates of policy and critic are" if args.has_critic else "the learning rate is"
        return f"{rates} multiplied by {args.echo.rate_factor:g} for {args.echo.rate_steps} steps", []
