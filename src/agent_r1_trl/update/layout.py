"""How the rows of a micro-batch are laid out for a forward pass of the update (`update_layout`).

A layout moves rows between the micro-batches of one optimizer step, whose gradients are added up anyway:

- `padded`: as TRL does, all as wide as the longest trajectory.
- `grouped`: rows of like length share a micro-batch, whose padding is cut off.
- `packed`: the rows of a micro-batch become one row without padding (`packing.py`).
- `shared`: packed, and what rows have in common at their beginning is computed once.
- `auto`: on a CUDA GPU the first of `shared`, `packed` and `grouped` that the run's options and models allow; `padded`
  elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from agent_r1_trl.critic.attach import base_causal_lm
from agent_r1_trl.update.batches import join_rows, loss_masks, other_masks, take_rows, trim_padding, whole_rows
from agent_r1_trl.update.entries import KEPT_IDS, MICRO_BATCHES, Inputs
from agent_r1_trl.update.loss_weights import set_valid_scales
from agent_r1_trl.update.micro_batches import computed_ids, plan_scoring, repack, sort_key, valid_ids
from agent_r1_trl.update.packed_attention import SEGMENTS, use_packed_attention
from agent_r1_trl.update.packed_probe import check_packed_rows, is_out_of_reach
from agent_r1_trl.update.packing import PackedBatch, pack, packed_log_probs
from agent_r1_trl.update.sampling_masks import SamplingMasks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from agent_r1_trl.trainers.config import MultiTurnConfig

logger = logging.getLogger(__name__)

AUTO = "auto"
UPDATE_LAYOUTS = ("padded", "grouped", "packed", "shared")
PACKED_LAYOUTS = ("packed", "shared")
REGROUPING_LAYOUTS = ("grouped", "shared")
"""Layouts that move rows between the micro-batches of an optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Facts about a micro-batch, read when its rollout was laid out, so that no pass makes the host wait for them."""

    num_tokens: int
    """Tokens on all ranks that are in the policy's loss."""
    batch: PackedBatch | None
    """All rows in one micro-batch, in packed layouts."""
    read: dict[str, tuple[torch.Tensor, int]]
    """The tensors that this was read from, and how often each had been written to."""

    @property
    def has_loss(self) -> bool:
        """Whether a token on any rank is in the policy's loss."""
        return self.num_tokens > 0

    def fits(self, inputs: Inputs) -> bool:
        """Whether a micro-batch still holds these tensors, and nothing was written to them since."""
        if set(self.read) != _read_of(inputs):
            return False
        for name, (tensor, version) in self.read.items():
            if inputs[name] is not tensor or tensor._version != version:
                return False
        return True


def _read_of(inputs: Inputs) -> set[str]:
    """Names of the tensors of a micro-batch that say what a forward pass computes."""
    names = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", KEPT_IDS}
    return (names & set(inputs)) | set(other_masks(inputs))


class _Models(NamedTuple):
    """Arguments of a call of `UpdateLayout.prepare`."""

    models: tuple[PreTrainedModel, ...]
    has_router_loss: bool
    name: str
    autocast: Callable[[], AbstractContextManager[None]]


def _candidates(args: MultiTurnConfig, problem_with: Callable[[str], str]) -> list[str]:
    """The layouts among which `auto` chooses, the best first; none if the user has chosen."""
    if args.update_layout != AUTO:
        return []
    names = ["padded"]
    if isinstance(args.max_tokens_per_micro_batch, int):
        names = ["shared", "packed"]
    elif is_on_cuda(args):
        names = ["shared", "packed", "grouped", "padded"]
    return [name for name in names if not problem_with(name)] or names[-1:]


def is_on_cuda(args: MultiTurnConfig) -> bool:
    """Whether the run trains on a CUDA GPU."""
    return args.device.type == "cuda"


