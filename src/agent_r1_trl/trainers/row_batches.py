"""Deals the training rows of a rollout to optimizer steps, micro-batches and ranks, and weighs them in the loss.

Trajectories are shuffled and divided into micro-batches, as TRL does. Where they have several rows, all rows of one
are put into the optimizer step that it fell into, and within that step spread evenly over micro-batches and ranks
(`update/spreading.py`). The number of micro-batches stays.

`KeptRows`: rows that are not trained on, because a callback's `keep` said so, and optimizer steps in which none is,
which move neither weights, optimizer nor schedule. `for_own_loss`: what a `_compute_loss` that was written for TRL
reads of our micro-batches, advantages of (B,); those of (B, T) would broadcast in it to (B, B, T). Not covered: which
rows there are (`rollout_batch.py`).

transformers 5.17 and accelerate 1.15 names that this file touches: `optimizer` and its `_is_overflow`,
`accelerator.optimizer_step_was_skipped`, `state`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from trl import GRPOTrainer

from agent_r1_trl.advantages.gae import extend_turn_ids
from agent_r1_trl.errors import RunError
from agent_r1_trl.trainers.agreement import is_main_process
from agent_r1_trl.trainers.callbacks import OptimizerStep
from agent_r1_trl.trainers.rollout_batch import TrainingRows
from agent_r1_trl.update.batching import Inputs, join_rows, loss_masks, pad_right, policy_scale, take_rows
from agent_r1_trl.update.micro_batches import STANDS_FOR
from agent_r1_trl.update.spreading import deal_all_rows, spread_rows

logger = logging.getLogger(__name__)

IS_KEPT = "is_kept"
"""Entry of TRL's batch, (R,): whether the row is trained on; only where a callback has said so."""
HAS_SIGNAL = "has_signal"
"""Entry of a micro-batch: whether its optimizer step trains on any row of this rollout."""


