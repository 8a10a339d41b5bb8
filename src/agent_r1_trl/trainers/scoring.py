"""Passes that score tokens and train nothing, and what every pass over padded rows is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import nn
from trl.models.utils import disable_gradient_checkpointing

from agent_r1_trl.generation.local.decoding import evaluation_mode
from agent_r1_trl.generation.positions import positions_of, takes_positions
from agent_r1_trl.update.entries import KEPT_IDS, Inputs
from agent_r1_trl.update.rows import row_of, row_tensors
from agent_r1_trl.update.sampling_masks import SamplingMasks

if TYPE_CHECKING:
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer


class _Positioned:
    """A model as TRL calls it, which is told the positions of padded rows as well."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model

    def __call__(self, **inputs: Any) -> Any:
        """The model's output for `input_ids` and `attention_mask`, (B, L) each, and whatever else TRL passes."""
        return self._model(**inputs, position_ids=positions_of(inputs["attention_mask"]))


def with_positions(model: Callable[..., Any], trainer: MultiTurnTrainer) -> Callable[..., Any]:
    """The model for a padded pass: one that has positions counts them from each row's own first token.

    TRL passes none, so the model would count the padding on the left as well (`generation/positions.py`).
    """
    inner = model if isinstance(model, nn.Module) else trainer.model  # of PPO and of tests: a function around it
    return _Positioned(model) if takes_positions(trainer.accelerator.unwrap_model(inner)) else model


def score_rows(
    trainer: MultiTurnTrainer,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    kept_ids: SamplingMasks | torch.Tensor | None,
) -> torch.Tensor:
    """The work of `MultiTurnTrainer.score_tokens`, whose docstring has the arguments; (n, T)."""
    lengths = torch.tensor([len(ids) for ids in completions], device=trainer.accelerator.device).view(-1, 1)
    most = max(gather_object([len(prompts)]))
    rows = [row_of(*ids) for ids in zip(prompts, completions, strict=True)]
    rows += [row_of([], [])] * (most - len(rows))
    if not rows:
        return torch.zeros(0, 1, device=lengths.device)
    padding: dict[str, Any] = {
        "pad_token_id": trainer._tokenizer.pad_token_id,
        "multiple_of": trainer.pad_to_multiple_of,
    }
    output = row_tensors(rows, **padding, has_logprobs=False, device=lengths.device)
    if kept_ids is not None:
        num_columns = output["completion_ids"].shape[1]
        masks = SamplingMasks.of(kept_ids)[:, :num_columns]
        output[KEPT_IDS] = masks.pad(right=num_columns - masks.shape[1], below=len(rows) - len(masks))
    loss_pass, trainer._loss_pass = trainer._loss_pass, None  # a term may ask while the loss is computed
    try:
        options = trainer.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, options):
            log_probs = trainer._log_probs(trainer.model, output)[: len(prompts)]
    finally:
        trainer._loss_pass = loss_pass
    is_given = torch.arange(log_probs.shape[1], device=lengths.device) < lengths
    return torch.where(is_given, log_probs, 0.0)[:, : max([1, *map(len, completions)])]


def score_again(trainer: MultiTurnTrainer, rows: Inputs) -> torch.Tensor:
    """(R, T) the policy's present log-probs of rows of an earlier batch, without dropout.

    A collective call, outside the loss.
    """
    options = trainer.args.gradient_checkpointing_kwargs
    quiet = evaluation_mode(trainer.model)
    with torch.no_grad(), quiet, disable_gradient_checkpointing(trainer.model, options):
        return trainer._log_probs(trainer.model, rows)
