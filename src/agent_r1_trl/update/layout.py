"""Which rows of a rollout share a forward pass of the update: how they are dealt out, and how they are laid out.

`deal`: trajectories are shuffled and cut into optimizer steps, as TRL does; the rows of a step, all rows of each of
its trajectories, are spread evenly over ranks and micro-batches. Rows that are not kept leave the update; the
trajectories that are left take turns in the steps, so that none has many more than another. The number of
micro-batches stays, and a micro-batch has equally many rows on all ranks: a dummy row without loss fills up.

`UpdateLayout` (`update_layout`) moves rows between the micro-batches of one optimizer step, whose gradients are added
up anyway:

- `padded`: as TRL does, all as wide as the longest trajectory.
- `grouped`: rows of like length share a micro-batch, whose padding is cut off.
- `packed`: the rows of a micro-batch become one row without padding (`packing.py`).
- `shared`: packed, and what rows have in common at their beginning is computed once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType, gather_object

from agent_r1_trl.critic.attach import base_causal_lm
from agent_r1_trl.update.batching import (
    DUMMY,
    EXTRA_TOKENS,
    KEPT_IDS,
    Inputs,
    exchange,
    join_rows,
    loss_masks,
    other_masks,
    set_valid_scales,
    take_rows,
    trim_padding,
    whole_rows,
)
from agent_r1_trl.update.micro_batches import MICRO_BATCHES, computed_ids, plan_scoring, repack, sort_key, valid_ids
from agent_r1_trl.update.packed_attention import SEGMENTS, use_packed_attention
from agent_r1_trl.update.packing import PackedBatch, pack, packed_log_probs

IS_KEPT = "is_kept"
"""Entry of TRL's batch, (R,): whether the row is trained on; only where a callback has said so."""
HAS_SIGNAL = "has_signal"
"""Entry of a micro-batch: whether its optimizer step trains on any row of this rollout; only where some may not."""


def deal(
    output: Inputs,
    trajectories: torch.Tensor,
    order: torch.Tensor,
    *,
    args: Any,
    accelerator: Any,
) -> list[Inputs]:
    """The micro-batches of a rollout, `steps_per_generation` of them. All ranks must call it.

    `output` is TRL's batch of this rank's R rows, `trajectories`, (R,), that of each row (-1 for none), and `order`,
    (B,), says in which order these are trained on.
    """
    rows, is_filtered = dict(output), IS_KEPT in output
    is_dealt = trajectories >= 0
    kept = is_dealt.int()  # 2 in the policy's loss, 1 in a loss term alone
    if is_filtered:
        is_kept = rows.pop(IS_KEPT)
        rows["tool_mask"] = rows["tool_mask"] * is_kept.unsqueeze(1)
        rows["in_baseline"] = rows["in_baseline"] & is_kept
        extra = [rows[name].any(dim=1) for name in rows if name.startswith(EXTRA_TOKENS)]
        kept = is_dealt * functools.reduce(torch.maximum, [item.int() for item in extra], 2 * is_kept.int()).cpu()
        is_dealt = kept > 0
        if "value_mask" in rows:
            rows["value_mask"] = rows["value_mask"] & is_kept.unsqueeze(1)
    place = torch.where(is_dealt, order.argsort()[trajectories], -1)
    everywhere = gather_object([(place.tolist(), kept.tolist(), len(order))])
    plan, has_signal = plan_deal(
        everywhere, args.steps_per_generation, args.gradient_accumulation_steps, in_turns=is_filtered
    )
    rows, chosen = exchange(rows, plan, accelerator)
    rows = trim_padding(rows) if is_filtered else rows
    buffer = [take_rows(rows, places) for places in chosen]
    return _mark_signal(buffer, has_signal, accelerator) if is_filtered else buffer


