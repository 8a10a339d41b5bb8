"""Whether the loss of the installed TRL is the one that was tested, measured at the first training step.

Names and arguments can stay while their meaning changes (`trl_release.py` compares the former): a loss over rows in
place of tokens, old log-probs under another key, another divisor. Nothing would be logged. So before the first loss
two small rows with given log-probs go through TRL's own `_compute_loss`, and value and gradient are compared with the
objective as it stands here, written out by hand. TRL's method is called on a copy of the trainer's attributes:
metrics, random numbers, weights and gradients of the run stay as they are, and no other rank is asked for anything.

Not covered: the entropy bonus, `top_entropy_quantile`, `off_policy_mask_threshold` and the router's loss.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate import Accelerator
from trl.models.utils import disable_gradient_checkpointing

from agent_r1_trl.errors import RunError
from agent_r1_trl.trainers.evaluation import EvaluatingTrainer
from agent_r1_trl.trainers.trl_release import TESTED, changed_bodies

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer
else:
    # This module is loaded in the first step, and another package may have put a trainer of its own into trl by then.
    GRPOTrainer = EvaluatingTrainer.__bases__[0]

TOLERANCE = 1e-6
"""Relative difference of value and gradients, in float64, that counts as none."""
NUM_PROCESSES, NUM_ACCUMULATED, NUM_PER_GENERATION = 2, 3, 5
"""The values with which the two rows are computed: numbers that differ, so that none can stand for another."""


class TRLChangedError(RunError, ValueError):
    """The installed TRL computes another loss than the one that was tested; names both releases and the fix."""


def check_trls_loss(trainer: GRPOTrainer) -> None:
    """Both checks, once for each trainer.

    Raises:
        TRLChangedError: TRL's loss, or the temperature of its log-probs, is another one.
    """
    check_loss(trainer)
    check_temperature(trainer)


def missing_entry(error: KeyError) -> TRLChangedError:
    """The meaning of an entry that TRL's loss asks for in vain."""
    key = error.args[0] if error.args else None
    asked = f"trl {trl.__version__}: its GRPOTrainer._compute_loss reads {key!r}, which the micro-batch does not hold."
    if changed_bodies(GRPOTrainer):
        return TRLChangedError(
            f"{asked} agent-r1-trl was tested with {TESTED}, whose loss does not ask for it. {_fix()}"
        )
    return TRLChangedError(
        f"{asked} This is the loss that was tested, so something has removed the entry: look for a subclass or a "
        f"callback that changes the micro-batch, and leave {key!r} in it."
    )


def _fix() -> str:
    return f"Install the tested release: pip install trl=={TESTED}"


# -------------------------------------------------------------------- two rows


