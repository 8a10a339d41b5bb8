"""From trajectories to the rows that TRL's batch consists of and to what estimators read, and what is done with rows.

A trajectory has one training row, or several if its context was rewritten on the way. Advantages are estimated over
the tokens of a trajectory in the order of time; the policy's loss is computed over rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.nn import functional

from agent_r1_trl.advantages.estimators import CreditInputs
from agent_r1_trl.advantages.gae import extend_turn_ids
from agent_r1_trl.trajectory import Message, Row, Trajectory

logger = logging.getLogger(__name__)

Inputs = dict[str, Any]
"""TRL's batch: tensors of B rows, scalars, None."""


def trim_padding(inputs: Inputs) -> Inputs:
    """Drop the columns of prompts (left) and completions (right) that are padding in every row."""
    prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
    first = int(prompt.any(dim=0).int().argmax())
    last = completion.shape[1] - int(completion.any(dim=0).flip(0).int().argmax())
    trimmed = dict(inputs)
    for name, value in inputs.items():
        if name in ("prompt_ids", "prompt_mask"):
            trimmed[name] = value[:, first:]
        elif has_rows(value) and value.shape[1:2] == completion.shape[1:]:
            trimmed[name] = value[:, :last]
    return trimmed


def has_rows(value: Any) -> bool:
    """Whether an entry of TRL's batch has an element per row."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def join_rows(parts: list[Inputs]) -> Inputs:
    """The rows of several micro-batches of the same widths in one; what has no rows is that of the first."""
    joined = {}
    for name, value in parts[0].items():
        if isinstance(value, list):  # an entry of a subclass
            value = [item for part in parts for item in part[name]]
        joined[name] = torch.cat([part[name] for part in parts]) if has_rows(value) else value
    return joined


def take_rows(rows: Inputs, index: Any) -> Inputs:
    """Some rows of a batch; what has no rows stays.

    An entry of a subclass may be a list, or lie on the host: there an index from a GPU is refused.
    """
    taken = {}
    for name, value in rows.items():
        if isinstance(value, list):
            value = [value[place] for place in torch.arange(len(value))[_beside(index, "cpu")].tolist()]
        taken[name] = value[_beside(index, value.device)] if has_rows(value) else value
    return taken


def _beside(index: Any, device: torch.device | str) -> Any:
    return index.to(device) if isinstance(index, torch.Tensor) else index


def set_valid_scales(buffer: list[dict[str, Any]], *, steps_per_update: int, accelerator: Any) -> None:
    """Put `row_scale`, `micro_batch_scale` and `turn_scale` into TRL's micro-batches, in the order of training.

    They are rows per trajectory in the baseline, micro-batches per one with such a row, and with `turn_shares`
    micro-batches per turn in the loss. They are counted over the micro-batches of each optimizer step on all ranks
    (over the whole buffer if the steps do not divide it), so all ranks must call this.
    """
    width = steps_per_update if len(buffer) % steps_per_update == 0 else len(buffer)
    has_turns = "turn_shares" in buffer[0]
    own = []
    for inputs in buffer:
        live = inputs["in_baseline"]
        turns = [(inputs["turn_shares"] * inputs["tool_mask"]).sum()] if has_turns else []
        own.append(torch.stack([(live & inputs["is_first_row"]).sum().float(), live.any().float(), *turns]))
    counts = torch.stack(own).view(-1, width, len(own[0])).sum(dim=1)  # (steps, 2 or 3)
    counts = accelerator.reduce(counts, reduction="sum")
    for step, (trajectories, batches, *turns) in enumerate(counts.round().clamp(min=1).tolist()):
        num_batches = width * accelerator.num_processes
        for inputs in buffer[step * width : (step + 1) * width]:
            # Micro-batches may differ in size, but not between ranks.
            inputs["row_scale"] = torch.tensor(len(inputs["in_baseline"]) * num_batches / trajectories)
            inputs["micro_batch_scale"] = torch.tensor(num_batches / batches)
            if has_turns:
                inputs["turn_scale"] = torch.tensor(num_batches / turns[0])


def loss_weights(inputs: Inputs, trainer: Any) -> torch.Tensor | float:
    """What TRL's loss of a micro-batch of M rows is multiplied by: a number, or (M, 1), or (M, T) with turns.

    TRL's loss types divide by rows, by micro-batches, or by tokens. Here every token gets the weight that it would
    have if its trajectory were one row and nothing were lost, or that `loss_unit` asks for.
    """
    if "row_scale" not in inputs:  # a rollout of TRL's own
        return 1.0
    mask, _ = loss_masks(inputs)
    tokens = mask.sum(dim=1).clamp(min=1).float()  # (M,)
    of_trajectory = tokens + inputs["tokens_in_other_rows"]
    kind = {"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(trainer.loss_type, trainer.loss_type)
    row_scale, unit = float(inputs["row_scale"]), trainer.args.loss_unit
    if unit is None and kind == "grpo":
        return (tokens / of_trajectory * row_scale).unsqueeze(1)
    if unit is None:
        return {"bnpo": float(inputs["micro_batch_scale"]), "dapo": 1.0}.get(kind, row_scale)
    num_steps = trainer.args.steps_per_generation if trainer.model.training else 1  # of micro-batches in a rollout
    per_batch = inputs["num_items_in_batch"].clamp(min=1).float() / trainer.accelerator.num_processes / num_steps
    divisor = {  # TRL's, of a token
        "grpo": tokens * len(tokens),
        "dr_grpo": torch.full_like(tokens, len(tokens) * trainer.max_completion_length),
        "luspo": torch.full_like(tokens, len(tokens)),
        "bnpo": mask.sum().clamp(min=1).float().expand_as(tokens),
        "dapo": per_batch.expand_as(tokens),
    }[kind].unsqueeze(1)  # (M, 1)
    if unit == "turn":
        return divisor * inputs["turn_scale"] * inputs["turn_shares"]
    return divisor / (per_batch if unit == "token" else len(tokens) / row_scale * of_trajectory.unsqueeze(1))


def pad_lists(
    rows: Sequence[Sequence[float]], value: float, *, length: int, dtype: torch.dtype, side: str = "right"
) -> torch.Tensor:
    """Stack ragged rows into (B, length), filled up with `value` on the `right` or the `left`."""
    out = torch.full((len(rows), length), value, dtype=dtype)  # (B, T)
    for index, row in enumerate(rows):
        if row:
            out[index, slice(len(row)) if side == "right" else slice(-len(row), None)] = torch.tensor(row, dtype=dtype)
    return out


def pad_tokens(items: Sequence[Any], name: str, value: int, length: int) -> torch.Tensor:
    """(B, length) int64: a list of each trajectory or row, with one number per token, filled up with `value`."""
    return pad_lists([getattr(item, name) for item in items], value, length=length, dtype=torch.long)


def whole_rows(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, (B, P + T) each, of prompts and completions in TRL's batch."""
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    return ids, mask


