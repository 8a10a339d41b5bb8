"""The inputs of TRL's loss, and the fate of the optimizer step that it leads to.

`KeptRows`: rows that are not trained on, because a callback's `keep` said so, and optimizer steps in which none is,
which move neither weights, optimizer nor schedule. `LossPass`: one computation of the loss. `for_own_loss`: what a
`_compute_loss` that was written for TRL reads of our micro-batches.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from trl import GRPOTrainer

from agent_r1_trl.errors import RunError
from agent_r1_trl.objects import OwnObjectError, users_code
from agent_r1_trl.trainers.callbacks import OptimizerStep, UpdateHooks, is_main_process, raised_everywhere
from agent_r1_trl.trainers.log_means import TokenMean
from agent_r1_trl.update.batches import loss_masks, neutral_outside
from agent_r1_trl.update.entries import (
    COUNT_OF,
    EXTRA_TOKENS,
    HAS_SIGNAL,
    HAS_TERM,
    KEPT_IDS,
    KEPT_SHARE,
    RESERVED,
    STANDS_FOR,
    TOKEN_ADVANTAGES,
    Inputs,
)
from agent_r1_trl.update.layout import Plan
from agent_r1_trl.update.loss_weights import loss_weights
from agent_r1_trl.update.sampling_masks import SamplingMasks

if TYPE_CHECKING:
    from torch import nn

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer
    from agent_r1_trl.update.rows import TrainingRows

logger = logging.getLogger(__name__)


@dataclass
class Trained:
    """The part of the pending optimizer step that one micro-batch trains on."""

    policy: bool
    """Whether there are rows that are kept."""
    terms: dict[str, bool]
    """For each loss term with tokens of its own, under their entry, whether there are any."""
    stands_for: float
    """How many of the Trainer's micro-steps it stands for."""


