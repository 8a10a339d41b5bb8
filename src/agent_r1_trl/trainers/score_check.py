"""Before the first update: is the policy scored as it was sampled?

A few rows of the first rollout are scored together, as the update does it. Each is scored once more alone, by the
model's own forward pass and head: no padding, no packing, no cache, in eval mode. The trainer's log-probs, and those
that the transformers generator reported, must be the model's own. Where they are not, old and new log-probs still
agree with each other and every ratio is 1, so nothing else would show it.

Found in this way: positions that count padding, frequencies that depend on the longest row of a batch, dropout that
is a number in an attention function, output layers that do more than multiply.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import trl
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.generation.local.decoding import evaluation_mode
from agent_r1_trl.generation.sync import own_log_probs
from agent_r1_trl.trainers.callbacks import is_main_process
from agent_r1_trl.trainers.dropout import noise_rates
from agent_r1_trl.trainers.trainable import adapter_weights
from agent_r1_trl.trainers.trl_release import TESTED, changed_bodies
from agent_r1_trl.trajectory import Row
from agent_r1_trl.update.batches import whole_rows
from agent_r1_trl.update.rows import row_of, row_tensors

if TYPE_CHECKING:
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer
    from agent_r1_trl.trainers.rollout_batch import UpdateBatch

logger = logging.getLogger(__name__)

_MAX_PLACES = 256
"""Tokens of a row that are compared, evenly spread."""
_EXACT = (1e-3, 1e-2)
_ROUNDED = (0.1, 1.0)
"""Largest mean, and largest 99th percentile, of absolute differences that are rounding: in float32 and in 16 bits."""

_STIR = 0.1
"""Standard deviation of what is added to an adapter's weights while the check looks at its noise."""

Scores = list[torch.Tensor]
"""For each row, (n,) log-probs of the tokens that are compared."""


def check_scores(trainer: MultiTurnTrainer, batch: UpdateBatch) -> bool:
    """Compare the log-probs of some rows of a rollout. All ranks must call it, before the first update.

    Returns:
        False where no rank had a row with an action token to look at.

    Raises:
        ValueError: they differ, and `score_check` is 'error'.
    """
    rows = _chosen_rows(batch.training_rows.rows, with_twin=trainer.layout.name == "shared")
    if not any(gather_object([bool(rows)])):
        return False
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        problem = _ScoreCheck(trainer, rows).find_problem()
    if problem is None:
        return True
    text = f"{problem} score_check: warn trains all the same."
    if trainer.args.score_check == "error":
        raise ValueError(text)
    if is_main_process():
        logger.warning("%s", text)
    return True