class KeptRows:
    """Takes rows out of the update of a run, and skips the steps that are left without any.

    Args:
        args: of the trainer.
        accelerator: of the trainer.
    """

    def __init__(self, args: Any, accelerator: Any) -> None:
        self._args, self._accelerator = args, accelerator
        self._is_engine = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the steps of an earlier run."""
        self.num_skipped = 0
        """Optimizer steps skipped because nothing was kept, of this run, or since it was resumed."""
        self._signals: list[tuple[bool, float]] = []
        """For each micro-batch of the pending optimizer step, whether its rollout has any row that is kept, and how
        many micro-batches it stands for."""

    # ---------------------------------------------------------------- a rollout

    def rows_to_score(self, rows: TrainingRows, is_kept: torch.Tensor | None, beta: float) -> list[int] | None:
        """Which of R rows need old and reference log-probs; None for all. All ranks must call it.

        Args:
            rows: of this rank.
            is_kept: (B,) bool.
            beta: weight of the KL term; 0 needs no reference.

        Returns:
            Full forward passes, equally many on all ranks: a row may be there more than once.
        """
        args = self._args
        has_scores = beta != 0 or args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations)
        is_read = args.use_vllm or args.kl_placement == "reward" or getattr(args, "critic_uses_filtered", False)
        if is_kept is None or not has_scores or is_read:
            return None
        kept = rows.expand(is_kept).nonzero().flatten().tolist()
        size = args.per_device_train_batch_size
        most = max(1, *gather_object([len(kept)]))
        num = -(-most // size) * size
        return [*kept, *[0] * num][:num] if num < len(rows) else None

    def apply(self, buffer: list[Inputs]) -> list[Inputs]:
        """The micro-batches of a rollout without the rows that are not trained on. All ranks must call it.

        Their scales for lost rows (`set_live_scales`) must be counted anew.
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
        """Take the tokens of rows that are not kept out of the losses.

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
        """The loss of a micro-batch, taken note of.

        With DeepSpeed, which makes the optimizer step inside the backward pass, NaN in a step without rows: then it
        makes none.
        """
        is_poisoned = self.must_skip(inputs)
        self._signals.append((bool(inputs.get(HAS_SIGNAL, True)), inputs.get(STANDS_FOR, 1.0)))
        return loss * math.nan if is_poisoned else loss

    def must_skip(self, inputs: Inputs) -> bool:
        """Whether this micro-batch is the last of a step without rows, which DeepSpeed would make."""
        has_signal = self._has_signal or bool(inputs.get(HAS_SIGNAL, True))
        return self._is_engine and self._accelerator.sync_gradients and not has_signal

    def rescale(self, model: torch.nn.Module) -> None:
        """Make the gradients of an optimizer step over several rollouts a mean over those that have rows.

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
        """Whether any rollout of the optimizer step under way has rows, as far as it was trained on."""
        return any(has_signal for has_signal, _ in self._signals)

    def end_step(self, trainer: Any, model: Any, norms: Sequence[Any]) -> bool:
        """Ask the callbacks about an optimizer step, and skip it if one says so or it has nothing to train on.

        Args:
            trainer: whose step it is.
            model: as it is trained.
            norms: the gradient norms of all its parameters.

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
            self._say_skipped(step.number, trainer.features.leave_out)
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

    def _say_skipped(self, number: int, leave_out: Sequence[str]) -> None:
        self.num_skipped += 1
        if is_main_process() and self.num_skipped == 1:
            logger.warning(
                "Optimizer step %d was skipped, because %s left no trajectory of the rollout for it. Further ones are "
                "only counted, as filter/skipped_steps.",
                number + 1,
                " and ".join(leave_out) or "a callback's keep",
            )


NUM_TOKENS = "trajectory_tokens"
"""Entry of a micro-batch, (R,): tokens in the loss of the trajectory that the row belongs to."""
NUM_TRAJECTORIES = "num_trajectories"
"""Entry of a micro-batch: trajectories in the baseline of its optimizer step, on all ranks, per micro-batch of TRL's
accumulation (their number, unless a rollout is a part of an optimizer step)."""
TURN_SHARES = "turn_shares"
"""Entry of a micro-batch with `loss_unit="turn"`, (R, T): one over the tokens of its turn, at tokens in the loss."""
NUM_TURNS = "num_turns"
"""As `NUM_TRAJECTORIES`, the turns that have tokens in the loss."""
_IS_FIRST = "is_first_row"


class RowBatches:
    """Makes the micro-batches of a rollout.

    Args:
        kept_rows: of the run.
        args: a `MultiTurnConfig`.
        accelerator: of the trainer.
    """

    def __init__(self, kept_rows: KeptRows, args: Any, accelerator: Any) -> None:
        self._kept_rows, self._args, self._accelerator = kept_rows, args, accelerator

    def add_shares(self, output: Inputs, rows: TrainingRows, *, is_training: bool) -> None:
        """Put into TRL's batch what the weights of rows in the loss are made of, where a trajectory has several.

        All ranks must call it.

        Args:
            output: of R rows.
            rows: of the batch.
            is_training: whether the batch will be dealt; otherwise it is one micro-batch.
        """
        if not rows.is_split:
            return
        loss_tokens = (output["completion_mask"] * output["tool_mask"]).sum(dim=1)  # (R,)
        output[NUM_TOKENS] = rows.expand(rows.total(loss_tokens))
        if self._args.loss_unit == "turn":
            output[TURN_SHARES] = turn_shares(output, rows)
        output[_IS_FIRST] = torch.tensor(rows.is_first, device=loss_tokens.device)
        if not is_training:
            self._count(output, torch.ones_like(output[_IS_FIRST]), [output], share=1.0)

    def deal(self, output: Inputs, rows: TrainingRows, order: torch.Tensor) -> list[Inputs]:
        """The micro-batches of a rollout, `steps_per_generation` of them. All ranks must call it.

        Args:
            output: TRL's batch of R rows.
            rows: of the batch.
            order: (B,) the trajectories in the order in which they are trained on.
        """
        number = self._args.steps_per_generation
        if not rows.is_split:
            return self._kept_rows.apply([take_rows(output, part) for part in order.chunk(number)])
        return self._deal_rows(output, rows.index, [part.tolist() for part in order.chunk(number)])

    def _deal_rows(self, rows: Inputs, index: list[int], parts: list[list[int]]) -> list[Inputs]:
        """Put the rows of each trajectory into the optimizer step that it fell into.

        Rows that are not kept leave the update here, as `KeptRows.apply` has it for whole trajectories.

        Args:
            rows: TRL's batch of R rows.
            index: of each row its trajectory.
            parts: of each micro-batch its trajectories, in the order of training.
        """
        per_step = self._args.gradient_accumulation_steps
        width = per_step if len(parts) % per_step == 0 else len(parts)
        num_steps, num_kept = len(parts) // width, None
        step_of = {trajectory: number // width for number, part in enumerate(parts) for trajectory in part}
        is_trained = torch.ones_like(rows[_IS_FIRST])
        if IS_KEPT in rows:
            kept, for_critic = self._kept_rows.take_out(rows)
            is_trained = is_trained if for_critic else kept
            of_kept = {item for item, is_kept in zip(index, kept.tolist(), strict=True) if is_kept}
            step_of, num_kept = self._take_turns([*step_of], of_kept, num_steps)
        # Rows that fill up are in no step.
        steps = torch.tensor([step_of.get(item, -1) for item in index], device=is_trained.device)
        dealt: list[Inputs] = []
        for step in range(num_steps):
            in_step = steps == step
            window, _ = spread_rows(
                rows,
                in_step & is_trained,
                num_micro_batches=width,
                steps_per_update=width,
                accelerator=self._accelerator,
            )
            self._count(rows, in_step, window, share=width / per_step)
            dealt += window
        if num_kept is None:
            return dealt
        return self._kept_rows.mark_signal(dealt, [number // width < num_kept for number in range(len(dealt))])

    def _take_turns(self, order: list[int], kept: set[int], num_steps: int) -> tuple[dict[int, int], int]:
        """Spread trajectories evenly over the optimizer steps, first those that are kept and then the others.

        All ranks must call it.

        Args:
            order: this rank's trajectories in the order of training.
            kept: those that the filter leaves in the update.
            num_steps: optimizer steps of this rollout.

        Returns:
            The step of each trajectory, and how many are kept on all ranks: with fewer of them than steps, the steps
            from that number on have none.
        """
        own = [[index for index in order if index in kept], [index for index in order if index not in kept]]
        counts = gather_object([[len(part) for part in own]])  # (ranks, 2)
        step_of: dict[int, int] = {}
        before = 0
        for part, of_ranks in zip(own, zip(*counts, strict=True), strict=True):
            first = before + sum(of_ranks[: self._accelerator.process_index])
            step_of |= {index: (first + place) % num_steps for place, index in enumerate(part)}
            before += sum(of_ranks)
        return step_of, sum(num_kept for num_kept, _ in counts)

    def _count(self, rows: Inputs, in_step: torch.Tensor, window: list[Inputs], *, share: float) -> None:
        """Count the trajectories of an optimizer step, and its turns if the loss weighs these.

        Args:
            rows: this rank's R.
            in_step: (R,) bool, those of the step.
            window: its micro-batches.
            share: micro-batches of the step in this rollout, by those of TRL's accumulation.
        """
        live = (rows["in_baseline"] & rows[_IS_FIRST] & in_step).sum().float()
        live = self._accelerator.reduce(live, reduction="sum").clamp(min=1) / share
        for inputs in window:
            inputs.pop(_IS_FIRST, None)
            inputs[NUM_TRAJECTORIES] = live
        if TURN_SHARES in rows:
            shares = (rows[TURN_SHARES] * rows["tool_mask"])[in_step]  # filtered ones have left the mask
            turns = self._accelerator.reduce(shares.sum(), reduction="sum").round().clamp(min=1) / share
            for inputs in window:
                inputs[NUM_TURNS] = turns


# -------------------------------------------------------------------- weights in the loss


def turn_shares(output: Inputs, rows: TrainingRows) -> torch.Tensor:
    """(R, T) one over the tokens of its turn that are in the loss, at each of these; 0 elsewhere.

    Args:
        output: TRL's batch of R rows.
        rows: of the batch.
    """
    mask = output["completion_mask"] * output["tool_mask"]  # (R, T)
    turn_ids = pad_right([row.turn_ids for row in rows.rows], -1, length=mask.shape[1], dtype=torch.long)
    turns = extend_turn_ids(turn_ids.to(mask.device), mask).clamp(min=0)  # (R, T)
    in_loss = mask.float()
    counts = in_loss.new_zeros(len(turns), int(turns.max()) + 1).scatter_add(1, turns, in_loss)  # (R, K)
    return in_loss / counts.gather(1, turns).clamp(min=1)


def row_weights(inputs: Inputs, trainer: Any) -> torch.Tensor | None:
    """(M, 1) what the loss of each row of a micro-batch is multiplied by; None where TRL's own weights stand.

    With `loss_unit="turn"`, (M, T): what that of each token is multiplied by.

    TRL's loss types divide by rows, by micro-batches, or by tokens. Here every token gets the weight that it would
    have if its trajectory were one row, or that `loss_unit` asks for.

    Args:
        inputs: M rows.
        trainer: in whose loss they are.
    """
    if NUM_TOKENS not in inputs:
        return None
    args, kind, unit = trainer.args, trainer.loss_type, trainer.args.loss_unit
    is_training, num_ranks = trainer.model.training, trainer.accelerator.num_processes
    tokens = (inputs["completion_mask"] * inputs["tool_mask"]).sum(dim=1).clamp(min=1).float()  # (M,)
    of_trajectory = inputs[NUM_TOKENS].clamp(min=1).float()  # (M,)
    per_trajectory = num_ranks / inputs[NUM_TRAJECTORIES]
    steps = trainer.current_gradient_accumulation_steps if is_training else 1
    batch = inputs["num_items_in_batch"].clamp(min=1).float() / num_ranks
    per_token = 1 / (batch * steps / args.steps_per_generation if is_training else batch)
    length = trainer.max_completion_length
    natural = {  # the weight of a token that TRL gives, and that of a trajectory which is one row
        "grpo": (1 / (tokens * len(tokens) * steps), per_trajectory / of_trajectory),
        "dr_grpo": (1 / (len(tokens) * length * steps) + 0 * tokens, per_trajectory / length + 0 * tokens),
        "luspo": (1 / (len(tokens) * steps) + 0 * tokens, per_trajectory + 0 * tokens),
        "bnpo": (1 / (tokens_of(inputs) * steps) + 0 * tokens, None),
        "dapo": (per_token + 0 * tokens, None),
    }
    given, wanted = natural[{"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(kind, kind)]
    if unit == "turn":
        return num_ranks / inputs[NUM_TURNS] * inputs[TURN_SHARES] / given.unsqueeze(1)
    if unit == "token":
        wanted = per_token + 0 * tokens
    elif unit == "trajectory":
        wanted = per_trajectory / of_trajectory
    elif wanted is None:
        wanted = given * (inputs["micro_batch_scale"] if kind == "bnpo" and "micro_batch_scale" in inputs else 1.0)
    return (wanted / given).unsqueeze(1)


def tokens_of(inputs: Inputs) -> torch.Tensor:
    """Number of tokens in the loss, at least 1."""
    return (inputs["completion_mask"] * inputs["tool_mask"]).sum().clamp(min=1).float()


def policy_weights(inputs: Inputs, trainer: Any) -> tuple[Any, Any]:
    """What the advantages of a micro-batch are multiplied by, and the weight of its KL term."""
    weights = row_weights(inputs, trainer)
    if weights is not None:
        return weights, WeightedBeta(trainer.beta, weights)
    scale = policy_scale(inputs, trainer.loss_type)
    return scale, trainer.beta * scale


class WeightedBeta:
    """The weight of the KL term, times one of each row or token, as TRL's loss reads it."""

    def __init__(self, beta: float, weights: torch.Tensor) -> None:
        self._beta, self._weights = beta, weights

    def __eq__(self, other: object) -> bool:
        return self._beta == other

    __hash__ = None  # type: ignore[assignment]

    def __mul__(self, kl: torch.Tensor) -> torch.Tensor:
        return self._beta * self._weights * kl