class UpdateLayout:
    """The layout of a run.

    Args:
        args: of the run.
        problem_with: why a layout does not go with the other settings; "" where it does. Asked for `auto` alone.
    """

    def __init__(self, args: MultiTurnConfig, problem_with: Callable[[str], str] = lambda layout: "") -> None:
        limit = args.max_tokens_per_micro_batch
        self.max_tokens = limit if isinstance(limit, int) else None
        """Limit of tokens per micro-batch; with `auto` None until the run begins (`trainers/token_limit.py`)."""
        self.notes: list[str] = []
        """Lines for the user: what `auto` has chosen, and why."""
        self._has_warned = False
        self._plans: dict[int, Plan] = {}
        """Plans of the last rollout's micro-batches, by the identity of their `completion_ids`."""
        self._steps_per_update = args.gradient_accumulation_steps
        self._may_regroup = _fit_together(args.steps_per_generation, args.gradient_accumulation_steps)
        self._prepared: list[_Models] = []
        self._loaded_with: list[tuple[PreTrainedConfig, str]] = []
        """Configurations of prepared models, and the attention that each had before."""
        self._others = _candidates(args, problem_with)
        """Layouts to try where the present one does not fit; empty unless the user leaves the choice to us."""
        self._use(self._others.pop(0) if self._others else args.update_layout)
        # PyTorch's first choice on Hopper and Blackwell, cuDNN, builds a plan of tens of milliseconds for each new
        # shape, and lengths are new in every batch.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def _use(self, name: str) -> None:
        self.name = name
        self.is_packed = name in PACKED_LAYOUTS
        self._shares_prefixes = name == "shared"
        self._regroups = name in REGROUPING_LAYOUTS and self._may_regroup
        self._attention: str | None = None

    def prepare(
        self,
        *models: PreTrainedModel,
        has_router_loss: bool = False,
        name: str = "the model",
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Prepare causal LMs and backbones for this layout, once they are loaded; `name` is theirs in messages.

        With `update_layout: auto`, a model that does not fit the layout chosen so far leads to the next one.

        Raises:
            ValueError: for a model, or a router's auxiliary loss, that cannot be trained in this layout.
        """
        self._prepared.append(_Models(models, has_router_loss, name, autocast))
        new = self._prepared[-1:]
        while True:
            try:
                for each in new:
                    self._prepare(each)
                return
            except ValueError as error:
                if not self._others:
                    raise
                for config, attention in self._loaded_with:
                    config._attn_implementation = attention
                chosen = self._others.pop(0)
                logger.warning("update_layout: auto takes %r instead of %r. %s", chosen, self.name, error)
                self._use(chosen)
                new = self._prepared

    def _prepare(self, models: _Models) -> None:
        if models.has_router_loss and self.name != "padded":
            raise ValueError(
                f"update_layout={self.name!r}: the router's auxiliary loss depends on which rows are padded into "
                "one micro-batch. Set router_aux_loss_coef=0.0, or update_layout='padded'."
            )
        if not self.is_packed:
            return
        for model in models.models:
            base = base_causal_lm(model)
            self._loaded_with.append((base.config, base.config._attn_implementation))
            kind = use_packed_attention(base, name=models.name, share_prefixes=self._shares_prefixes)
            if self._others and is_out_of_reach(base):
                raise ValueError(
                    f"{models.name.capitalize()} could not be tried in packed rows before the run, since its weights "
                    "are sharded or not on the GPU yet. Set update_layout='shared' if you know that it can."
                )
            with models.autocast():
                check_packed_rows(base, attention=kind, share_prefixes=self._shares_prefixes, name=models.name)
            if self._attention not in (None, kind):
                raise ValueError(
                    f"update_layout={self.name!r}: {models.name} has another attention implementation than the "
                    "policy. Load both with the same attn_implementation, or set update_layout='grouped'."
                )
            self._attention = kind

    def arrange(self, buffer: list[Inputs], accelerator: Accelerator) -> list[Inputs]:
        """The micro-batches of a new rollout, with the rows of each optimizer step in this layout's order.

        All ranks must call it: the scales for lost rows are counted anew, by optimizer step (`set_valid_scales`).
        """
        if self._regroups and self.max_tokens is None:
            buffer = regroup(buffer, steps_per_update=self._steps_per_update, by_beginning=self._shares_prefixes)
        if self.name == "grouped":  # nothing computes the padding that is common to a micro-batch
            buffer = [trim_padding(inputs) for inputs in buffer]
        if "in_baseline" not in buffer[0]:  # TRL's own batches do without
            return buffer
        set_valid_scales(buffer, steps_per_update=self._steps_per_update, accelerator=accelerator)
        if self.max_tokens is not None:
            self._warn_of_long_rows(buffer, self.max_tokens)
            buffer = repack(
                buffer,
                max_tokens=self.max_tokens,
                steps_per_update=self._steps_per_update,
                share_prefixes=self._shares_prefixes,
                accelerator=accelerator,
                needs_every_step=accelerator.distributed_type == DistributedType.DEEPSPEED,
            )
        micro_batches = []
        for inputs in buffer:
            micro_batches += inputs.get(MICRO_BATCHES, [inputs])
        self._read(micro_batches, accelerator)
        return buffer

    def _read(self, micro_batches: list[Inputs], accelerator: Accelerator) -> None:
        """Make the `Plan` of each micro-batch; all ranks have as many."""
        counts = torch.stack([loss_masks(inputs)[0].sum() for inputs in micro_batches])
        counts = accelerator.reduce(counts, reduction="sum")
        self._plans = {}
        for inputs, count in zip(micro_batches, counts.tolist(), strict=True):
            batch = None
            if self.is_packed:
                ids, mask = whole_rows(inputs)
                _, scored = loss_masks(inputs)
                batch = self.pack(ids, mask, scored, inputs.get(KEPT_IDS))
            read = {name: (inputs[name], inputs[name]._version) for name in _read_of(inputs)}
            self._plans[id(inputs["completion_ids"])] = Plan(num_tokens=int(count), batch=batch, read=read)

    def plan_of(self, inputs: Inputs) -> Plan | None:
        """The plan of a micro-batch; None if it is not of the last rollout, or other rows or masks stand in it now."""
        plan = self._plans.get(id(inputs["completion_ids"]))
        if plan is None or not plan.fits(inputs):
            return None
        return plan

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
        model: Callable[..., Any],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored: torch.Tensor,
        *,
        accelerator: Accelerator,
        batch_size: int | None,
        plan: Plan | None = None,
        kept_ids: SamplingMasks | None = None,
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
            kept_ids: (B, T) what each token was drawn from (`KEPT_IDS`); None: the whole vocabulary.

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
        model: Callable[..., Any],
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
        return batch_size if self.max_tokens is None else None

    def pack(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored: torch.Tensor,
        kept_ids: SamplingMasks | None = None,
    ) -> PackedBatch:
        """A batch as `log_probs` takes it, in one row."""
        return pack(
            input_ids,
            attention_mask,
            scored,
            kept_ids,
            share_prefixes=self._shares_prefixes,
            attention=self._attention or SEGMENTS,
        )

    def _packed(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        scored: torch.Tensor,
        size: int | None,
        kept_ids: SamplingMasks | None = None,
    ) -> Iterator[tuple[list[int], PackedBatch]]:
        """Micro-batches and the rows in each; one without rows computes a token, for the other ranks' sake."""
        if size is None:
            assert self.max_tokens is not None
            ids = computed_ids(input_ids, attention_mask, scored)
            micro_batches = plan_scoring(ids, self.max_tokens, share_prefixes=self._shares_prefixes)
            empty = [row for row, computed in enumerate(ids) if not len(computed)]  # they cost nothing
            micro_batches[0] = micro_batches[0] + empty
        else:
            all_rows = [*range(len(scored))]
            micro_batches = [all_rows[start : start + size] for start in range(0, len(scored), size)]
        for rows in micro_batches:
            chosen = torch.tensor(rows or [0], device=scored.device)
            is_scored = scored[chosen]
            if not rows:
                is_scored = torch.zeros_like(is_scored)
            kept = None if kept_ids is None else kept_ids[chosen]
            yield rows, self.pack(input_ids[chosen], attention_mask[chosen], is_scored, kept)


def _in_order(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    """(B, T) values of the rows `order`, in the order of their numbers."""
    places = torch.tensor(order, device=values.device).argsort()
    return values[places]


def _fit_together(per_generation: int, per_update: int) -> bool:
    """Whether rollouts consist of whole optimizer steps, or these of whole rollouts."""
    return per_generation % per_update == 0 or per_update % per_generation == 0


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
            order = _order_by_beginning(ids, mask)
        else:
            order = mask.sum(dim=1).argsort(descending=True, stable=True)
        sizes = [len(inputs["completion_ids"]) for inputs in window]
        for rows in order.split(sizes):
            regrouped.append(take_rows(joined, rows))
    return regrouped


def _order_by_beginning(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(R,) the numbers of rows, (R, P + T), in the order of their tokens."""
    keys = []
    for row, is_token in zip(ids.cpu(), mask.cpu().bool(), strict=True):
        keys.append(sort_key(row[is_token].numpy()))
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