def with_one_more(inputs: dict[str, torch.Tensor], has_more: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns of TRL's batch with a completion token of id 0 behind the last one of rows that `has_more`, (B,).

    All completions, (B, T), become (B, T + 1).
    """
    ids, mask = (functional.pad(inputs[f"completion_{name}"], (0, 1)) for name in ("ids", "mask"))
    ends = mask.sum(dim=1, keepdim=True)  # (B, 1)
    mask = mask.scatter(1, ends, has_more.to(mask).unsqueeze(1))
    return {**inputs, "completion_ids": ids, "completion_mask": mask}


def loss_masks(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) the tokens of the policy's loss in TRL's batch, and these with those of the critic's and of all terms."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask, functools.reduce(torch.Tensor.logical_or, [inputs[name] for name in other_masks(inputs)], mask.bool())


def other_masks(inputs: Inputs) -> list[str]:
    """Names of the (B, T) masks in TRL's batch, besides the policy's, whose tokens a forward pass must compute."""
    return [name for name in inputs if name == "value_mask" or name.startswith(EXTRA_TOKENS)]


def neutral_outside(inputs: Inputs, mask: torch.Tensor) -> Inputs:
    """A micro-batch that is read at its loss mask, (B, T), alone: elsewhere ratios are 1, log-probs and advantages 0.

    It goes with log-probs of the policy that are 0 there (`LossPass.masked`).
    """
    fills = {name: 0.0 for name in inputs if name == "advantages" or name.endswith("per_token_logps")}
    fills |= {name: 1.0 for name in inputs if name == "importance_sampling_ratio"}
    given = {name: inputs[name] for name in fills if inputs[name] is not None}
    return {**inputs, **{name: torch.where(mask.bool(), value, fills[name]) for name, value in given.items()}}


def row_means(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each row over its masked entries, (B, T) -> (B,); 0 for a row without any.

    >>> row_means(torch.tensor([[1.0, 9.0, 2.0], [9.0, 9.0, 9.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]])).tolist()
    [1.5, 0.0]
    """
    keep = mask.bool()
    return torch.where(keep, x, 0.0).sum(dim=1) / keep.sum(dim=1).clamp(min=1)


# -------------------------------------------------------------------- trajectories and their rows


TRAJECTORY_ROW = "trajectory_row"
"""Entry of TRL's batch, (R,): the place of each row's trajectory in the rollout of all ranks."""
TRAINING_ROW = "training_row"
"""Entry of TRL's batch, (R,): the row's place among those of all ranks, each of which has R."""
IS_FIRST = "is_first_row"
"""Entry of TRL's batch, (R,): whether the row is the first one of its trajectory."""
OTHER_TOKENS = "tokens_in_other_rows"
"""Entry of TRL's batch, (R,): tokens in the loss of the trajectory's other rows."""
KEPT_IDS = "kept_ids"
"""Entry of TRL's batch where tokens are drawn from a part of the vocabulary (`TrainingRows.kept_ids`)."""
EXTRA_TOKENS = "extra_tokens/"
"""How entries of TRL's batch begin, (R, T) bool each: the tokens of a loss term of the user's, under its name."""
TURN_SHARES = "turn_shares"
"""Entry of TRL's batch with `loss_unit="turn"`, (R, T): one over the tokens of its turn, at tokens in the loss."""


class TrainingRows:
    """The R rows of this rank's B trajectories, in the order of these; empty ones fill up to `num_rows`."""

    def __init__(self, trajectories: Sequence[Trajectory], *, num_rows: int = 0) -> None:
        self.trajectories = trajectories
        pairs = [(index, row) for index, item in enumerate(trajectories) for row in trained_rows(item)]
        pairs += [(-1, row_of([], []))] * (num_rows - len(pairs))
        self.rows: list[Row] = [row for _, row in pairs]
        self.index = torch.tensor([index for index, _ in pairs])
        """(R,) the trajectory of each row; -1 for one that fills up."""
        spans = [(number, *span) for number, row in enumerate(self.rows) for span in row.spans]
        number, start, end = np.array(spans, dtype=np.int64).reshape(-1, 3).T  # of each piece that is in one place
        size = end - start
        self._row = torch.from_numpy(np.repeat(number, size))  # (n,) of each of n tokens
        self._trajectory = self.index[self._row]
        places = np.arange(size.sum())
        before = np.cumsum([0, *(len(row.completion_ids) for row in self.rows)])
        self._position = torch.from_numpy(places - np.repeat(before[number], size))
        self._time = torch.from_numpy(places + np.repeat(start - np.cumsum(size) + size, size))

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], args: Any) -> TrainingRows:
        """The rows of this rank's batch, R on all ranks, so that all make as many forward passes. All must call it.

        Raises:
            ValueError: a trajectory has several rows, and `context.policy` does not allow for any.
        """
        if args.context.policy == "keep" and any(item.segments for item in trajectories):
            raise ValueError(
                "context.policy='keep', and a trajectory of this rollout has rewritten contexts: it was recorded "
                "with another policy. Set context.policy to that one."
            )
        return cls(trajectories, num_rows=max(gather_object([sum(len(trained_rows(item)) for item in trajectories)])))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        """T', tokens of the longest trajectory."""
        return max([1, *(len(item.completion_ids) for item in self.trajectories)])

    @property
    def last(self) -> torch.Tensor:
        """(B,) the row of each trajectory that holds its last token."""
        ends = torch.tensor([row.spans[-1][1] if row.spans else 0 for row in self.rows])
        order = ends.argsort(stable=True)
        order = order[self.index[order].argsort(stable=True)]  # by trajectory, and there by their ends
        return order[torch.searchsorted(self.index[order], torch.arange(len(self.trajectories)), right=True) - 1]

    @property
    def is_first(self) -> torch.Tensor:
        """(R,) whether a row is the first one of its trajectory."""
        before = torch.cat([torch.tensor([-1]), self.index[:-1]])
        return (self.index >= 0) & (self.index != before)

    # ---------------------------------------------------------------- tensors

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (R,): each row gets what its trajectory has, and one that fills up gets 0."""
        index = self.index.to(values.device)
        return torch.where(index >= 0, values[index.clamp(min=0)], torch.zeros_like(values[:1]))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (B,): sums over the rows of each trajectory."""
        num = len(self.trajectories)
        index = self.index.to(values.device) % (num + 1)  # what fills up comes last
        return values.new_zeros(num + 1).index_add(0, index, values)[:num]

    def kept_ids(self, places: torch.Tensor) -> torch.Tensor:
        """(R, T, K) int32, what each sampled token was drawn from, as the sampler says; filled up with -1.

        T is that of `places`, and K the largest number of ids on any rank, so all must call it. Tokens that nobody
        sampled, or whose sampler does not tell, have nothing but -1.
        """
        turns = [(index, turn) for index, item in enumerate(self.trajectories) for turn in item.turns]
        masks = [(index, turn.start, turn.kept_ids) for index, turn in turns if turn.kept_ids]
        if any(turn.kept_ids is None and turn.end > turn.start for _, turn in turns):
            _warn_of_lost_masks()
        width = max(gather_object([max([1, *(max(kept.counts, default=0) for *_, kept in masks)])]))
        time = torch.full((len(self.trajectories), self.length, width), -1, dtype=torch.int32)
        for index, start, kept in masks:
            time[index, start : start + len(kept)] = torch.from_numpy(kept.padded(width))
        return self.to_rows(time, places, fill=-1).to(places.device)

    def to_rows(self, x: torch.Tensor, places: torch.Tensor, *, fill: float = 0.0) -> torch.Tensor:
        """(B, T', ...) over time -> (R, T, ...) over positions, as many as `places`; `fill` where no token is."""
        rows = x.new_full((*places.shape, *x.shape[2:]), fill)
        rows[self._row, self._position] = x[self._trajectory, self._time]
        return rows

    def to_time(self, x: torch.Tensor) -> torch.Tensor:
        """(R, T) over positions -> (B, T') over time, 0 where no token is."""
        time = x.new_zeros((len(self.trajectories), self.length))
        time[self._trajectory, self._time] = x[self._row, self._position]
        return time