TOKEN_ADVANTAGES = "token_advantages"
"""Entry of a micro-batch that such a loss gets where `advantages` cannot be (B,): they are (B, T)."""


def is_own_loss(compute_loss: Any) -> bool:
    """Whether a `_compute_loss` is neither ours nor TRL's."""
    module = getattr(compute_loss, "__module__", None) or ""
    return module != GRPOTrainer.__module__ and not module.startswith(__name__.partition(".")[0] + ".")


def for_own_loss(inputs: Inputs, trainer: Any) -> Inputs:
    """A micro-batch whose advantages are (B,), or that says why they cannot be as soon as they are read.

    A loss that leaves them to ours, by `super()._compute_loss`, gets along with any.
    """
    token_advantages = inputs["advantages"]  # (B, T)
    if token_advantages.dim() == 1:  # a subclass has put others there
        return inputs
    mask = loss_masks(inputs)[0].bool()
    numbers = token_advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))  # (B, 1)
    reason = _why_not(inputs, trainer)
    differs = mask & (token_advantages != numbers) & ~token_advantages.isnan()
    if reason is None and bool(differs.any()):
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
    args = trainer.args
    if "value_mask" in inputs:
        return "with a critic every token has its own, and the critic's loss stands in super()._compute_loss"
    if NUM_TOKENS in inputs:
        settings = f"context.policy={args.context.policy!r}, loss_unit={args.loss_unit!r}"
        return f"a trajectory may have several rows ({settings})"
    if HAS_SIGNAL in inputs:
        return "sampling.filter_groups leaves micro-batches with different numbers of rows"
    if args.max_tokens_per_micro_batch is not None:
        return (
            f"max_tokens_per_micro_batch={args.max_tokens_per_micro_batch} makes micro-batches with different numbers "
            "of rows"
        )
    if args.kl_placement == "reward" and trainer.beta != 0:
        return "kl_placement='reward' has the KL term in them already, which a loss that reads self.beta adds again"
    return None
