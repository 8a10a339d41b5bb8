"""Why a token has its advantage: worked out from the record, and compared with what was recorded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_r1_trl.advantages.estimators import ESTIMATORS, CreditInputs, CreditSettings, Estimator
from agent_r1_trl.advantages.explanations import Parts, split_sums, work_out
from agent_r1_trl.advantages.masked import masked_values
from agent_r1_trl.recording.store import Record
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.credit_inputs import read_credit_inputs, weighted_turn_rewards
from agent_r1_trl.update.rows import pad_lists

TOLERANCE = 1e-4
"""Difference between what is worked out from exact numbers and what was recorded."""
ROUNDING = 2.0**-11
"""Relative error of the columns, which are float16."""
Line = tuple[str, float]


@dataclass(kw_only=True)
class Explanation:
    """The advantages of a trajectory as sums; in a sum, a label's first character says what its number does."""

    lines: list[Line]
    """The sums that all tokens share. A label without `+ - * / =` before it begins another sum."""
    advantages: list[float]
    """(T,) by the estimator's own function, from what was recorded."""
    max_gap: float
    """The largest difference between these, the sums' results and the recorded advantages, over all tokens."""
    tolerance: float
    """The size of rounding errors of that, most of it where a critic's values or KL penalties were recorded; where
    `max_gap` is larger, something else was trained on than is explained."""
    of_tokens: Parts = field(repr=False)
    """The other sums, in which some values are (T,)."""
    mask: list[bool] = field(repr=False)
    """(T,) whether a token has an advantage."""

    def at(self, position: int) -> list[Line]:
        """The sums of one token; empty if there are none but those of all tokens, or it has no advantage."""
        pairs = self.of_tokens if self.mask[position] else []
        return [(label, float(x[position] if isinstance(x, torch.Tensor) else x)) for label, x in pairs]


def explain(
    record: Record, group: Sequence[Record], step: Mapping[str, Any] | None, estimator: Estimator | None = None
) -> Explanation | None:
    """Work a trajectory's advantages out; None for those that were not trained on, or cannot be explained.

    Args:
        record: with its columns, where a critic or a KL penalty in the rewards is explained.
        group: the records of its group, itself included; others of its step may be among them.
        step: of `read_steps`, that of the record; None if there is none.
        estimator: the row of a user's own; None: the package's of the recorded name.
    """
    members = members_of(record, group)
    found = _RecordedGroup.find(members, step, estimator)
    return None if found is None else found.explain(next(i for i, item in enumerate(members) if item is record))


def explain_group(members: Sequence[Record], step: Mapping[str, Any] | None) -> list[Explanation | None]:
    """Like `explain`, for each member of one group; it takes much less time than one after the other."""
    found = _RecordedGroup.find(members, step)
    if found is None:
        return [None] * len(members)
    return [found.explain(index) for index in range(len(members))]


def members_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """The records of its group; a record of an older run, which does not say, stands alone."""
    key = (record.split, record.step, record.group)
    if record.group is None:
        return [record]
    return [other for other in records if (other.split, other.step, other.group) == key]