def _chosen_rows(rows: Sequence[Row], *, with_twin: bool) -> list[Row]:
    """The longest row and one with the shortest prompt; `with_twin` also one that shares the first one's prompt.

    Where all prompts are equally long the second is a part of the first, so that there is padding on the left.
    """
    candidates = [row for row in rows if any(row.action_mask)]
    if not candidates:
        return []
    longest = max(candidates, key=lambda row: len(row.prompt_ids) + len(row.completion_ids))
    other = min(candidates, key=lambda row: (len(row.prompt_ids), len(row.completion_ids)))
    if len(other.prompt_ids) == len(longest.prompt_ids) > 1:
        half = longest.prompt_ids[len(longest.prompt_ids) // 2 :]
        other = dataclasses.replace(longest, prompt_ids=half, logprobs=[])  # nobody sampled it
    chosen = [longest, other]
    if with_twin:
        twins = [row for row in candidates if row.prompt_ids == longest.prompt_ids and row is not longest]
        chosen.append(min(twins or candidates, key=lambda row: len(row.completion_ids)))
    return chosen


def _places(row: Row) -> list[int]:
    """Indices of action tokens of its completion, at most `_MAX_PLACES`, with the first and the last."""
    places = [index for index, is_action in enumerate(row.action_mask) if is_action]
    if len(places) <= _MAX_PLACES:
        return places
    steps = torch.linspace(0, len(places) - 1, _MAX_PLACES).round().long().tolist()
    return [places[step] for step in steps]


@dataclasses.dataclass(frozen=True)
class _Gap:
    """Absolute differences between two ways to score the same tokens."""

    mean: float
    high: float
    """Their 99th percentile."""

    @classmethod
    def between(cls, found: Scores, expected: Scores) -> _Gap:
        """Where the expected ones are finite: weights that have none are another guard's subject."""
        differences = torch.cat([left - right for left, right in zip(found, expected, strict=True)]).abs().double()
        differences = differences[torch.cat(expected).isfinite()]
        if not len(differences):
            return cls(0.0, 0.0)
        return cls(differences.mean().item(), differences.quantile(0.99).item())

    def exceeds(self, tolerance: tuple[float, float]) -> bool:
        """Whether they are more than rounding; NaN is."""
        return not (self.mean <= tolerance[0] and self.high <= tolerance[1])

    def __str__(self) -> str:
        return f"{self.mean:.3g} on average and {self.high:.3g} for one token in a hundred"


class _ScoreCheck:
    """The rows, and the ways to score them. Every method is a collective call."""

    def __init__(self, trainer: MultiTurnTrainer, rows: list[Row]) -> None:
        self._trainer = trainer
        self._rows = rows or [row_of([0], [0, 0])] * (3 if trainer.layout.name == "shared" else 2)
        self._places = [_places(row) for row in self._rows]
        policy = trainer.accelerator.unwrap_model(trainer.model)
        is_float32 = all(parameter.dtype == torch.float32 for parameter in policy.parameters())
        is_exact = is_float32 and trainer.accelerator.mixed_precision == "no"
        self._tolerance = _EXACT if is_exact else _ROUNDED
        self._own: Scores = []
        for row, places in zip(self._rows, self._places, strict=True):
            first = len(row.prompt_ids)
            with trainer.accelerator.autocast():
                self._own.append(
                    own_log_probs(
                        policy,
                        [*row.prompt_ids, *row.completion_ids],
                        [first + place for place in places or [0]],
                        temperature=trainer.args.temperature,
                    )[: len(places)]
                )

    def find_problem(self) -> str | None:
        """The problem, its cause and the fix; None if there is none."""
        args = self._trainer.args
        is_noise_meant = not args.disable_dropout or bool(args.neftune_noise_alpha)
        if is_noise_meant:
            self._warn_of_noise()
        elif problem := self._noise_of_adapter():
            return problem
        gap = self._worst(self._together(in_training=not is_noise_meant), self._own)
        if gap is not None:
            lengths = " and ".join(str(len(row.prompt_ids) + len(row.completion_ids)) for row in self._rows)
            return (
                "The update would score the policy differently from how it was sampled: log-probs of rows with "
                f"{lengths} tokens differ from the model's own by {gap}. {self._cause(is_noise_meant)}"
            )
        sampled = self._sampled()
        if sampled is None:
            return None
        gap = self._worst(*sampled)
        if gap is None:
            return None
        return (
            f"The transformers generator reports log-probs that differ from the model's own by {gap}: with its cache, "
            "or with the rows beside it in a batch, the model computes something else. Set generation_batch_rows: 1, "
            "or use_vllm: true."
        )

    def _cause(self, is_noise_meant: bool) -> str:
        """Which part makes the difference, and what helps."""
        layout = self._trainer.layout.name
        if not is_noise_meant:
            if self._worst(self._together(in_training=True), self._together(in_training=True)) is not None:
                return (
                    "Cause: dropout or other noise. Two passes over the same rows in training mode differ, and no "
                    "rate that disable_dropout reaches is left. Load the model with its rates at 0 "
                    "(model_init_kwargs)."
                )
            if self._worst(self._together(in_training=False), self._own) is None:
                return (
                    "Cause: training mode. In eval mode the scores are right, so the model has a part that works "
                    "otherwise while it trains. Load it without that part."
                )
        if self._worst(self._alone(self._score), self._own) is None:
            return (
                "Cause: neighbours. Each row alone is scored right, so the score of a row depends on the other rows "
                "of its micro-batch, or on padding, which a micro-batch of one row has as well. Take another model "
                "(docs/model-families.md)."
            )
        if layout != "padded" and self._worst(self._alone(self._score_as_trl), self._own) is None:
            return f"Cause: layout. update_layout={layout!r} does not fit this model. Set update_layout: padded."
        if changed_bodies(GRPOTrainer):
            return (
                f"Cause: probably TRL. trl {trl.__version__} is installed and computes log-probs with other code than "
                f"{TESTED}, which agent-r1-trl was tested with: pip install trl=={TESTED}."
            )
        return (
            "Cause: output layer. TRL multiplies the last hidden states with the head's weight, and this model's own "
            "head does more, or its forward pass does. Take another model."
        )

    def _warn_of_noise(self) -> None:
        devices = [self._trainer.accelerator.device] if self._trainer.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the run's own draws stay the same
            gap = self._worst(self._together(in_training=True), self._together(in_training=False))
        if gap is not None and is_main_process() and not noise_rates(self._trainer.model):
            logger.warning(
                "In training mode log-probs differ by %s from those in eval mode (disable_dropout=%s, "
                "neftune_noise_alpha=%s). The sampler has no such noise.",
                gap,
                self._trainer.args.disable_dropout,
                self._trainer.args.neftune_noise_alpha,
            )

    def _noise_of_adapter(self) -> str | None:
        """What is wrong with an adapter that draws numbers in training mode; None if it does not.

        A new adapter adds nothing to its layers, and neither does its noise: its weights are others while this looks.
        """
        trainer = self._trainer
        weights = [] if trainer.is_fsdp_enabled else adapter_weights(trainer.model)  # FSDP's are parts of one line
        if not any(gather_object([bool(weights)])):
            return None
        before = [weight.clone() for weight in weights]
        devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the run's own draws stay the same
            for weight in weights:
                weight.add_(_STIR * torch.randn_like(weight))
            try:
                gap = self._worst(self._together(in_training=True), self._together(in_training=True))
            finally:
                for weight, value in zip(weights, before, strict=True):
                    weight.copy_(value)
        if gap is None:
            return None
        config = next(iter(trainer.model.peft_config.values()))
        kind = getattr(config.peft_type, "value", config.peft_type)
        return (
            f"peft_config={type(config).__name__} ({kind}) is random in training mode: log-probs of two passes over "
            f"the same rows differ by {gap} once its weights are not those that it begins with, and no rate that "
            "disable_dropout reaches is left. The sampler has no such noise. "
            "Take an adapter without it, such as peft_config=LoraConfig(), or set disable_dropout: false."
        )

    # ---------------------------------------------------------------- ways to score

    def _together(self, *, in_training: bool) -> Scores:
        """All rows in one micro-batch of the run's layout."""
        mode = nullcontext() if in_training else evaluation_mode(self._trainer.model)
        with mode:
            return self._score(self._rows, self._places)

    def _alone(self, score: Callable[[list[Row], list[list[int]]], Scores]) -> Scores:
        """Each row in a micro-batch of its own, in eval mode."""
        with evaluation_mode(self._trainer.model):
            return [score([row], [places])[0] for row, places in zip(self._rows, self._places, strict=True)]

    def _score(self, rows: list[Row], places: list[list[int]]) -> Scores:
        """As the trainer scores a micro-batch."""
        return self._read(self._trainer._get_per_token_logps_and_entropies, rows, places)

    def _score_as_trl(self, rows: list[Row], places: list[list[int]]) -> Scores:
        """As TRL does, in no layout of ours."""

        def compute(*args: torch.Tensor, **options: int) -> tuple:
            return GRPOTrainer._get_per_token_logps_and_entropies(self._trainer, *args, **options)

        return self._read(compute, rows, places)

    def _read(self, compute: Callable[..., tuple], rows: list[Row], places: list[list[int]]) -> Scores:
        trainer = self._trainer
        output = row_tensors(
            rows,
            pad_token_id=trainer._tokenizer.pad_token_id,
            multiple_of=trainer.pad_to_multiple_of,
            has_logprobs=False,
            device=trainer.accelerator.device,
        )
        length = output["completion_ids"].shape[1]
        log_probs = compute(trainer.model, *whole_rows(output), length, batch_size=len(rows))[0]  # (R, T)
        return [row[chosen].float() for row, chosen in zip(log_probs, places, strict=True)]

    def _sampled(self) -> tuple[Scores, Scores] | None:
        """Log-probs of the sampled rows from the transformers generator, and from the model itself.

        None where another one sampled, or truncated the distribution.
        """
        trainer = self._trainer
        is_cut = trainer.args.sampling_params(is_training=True).cuts
        if is_cut or trainer.features.replaces_sampling:
            return None
        if not isinstance(trainer.rollouts.generator, TransformersGenerator):
            return None
        found, expected = [], []
        for row, places, own in zip(self._rows, self._places, self._own, strict=True):
            if row.logprobs:
                found.append(torch.tensor([row.logprobs[place] for place in places], device=own.device))
                expected.append(own)
        return (found, expected) if found else ([torch.zeros(0)], [torch.zeros(0)])

    def _worst(self, found: Scores, expected: Scores) -> _Gap | None:
        """The gap of a rank where it is more than rounding; None if it is nowhere."""
        gaps: list[_Gap] = gather_object([_Gap.between(found, expected)])
        return next((gap for gap in gaps if gap.exceeds(self._tolerance)), None)
