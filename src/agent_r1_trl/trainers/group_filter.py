"""Trains on the groups of a rollout that can teach something, and skips the step if none can (`filter_groups`).

Which groups: `agent_r1_trl.filtering`. Advantages are estimated over all rows before; then the rows of the other
groups leave the update, and those that stay are spread anew over ranks and micro-batches (`update/spreading.py`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object

from agent_r1_trl.filtering import DEFAULT_VALUES, check_rule, raw_returns, select_groups, signal_to_noise
from agent_r1_trl.trainers.failures import is_main_process
from agent_r1_trl.trainers.played import PlayedBatch
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.micro_batches import STANDS_FOR
from agent_r1_trl.update.rows import Inputs, join_rows
from agent_r1_trl.update.spreading import deal_all_rows, spread_rows

logger = logging.getLogger(__name__)

IS_KEPT = "is_kept"
"""Entry of TRL's batch, (B,): whether the row is in a group that is trained on; only where the filter is applied."""
HAS_SIGNAL = "has_signal"
"""Entry of a micro-batch: whether its optimizer step trains on any row of this rollout."""
KEPT_SHARE = "kept_share"
"""Entry of TRL's batch: what its loss is multiplied by."""


@dataclass(frozen=True)
class FilterSettings:
    """What the filter does; the fields are the training arguments `filter_groups`, `filter_value` and so on."""

    rule: str | None = None
    """None: nothing is filtered."""
    value: float = 0.0
    statistic: str = "std"
    when: float | None = None
    loss_scaling: bool = False


