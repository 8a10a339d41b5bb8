"""The entries of a batch and of its micro-batches: all of them, with their shapes, their writers and their readers.

`_generate_and_score_completions` returns a batch, as TRL's does, `deal` and the layouts cut it into micro-batches,
and `compute_loss` reads these. A batch has R rows on each rank, and a micro-batch fewer; P are the columns of the
prompts, which are padded on the left, T those of the completions, padded on the right. An entry of the shape () is the
same number in every micro-batch of an optimizer step.

An entry with rows is a tensor, or `SamplingMasks`, whose first dimension is R: whatever moves, pads and joins rows
(`batches.py`) finds it by that, and needs no change for a new one.
"""

from __future__ import annotations

from typing import Any, Final, TypedDict

import torch

from agent_r1_trl.update.sampling_masks import SamplingMasks

Inputs = dict[str, Any]
"""A batch or micro-batch: `Entries`, and what stands in it under names that are made (`OPEN_NAMES`)."""

TRAJECTORY_ROW: Final = "trajectory_row"
TRAINING_ROW: Final = "training_row"
IS_FIRST: Final = "is_first_row"
OTHER_TOKENS: Final = "tokens_in_other_rows"
TURN_SHARES: Final = "turn_shares"
KEPT_IDS: Final = "kept_ids"
KEPT_SHARE: Final = "kept_share"
IS_KEPT: Final = "is_kept"
HAS_SIGNAL: Final = "has_signal"
TOKEN_ADVANTAGES: Final = "token_advantages"
MICRO_BATCHES: Final = "micro_batches"
STANDS_FOR: Final = "stands_for"
EFFECTIVE_SHARE: Final = "effective_share"