@functools.cache
def _warn_of_lost_masks() -> None:
    logger.warning(
        "top_k, top_p or min_p is set, and the generator does not tell what each token was drawn from "
        "(Generation.kept_ids): the trainer scores the whole vocabulary, so the gradient is another distribution's."
    )


def row_of(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Row:
    """A row of no trajectory, to be scored alone."""
    return Row(
        prompt_ids=[*prompt_ids], completion_ids=[*completion_ids], action_mask=[], turn_ids=[], logprobs=[], spans=[]
    )


def trained_rows(trajectory: Trajectory) -> list[Row]:
    """The rows of a trajectory that hold an action token; its first one if none does."""
    rows = trajectory.rows
    return [row for row in rows if any(row.action_mask)] or rows[:1]


def row_tensors(
    rows: Sequence[Row], *, pad_token_id: int, multiple_of: int | None, has_logprobs: bool, device: torch.device
) -> dict[str, Any]:
    """Prompts, completions and their masks in TRL's form: prompts padded on the left, (R, P), the rest (R, T).

    The padding token stands for an empty prompt or completion, too, on which forward passes crash; P and T are
    multiples of `multiple_of`. With `has_logprobs` the sampler's are there, 0 outside what it sampled.
    """

    def padded(lists: Sequence[Sequence[float]], value: float, side: str = "right", dtype: Any = torch.long) -> Any:
        length = -(-max(map(len, lists)) // (multiple_of or 1)) * (multiple_of or 1)
        return pad_lists(lists, value, length=length, dtype=dtype, side=side).to(device)

    prompts = [row.prompt_ids or [pad_token_id] for row in rows]
    completions = [row.completion_ids or [pad_token_id] for row in rows]
    output = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0),
    }
    if has_logprobs:
        logprobs = [row.logprobs or [0.0] for row in rows]
        output["sampling_per_token_logps"] = padded(logprobs, 0.0, dtype=torch.float32)
    return output


