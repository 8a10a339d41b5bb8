"""What TRL's loss is given, and what becomes of the optimizer step that it leads to.

`KeptRows`: rows that are not trained on, because a callback's `keep` said so, and optimizer steps in which none is,
which move neither weights, optimizer nor schedule. `LossPass`: one computation of the loss. `for_own_loss`: what a
`_compute_loss` that was written for TRL reads of our micro-batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from trl import GRPOTrainer

from agent_r1_trl.errors import RunError
from agent_r1_trl.objects import OwnObjectError
from agent_r1_trl.trainers.callbacks import OptimizerStep, UpdateHooks, is_main_process, raised_everywhere
from agent_r1_trl.update.batching import EXTRA_TOKENS, KEPT_IDS, TURN_SHARES, Inputs, loss_masks, loss_weights
from agent_r1_trl.update.layout import HAS_SIGNAL, IS_KEPT
from agent_r1_trl.update.micro_batches import MICRO_BATCHES, STANDS_FOR

logger = logging.getLogger(__name__)


class KeptRows:
    """Skips the optimizer steps that are left without any row, and makes the others a mean over rollouts with rows."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._is_engine = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the steps of an earlier run."""
        self.num_skipped = 0
        """Optimizer steps skipped because nothing was kept, of this run, or since it was resumed."""
        self._signals: list[tuple[bool, float]] = []
        """For each micro-batch of the pending optimizer step, whether its rollout has any row that is kept, and how
        many micro-batches it stands for."""

    # ---------------------------------------------------------------- an optimizer step

    def weigh(self, loss: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The loss of a micro-batch, taken note of; NaN keeps DeepSpeed from a step without rows (`must_skip`)."""
        is_poisoned = self.must_skip(inputs)
        self._signals.append((bool(inputs.get(HAS_SIGNAL, True)), inputs.get(STANDS_FOR, 1.0)))
        return loss * math.nan if is_poisoned else loss

    def must_skip(self, inputs: Inputs) -> bool:
        """Whether this micro-batch is the last of a step without rows, which DeepSpeed makes in the backward pass."""
        has_signal = self._has_signal or bool(inputs.get(HAS_SIGNAL, True))
        return self._is_engine and self._accelerator.sync_gradients and not has_signal

    def rescale(self, model: torch.nn.Module) -> None:
        """Make the gradients of an optimizer step over several rollouts a mean over those that have rows.

        The others have put zeros into that mean. Not with DeepSpeed, which has made its step already.
        """
        num_live = sum(number for has_signal, number in self._signals if has_signal)
        num = sum(number for _, number in self._signals)
        if self._is_engine or num_live in (0, num):
            return
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(num / num_live)

    @property
    def _has_signal(self) -> bool:
        """Whether any rollout of the optimizer step in flight has rows, as far as it was trained on."""
        return any(has_signal for has_signal, _ in self._signals)

    def end_step(self, trainer: Any, model: Any, norms: Sequence[Any]) -> bool:
        """Ask the callbacks about an optimizer step, and skip it if one says so or it has nothing to train on.

        Returns:
            Whether it has nothing to train on: then no norm means anything.

        Raises:
            RunError: DeepSpeed has made a step that should have been skipped.
        """
        has_skipped = self._is_engine and self._accelerator.optimizer_step_was_skipped
        step = OptimizerStep(
            number=trainer.state.global_step,
            norms=tuple(norms),
            is_finite=not has_skipped and all(norm is None or math.isfinite(norm) for norm in norms),
            is_scaled=self._accelerator.mixed_precision == "fp16",
            lacks_tokens=not self._has_signal,
        )
        self._signals = []
        if step.lacks_tokens:
            step.is_skipped = True
            self.num_skipped += 1
            if self.num_skipped == 1 and is_main_process():
                logger.warning(
                    "Optimizer step %d was skipped, because %s left no trajectory of the rollout for it. Further ones "
                    "are only counted, as filter/skipped_steps.",
                    step.number + 1,
                    " and ".join(trainer.features.leave_out) or "a callback's keep",
                )
        trainer.features.call("before_step", step)
        if self.num_skipped:
            trainer._metrics["train"]["filter/skipped_steps"] = [float(self.num_skipped)]
        if self._is_engine:  # it has made its step already
            if step.is_skipped and not has_skipped:
                raise RunError(
                    "DeepSpeed made an optimizer step from gradients that are not finite, so the weights are lost. Go "
                    "on from the last checkpoint (resume_from_checkpoint: true), and update deepspeed, or set "
                    "bf16.check_grad_overflow in its configuration."
                )
        elif not step.is_scaled:  # the scaler skips by itself
            if step.is_skipped:
                model.zero_grad(set_to_none=True)  # neither momentum nor weight decay moves what has no gradient
            trainer.optimizer._is_overflow = step.is_skipped  # the schedule waits as well
        return step.lacks_tokens


# -------------------------------------------------------------------- weights in the loss


def policy_weights(inputs: Inputs, trainer: Any) -> tuple[Any, Any]:
    """What the advantages of a micro-batch are multiplied by, and the weight of its KL term."""
    weights = loss_weights(inputs, trainer)
    return weights, trainer.beta * weights if isinstance(weights, float) else WeightedBeta(trainer.beta, weights)


class WeightedBeta:
    """The weight of the KL term, times one of each row or token, as TRL's loss reads it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, beta: float, weights: torch.Tensor) -> None:
        self._beta, self._weights = beta, weights

    def __eq__(self, other: object) -> bool:
        return self._beta == other

    def __float__(self) -> float:
        return self._beta

    def __mul__(self, kl: torch.Tensor) -> torch.Tensor:
        return self._beta * self._weights * kl

    __rmul__ = __mul__


TOKEN_ADVANTAGES = "token_advantages"
"""Entry of a micro-batch that such a loss gets where `advantages` cannot be (B,): they are (B, T)."""


def is_own_loss(compute_loss: Any) -> bool:
    """Whether a `_compute_loss` is neither ours nor TRL's."""
    module = getattr(compute_loss, "__module__", None) or ""
    return module != GRPOTrainer.__module__ and not module.startswith(__name__.partition(".")[0] + ".")


def for_own_loss(inputs: Inputs, trainer: Any) -> Inputs:
    """A micro-batch whose advantages are (B,), or that says why they cannot be as soon as they are read.

    Those of (B, T) would broadcast to (B, B, T). A loss that leaves them to `super()._compute_loss` takes any.
    """
    token_advantages = inputs["advantages"]  # (B, T)
    if token_advantages.dim() == 1:  # a subclass has put others there
        return inputs
    mask = loss_masks(inputs)[0].bool()
    numbers = token_advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))  # (B, 1)
    reason = _why_not(inputs, trainer)
    if reason is None and bool((mask & (token_advantages != numbers) & ~token_advantages.isnan()).any()):
        estimator = str(trainer.args.advantage_estimator)
        reason = f"advantage_estimator={estimator!r} gives the tokens of a row different ones"
    if reason is None:
        return {**inputs, "advantages": torch.where(mask.any(dim=1), numbers.squeeze(1), 0.0)}
    rest = {name: value for name, value in inputs.items() if name != "advantages"}
    return _TokenAdvantages(rest | {TOKEN_ADVANTAGES: token_advantages}, reason)