@dataclass
class TermGradients:
    """Gradients of loss terms that are kept apart from those of the policy until an optimizer step ends.

    A step over several rollouts is a mean over those with kept rows, for the policy, and over those with tokens of the
    term, for a term. How many these are is known at the end of the step only, so that the two need a sum of their own.
    """

    sums: dict[str, dict[torch.nn.Parameter, torch.Tensor]] = field(default_factory=dict)
    """Entry of a term's tokens -> gradients by parameter, on this rank."""

    def add(self, entry: str, part: torch.Tensor, model: torch.nn.Module) -> None:
        """Add the gradients of a term's part in the loss of a micro-batch, whose graph stays."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(part, parameters, retain_graph=True, allow_unused=True)
        sums = self.sums.setdefault(entry, {})
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient

    def move_to(self, model: torch.nn.Module, entry: str, scale: float, accelerator: Accelerator) -> None:
        """Add a term's gradients times `scale`, a mean over ranks, to those of the model. All ranks must call it."""
        sums = self.sums.pop(entry, {})
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            gradient = sums.get(parameter, torch.zeros_like(parameter))
            gradient = scale * accelerator.reduce(gradient, reduction="mean")
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class KeptRows:
    """Skips the optimizer steps in which nothing would move, and makes the others a mean over rollouts with rows.

    Args:
        accelerator: of the trainer.
        spans_rollouts: whether an optimizer step may train on several rollouts.
    """

    def __init__(self, accelerator: Accelerator, *, spans_rollouts: bool = False) -> None:
        self._accelerator = accelerator
        self._is_engine = accelerator.distributed_type == DistributedType.DEEPSPEED
        self._keeps_apart = spans_rollouts and not self._is_engine
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the steps of an earlier run."""
        self.num_skipped = 0
        """Optimizer steps skipped because nothing was kept, of this run, or since it was resumed."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._trained: list[Trained] = []
        """The part of each micro-batch of the pending optimizer step."""
        self._term_moves = False
        """Whether a loss term has a gradient other than 0 in a micro-batch without rows that are kept, on any rank."""
        self._apart = TermGradients()

    # ---------------------------------------------------------------- an optimizer step

    def weigh(self, loss: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Note what a micro-batch contributes to the step, and return its loss.

        The loss is NaN where no rank has a row to train on (`must_skip`): DeepSpeed then skips its step.
        """
        is_poisoned = self.must_skip(inputs)
        terms = {
            name.removeprefix(HAS_TERM): bool(has_any)
            for name, has_any in inputs.items()
            if name.startswith(HAS_TERM + EXTRA_TOKENS)
        }
        policy = bool(inputs.get(HAS_SIGNAL, True))
        stands_for = inputs.get(STANDS_FOR, 1.0)
        self._trained.append(Trained(policy, terms, stands_for))
        return loss * math.nan if is_poisoned else loss

    def note_term(self, *, moves: bool) -> None:
        """A loss term has a gradient other than 0, or none, in a micro-batch without rows that are kept."""
        self._term_moves = self._term_moves or moves

    def keep_apart(self, part: torch.Tensor, entry: str, inputs: Inputs, model: torch.nn.Module) -> torch.Tensor:
        """A loss term's part in the loss of a micro-batch, without gradient where that is kept for `rescale`.

        `entry` is that of the term's own tokens. It costs a second backward pass, and memory for the gradients.
        """
        if not self._keeps_apart or HAS_SIGNAL not in inputs or not part.requires_grad:
            return part
        self._apart.add(entry, part, model)
        return part.detach()

    @property
    def has_computed(self) -> bool:
        """Whether the step in flight has had a micro-batch; with a limit of tokens, a micro-step may have none."""
        return bool(self._trained)

    def must_skip(self, inputs: Inputs) -> bool:
        """Whether this is the last micro-batch of a step that moves nothing; DeepSpeed steps in the backward pass."""
        moves = self._moves or bool(inputs.get(HAS_SIGNAL, True))
        return self._is_engine and self._accelerator.sync_gradients and not moves

    def rescale(self, model: torch.nn.Module) -> None:
        """Make the gradients of an optimizer step over several rollouts a mean over those that have rows.

        The others have put zeros into that mean. A loss term over tokens of its own is a mean over the rollouts that
        have such tokens. Not with DeepSpeed, which has made its step already. All ranks must call it.
        """
        num = sum(one.stands_for for one in self._trained)
        num_kept = sum(one.stands_for for one in self._trained if one.policy)
        if self._is_engine:
            return
        if num_kept not in (0, num):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(num / num_kept)
        if not self._keeps_apart:
            return
        for entry in sorted({entry for one in self._trained for entry in one.terms}):
            num_with_tokens = sum(one.stands_for for one in self._trained if one.terms.get(entry))
            if num_with_tokens:
                self._apart.move_to(model, entry, num / num_with_tokens, self._accelerator)

    @property
    def _moves(self) -> bool:
        """Whether the optimizer step in flight trains on any row or moves by a term, as far as it went."""
        return self._term_moves or any(one.policy for one in self._trained)

    def end_step(self, trainer: MultiTurnTrainer, model: nn.Module, norms: Sequence[Any]) -> bool:
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
            lacks_tokens=not self._moves,
        )
        self._begin_step()
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


def is_own_loss(compute_loss: Callable[..., torch.Tensor]) -> bool:
    """Whether a `_compute_loss` is neither ours nor TRL's."""
    module = getattr(compute_loss, "__module__", None) or ""
    return module != GRPOTrainer.__module__ and not module.startswith(__name__.partition(".")[0] + ".")


def for_own_loss(inputs: Inputs, trainer: MultiTurnTrainer) -> Inputs:
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

    def get(self, name: str, default: object = None) -> Any:
        return self[name] if name in self or name == "advantages" else default


def _why_not(inputs: Inputs, trainer: MultiTurnTrainer) -> str | None:
    """Why a loss over rows would be another one here, whatever the advantages are."""
    args, limit = trainer.args, trainer.layout.max_tokens
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
    """The factor of the entropy bonus's gradient."""
    plan: Plan | None = None
    """The layout's plan of the micro-batch (`layout.py`), for the forward pass of its rows; None where it has none."""
    kept_ids: SamplingMasks | None = None
    """(B, T) what the tokens were drawn from, for the same pass; None: the whole vocabulary."""
    log_probs: torch.Tensor | None = None
    """(B, T) the policy's, once the forward pass has run."""
    unmasked: torch.Tensor | None = None
    """(B, T) the same before the mask."""
    scale: float | torch.Tensor = 1.0
    """The factor of the advantages: a number, (B, 1) or (B, T)."""
    plan_given: Plan | None = None
    """`plan`, which the first forward pass uses up."""

    @classmethod
    def of(cls, inputs: Inputs, trainer: MultiTurnTrainer) -> LossPass:
        """The pass of one micro-batch."""
        mask, scored = loss_masks(inputs)
        plan = trainer.layout.plan_of(inputs)
        return cls(
            mask=mask,
            scored=scored,
            entropy_scale=float(inputs.get("micro_batch_scale", 1.0)),
            plan=plan,
            kept_ids=inputs.get(KEPT_IDS),
            scale=loss_weights(inputs, trainer),
            plan_given=plan,
        )

    @contextlib.contextmanager
    def read_by(self, trainer: MultiTurnTrainer) -> Iterator[None]:
        """While TRL's loss runs, `beta` is the weight of this micro-batch's KL term: 0 where rewards hold it already.

        To TRL the entropy of a step that is skipped is 0 or NaN, which its adaptive bonus must not answer.
        """
        beta = trainer.beta
        entropy_coef = trainer.entropy_coef
        entropy = trainer._last_world_entropy
        weighted = beta * self.scale if isinstance(self.scale, float) else WeightedBeta(beta, self.scale)
        trainer.beta = 0.0 if trainer.args.kl_placement == "reward" else weighted
        try:
            yield
        finally:
            trainer.beta = beta
        if not trainer._last_world_entropy > 0:
            trainer.entropy_coef, trainer._last_world_entropy = entropy_coef, entropy
            if values := trainer._metrics["train"].get("entropy_coef"):
                values[-1] = entropy_coef

    def masked(self, *parts: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Results of a forward pass, (B, T) each, with 0 outside the mask (packed ones read some for the critic)."""
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
        self, term: LossTerm, inputs: Inputs, accelerator: Accelerator
    ) -> tuple[torch.Tensor, TokenMean, bool]:
        """A loss term, summed over this micro-batch's tokens.

        Returns:
            The sum, its mean per token over all ranks, and, where no row of the step is kept, whether the term has a
            gradient other than 0 on any rank.

        Raises:
            ValueError: if the term is no scalar tensor.
        """
        mask = inputs.get(term.entry, self.mask).bool()
        log_probs = self.log_probs if self.unmasked is None else self.unmasked
        assert log_probs is not None
        given = torch.where(mask, log_probs, 0.0)
        with users_code(term.source(term.loss)):
            value = term.loss(inputs, given, mask)
        if value is None:
            value = mask.new_zeros((), dtype=torch.float32)  # other ranks may have one: they wait in the reduction
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise term.refusal(
                term.loss, value, "a scalar tensor, the term summed over the tokens of `mask`, or None for no term"
            )
        moves = value.new_zeros((), dtype=torch.double)
        if value.requires_grad and not inputs.get(HAS_SIGNAL, True):
            (gradient,) = torch.autograd.grad(value, [given], retain_graph=True, allow_unused=True)
            # A term that reads no log-probs moves the policy in a way of its own.
            moves = moves + (1.0 if gradient is None else (gradient[mask] != 0).any().double())
        sums = torch.stack([value.detach().double(), mask.sum().double(), moves])
        total, num_tokens, num_moving = accelerator.reduce(sums, reduction="sum").tolist()
        return value, TokenMean(total / max(1.0, num_tokens), num_tokens), num_moving > 0


@contextlib.contextmanager
def trls_loss(trainer: MultiTurnTrainer) -> Iterator[None]:
    """Around a call of TRL's `_compute_loss`, which is checked before the first one in training (`trl_canary.py`).

    Raises:
        TRLChangedError: it computes something else than the tested one, or reads what our micro-batches do not hold.
    """
    if trainer.model.training and not trainer.is_trl_checked:
        canary = importlib.import_module("agent_r1_trl.trainers.trl_canary")
        canary.check_trls_loss(trainer)
        trainer.is_trl_checked = True
    try:
        yield
    except KeyError as error:
        if _raised_in(error) != GRPOTrainer.__module__:
            raise
        canary = importlib.import_module("agent_r1_trl.trainers.trl_canary")
        raise canary.missing_entry(error) from error


def _raised_in(error: KeyError) -> str:
    """The module whose code asked for the key."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return "" if place is None else place.tb_frame.f_globals.get("__name__", "")


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

    def mark(self, output: Inputs, accelerator: Accelerator) -> None:
        """Put its tokens, and their number, into TRL's batch of R rows. All ranks must call it.

        Raises:
            ValueError: if they are no (R, T) bool tensor.
        """
        if self.tokens is None:
            return
        valid = output["completion_mask"].bool()
        with raised_everywhere():
            with users_code(self.source(self.tokens)):
                mask = self.tokens(output)
            mask = torch.zeros_like(valid) if mask is None else mask
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != valid.shape:
                raise self.refusal(self.tokens, mask, f"a bool tensor of shape {tuple(valid.shape)}, or None for none")
        output[self.entry] = mask & valid
        output[COUNT_OF + self.entry] = accelerator.gather(output[self.entry].sum()).sum()

    def source(self, function: object) -> str:
        """The name of one of its functions, for messages."""
        return getattr(function, "__qualname__", f"{self.name}={function!r}")

    def refusal(self, function: object, found: object, wanted: str) -> OwnObjectError:
        """The problem of something that one of its functions has returned."""
        text = f"a {found.dtype} of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        return OwnObjectError(f"{self.source(function)} returned {text}. Return {wanted}.")


def num_loss_tokens(trainer: MultiTurnTrainer, plan: Plan | None, mask: torch.Tensor) -> int:
    """Tokens in the loss, (B, T), of a micro-batch, on all ranks as far as all of them can ask.

    `plan` is None in an evaluation, and where a subclass has put other masks into a micro-batch of this rank.
    """
    if plan is not None:
        return plan.num_tokens
    own = mask.sum()
    if trainer.model.training:  # the other ranks may have plans: nobody would answer a collective call
        return int(own)
    return int(trainer.accelerator.reduce(own, reduction="sum"))


def add_terms(
    trainer: MultiTurnTrainer, loss: torch.Tensor, inputs: Inputs, whole: Inputs, loss_pass: LossPass
) -> torch.Tensor:
    """The loss of a micro-batch with the user's terms, each divided by the number of its tokens in the optimizer step.

    `whole` are the inputs before they were made neutral outside the policy's mask.
    """
    for term in loss_terms(trainer):
        has_own_tokens = term.entry in inputs
        read = inputs
        if has_own_tokens:
            read = neutral_outside(whole, loss_pass.mask.bool() | inputs[term.entry])
        value, mean, moves = loss_pass.extra_term(term, read, trainer.accelerator)
        trainer.add_metrics({term.name: mean})
        if trainer.model.training:
            trainer.features.call("on_term", term.source(term.loss), value.detach())
        counted = COUNT_OF + term.entry
        num_tokens = inputs[counted if counted in inputs else "num_items_in_batch"]
        part = value / trainer._normaliser(num_tokens)
        is_held = getattr(trainer, "is_warming_up", False)  # the policy's part of the loss gets weight 0
        if has_own_tokens and trainer.model.training and not is_held:
            trainer.kept_rows.note_term(moves=moves)
            part = trainer.kept_rows.keep_apart(part, term.entry, inputs, trainer.model)
        if has_own_tokens:  # the filter has left these rows in, and will multiply the whole loss
            part = part / inputs.get(KEPT_SHARE, 1.0)
        loss = loss + part
    return loss


def loss_terms(trainer: MultiTurnTrainer) -> list[LossTerm]:
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


def add_columns(output: Inputs, trajectories: Sequence[Any], rows: TrainingRows, owners: Sequence[Any]) -> Inputs:
    """Put what owners return in `extra_columns` into TRL's batch of R rows, and return what they have of each token.

    All ranks must call it.

    Raises:
        ValueError: for names that TRL's batch has, for what is neither (R,) nor (R, T), and if ranks have others.
    """
    valid, found = output["completion_mask"], {}
    for owner in owners:
        if getattr(owner.extra_columns, "__func__", None) is UpdateHooks.extra_columns:
            continue
        hook = f"{type(owner).__name__}.extra_columns"
        with users_code(hook):
            columns = owner.extra_columns(output, trajectories, rows)
        with raised_everywhere():
            refuse_columns(columns, output, hook)
        shapes = {name: (value.dim(), str(value.dtype)) for name, value in (columns or {}).items()}
        everywhere = gather_object([shapes])
        if any(other != shapes for other in everywhere):
            raise OwnObjectError(
                f"{hook} returned different columns on different ranks: {everywhere}. Return the same "
                "names and dtypes on all, zeros where a rank has nothing."
            )
        for name, value in (columns or {}).items():
            output[name] = value.detach().to(valid.device)
            if value.dim() == 2:
                output[name] = found[name] = output[name].masked_fill(valid == 0, 0)
    return found


def refuse_columns(columns: object, output: Inputs, hook: str) -> None:
    """Refuse (ValueError) what an `extra_columns` may not return."""
    if not isinstance(columns, Mapping | None):
        raise OwnObjectError(f"{hook} returned {columns!r:.100}. Return a dict of names and tensors, or None.")
    allowed = [tuple(output["completion_mask"].shape), tuple(output["completion_mask"].shape[:1])]
    for name, value in (columns or {}).items():
        if name in output or name in RESERVED or not isinstance(name, str) or name.startswith(EXTRA_TOKENS):
            raise OwnObjectError(f"{hook}: {name!r} is an entry of TRL's batch already. Choose another name.")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape not in allowed:
            raise OwnObjectError(
                f"{hook}: {name!r} is {shape}. Return tensors of shape {allowed[0]}, an entry for each token of the "
                f"completions, or {allowed[1]}, one for each row."
            )