def add_masks(
    output: dict[str, Any],
    rows: TrainingRows,
    in_baseline: torch.Tensor,
    in_loss: torch.Tensor,
    *,
    args: Any,
    accelerator: Any,
) -> None:
    """Put into TRL's batch which rows and tokens count, (B,) each, once every reward is known. All ranks must call it.

    The batch gets `tool_mask`, `num_items_in_batch`, `in_baseline`, and what `loss_weights` is made of.
    """
    tokens, device = output["completion_mask"], in_loss.device  # (R, T)
    if args.loss_mask:  # observation tokens stay out of the loss
        tokens = pad_tokens(rows.rows, "action_mask", 0, tokens.shape[1]).to(device)
    mask = output["tool_mask"] = tokens * rows.expand(in_loss).unsqueeze(1)
    output["num_items_in_batch"] = accelerator.gather(mask.sum()).sum()
    own = (output["completion_mask"] * mask).sum(dim=1)  # (R,)
    output |= {"in_baseline": rows.expand(in_baseline), IS_FIRST: rows.is_first.to(device)}
    output[OTHER_TOKENS] = rows.expand(rows.total(own)) - own * (rows.index >= 0).to(device)
    if args.loss_unit == "turn":
        output[TURN_SHARES] = turn_shares(output, rows)
    set_valid_scales([output], steps_per_update=1, accelerator=accelerator)