def advantages_of(inputs: Inputs) -> torch.Tensor:
    """The advantages that a micro-batch of B rows has for our loss, whichever form they are in; (B, T), or (B, 1)."""
    advantages = dict.get(inputs, "advantages")
    advantages = inputs[TOKEN_ADVANTAGES] if advantages is None else advantages
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


class _TokenAdvantages(dict):
    """A micro-batch without `advantages`."""

    def __init__(self, inputs: Inputs, reason: str) -> None:
        super().__init__(inputs)
        self._reason = reason

    def __missing__(self, name: str) -> Any:
        if name != "advantages":
            raise KeyError(name)
        raise ValueError(
            "A _compute_loss written for TRL reads inputs['advantages'], one number for each row, and there is none: "
            f"{self._reason}. Read inputs['{TOKEN_ADVANTAGES}'], (B, T) as the log-probs are; or leave the advantages "
            "to super()._compute_loss(model, inputs) and add a term, or override extra_loss."
        )

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name == "advantages" else default


def _why_not(inputs: Inputs, trainer: Any) -> str | None:
    """Why a loss over rows would be another one here, whatever the advantages are."""
    args, limit = trainer.args, trainer.args.max_tokens_per_micro_batch
    settings = f"context.policy={args.context.policy!r}, loss_unit={args.loss_unit!r}"
    reasons = {
        "with a critic every token has its own, and the critic's loss stands in super()._compute_loss": (
            "value_mask" in inputs
        ),
        f"a trajectory may have several rows ({settings})": args.context.policy != "keep"
        or args.loss_unit is not None,
        "sampling.filter_groups leaves micro-batches with different numbers of rows": HAS_SIGNAL in inputs,
        f"max_tokens_per_micro_batch={limit} makes micro-batches with different numbers of rows": limit is not None,
        "kl_placement='reward' has the KL term in them already, which a loss that reads self.beta adds again": (
            args.kl_placement == "reward" and trainer.beta != 0
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# -------------------------------------------------------------------- one computation of the loss


@dataclass
class LossPass:
    """State of one loss computation: its mask, and the log-probs of the forward pass inside it."""

    mask: torch.Tensor
    """(B, T) tokens that enter the loss."""
    scored: torch.Tensor
    """(B, T) tokens that a packed forward pass reads: with a critic, those of its loss as well."""
    entropy_scale: float = 1.0
    """What the gradient of the entropy bonus is multiplied by."""
    plan: Any = None
    """The layout's plan of the micro-batch (`layout.py`), for the forward pass of its rows; None where it has none."""
    kept_ids: torch.Tensor | None = None
    """(B, T, K) what the tokens were drawn from, for the same pass; None: the whole vocabulary."""
    log_probs: torch.Tensor | None = None
    """(B, T) the policy's, once the forward pass has run."""
    unmasked: torch.Tensor | None = None
    """(B, T) the same before the mask."""

    def masked(self, *parts: torch.Tensor | None) -> list[torch.Tensor | None]:
        """What a forward pass gave, (B, T) each, with 0 outside the mask (packed ones read some for the critic)."""
        self.unmasked = parts[0]
        return [None if part is None else torch.where(self.mask.bool(), part, 0.0) for part in parts]

    def reaching(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss with a way to the parameters, which a mask that is 0 throughout has cut."""
        return loss if self.unmasked is None else loss + 0.0 * self.unmasked.sum()

    def take(self, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> None:
        """Keep the log-probs, (B, T), and scale the gradient that will come back to the entropies, (B, T)."""
        self.log_probs = log_probs
        self.plan = self.kept_ids = None  # a second pass inside the loss may be one of other rows
        if self.entropy_scale != 1.0 and entropies is not None and entropies.requires_grad:
            entropies.register_hook(lambda gradient: gradient * self.entropy_scale)

    def extra_term(
        self, term: LossTerm, inputs: dict[str, Any], accelerator: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """A loss term, summed over this micro-batch's tokens, and its mean per token over all ranks.

        Raises:
            ValueError: if the term is no scalar tensor.
        """
        mask = inputs.get(term.entry, self.mask).bool()
        log_probs = self.log_probs if self.unmasked is None else self.unmasked
        assert log_probs is not None
        value = term.loss(inputs, torch.where(mask, log_probs, 0.0), mask)
        if value is None:
            value = mask.new_zeros((), dtype=torch.float32)  # other ranks may have one: they wait in the reduction
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise term.refusal(
                term.loss, value, "a scalar tensor, the term summed over the tokens of `mask`, or None for no term"
            )
        sums = accelerator.reduce(torch.stack([value.detach().double(), mask.sum().double()]), reduction="sum")
        return value, {term.name: (sums[0] / sums[1]).item()}  # NaN, which logs leave out, without any token


# -------------------------------------------------------------------- terms of the user's own


@dataclass(frozen=True)
class LossTerm:
    """A loss term beside TRL's, and the tokens that it is summed over."""

    name: str
    loss: Callable[..., torch.Tensor | None]
    """`extra_loss` of a trainer or a callback, or the function that `loss_term` stands for."""
    tokens: Callable[[Inputs], torch.Tensor | None] | None = None
    """`extra_tokens`; None: the term is summed over the tokens of the policy's loss."""

    @property
    def entry(self) -> str:
        """The entry of TRL's batch that holds its tokens; before it stands `num_` for their number on all ranks."""
        return EXTRA_TOKENS + self.name

    def mark(self, output: Inputs, accelerator: Any) -> None:
        """Put its tokens, and their number, into TRL's batch of R rows. All ranks must call it.

        Raises:
            ValueError: if they are no (R, T) bool tensor.
        """
        if self.tokens is None:
            return
        valid = output["completion_mask"].bool()
        with raised_everywhere():
            mask = self.tokens(output)
            mask = torch.zeros_like(valid) if mask is None else mask
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != valid.shape:
                raise self.refusal(self.tokens, mask, f"a bool tensor of shape {tuple(valid.shape)}, or None for none")
        output[self.entry] = mask & valid
        output[f"num_{self.entry}"] = accelerator.gather(output[self.entry].sum()).sum()

    def refusal(self, function: Any, found: Any, wanted: str) -> OwnObjectError:
        """What is wrong with something that one of its functions has returned."""
        text = f"a {found.dtype} of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        source = getattr(function, "__qualname__", f"{self.name}={function!r}")
        return OwnObjectError(f"{source} returned {text}. Return {wanted}.")


def loss_terms(trainer: Any) -> list[LossTerm]:
    """The terms of the trainer's subclass, of `loss_term` and of callbacks.

    Raises:
        ValueError: tokens are named, and no term.
    """
    owners = [("extra_loss", trainer)]
    owners += [(item.name or type(item).__name__, item) for item in getattr(trainer, "features", ())]
    terms = []
    for name, owner in owners:
        has_loss, has_tokens = (
            getattr(type(owner), hook) is not getattr(UpdateHooks, hook) for hook in ("extra_loss", "extra_tokens")
        )
        if has_loss:
            terms.append(LossTerm(name, owner.extra_loss, owner.extra_tokens if has_tokens else None))
        elif has_tokens:
            raise ValueError(f"{type(owner).__name__}.extra_tokens names tokens that no loss reads. Write extra_loss.")
    if own := trainer.args.loss_term:
        terms.append(LossTerm("loss_term", own, getattr(own.target, "extra_tokens", None)))
    names = [term.name for term in terms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"callbacks: two have a loss term of the name {twice[0]!r}. Give one of them another name.")
    return terms


_TAKEN = (
    "advantages", "returns", "old_values", "value_mask", "num_value_items", "old_per_token_logps",
    "ref_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", KEPT_IDS, IS_KEPT, HAS_SIGNAL,
    MICRO_BATCHES, STANDS_FOR, TOKEN_ADVANTAGES, TURN_SHARES, "pixel_values", "num_images",
)  # fmt: skip
"""Entries of TRL's batch that come after the columns, or that some runs do not have."""


def add_columns(output: Inputs, trajectories: Sequence[Any], rows: Any, owners: Sequence[Any]) -> Inputs:
    """Put what owners return in `extra_columns` into TRL's batch of R rows, and return what they have of each token.

    All ranks must call it.

    Raises:
        ValueError: for names that TRL's batch has, for what is neither (R,) nor (R, T), and if ranks have others.
    """
    valid, found = output["completion_mask"], {}
    for owner in owners:
        if getattr(owner.extra_columns, "__func__", None) is UpdateHooks.extra_columns:
            continue
        columns, hook = owner.extra_columns(output, trajectories, rows), f"{type(owner).__name__}.extra_columns"
        with raised_everywhere():
            refuse_columns(columns, output, hook)
        shapes = {name: (value.dim(), str(value.dtype)) for name, value in (columns or {}).items()}
        everywhere = gather_object([shapes])
        if any(other != shapes for other in everywhere):
            raise OwnObjectError(
                f"{hook}: ranks differ in what it returned, {everywhere}. Return the same names and "
                "dtypes on all, zeros where a rank has nothing."
            )
        for name, value in (columns or {}).items():
            output[name] = value.detach().to(valid.device)
            if value.dim() == 2:
                output[name] = found[name] = output[name].masked_fill(valid == 0, 0)
    return found


def refuse_columns(columns: Any, output: Inputs, hook: str) -> None:
    """Refuse (ValueError) what an `extra_columns` may not return."""
    if not isinstance(columns, Mapping | None):
        raise OwnObjectError(f"{hook} returned {columns!r:.100}. Return a dict of names and tensors, or None.")
    allowed = [tuple(output["completion_mask"].shape), tuple(output["completion_mask"].shape[:1])]
    for name, value in (columns or {}).items():
        if name in output or name in _TAKEN or not isinstance(name, str) or name.startswith(EXTRA_TOKENS):
            raise OwnObjectError(f"{hook}: {name!r} is an entry of TRL's batch already. Choose another name.")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape not in allowed:
            raise OwnObjectError(
                f"{hook}: {name!r} is {shape}. Return tensors of shape {allowed[0]}, an entry for each token of the "
                f"completions, or {allowed[1]}, one for each row."
            )