class GroupFilter:
    """The filter of a run, which can be switched on and off between two rollouts.

    Args:
        args: of the trainer.
        accelerator: of the trainer.
    """

    def __init__(self, args: Any, accelerator: Any) -> None:
        self.settings = FilterSettings()
        self.num_skipped = 0
        """Optimizer steps skipped for want of signal, of this run, or since it was resumed."""
        self._args, self._accelerator = args, accelerator
        self._signals: list[tuple[bool, float]] = []
        """Of each pass of the optimizer step under way, whether its rollout has any, and the micro-batches it is."""
        self._is_engine = accelerator.distributed_type == DistributedType.DEEPSPEED
        if args.filter_groups is not None:
            self.enable(
                args.filter_groups,
                args.filter_value,
                statistic=args.filter_statistic,
                when=args.filter_when,
                loss_scaling=args.filter_loss_scaling,
            )

    def enable(
        self,
        rule: str,
        value: float | None = None,
        *,
        statistic: str = "std",
        when: float | None = None,
        loss_scaling: bool = False,
    ) -> None:
        """Filter from the next rollout on. All ranks must do so in the same step.

        Args:
            rule: `top_fraction`, `top_p` or `min_p`, as for `select_groups`.
            value: of the rule; None for its usual one.
            statistic: `std` or `var`.
            when: filter only where the signal-to-noise ratio is above this.
            loss_scaling: multiply the loss by the share of rows that are kept.

        Raises:
            ValueError: the run cannot be filtered, or not so; names the option and the cure.
        """
        check_can_filter(self._args)
        value = DEFAULT_VALUES.get(rule, math.nan) if value is None else value
        check_rule(rule, value, statistic)
        self.settings = FilterSettings(rule, value, statistic, when, loss_scaling)

    def begin_run(self) -> None:
        """Forget the steps of an earlier run."""
        self.num_skipped, self._signals = 0, []

    def disable(self) -> None:
        """Train on everything from the next rollout on."""
        self.settings = FilterSettings()

    # ---------------------------------------------------------------- a rollout

    def choose(
        self, trajectories: Sequence[Trajectory], in_baseline: torch.Tensor, group_size: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Entries for TRL's batch that say which rows are trained on, and `filter/*`. All ranks must call it.

        Args:
            trajectories: this rank's B, with all their rewards.
            in_baseline: (B,) bool.
            group_size: trajectories of one prompt, which are consecutive rows of all ranks.
        """
        settings = self.settings
        if settings.rule is None:
            return {}, {}
        own = raw_returns(trajectories).to(in_baseline.device).masked_fill(~in_baseline, math.nan)
        returns = self._accelerator.gather(own)  # (N,)
        group_ids = torch.arange(len(returns), device=returns.device) // group_size
        ratio = signal_to_noise(returns, group_ids)
        kept = select_groups(
            returns, group_ids, rule=settings.rule, value=settings.value, statistic=settings.statistic
        )
        # Where nothing can be kept there is nothing to train on either, whatever the gate says.
        is_applied = settings.when is None or ratio > settings.when or not bool(kept.any())
        share = int(kept.sum()) / max(1, int((~returns.isnan()).sum())) if is_applied else 1.0
        metrics = {"kept_share": share, "signal_to_noise": ratio, "is_applied": float(is_applied)}
        entries = {}
        if is_applied:
            first = self._accelerator.process_index * len(own)
            entries[IS_KEPT] = kept[first : first + len(own)]
            if settings.loss_scaling:
                entries[KEPT_SHARE] = torch.tensor(share, device=own.device)
        return entries, {f"filter/{name}": value for name, value in metrics.items()}

    def skips_scores(self, beta: float) -> bool:
        """Whether TRL would compute old or reference log-probs of rows that are filtered, and that nothing else reads.

        Args:
            beta: weight of the KL term; 0 needs no reference.
        """
        args = self._args
        per_rollout = args.steps_per_generation * args.num_iterations
        has_scores = beta != 0 or args.gradient_accumulation_steps % per_rollout != 0  # TRL's condition
        is_read = args.use_vllm or args.kl_placement == "reward" or getattr(args, "critic_uses_filtered", False)
        return self.settings.rule is not None and has_scores and not is_read

    def chosen(self, played: PlayedBatch, group_size: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """What `choose` says of a batch, or has said of it before."""
        return played.chosen or self.choose(played.trajectories, played.in_baseline, group_size)

    def choose_early(self, played: PlayedBatch, group_size: int) -> None:
        """Choose before TRL scores the rows, which need not score the others then. All ranks must call it.

        Args:
            played: whose rewards are settled.
            group_size: as for `choose`.
        """
        played.chosen = self.choose(played.trajectories, played.in_baseline, group_size)
        kept = played.chosen[0].get(IS_KEPT)
        if kept is None:
            return
        rows = played.training_rows.expand(kept).nonzero().flatten().tolist()
        size = self._args.per_device_train_batch_size
        most = max(1, *gather_object([len(rows)]))
        num = -(-most // size) * size  # full forward passes, and equally many on all ranks
        if num < len(played.training_rows):
            played.scored_rows = [*rows, *[0] * num][:num]

    def apply(self, buffer: list[Inputs]) -> list[Inputs]:
        """The micro-batches of a rollout without the rows that are not trained on. All ranks must call it.

        Their scales for lost rows (`live_rows.py`) must be counted anew.
        """
        if IS_KEPT not in buffer[0]:
            return buffer
        rows = join_rows(buffer)
        kept, for_critic = self.take_out(rows)
        spread = deal_all_rows if for_critic else spread_rows
        buffer, has_signal = spread(
            rows,
            kept,
            num_micro_batches=len(buffer),
            steps_per_update=self._args.gradient_accumulation_steps,
            accelerator=self._accelerator,
        )
        return self.mark_signal(buffer, has_signal)

    def take_out(self, rows: Inputs) -> tuple[torch.Tensor, bool]:
        """Take the tokens of filtered rows out of the losses.

        Returns:
            (R,) bool, the rows that stay in the update; and whether the critic trains on the others nevertheless.
        """
        kept = rows.pop(IS_KEPT)
        rows["tool_mask"] = rows["tool_mask"] * kept.unsqueeze(1)
        rows["in_baseline"] = rows["in_baseline"] & kept
        for_critic = "value_mask" in rows and self._args.critic_uses_filtered
        if "value_mask" in rows and not for_critic:
            rows["value_mask"] = rows["value_mask"] & kept.unsqueeze(1)
        return kept, for_critic

    def mark_signal(self, buffer: list[Inputs], has_signal: Sequence[bool]) -> list[Inputs]:
        """Say which micro-batches belong to a step that is made, and divide by the mean over these steps alone.

        All ranks must call it.

        Args:
            buffer: the micro-batches of a rollout, without the rows that are not trained on.
            has_signal: of each, whether its optimizer step holds a row that is kept, on any rank.
        """
        counted = {"num_items_in_batch": "tool_mask", "num_value_items": "value_mask"}
        counted = {name: mask for name, mask in counted.items() if mask in buffer[0]}
        tokens = {name: self._count(buffer, has_signal, mask) for name, mask in counted.items()}
        live = max(1, sum(has_signal)) / len(buffer)  # TRL divides by the mean over all optimizer steps
        for inputs, signal in zip(buffer, has_signal, strict=True):
            inputs |= {name: count / live for name, count in tokens.items()}
            inputs[HAS_SIGNAL] = torch.tensor(signal)
        return buffer

    def _count(self, buffer: Sequence[Inputs], has_signal: Sequence[bool], mask: str) -> torch.Tensor:
        """Number of tokens that are trained on, of all ranks; those of a step that is skipped are not."""
        own = [inputs[mask].sum() * signal for inputs, signal in zip(buffer, has_signal, strict=True)]
        return self._accelerator.gather(torch.stack(own).sum()).sum()

    # ---------------------------------------------------------------- an optimizer step

    def weigh(self, loss: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The loss of a micro-batch times the share that is kept, if that was asked for.

        With DeepSpeed, which makes the optimizer step inside the backward pass, NaN in a step without signal: then it
        makes none.
        """
        self._signals.append((bool(inputs.get(HAS_SIGNAL, True)), inputs.get(STANDS_FOR, 1.0)))
        must_skip = self._is_engine and self._accelerator.sync_gradients and not self._has_signal
        return loss * inputs.get(KEPT_SHARE, 1.0) * (math.nan if must_skip else 1.0)

    def rescale(self, model: torch.nn.Module) -> None:
        """Make the gradients of an optimizer step over several rollouts a mean over those that have signal.

        The others have put zeros into that mean. Not with DeepSpeed, which has made its step already, and not with
        `critic_uses_filtered`, whose critic has learnt from all of them.
        """
        num_live = sum(number for has_signal, number in self._signals if has_signal)
        is_mixed = self._has_signal and not all(has_signal for has_signal, _ in self._signals)
        if self._is_engine or getattr(self._args, "critic_uses_filtered", False) or not is_mixed:
            return
        num = sum(number for _, number in self._signals)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(num / num_live)

    @property
    def _has_signal(self) -> bool:
        """Whether any rollout of the optimizer step under way has signal, as far as it was trained on."""
        return any(has_signal for has_signal, _ in self._signals)

    def ends_without_signal(self, step: int) -> bool:
        """Whether the optimizer step under way has nothing to train on; the next one begins.

        Args:
            step: number of optimizer steps before this one.
        """
        has_signal, self._signals = self._has_signal, []
        if has_signal:
            return False
        self.num_skipped += 1
        if is_main_process() and self.num_skipped == 1:
            logger.warning(
                "Optimizer step %d was skipped, because too few groups of its rollout hold trajectories that earned "
                "different returns (filter_groups=%r trains on such groups alone). Further ones are only counted, as "
                "filter/skipped_steps.",
                step + 1,
                self.settings.rule,
            )
        return True


def of_scored_rows(score: Callable[..., tuple]) -> Callable[..., tuple]:
    """A trainer's method that computes log-probs (B, T), for the `scored_rows` of the batch that it is being handed.

    The other rows get 0.
    """

    @functools.wraps(score)
    def call(trainer: Any, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> tuple:
        rows = None if trainer._played is None else trainer._played.scored_rows
        if rows is None:
            return score(trainer, model, input_ids, attention_mask, *args, **kwargs)
        some = score(trainer, model, input_ids[rows], attention_mask[rows], *args, **kwargs)[0]
        log_probs = some.new_zeros(len(input_ids), some.shape[1])
        log_probs[rows] = some
        return log_probs, None, None

    return call


def check_can_filter(args: Any) -> None:
    """Refuse to filter where groups say nothing, or where a step cannot be skipped.

    Raises:
        ValueError: names the option and the cure.
    """
    if args.num_generations is not None and args.num_generations < 2:
        raise ValueError(
            f"filter_groups with num_generations={args.num_generations}: a group of one has no spread, so nothing "
            "would ever be trained on. Set num_generations to 2 or more (4 to 16 is usual), or remove filter_groups."
        )
    if args.fp16:
        raise ValueError(
            "filter_groups with fp16=True: a step without signal cannot be skipped without halving the scale of the "
            "loss. Set bf16=True and fp16=False, or remove filter_groups."
        )