def turn_shares(output: dict[str, Any], rows: TrainingRows) -> torch.Tensor:
    """(R, T) one over the tokens of its turn that are in the loss, at each of these; 0 elsewhere."""
    mask = output["completion_mask"] * output["tool_mask"]  # (R, T)
    turn_ids = pad_tokens(rows.rows, "turn_ids", -1, mask.shape[1])
    turns = extend_turn_ids(turn_ids.to(mask.device), mask).clamp(min=0)  # (R, T)
    in_loss = mask.float()
    counts = in_loss.new_zeros(len(turns), int(turns.max()) + 1).scatter_add(1, turns, in_loss)  # (R, K)
    return in_loss / counts.gather(1, turns).clamp(min=1)


# -------------------------------------------------------------------- rows between ranks


DUMMY = -1
"""In a plan, a row that fills up."""
_PADDED_LEFT = ("prompt_ids", "prompt_mask")
_RATIOS = "importance_sampling_ratio"


def exchange(rows: Inputs, plan: list[list[list[int]]], accelerator: Any) -> tuple[Inputs, list[torch.Tensor]]:
    """This rank's rows under a plan, and a dummy behind them. Only those that move are sent, to all ranks.

    The plan is (rank, micro-batch) -> numbers of rows, which go on from rank to rank. Returns the rows, and for each
    micro-batch of this rank the places of its rows among them.
    """
    rank, counts = accelerator.process_index, gather_object([len(rows["completion_ids"])])
    home = np.repeat(np.arange(len(counts)), counts).tolist()
    owner = {row: place for place, parts in enumerate(plan) for part in parts for row in part if row != DUMMY}
    first, device = sum(counts[:rank]), rows["completion_ids"].device
    moving = [row for row in sorted(owner) if owner[row] != home[row]]
    staying = [row for row in range(first, first + counts[rank]) if owner.get(row) == rank]
    dummy = dummy_row(take_rows(rows, slice(0, 1)))
    numbers = [*staying, *(row for row in moving if owner[row] == rank)]
    parts = [take_rows(rows, _index(row - first for row in staying)), dummy]
    if moving:
        own = {name: value.shape[1] for name, value in rows.items() if has_rows(value) and value.dim() >= 2}
        everywhere = gather_object([own])
        widths = {name: max(one[name] for one in everywhere) for name in everywhere[0]}
        leaving = take_rows(rows, _index(row - first for row in moving if home[row] == rank))
        pool = join_rows(gather_object([to_device(pad_rows(leaving, widths), torch.device("cpu"))]))
        arriving = take_rows(pool, _index(place for place, row in enumerate(moving) if owner[row] == rank))
        parts = [pad_rows(part, widths) for part in (parts[0], to_device(arriving, device), dummy)]
    place_of = {row: place for place, row in enumerate(numbers)} | {DUMMY: len(numbers)}
    return join_rows(parts), [_index(place_of[row] for row in part) for part in plan[rank]]


def _index(places: Iterable[int]) -> torch.Tensor:
    return torch.tensor([*places], dtype=torch.long)


def pad_rows(rows: Inputs, widths: dict[str, int]) -> Inputs:
    """The rows in these widths, none of which is smaller than theirs."""
    padded = dict(rows)
    for name, width in widths.items():
        missing = width - rows[name].shape[1]
        sides = (missing, 0) if name in _PADDED_LEFT else (0, missing)
        padded[name] = functional.pad(rows[name], (*[0, 0] * (rows[name].dim() - 2), *sides))
    return padded


