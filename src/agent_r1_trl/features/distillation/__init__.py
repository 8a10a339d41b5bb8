"""Self-distillation on the same rollouts: the policy learns from itself as it would act if it knew more.

The teacher is the same weights, after a prompt that also holds a hint: a column of the data set, the best trajectory
of the group, or what a function says. With the log-probs of what was sampled, S of the student and T of the teacher,

    d = clip(T - S, -2, 2)        term = -weight * mean of d * g(d) * S,   d and g without gradients

over the action tokens of trajectories that have a hint. The gate g is sigmoid(5 d) (SDAR's, in the sign of d), or 1
(`signed`). `raise` leaves out d: sigmoid(5 d) alone, as SDAR was released, which only ever raises what was sampled.

    trainer = MultiTurnGRPOTrainer(..., callbacks=[SelfDistillation("solution", weight=0.1)])

In a recipe: `callbacks: [my_file.py:distillation]`, an object of this class. It is logged as `distillation`.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from agent_r1_trl.chat.messages import as_text
from agent_r1_trl.settings import NotNegative, Positive, check_value
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.log_means import TokenMean
from agent_r1_trl.trainers.rewards import wait_for
from agent_r1_trl.trajectory import Message, Trajectory
from agent_r1_trl.update.entries import IS_KEPT, KEPT_IDS, Inputs
from agent_r1_trl.update.rows import pad_tokens

if TYPE_CHECKING:
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer
    from agent_r1_trl.update.rows import TrainingRows

logger = logging.getLogger(__name__)

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": lambda d: d * torch.sigmoid(5 * d),
    "signed": lambda d: d,
    "raise": lambda d: torch.sigmoid(5 * d),
}
"""The factor of a token's log-prob, of the clipped difference of teacher and student."""
SIBLING = "sibling"