@dataclass(kw_only=True)
class _RecordedGroup:
    """The facts from which a group's advantages were computed."""

    members: Sequence[Record]
    estimator: Estimator
    facts: Mapping[str, Any]
    """The line of its rollout in steps.jsonl."""
    parts: dict[str, CreditInputs]
    """The estimator's inputs: all rewards, under "", or `process` and `outcome` apart."""
    computed: torch.Tensor = field(init=False)
    """(N, T) advantages by the estimator's own function."""

    @classmethod
    def find(
        cls, members: Sequence[Record], step: Mapping[str, Any] | None, estimator: Estimator | None = None
    ) -> _RecordedGroup | None:
        """None if not all was recorded, or the estimator has no explanation."""
        first = members[0]
        row = estimator or ESTIMATORS.get(first.estimator or "")
        if row is None or row.explain is None or first.trajectory.advantages is None or first.group is None:
            return None
        if not step or first.split != "train":
            return None
        rollouts = [item for item in step["rollouts"] if item["first_group"] <= first.group]
        if not rollouts:
            return None
        facts = rollouts[-1]
        inputs = _read_inputs(members, facts, row)
        if inputs is None:
            return None
        return cls(members=members, estimator=row, facts=facts, parts=_split_inputs(inputs, facts))

    def __post_init__(self) -> None:
        self.mask = next(iter(self.parts.values())).mask  # (N, T)
        total = torch.zeros(self.mask.shape)
        for name, part in self.parts.items():
            advantages = self.estimator.estimate(part).advantages
            if self.estimator.needs_critic and part.whitening is not None:  # the trainer's doing
                advantages = (advantages.double() - part.whitening[0]) / part.whitening[1]
            total = total + (self.facts[f"{name}_weight"] if name else 1.0) * advantages
        self.computed = torch.where(self.mask, total, 0.0)

    def explain(self, index: int) -> Explanation:
        """The advantages of one of the members."""
        item = self.members[index].trajectory
        mask = self.mask[index]
        computed = self.computed[index]
        sums = work_out(self._sums(index)) if mask.any() else [(f"advantage, as {_why_none(item)}", 0.0)]
        recorded = torch.zeros(len(mask))
        recorded[: len(item.completion_ids)] = torch.tensor(item.advantages)
        # Without a loss mask observations carry on what stands before them.
        compared = mask | pad_lists([item.action_mask], 0, length=len(mask), dtype=torch.bool)[0]
        found = torch.stack([computed.double(), torch.where(mask, sums[-1][1], 0.0).double()])  # (2, T)
        length = len(item.completion_ids)
        sums = [(label, x[:length] if isinstance(x, torch.Tensor) else x) for label, x in sums]
        lines: Parts = []
        of_tokens: Parts = []
        for one in split_sums(sums):
            (of_tokens if any(isinstance(x, torch.Tensor) for _, x in one) else lines).extend(one)
        return Explanation(
            lines=lines,
            advantages=computed[:length].tolist(),
            max_gap=max([0.0, *(found - recorded).abs()[:, compared].flatten().tolist()]),
            tolerance=TOLERANCE + self._rounding(index),
            of_tokens=of_tokens,
            mask=mask[:length].tolist(),
        )

    def _rounding(self, index: int) -> float:
        """How far off advantages may be since columns are rounded."""
        error = 0.0
        for name, part in self.parts.items():
            weight = self.facts[f"{name}_weight"] if name else 1.0
            # In GAE the weights of all values sum up to less than 2.
            values = torch.zeros(1) if part.values is None else masked_values(part.values[index], self.mask[index])
            largest = 2 * values.abs().max()
            penalties = 0.0 if part.kl_rewards is None else part.kl_rewards[index].abs().sum()
            error += abs(weight) * ROUNDING * float(largest + penalties) / (part.whitening or (0.0, 1.0))[1]
        return error

    def _sums(self, index: int) -> Parts:
        assert self.estimator.explain is not None
        names = {"": "that are not attributed"}
        sums: Parts = [
            (f"std of turn rewards {names.get(name, f'of {name}')}, by which they are divided", value)
            for name, value in self.facts["source_scales"].items()
        ]
        weights = {name: self.facts[f"{name}_weight"] for name in ("process", "outcome")}
        if "" in self.parts:
            sums += [(f"{name} reward weight, counted in them", x) for name, x in weights.items() if x != 1.0]
            return [*sums, *self.estimator.explain(self.parts[""], index), ("= advantage", None)]
        last: Parts = []
        for name, part in self.parts.items():
            sums += work_out([*self.estimator.explain(part, index), (f"= {name} advantage", None)])
            last.append((f"{'+ ' * bool(last)}{weights[name]:g} * {name} advantage", weights[name] * sums[-1][1]))
        return [*sums, *last, ("= advantage", None)]


# -------------------------------------------------------------------- from the record to the estimator