def plan_deal(
    ranks: Sequence[tuple[Sequence[int], Sequence[int], int]],
    num_micro_batches: int,
    steps_per_update: int,
    *,
    in_turns: bool,
) -> tuple[list[list[list[int]]], list[bool]]:
    """Which rows each micro-batch of each rank gets, and of each whether its optimizer step trains on any row.

    Args:
        ranks: of each, for each of its rows the place of the row's trajectory in the order of training (-1 for a row
            that nobody gets) and whether the row is kept (those with larger numbers are dealt first); and its number
            of trajectories. Rows are numbered throughout.
        num_micro_batches: of the rollout, on each rank.
        steps_per_update: micro-batches of one optimizer step.
        in_turns: steps, and within them micro-batches, take turns; otherwise each gets a stretch.

    Returns:
        (rank, micro-batch) -> numbers of rows, `DUMMY` where there is none.

    >>> plan_deal([([1, 0, 2, 3], [True] * 4, 4)], 2, 1, in_turns=False)
    ([[[1, 0], [2, 3]]], [True, True])
    >>> plan_deal([([0, 1, 2, 3], [True] * 4, 4)], 2, 1, in_turns=True)[0]
    [[[0, 2], [1, 3]]]
    """
    width = steps_per_update if num_micro_batches % steps_per_update == 0 else num_micro_batches
    num_steps = num_micro_batches // width
    rank = np.repeat(np.arange(len(ranks)), [len(places) for places, _, _ in ranks])  # (N,), of each row
    place, is_kept = (np.concatenate([one[index] for one in ranks]).astype(int) for index in (0, 1))  # (N,)
    order = np.lexsort((place, rank, -is_kept))  # stable
    order = order[place[order] >= 0]
    if in_turns:
        is_next = np.diff(rank[order], prepend=-1).astype(bool) | np.diff(place[order], prepend=-1).astype(bool)
        step = (np.cumsum(is_next) - 1) % num_steps  # of each row in the order
    else:
        step = place[order] * num_steps // ranks[0][2]
    plan: list[list[list[int]]] = [[] for _ in ranks]
    has_signal: list[bool] = []
    for number in range(num_steps):
        in_step = order[step == number]
        own = _balanced([in_step[rank[in_step] == index].tolist() for index in range(len(ranks))])
        for micro_batches, rows in zip(plan, own, strict=True):
            parts = [rows[start::width] for start in range(width)]
            if not in_turns:
                parts = [part.tolist() for part in np.array_split(np.array(rows, dtype=int), width)]
            micro_batches += [part or [DUMMY] for part in parts]
        has_signal += [bool(is_kept[in_step].any())] * width
    return plan, has_signal