class SelfDistillation(RolloutCallback):
    """A loss term that pulls the policy towards itself with a hint.

    Args:
        context: where the hint of a trajectory comes from: a column of the data set; "sibling", the best trajectory of
            its group that earned more; or a function, plain or async, of the trajectory and its row of the data set.
            None or "" is no hint, and such a trajectory has no term.
        weight: of the term.
        gate: `sigmoid`, `signed` or `raise`.
        text: how the hint is put behind the prompt's last user message.
        clip: largest |T - S|.
        ratio_cap: largest weight of a token that has become more likely since it was sampled (`num_iterations`,
            `rollouts_ahead`).

    Raises:
        ValueError: for an unknown gate, a `text` without {hint}, or a number out of range.
    """

    name = "distillation"

    def __init__(
        self,
        context: str | Callable[[Trajectory, dict[str, Any]], Any] = SIBLING,
        *,
        weight: float = 0.1,
        gate: str = "sigmoid",
        text: str = "\n\nHint: {hint}",
        clip: float = 2.0,
        ratio_cap: float = 2.0,
    ) -> None:
        if gate not in GATES:
            raise ValueError(f"gate={gate!r} is not one of {', '.join(map(repr, GATES))}. Set gate to one of them.")
        if "{hint}" not in text:
            raise ValueError(f"text={text!r} has no {{hint}}, the place of the hint. Add it.")
        for option, value, rule in (
            ("weight", weight, NotNegative),
            ("clip", clip, Positive),
            ("ratio_cap", ratio_cap, Positive),
        ):
            check_value(f"SelfDistillation.{option}", value, rule)
        self.context = context
        self.weight = weight
        self.gate = gate
        self.text = text
        self.clip, self.ratio_cap = clip, ratio_cap

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """The trainer is made.

        Raises:
            ValueError: hints are to come from siblings, and there are none, or from a column that a data set lacks.
        """
        super().attach(trainer)
        if self.context == SIBLING and trainer.num_generations < 2:
            raise ValueError(
                "SelfDistillation(context='sibling') with num_generations=1: a trajectory has no siblings. Set "
                "num_generations to 2 or more, or pass a column of the data set or a function."
            )
        evaluated = trainer.eval_dataset
        for data in (trainer.train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])):
            if isinstance(data, Dataset) and data.format["type"] != "custom":  # else rows are read as they come
                self._check_columns(data.column_names)

    def _check_columns(self, columns: Iterable[str]) -> None:
        if isinstance(self.context, str) and self.context not in (SIBLING, *columns):
            raise ValueError(
                f"SelfDistillation(context={self.context!r}): the data set has no such column, only "
                f"{', '.join(sorted(columns))}. Name one that training and evaluation data have, 'sibling', or pass a "
                "function."
            )

    # ---------------------------------------------------------------- hints

    def hints(self, trajectories: Sequence[Trajectory]) -> list[str | None]:
        """The hint of each of this rank's trajectories. All ranks must call it."""
        if self.context == SIBLING:
            return self._siblings(trajectories)
        examples = self.trainer.last_batch.rows
        if isinstance(self.context, str):
            for row in examples:
                self._check_columns(row)
            return [row[self.context] for row in examples]
        return [wait_for(self.context(item, row)) for item, row in zip(trajectories, examples, strict=True)]

    def _siblings(self, trajectories: Sequence[Trajectory]) -> list[str | None]:
        """For each trajectory the turns of the best one of its group; None where that is no better."""
        size, rank = self.trainer._group_size, self.trainer.accelerator.process_index
        own = [(item.total_reward, _said(item)) if item.in_baseline else (-torch.inf, "") for item in trajectories]
        everywhere = gather_object(own)
        found: list[str | None] = []
        for place, (reward, _) in enumerate(own, start=rank * len(trajectories)):
            start = place - place % size
            best_reward, best_turns = max(everywhere[start : start + size])
            found.append(best_turns if best_reward > reward else None)
        return found

    def _hinted(self, item: Trajectory, hint: str | None) -> list[int] | None:
        """The prompt's ids with the hint; None where there is no hint, or no place for it."""
        last = max((i for i, message in enumerate(item.prompt_messages) if message["role"] == "user"), default=None)
        if hint in (None, "", []) or last is None:
            return None
        message = item.prompt_messages[last]
        longer = [*item.prompt_messages]
        content = as_text(message.get("content"), "the prompt")
        longer[last] = {**message, "content": content + self.text.replace("{hint}", str(hint))}
        plain, hinted = (self.trainer.chat.encode_prompt(messages) for messages in (item.prompt_messages, longer))
        num_same = 0
        while num_same < min(len(plain), len(hinted)) and plain[num_same] == hinted[num_same]:
            num_same += 1
        # Tools, which are not known here, stand before what both begin with ends.
        place = len(item.prompt_ids) - (len(plain) - num_same)
        if item.prompt_ids[place:] != plain[num_same:]:
            _warn_of_template()
            return None
        return [*item.prompt_ids[:place], *hinted[num_same:]]

    # ---------------------------------------------------------------- the term

    def extra_columns(
        self, output: Inputs, trajectories: Sequence[Trajectory], rows: TrainingRows
    ) -> Mapping[str, torch.Tensor]:
        """`NAME/teacher`, (R, T) its log-probs, `NAME/is_action`, (R, T), and `NAME/has_teacher`, (R,).

        NAME is `distillation`, or another.

        A row whose context was rewritten has none, nor one that with its hint is longer than the model's context.
        """
        prompts = [self._hinted(*pair) for pair in zip(trajectories, self.hints(trajectories), strict=True)]
        most = self.trainer.rollouts.limits.max_model_length or math.inf
        chosen = []
        for number, index in enumerate(rows.index.tolist()):
            if index < 0 or not trajectories[index].in_baseline:
                continue
            row, prompt = rows.rows[number], prompts[index]
            is_rewritten = row.prompt_ids != trajectories[index].prompt_ids
            if prompt and not is_rewritten and len(prompt) + len(row.completion_ids) <= most:
                chosen.append(number)
        device = output["completion_mask"].device
        places = torch.tensor(chosen, dtype=torch.long)
        kept = output[KEPT_IDS][places] if KEPT_IDS in output else None
        hinted = [prompts[index] or [] for index in rows.index[places].tolist()]
        log_probs = self.trainer.score_tokens(hinted, [rows.rows[n].completion_ids for n in chosen], kept)
        teacher = torch.zeros(output["completion_mask"].shape, device=device)
        teacher[places.to(device), : log_probs.shape[1]] = log_probs.float()
        has_teacher = torch.zeros(len(rows), dtype=torch.bool, device=device)
        has_teacher[places.to(device)] = True
        share = torch.tensor(len({*rows.index[places].tolist()}) / len(trajectories), device=device)
        share = self.trainer.accelerator.reduce(share, reduction="mean")
        self.trainer.add_metrics({f"{self.name}/hinted_share": share.item()})
        is_action = pad_tokens(rows.rows, "action_mask", 0, teacher.shape[1]).bool().to(device)
        columns = {"teacher": teacher, "is_action": is_action, "has_teacher": has_teacher}
        return {f"{self.name}/{name}": column for name, column in columns.items()}

    def extra_tokens(self, inputs: Inputs) -> torch.Tensor:
        """The action tokens of rows with a teacher; with a weight, also of groups that a filter has left out."""
        in_loss = (inputs["completion_mask"] * inputs["tool_mask"]).bool()  # without `loss_mask` observations, too
        if self.weight == 0 and IS_KEPT in inputs:  # rows that come back for nothing would cost a pass
            in_loss = in_loss & inputs[IS_KEPT].unsqueeze(1)
        return in_loss & inputs[f"{self.name}/is_action"] & inputs[f"{self.name}/has_teacher"].unsqueeze(1)

    def extra_loss(self, inputs: Inputs, log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The term, summed over the tokens of `mask`; logs the mean of T - S."""
        student = log_probs.detach()
        gap = torch.where(mask, inputs[f"{self.name}/teacher"] - student, 0.0)
        sums = torch.stack([gap.sum().double(), mask.sum().double()])
        total, count = self.trainer.accelerator.reduce(sums, reduction="sum").tolist()
        self.trainer.add_metrics({f"{self.name}/gap": TokenMean(total / max(1.0, count), count)})
        weights = GATES[self.gate](gap.clamp(-self.clip, self.clip))
        if (sampled := self._log_probs_then(inputs)) is not None:
            weights = weights * (student - sampled).exp().clamp(max=self.ratio_cap)
        return -self.weight * (weights * log_probs * mask).sum()

    def _log_probs_then(self, inputs: Inputs) -> torch.Tensor | None:
        """(B, T) the log-probs of the tokens when they were sampled; None where the policy is still that one."""
        old = inputs.get("old_per_token_logps")
        sampled = inputs.get("sampling_per_token_logps")
        if old is None or sampled is None or not self.trainer.args.rollouts_ahead:
            return old
        return torch.where(sampled.isnan(), old, sampled)


def _said(item: Trajectory) -> str:
    """A trajectory's turns, as a hint for its siblings."""
    texts = [_text(turn.message) for turn in item.env_turns]
    return "\n".join(text for text in texts if text)


def _text(message: Message) -> str:
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [str(message.get("content") or ""), *calls]))


@functools.cache
def _warn_of_template() -> None:
    logger.warning(
        "SelfDistillation finds no place for a hint in what the chat template made of a prompt. Such trajectories "
        "have no term."
    )