def _read_inputs(group: Sequence[Record], facts: Mapping[str, Any], estimator: Estimator) -> CreditInputs | None:
    """The estimator's inputs of this group; None if not all of them were recorded."""
    trajectories = [record.trajectory for record in group]
    if any(item.seat_rewards for item in trajectories):
        return None  # each seat is a row of its own there
    length = max([1, *(len(item.completion_ids) for item in trajectories)])
    is_masking = facts["truncated_trajectories"] == "mask"
    in_baseline = torch.tensor([item.in_baseline for item in trajectories])
    in_loss = in_baseline & torch.tensor([not (is_masking and item.stop_reason.is_truncated) for item in trajectories])
    masks = [item.action_mask if facts["advantage_mask"] else [1] * len(item.completion_ids) for item in trajectories]
    given: dict[str, Any] = {}
    if facts["kl_in_reward"]:
        given["kl_rewards"] = _column(group, "kl_reward", length)
    if estimator.needs_critic:
        given["values"] = _column(group, "value", length)
        given["bootstrap_values"] = torch.tensor([record.bootstrap_value for record in group])
    if given and (not facts["advantage_mask"] or any(value is None for value in given.values())):
        return None  # columns hold what the policy has sampled alone
    weights = (1.0, 1.0) if facts["has_parts"] else (facts["process_weight"], facts["outcome_weight"])
    names = {item.name for item in dataclasses.fields(CreditSettings)}
    return read_credit_inputs(
        trajectories,
        mask=pad_lists(masks, 0, length=length, dtype=torch.bool) & in_loss.unsqueeze(1),
        in_baseline=in_baseline,
        group_ids=torch.zeros(len(group), dtype=torch.long),
        turn_rewards=weighted_turn_rewards(trajectories, weight=weights[0], source_scales=facts["source_scales"]),
        outcome_weight=weights[1],
        settings=CreditSettings(
            scale_rewards=facts.get("scale", "group"), **{name: facts[name] for name in names & facts.keys()}
        ),
        **given,
    )


def _column(group: Sequence[Record], name: str, length: int) -> torch.Tensor | None:
    """(N, T) a column over all tokens, 0 where the policy has sampled none; None if one has no such column."""
    table = torch.zeros(len(group), length)
    for index, record in enumerate(group):
        is_policy = torch.tensor(record.trajectory.action_mask, dtype=torch.bool)
        if name in record.columns:
            table[index, : len(is_policy)][is_policy] = torch.tensor(record.columns[name])
        elif record.trajectory.in_baseline and is_policy.any():
            return None
    return table


def _split_inputs(inputs: CreditInputs, facts: Mapping[str, Any]) -> dict[str, CreditInputs]:
    parts = {name: inputs.only(name) for name in ("process", "outcome")} if facts["has_parts"] else {"": inputs}
    for name, part in parts.items():
        whitening = (facts["whitening"] or {}).get(name) if name else facts["whitening"]
        if whitening:
            std = math.inf if whitening["std"] is None else whitening["std"]
            parts[name] = dataclasses.replace(part, whitening=(whitening["mean"], std))
    return parts


def _why_none(item: Trajectory) -> str:
    if item.stop_reason.is_infrastructure_failure:
        return f"{item.stop_reason.value} is not the policy's doing"
    if not item.is_scored:
        return item.error or "nothing scored the trajectory"
    if item.is_group_too_small:
        return "too few of its group are left"
    return "limits ended it" if item.action_mask and any(item.action_mask) else "the policy has sampled nothing"


# -------------------------------------------------------------------- as text


def describe(record: Record, group: Sequence[Record], step: Mapping[str, Any] | None) -> str:
    """The returns of a trajectory's group, its estimator, and a line for each number of its sums.

    Sums of single tokens are those of the last one that the policy sampled. "" for a trajectory that was not sampled
    to be trained on. Arguments as for `explain`.
    """
    item = record.trajectory
    if record.split != "train" or (item.advantages is None and not item.is_replaced):
        return ""
    how = record.estimator or "estimator not recorded"
    how += f", scale_rewards {record.scale}" if record.scale else ""
    how += "; replaced by another group, so not trained on" if item.is_replaced else ""
    members = [other.trajectory for other in members_of(record, group)]
    mates = ", ".join(_member(mate) + " (this)" * (mate is item) for mate in members)
    head = f"group of {len(members)}: {mates}; {how}" if len(members) > 1 else f"return {_member(item)}; {how}"
    found = explain(record, group, step)
    if found is None:
        return head + "\nrecorded advantage; no explanation" * (not item.is_replaced)
    lines = [_text(line) for line in found.lines]
    last = max((place for place, is_in in enumerate(found.mask) if is_in and item.action_mask[place]), default=0)
    of_last = [_text(line) for line in found.at(last)] if found.mask else []
    lines += ["of its last token:", *of_last] if of_last else []
    if found.max_gap > found.tolerance:
        lines.append(f"It was recorded otherwise: the largest difference is {found.max_gap:.2g}.")
    return "\n".join([head, *lines])


def _text(line: Line) -> str:
    label, value = line
    sign, _, rest = label.partition(" ")
    return (
        f"  {sign} {value:>10.4g}  {rest}" if len(sign) == 1 and not sign.isalnum() else f"    {value:>10.4g}  {label}"
    )


def _member(item: Trajectory) -> str:
    return f"{item.total_reward:+.3f}" if item.in_baseline else f"none ({item.stop_reason.value})"