class Entries(TypedDict, total=False):
    """The entries of batches and micro-batches; a run's settings decide which ones are there.

    Every text names all functions that write the entry, and some that read it: what would be wrong without it.
    """

    # ---------------------------------------------------------------- rows, in TRL's form

    prompt_ids: torch.Tensor
    """(R, P) int64. Written by `row_tensors`, `MultiTurnPPOTrainer._read_open_contexts`. Read by `whole_rows`, TRL."""
    prompt_mask: torch.Tensor
    """(R, P) int64, 1 at tokens. Written by `row_tensors`, `MultiTurnPPOTrainer._read_open_contexts`. Read by
    `whole_rows`, TRL."""
    completion_ids: torch.Tensor
    """(R, T) int64. Written by `row_tensors`, `with_one_more`, `MultiTurnPPOTrainer._read_open_contexts`. Read by
    `whole_rows`, TRL."""
    completion_mask: torch.Tensor
    """(R, T) int64, 1 at tokens. Written by `row_tensors`, `with_one_more`, `MultiTurnPPOTrainer._read_open_contexts`.
    Read by `loss_masks`, `whole_rows`, TRL."""
    tool_mask: torch.Tensor
    """(R, T) int64, 1 at tokens in the loss: the policy's own, with `loss_mask`, of rows that count. Written by
    `add_masks`, `deal`. Read by `loss_masks`, TRL."""

    # ---------------------------------------------------------------- whose row it is, and how much it counts

    trajectory_row: torch.Tensor
    """(R,) int64, the place of the row's trajectory in the rollout of all ranks. Written by
    `MultiTurnTrainer._tensors`. Read by `NumberWatch.check_loss`."""
    training_row: torch.Tensor
    """(R,) int64, the row's place among those of all ranks, each of which has R. Written by
    `MultiTurnTrainer._tensors`. Read by `Recorder.check_loss`."""
    is_first_row: torch.Tensor
    """(R,) bool, whether it is the first row of its trajectory. Written by `add_masks`. Read by `_valid_counts`."""
    in_baseline: torch.Tensor
    """(R,) bool, whether its trajectory has a reward to compare. Written by `add_masks`, `deal`. Read by
    `set_valid_scales`."""
    is_kept: torch.Tensor
    """(R,) bool, whether it is trained on; only where a callback's `keep` has said so. Written by
    `MultiTurnTrainer._tensors`, `AgeGuard.rollout_end`. Read by `deal`."""
    trajectory_rewards: torch.Tensor
    """(R,) float32, what its trajectory has earned in all; 0 outside the baseline. Written by
    `MultiTurnTrainer._tensors`. Read by losses of the user's own."""
    tokens_in_other_rows: torch.Tensor
    """(R,) int64, tokens in the loss of the trajectory's other rows. Written by `add_masks`. Read by
    `loss_weights`."""
    turn_shares: torch.Tensor
    """(R, T) float32, one over the tokens of its turn, at tokens in the loss; with `loss_unit="turn"`. Written by
    `add_masks`. Read by `loss_weights`, `_valid_counts`."""

    # ---------------------------------------------------------------- log-probs

    kept_ids: SamplingMasks
    """(R, T) the ids that each token was drawn from, where that is a part of the vocabulary. Written by
    `MultiTurnTrainer._tensors`, `score_rows`, `load_rollout`. Read by `LossPass.of`, `MultiTurnTrainer._log_probs`."""
    sampling_per_token_logps: torch.Tensor
    """(R, T) float32, the sampler's log-probs; NaN where it could not tell. With vLLM. Written by `row_tensors`. Read
    by `weigh_mismatch`, TRL."""
    old_per_token_logps: torch.Tensor
    """(R, T) float32, the policy's before the update, unless the first pass of the loss gives them. Written by
    `MultiTurnTrainer._add_log_probs`. Read by `kl_rewards`, `weigh_mismatch`, TRL."""
    ref_per_token_logps: torch.Tensor
    """(R, T) float32, the reference's, with a KL term. Written by `MultiTurnTrainer._add_log_probs`. Read by
    `kl_rewards`, TRL."""
    importance_sampling_ratio: torch.Tensor
    """(R, T) float32, of trainer to sampler, 1 outside action tokens. With vLLM. Written by `weigh_mismatch`. Read by
    TRL."""

    # ---------------------------------------------------------------- advantages, and the critic's part

    advantages: torch.Tensor
    """(R, T) float32, 0 outside the estimator's mask; (R,) where a subclass of the user's has put others there.
    Written by `MultiTurnTrainer._advantages`, `MultiTurnPPOTrainer._advantages`, `MultiTurnTrainer._compute_loss`,
    `for_own_loss`. Read by `advantages_of`, `has_advantage`, TRL."""
    token_advantages: torch.Tensor
    """(R, T) float32, the advantages, in what a loss written for TRL is given where they cannot be (R,). Written by
    `for_own_loss`. Read by `advantages_of`."""
    returns: torch.Tensor
    """(R, T) float32, the critic's targets. Written by `MultiTurnPPOTrainer._advantages`. Read by
    `MultiTurnPPOTrainer._compute_loss`."""
    old_values: torch.Tensor
    """(R, T) float32, the critic's values before the update. Written by `MultiTurnPPOTrainer._advantages`. Read by
    `MultiTurnPPOTrainer._compute_loss`."""
    value_mask: torch.Tensor
    """(R, T) bool, tokens in the critic's loss. Written by `MultiTurnPPOTrainer._advantages`, `deal`. Read by
    `MultiTurnPPOTrainer._compute_loss`."""

    # ---------------------------------------------------------------- numbers of an optimizer step

    num_items_in_batch: torch.Tensor
    """() int64, tokens in the policy's loss, of all ranks; where a callback keeps some rows, float32, the mean over
    the steps that have any. Written by `add_masks`, `_mark_signal`. Read by `_tokens_per_micro_batch`,
    TRL."""
    num_value_items: torch.Tensor
    """() int64, the same of the critic's loss. Written by `MultiTurnPPOTrainer._advantages`,
    `_mark_signal`. Read by `MultiTurnPPOTrainer._compute_loss`."""
    row_scale: torch.Tensor
    """() float32, rows of a micro-batch per trajectory in the baseline. Written by `set_valid_scales`,
    `_micro_batches_of`. Read by `loss_weights`."""
    micro_batch_scale: torch.Tensor
    """() float32, micro-batches per one that has a row in the baseline. Written by `set_valid_scales`,
    `_micro_batches_of`. Read by `_whole_trajectories`, `LossPass.of`."""
    turn_scale: torch.Tensor
    """() float32, micro-batches per turn in the loss; with `loss_unit="turn"`. Written by `set_valid_scales`. Read by
    `loss_weights`."""
    kept_share: torch.Tensor
    """() float32, what a filter multiplies the loss of the rows that it keeps by. Written by
    `GroupFilter.rollout_end`. Read by `GroupFilter.check_loss`, `add_terms`."""
    has_signal: torch.Tensor
    """() bool, whether the step trains policy and critic on any row of this rollout; only where rows may be excluded.
    Written by `_mark_signal`. Read by `KeptRows.weigh`, `KeptRows.must_skip`, `LossPass.extra_term`."""

    # ---------------------------------------------------------------- micro-batches by tokens

    micro_batches: list[Inputs]
    """The only entry of a micro-step's inputs with `max_tokens_per_micro_batch`: micro-batches, each for a forward and
    backward pass. Written by `repack`. Read by `MultiTurnTrainer.compute_loss`, `UpdateLayout.arrange`."""
    stands_for: float
    """How many of the Trainer's micro-steps it stands for. Written by `repack`. Read by `KeptRows.weigh`."""
    effective_share: torch.Tensor
    """() float32, how far the policy is from the one that sampled the batch, 1: not at all; with `rollouts_ahead`.
    Written by `weigh_mismatch`. Read by `AgeGuard.rollout_end`."""


EXTRA_TOKENS: Final = "extra_tokens/"
HAS_TERM: Final = "has_"
COUNT_OF: Final = "num_"

OPEN_NAMES = {
    EXTRA_TOKENS: "(R, T) bool, the tokens of a loss term, under its name. `LossTerm.mark`.",
    COUNT_OF + EXTRA_TOKENS: "() their number, of all ranks. `LossTerm.mark`, `_mark_signal`.",
    HAS_TERM + EXTRA_TOKENS: "() bool, whether the step has any in this rollout, on any rank. `_mark_signal`.",
}
"""How entries begin whose names are made. Others are columns of callbacks and subclasses (`extra_columns`)."""

RESERVED = frozenset({*Entries.__annotations__, "pixel_values", "num_images"})
"""Names that no column of a user's own may have: ours, and those that TRL gives to pictures."""