@dataclass(frozen=True, kw_only=True)
class TwoRows:
    """A micro-batch of two rows of five tokens, one of them shorter, and the log-probs of a policy that has moved.

    Ratios to the old log-probs lie inside the clip range and beyond both of its ends, with advantages of either sign.
    """

    log_probs: torch.Tensor = field(
        default_factory=lambda: _numbers([[-0.9, -1.1, -0.7, -2.0, -1.4], [-1.3, -0.4, -1.6, -3.0, -0.2]])
    )
    """(B, T) the policy's."""
    old: torch.Tensor = field(
        default_factory=lambda: _numbers([[-1.9, -1.0, -0.75, -1.2, -1.45], [-0.5, -0.9, -1.55, -2.5, -0.6]])
    )
    """(B, T) `old_per_token_logps`."""
    reference: torch.Tensor = field(
        default_factory=lambda: _numbers([[-1.2, -0.8, -1.5, -0.6, -1.1], [-0.9, -0.7, -1.1, -0.2, -2.0]])
    )
    """(B, T) `ref_per_token_logps`."""
    advantages: torch.Tensor = field(
        default_factory=lambda: _numbers([[0.7, -1.2, 0.4, 0.9, 1.1], [-0.8, 1.5, -0.3, 0.6, -0.5]])
    )
    """(B, T)."""
    importance: torch.Tensor = field(
        default_factory=lambda: _numbers([[0.8, 1.3, 1.0, 1.0, 0.9], [1.1, 0.7, 1.0, 1.0, 1.0]])
    )
    """(B, T) `importance_sampling_ratio`, 1 outside the mask, as in our batches."""
    completion_mask: torch.Tensor = field(default_factory=lambda: _numbers([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    """(B, T) the tokens of the completions."""
    tool_mask: torch.Tensor = field(default_factory=lambda: _numbers([[1, 1, 1, 0, 1], [1, 1, 1, 1, 1]]))
    """(B, T) 0 for what the policy did not sample."""
    num_items: float = 12.0
    """`num_items_in_batch`."""

    @property
    def mask(self) -> torch.Tensor:
        """(B, T) the tokens in the loss."""
        return self.completion_mask * self.tool_mask

    def inputs(self) -> dict[str, torch.Tensor]:
        """The micro-batch as TRL's loss reads it."""
        ids = torch.arange(10).view(2, 5)
        return {
            "prompt_ids": ids[:, :2],
            "prompt_mask": torch.ones_like(ids[:, :2]),
            "completion_ids": ids,
            "completion_mask": self.completion_mask.long(),
            "tool_mask": self.tool_mask.long(),
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.reference,
            "importance_sampling_ratio": self.importance,
            "sampling_per_token_logps": self.old,
            "num_items_in_batch": torch.tensor(self.num_items, dtype=torch.float64),
        }


def _numbers(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# -------------------------------------------------------------------- the objective by hand


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings and state on which the objective depends."""

    args: GRPOConfig
    loss_type: str
    epsilon_low: float
    epsilon_high: float
    beta: float
    is_corrected: bool
    """Whether the loss is multiplied by the ratios to the sampler."""
    max_completion_length: int

    @classmethod
    def of(cls, trainer: GRPOTrainer) -> LossSettings:
        """The settings of a trainer, whose `beta` may hold a weight of each row at the moment (`WeightedBeta`)."""
        return cls(
            args=trainer.args,
            loss_type=trainer.loss_type,
            epsilon_low=trainer.epsilon_low,
            epsilon_high=trainer.epsilon_high,
            beta=0.0 if trainer.beta == 0.0 else float(trainer.beta),
            is_corrected=bool(trainer.use_vllm and trainer.args.vllm_importance_sampling_correction),
            max_completion_length=trainer.max_completion_length,
        )


def objective(rows: TwoRows, log_probs: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """The loss of the two rows as TRL 1.16 defines it, with the settings of a run.

    PPO's clipped objective (arXiv 1707.06347, equation 7) and its kin by `loss_type`, k3 as the KL term (Schulman,
    "Approximating KL divergence", 2020), and the normaliser of each type.

    Args:
        rows: what is given.
        log_probs: (B, T) the policy's, which gradients reach.
        settings: of the run.
    """
    args = settings.args
    kind = settings.loss_type
    mask = rows.mask
    log_ratio = log_probs - rows.old
    if args.importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(dim=1) / mask.sum(dim=1)).unsqueeze(1)  # (B, 1)
    ratio = log_ratio.exp()
    if kind == "cispo":
        tokens = -ratio.clamp(max=settings.epsilon_high).detach() * rows.advantages * log_probs
    elif kind == "sapo":
        tokens = _soft_clipped(ratio, rows.advantages, args)
    elif kind == "vespo":
        tokens = -_gamma_weight(rows, log_probs, settings) * rows.advantages * log_probs
    else:
        bounded = ratio.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
        ratio_above = ratio if args.delta is None else ratio.clamp(max=args.delta)
        tokens = -torch.minimum(ratio_above * rows.advantages, bounded * rows.advantages)
    if settings.is_corrected and kind != "vespo":
        tokens = tokens * rows.importance
    if settings.beta != 0.0:
        gap = rows.reference - log_probs
        penalty = gap.exp() - gap - 1
        tokens = tokens + settings.beta * (penalty * ratio if args.use_bias_correction_kl else penalty)
    return _normalised(tokens * mask, mask, rows, settings)


def _soft_clipped(ratio: torch.Tensor, advantages: torch.Tensor, args: GRPOConfig) -> torch.Tensor:
    """SAPO (arXiv 2511.20347): a sigmoid in place of the clip, with a temperature for each sign of the advantage."""
    slope = torch.where(advantages > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
    return -torch.sigmoid(slope * (ratio - 1)) * 4 / slope * advantages


def _gamma_weight(rows: TwoRows, log_probs: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """VESPO's weight of each token, exp(lambda) * w^k * exp(-lambda * w), w the ratio of the row; no gradient."""
    args = settings.args
    log_weight = ((log_probs - rows.old) * rows.mask).sum(dim=1, keepdim=True).detach()  # (B, 1)
    if settings.is_corrected:
        log_weight = log_weight + rows.importance.log().sum(dim=1, keepdim=True)
    is_gain = rows.advantages >= 0
    power = torch.where(is_gain, args.vespo_k_pos, args.vespo_k_neg)
    rate = torch.where(is_gain, args.vespo_lambda_pos, args.vespo_lambda_neg).clamp(min=1e-4)
    return torch.exp(rate + power * log_weight - rate * log_weight.exp())


def _normalised(tokens: torch.Tensor, mask: torch.Tensor, rows: TwoRows, settings: LossSettings) -> torch.Tensor:
    """The sum over (B, T) tokens, 0 outside the mask, by the normaliser of the loss type."""
    kind = settings.loss_type
    if kind in ("cispo", "dapo", "vespo"):
        window = rows.num_items / NUM_PROCESSES * NUM_ACCUMULATED / NUM_PER_GENERATION
        return tokens.sum() / window
    if kind in ("grpo", "sapo"):
        loss = (tokens.sum(dim=1) / mask.sum(dim=1)).mean()
    elif kind == "bnpo":
        loss = tokens.sum() / mask.sum()
    elif kind == "dr_grpo":
        loss = tokens.sum() / (len(tokens) * settings.max_completion_length)
    else:  # luspo
        loss = tokens.sum(dim=1).mean()
    return loss / NUM_ACCUMULATED


# -------------------------------------------------------------------- the comparison


def check_loss(trainer: GRPOTrainer) -> None:
    """Compare TRL's loss of two rows, and its gradient, with the objective by hand.

    Raises:
        TRLChangedError: they differ; says how.
    """
    rows = TwoRows()
    settings = LossSettings.of(trainer)
    try:
        found = _with_gradient(lambda log_probs: _loss_of_trl(rows, log_probs, trainer, settings), rows)
    except KeyError as error:
        raise missing_entry(error) from error
    expected = _by_hand(rows, settings)
    if _is_same(found, expected):
        return
    raise TRLChangedError(
        f"{_lead()} computes another loss than the one that was tested (loss_type={settings.loss_type!r}): two rows "
        f"give {found[0].item():.6g} where the objective by hand is {expected[0].item():.6g}, and "
        f"{_what_differs(found, expected, rows, settings)}. A run would train on it without a sign. {_fix()}"
    )


def _lead() -> str:
    """Who is to blame: another release, or whoever has changed the tested one."""
    method = GRPOTrainer._compute_loss
    module = getattr(method, "__module__", "") or ""
    if module.partition(".")[0] != "trl":
        return (
            f"GRPOTrainer._compute_loss of trl {trl.__version__} (tested: {TESTED}) was replaced by "
            f"{method.__qualname__} of {module!r} (a loss of your own belongs in a subclass of our trainer). It"
        )
    return f"trl {trl.__version__} (agent-r1-trl was tested with {TESTED})"


def _loss_of_trl(rows: TwoRows, log_probs: torch.Tensor, trainer: GRPOTrainer, settings: LossSettings) -> torch.Tensor:
    """The result of TRL's own method for the rows; subclasses of it, ours and the user's, are left out."""
    stand_in = GRPOTrainer.__new__(GRPOTrainer)
    stand_in.__dict__.update(vars(trainer))
    args = copy.copy(trainer.args)
    args.__dict__.update(gradient_accumulation_steps=NUM_ACCUMULATED, steps_per_generation=NUM_PER_GENERATION)

    def given(*_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nothing = torch.zeros_like(log_probs)
        return log_probs, nothing, nothing.sum()

    stand_in.__dict__.update(
        _get_per_token_logps_and_entropies=given,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        accelerator=_OneProcess(trainer.accelerator),
        args=args,
        beta=settings.beta,
        current_gradient_accumulation_steps=NUM_ACCUMULATED,
        temperature=0.5,  # the log-probs are given: nothing may be divided by it again
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
    )
    inputs = rows.inputs()
    if not settings.is_corrected:
        del inputs["importance_sampling_ratio"]
    return GRPOTrainer._compute_loss(stand_in, trainer.model, inputs)


class _OneProcess:
    """An accelerator whose collective calls are answered here, so that no rank waits for another."""

    num_processes = NUM_PROCESSES
    sync_gradients = False
    device = torch.device("cpu")

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def gather(self, values: torch.Tensor, **_: object) -> torch.Tensor:
        return values

    def gather_for_metrics(self, values: torch.Tensor, **_: object) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, **_: object) -> torch.Tensor:
        return values

    def autocast(self, **_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


Losses = tuple[torch.Tensor, torch.Tensor]
"""A loss, a scalar, and its gradient with respect to the (B, T) log-probs."""


def _with_gradient(loss_of: Callable[[torch.Tensor], torch.Tensor], rows: TwoRows) -> Losses:
    with torch.enable_grad():
        log_probs = rows.log_probs.clone().requires_grad_()
        loss = loss_of(log_probs).double()
        (gradient,) = torch.autograd.grad(loss, log_probs, allow_unused=True)
    return loss.detach(), torch.zeros_like(log_probs) if gradient is None else gradient


def _by_hand(rows: TwoRows, settings: LossSettings) -> Losses:
    return _with_gradient(lambda log_probs: objective(rows, log_probs, settings), rows)


def _is_same(one: Losses, other: Losses) -> bool:
    """Whether both value and gradient agree."""
    return all(
        bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1.0))
        for found, expected in zip(one, other, strict=True)
    )


def _what_differs(found: Losses, expected: Losses, rows: TwoRows, settings: LossSettings) -> str:
    """The likeliest cause: an input that is not read, a factor, or another weight of each row."""
    ones = torch.ones_like(rows.tool_mask)
    blind = {
        "does not read inputs['old_per_token_logps']": replace(rows, old=rows.log_probs),
        "does not read inputs['importance_sampling_ratio']": replace(rows, importance=ones),
        "does not leave out inputs['tool_mask']": replace(rows, tool_mask=ones),
    }
    for text, changed in blind.items():
        if _is_same(found, _by_hand(changed, settings)):
            return f"it {text}"
    if settings.beta and _is_same(found, _by_hand(rows, replace(settings, beta=0.0))):
        return "it leaves the KL term out (beta)"
    gradient, wanted = found[1], expected[1]
    is_read = wanted != 0
    if bool((gradient[~is_read].abs() > TOLERANCE).any()) or not bool(is_read.any()):
        return "tokens have a gradient that should have none (mask or clipping)"
    factors = gradient[is_read] / wanted[is_read]
    if _is_constant(factors):
        return f"its gradient is {factors[0].item():.4g} times as large (another divisor or scale)"
    per_row = [gradient[row][is_read[row]] / wanted[row][is_read[row]] for row in range(len(gradient))]
    if all(_is_constant(part) for part in per_row if len(part)):
        shares = ", ".join(f"{part[0].item():.4g}" for part in per_row if len(part))
        return f"its rows weigh {shares} times as much (a mean over rows in place of tokens, or the other way round)"
    return f"the largest difference of the gradient is {(gradient - wanted).abs().max().item():.3g}"


def _is_constant(factors: torch.Tensor) -> bool:
    return bool((factors - factors[0]).abs().max() <= 1e-5 * factors[0].abs())


# -------------------------------------------------------------------- the temperature


def check_temperature(trainer: GRPOTrainer) -> None:
    """Ask which temperature the policy's log-probs have, of two forward passes of two rows; none with temperature 1.

    Log-probs by TRL's method are compared with those of the model's own logits, divided by the temperature once, twice
    and not at all. The nearest must be the first, which tells them apart in any precision.

    Raises:
        TRLChangedError: another one is nearer, or none is near.
    """
    temperature = trainer.args.temperature
    if temperature == 1.0:
        return
    model, length = trainer.model, 3
    ids = torch.arange(8, device=trainer.accelerator.device).view(2, 4) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    with torch.no_grad(), _evaluating(trainer):
        found = GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, ids, mask, length)[0].double()
        with trainer.accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = logits[:, -length - 1 : -1].double()  # what predicts the last tokens
    errors = {}
    for power, text in ((1, "once"), (2, "twice"), (0, "not at all")):
        log_probs = (logits / temperature**power).log_softmax(dim=-1)
        by_hand = log_probs.gather(2, ids[:, -length:].unsqueeze(2)).squeeze(2)
        errors[text] = (found - by_hand).abs().max().item()
    nearest = min(errors, key=lambda text: errors[text])
    largest = (logits.abs().max() / temperature).item()
    rounding = max(1e-3, 4 * largest * torch.finfo(_precision(trainer)).eps)
    is_another = errors["once"] > max(1e-4, 4 * errors[nearest])
    if not is_another and errors["once"] <= rounding:
        return
    raise TRLChangedError(
        f"trl {trl.__version__} (agent-r1-trl was tested with {TESTED}) divides the logits by "
        f"temperature={temperature:g} {nearest if is_another else 'in another way'} in the log-probs that are trained "
        f"on, and the sampler does so once: the difference is up to {errors['once']:.3g}. {_fix()}; or set "
        "temperature=1."
    )


def _precision(trainer: GRPOTrainer) -> torch.dtype:
    """The coarsest dtype that the logits are computed in."""
    by_name = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return by_name.get(trainer.accelerator.mixed_precision, trainer.model.dtype)


@contextlib.contextmanager
def _evaluating(trainer: GRPOTrainer) -> Iterator[None]:
    """Without dropout, so that no random number is drawn; every module is put back as it was."""
    model = trainer.model
    modes = [(module, module.training) for module in model.modules()]
    with disable_gradient_checkpointing(model, trainer.args.gradient_checkpointing_kwargs):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