def _balanced(ranks: list[list[int]]) -> list[list[int]]:
    """Rows of each rank, moved from those with many to those with few; then dummies make them equally many."""
    total, num = sum(map(len, ranks)), len(ranks)
    shares = [total // num + (index < total % num) for index in range(num)]
    moving = [row for rows, share in zip(ranks, shares, strict=True) for row in rows[share:]]
    balanced = []
    for rows, share in zip(ranks, shares, strict=True):
        missing = max(0, share - len(rows))
        balanced.append([*rows[:share], *moving[:missing], *[DUMMY] * (shares[0] - share)])
        moving = moving[missing:]
    return balanced


def _mark_signal(buffer: list[Inputs], has_signal: Sequence[bool], accelerator: Any) -> list[Inputs]:
    """Say which micro-batches belong to a step that is made, and divide by the mean over these steps alone.

    All ranks must call it.
    """
    counted = {"num_items_in_batch": "tool_mask", "num_value_items": "value_mask"}
    counted |= {f"num_{name}": name for name in buffer[0] if name.startswith(EXTRA_TOKENS)}
    live = max(1, sum(has_signal)) / len(buffer)  # TRL divides by the mean over all optimizer steps
    for name, mask in counted.items():
        if mask in buffer[0]:
            own = [inputs[mask].sum() * signal for inputs, signal in zip(buffer, has_signal, strict=True)]
            count = accelerator.gather(torch.stack(own).sum()).sum()
            for inputs in buffer:
                inputs[name] = count / live
    for inputs, signal in zip(buffer, has_signal, strict=True):
        inputs[HAS_SIGNAL] = torch.tensor(signal)
    return buffer


# -------------------------------------------------------------------- layouts


logger = logging.getLogger(__name__)

UPDATE_LAYOUTS = ("padded", "grouped", "packed", "shared")
PACKED_LAYOUTS = ("packed", "shared")
REGROUPING_LAYOUTS = ("grouped", "shared")
"""Those that move rows between the micro-batches of an optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was read of a micro-batch when its rollout was laid out, so that no pass makes the host wait for it."""

    has_loss: bool
    """Whether a token on any rank is in the policy's loss."""
    batch: PackedBatch | None
    """All rows in one micro-batch, in packed layouts."""
    read: dict[str, tuple[torch.Tensor, int]]
    """The tensors that this was read from, and how often each had been written to."""

    def fits(self, inputs: Inputs) -> bool:
        """Whether a micro-batch still holds these tensors, and nothing was written to them since."""
        return set(self.read) == _read_of(inputs) and all(
            inputs[name] is tensor and tensor._version == version for name, (tensor, version) in self.read.items()
        )


def _read_of(inputs: Inputs) -> set[str]:
    """Names of the tensors of a micro-batch that say what a forward pass computes."""
    names = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", KEPT_IDS}
    return names & set(inputs) | set(other_masks(inputs))


class UpdateLayout:
    """The layout of a run; TRL's own without `args`."""

    def __init__(self, args: Any = None) -> None:
        self.name = "padded" if args is None else args.update_layout
        self.is_packed = self.name in PACKED_LAYOUTS
        self._max_tokens = None if args is None else args.max_tokens_per_micro_batch
        self._has_warned = False
        self._plans: dict[int, Plan] = {}
        """Plans of the last rollout's micro-batches, by the identity of their `completion_ids`."""
        self._attention: str | None = None
        self._steps_per_update, self._regroups = 1 if args is None else args.gradient_accumulation_steps, False
        if args is not None:
            # PyTorch's first choice on Hopper and Blackwell, cuDNN, builds a plan of tens of milliseconds for each new
            # shape, and lengths are new in every batch.
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self.name in REGROUPING_LAYOUTS:
            per_generation, per_update = args.steps_per_generation, self._steps_per_update
            self._regroups = per_generation % per_update == 0 or per_update % per_generation == 0

    def prepare(self, *models: Any, has_router_loss: bool = False, name: str = "the model") -> None:
        """Prepare causal LMs and backbones for this layout, once they are loaded; `name` is theirs in messages.

        Raises:
            ValueError: for a model, or a router's auxiliary loss, that cannot be trained in this layout.
        """
        if has_router_loss and self.name != "padded":
            raise ValueError(
                f"update_layout={self.name!r}: the router's auxiliary loss depends on which rows are padded into "
                "one micro-batch. Set router_aux_loss_coef=0.0, or update_layout='padded'."
            )
        if not self.is_packed:
            return
        for model in models:
            kind = use_packed_attention(base_causal_lm(model), name=name, share_prefixes=self.name == "shared")
            if self._attention not in (None, kind):
                raise ValueError(
                    f"update_layout={self.name!r}: {name} has another attention implementation than the policy. Load "
                    "both with the same attn_implementation, or set update_layout='grouped'."
                )
            self._attention = kind

    def arrange(self, buffer: list[Inputs], accelerator: Any) -> list[Inputs]:
        """The micro-batches of a new rollout, with the rows of each optimizer step in this layout's order.

        All ranks must call it: the scales for lost rows are counted anew, by optimizer step (`set_valid_scales`).
        """
        if self._regroups and self._max_tokens is None:
            buffer = regroup(buffer, steps_per_update=self._steps_per_update, by_beginning=self.name == "shared")
        if self.name == "grouped":  # nothing computes the padding that is common to a micro-batch
            buffer = [trim_padding(inputs) for inputs in buffer]
        if "in_baseline" not in buffer[0]:  # TRL's own batches do without
            return buffer
        set_valid_scales(buffer, steps_per_update=self._steps_per_update, accelerator=accelerator)
        if self._max_tokens is not None:
            self._warn_of_long_rows(buffer, self._max_tokens)
            buffer = repack(
                buffer,
                max_tokens=self._max_tokens,
                steps_per_update=self._steps_per_update,
                share_prefixes=self.name == "shared",
                accelerator=accelerator,
                needs_every_step=accelerator.distributed_type == DistributedType.DEEPSPEED,
            )
        self._read([one for inputs in buffer for one in inputs.get(MICRO_BATCHES, [inputs])], accelerator)
        return buffer

    def _read(self, micro_batches: list[Inputs], accelerator: Any) -> None:
        """Make the `Plan` of each micro-batch; all ranks have as many."""
        counts = torch.stack([loss_masks(inputs)[0].sum() for inputs in micro_batches])
        counts = accelerator.reduce(counts, reduction="sum")
        self._plans = {}
        for inputs, count in zip(micro_batches, counts.tolist(), strict=True):
            self._plans[id(inputs["completion_ids"])] = Plan(
                has_loss=count > 0,
                batch=self.pack(*whole_rows(inputs), loss_masks(inputs)[1], inputs.get(KEPT_IDS))
                if self.is_packed
                else None,
                read={name: (inputs[name], inputs[name]._version) for name in _read_of(inputs)},
            )

    def plan_of(self, inputs: Inputs) -> Plan | None:
        """The plan of a micro-batch; None if it is not of the last rollout, or other rows or masks stand in it now."""
        plan = self._plans.get(id(inputs["completion_ids"]))
        return plan if plan is not None and plan.fits(inputs) else None

    def _warn_of_long_rows(self, buffer: list[Inputs], limit: int) -> None:
        longest = max(len(ids) for inputs in buffer for ids in valid_ids(inputs))
        if longest > limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A trajectory has %d tokens to compute, more than max_tokens_per_micro_batch=%d. It is trained on "
                "alone, in a micro-batch that needs more memory than the others. Further ones are not reported.",
                longest,
                limit,
            )

    def log_probs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored: torch.Tensor,
        *,
        accelerator: Any,
        batch_size: int | None,
        plan: Plan | None = None,
        kept_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies from forward passes without padding; for the packed layouts.

        Args:
            model: the policy or the reference, as TRL calls it.
            input_ids: (B, P + T).
            attention_mask: (B, P + T).
            scored: (B, T) the completion tokens that need a log-prob.
            accelerator: of the trainer.
            batch_size: rows per forward pass; None: as `max_tokens_per_micro_batch` allows, which all ranks must call.
            plan: of the micro-batch whose rows these are, which one forward pass then computes.
            kept_ids: (B, T, K) what each token was drawn from (`KEPT_IDS`); None: the whole vocabulary.

        Returns:
            Two (B, T) tensors, 0 where nothing is scored; no entropies from a head that has none.
        """
        whole = accelerator.unwrap_model(getattr(model, "inner_model", model))  # PPO hands over a model that collects
        backbone = base_causal_lm(whole).base_model
        if plan is not None and plan.batch is not None:
            with accelerator.autocast():
                return packed_log_probs(model, backbone, plan.batch.for_another_pass())
        order, parts = [], []
        for rows, batch in self._packed(input_ids, attention_mask, scored, batch_size, kept_ids):
            with accelerator.autocast():
                both = packed_log_probs(model, backbone, batch)
            parts.append([part[: len(rows)] for part in both if part is not None])
            order += rows
        log_probs, *entropies = (_in_order(torch.cat(part), order) for part in zip(*parts, strict=True))
        return log_probs, entropies[0] if entropies else None

    def values(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored: torch.Tensor,
        batch_size: int | None,
    ) -> torch.Tensor:
        """(B, T) the critic's values of the scored tokens, 0 elsewhere; arguments as for `log_probs`."""
        order, parts = [], []
        for rows, batch in self._packed(input_ids, attention_mask, scored, batch_size):
            values = model(**batch.inputs, values_only=True).state_values
            parts.append(batch.layout.spread(values)[: len(rows)])
            order += rows
        return _in_order(torch.cat(parts), order)

    def scoring_size(self, batch_size: int | None) -> int | None:
        """Rows of a forward pass that trains nothing; None where the limit of tokens holds for it."""
        return batch_size if self._max_tokens is None else None

    def pack(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored: torch.Tensor,
        kept_ids: torch.Tensor | None = None,
    ) -> PackedBatch:
        """A batch as `log_probs` takes it, in one row."""
        return pack(
            input_ids,
            attention_mask,
            scored,
            kept_ids,
            share_prefixes=self.name == "shared",
            attention=self._attention or SEGMENTS,
        )

    def _packed(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored: torch.Tensor,
        size: int | None,
        kept_ids: torch.Tensor | None = None,
    ) -> Iterator[tuple[list[int], PackedBatch]]:
        """Micro-batches and the rows in each; one without rows computes a token, for the other ranks' sake."""
        if size is None:
            assert self._max_tokens is not None
            ids = computed_ids(input_ids, attention_mask, scored)
            micro_batches = plan_scoring(ids, self._max_tokens, share_prefixes=self.name == "shared")
            empty = [row for row, computed in enumerate(ids) if not len(computed)]  # they cost nothing
            micro_batches[0] = micro_batches[0] + empty
        else:
            micro_batches = [[*range(start, min(start + size, len(scored)))] for start in range(0, len(scored), size)]
        for rows in micro_batches:
            chosen = torch.tensor(rows or [0], device=scored.device)
            is_scored = scored[chosen] if rows else torch.zeros_like(scored[chosen])
            kept = None if kept_ids is None else kept_ids[chosen]
            yield rows, self.pack(input_ids[chosen], attention_mask[chosen], is_scored, kept)


def _in_order(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    """(B, T) values of the rows `order`, in the order of their numbers."""
    return values[torch.tensor(order, device=values.device).argsort()]


def regroup(buffer: list[Inputs], *, steps_per_update: int, by_beginning: bool) -> list[Inputs]:
    """The micro-batches of a rollout, the rows of each optimizer step sorted, so that like ones share a micro-batch.

    Like are rows that begin alike (the same prompt, or contexts of one trajectory that repeat each other), or rows of
    like length: the longest first, so that a batch that does not fit into memory fails at once.
    """
    regrouped: list[Inputs] = []
    for start in range(0, len(buffer), steps_per_update):
        window = buffer[start : start + steps_per_update]
        joined = join_rows(window)
        ids, mask = whole_rows(joined)
        if by_beginning:
            keys = [sort_key(row[kept].numpy()) for row, kept in zip(ids.cpu(), mask.cpu().bool(), strict=True)]
            order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
        else:
            order = mask.sum(dim=1).argsort(descending=True, stable=True)
        for rows in order.split([len(inputs["completion_ids"]) for inputs in window]):
            regrouped.append(take_rows(joined, rows))
    return regrouped