def dummy_row(row: Inputs) -> Inputs:
    """One row of two tokens that no loss, no statistic and no critic counts."""
    dummy = {}
    for name, value in row.items():
        if has_rows(value) and not name.endswith("_ids"):
            value = torch.ones_like(value) if name == _RATIOS else torch.zeros_like(value)
        dummy[name] = value
    dummy["prompt_mask"][:, -1] = 1
    dummy["completion_mask"][:, 0] = 1
    return dummy


def to_device(rows: Inputs, device: torch.device) -> Inputs:
    """The rows on a device."""
    return {name: value.to(device) if has_rows(value) else value for name, value in rows.items()}


# -------------------------------------------------------------------- what estimators read


def weighted_turn_rewards(
    trajectories: Sequence[Trajectory], *, weight: float, source_scales: dict[str, float]
) -> list[list[float]]:
    """Per trajectory, its turns' process rewards times `weight`, every source divided by its scale (if it has one)."""

    def value(parts: dict[str, float], total: float) -> float:
        if not source_scales:
            return weight * total
        rest = total - math.fsum(parts.values())  # what the environment did not attribute
        scaled = math.fsum(part / source_scales.get(name, 1.0) for name, part in parts.items())
        return weight * (scaled + rest / source_scales.get("", 1.0))

    return [[value(turn.reward_parts, turn.reward) for turn in item.turns] for item in trajectories]


def read_credit_inputs(
    trajectories: Sequence[Trajectory],
    *,
    mask: torch.Tensor,
    in_baseline: torch.Tensor,
    group_ids: torch.Tensor,
    turn_rewards: list[list[float]],
    outcome_weight: float,
    **given: Any,
) -> CreditInputs:
    """Tensors of this rank's B trajectories, on the device of `mask`; rows outside the baseline are emptied here.

    Per trajectory, `turn_rewards` has a (weighted) value for each turn, and the outcome is multiplied by its weight.
    """
    length, device = mask.shape[1], mask.device
    width = max([1, *(len(item.turns) for item in trajectories)])

    def on_tokens(rows: list[list[float]]) -> torch.Tensor:
        return pad_lists(rows, 0.0, length=length, dtype=torch.float32).to(device)

    outcomes = [outcome_weight * t.outcome_reward for t in trajectories]
    process = [t.token_rewards(turn_rewards=r, outcome=0.0) for t, r in zip(trajectories, turn_rewards, strict=True)]
    outcome = [
        t.token_rewards(turn_rewards=[0.0] * len(t.turns), outcome=o)
        for t, o in zip(trajectories, outcomes, strict=True)
    ]
    return CreditInputs(
        mask=mask.bool() & in_baseline.unsqueeze(1),
        turn_ids=pad_lists([t.turn_ids for t in trajectories], -1, length=length, dtype=torch.long).to(device),
        group_ids=group_ids,
        process_token_rewards=on_tokens(process),
        outcome_token_rewards=on_tokens(outcome),
        turn_rewards=pad_lists(turn_rewards, 0.0, length=width, dtype=torch.float32).to(device),
        outcome_rewards=torch.tensor(outcomes, device=device).float().masked_fill(~in_baseline, float("nan")),
        anchor_ids=pad_lists([anchors(t) for t in trajectories], -1, length=width, dtype=torch.long).to(device),
        **given,
    )


def anchors(trajectory: Trajectory) -> list[int]:
    """Per turn a number that names what it read (GiGPO's anchor state), equal on every rank.

    That is the context that the environment gave for the turn (`next_context`), else the observations before it. A
    summary's is a state of its own kind, with the request; the turn after it stands where the summary stood.
    """
    found, before = [], trajectory.prompt_messages
    for turn in trajectory.turns:
        if turn.summary_request is not None:
            found.append(_digest([*before, turn.summary_request]))
            continue
        found.append(_digest(before))
        before = turn.observations if turn.next_context is None else turn.next_context
    return found


def _digest(messages: Sequence[Message]) -> int:
    text = json.dumps([*map(_without_ids, messages)], default=str, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _without_ids(message: Message) -> list[Any]:
    """What a message says, calls included; their ids differ wherever the same was done twice."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [{name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}, calls]
