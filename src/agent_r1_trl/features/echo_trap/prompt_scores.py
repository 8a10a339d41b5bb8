"""How much the reasoning of a rollout depends on its prompt: every reasoning is scored after every prompt.

With P prompts in a rollout of all ranks that is P x P rows of forward passes without gradients, of a prompt and one
reasoning each; the update has P times the group size. The rows are shared out evenly, so that all ranks make the same
number of forward passes, which sharded weights need.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from agent_r1_trl.features.echo_trap.mutual_information import mutual_information
from agent_r1_trl.rollout.limits import context_length
from agent_r1_trl.trainers.callbacks import is_main_process
from agent_r1_trl.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Reasoning:
    """The first reasoning of one trajectory."""

    group: int
    prompt_ids: list[int]
    ids: list[int]
    """From the end of the prompt to the end of the reasoning."""
    num_before: int
    """Ids at the beginning that the policy did not sample, such as an opener that the template forces."""


def prompt_dependence(trainer: Any, trajectories: Sequence[Trajectory], group_size: int) -> dict[str, float]:
    """Mutual information and retrieval accuracy of this rollout; nothing with fewer than two prompts.

    All ranks must call it. It draws no random number that the training would see.

    Args:
        trainer: whose policy scores.
        trajectories: this rank's, in data order; groups are consecutive over all ranks.
        group_size: trajectories of one prompt.
    """
    first = trainer.accelerator.process_index * len(trajectories)
    own: dict[int, Trajectory] = {}
    for place, item in enumerate(trajectories, start=first):
        if item.in_baseline and item.turns and item.turns[0].end > item.turns[0].start:
            own.setdefault(place // group_size, item)
    found = [first_reasoning(item, trainer._tokenizer, group) for group, item in own.items()]
    chosen: dict[int, Reasoning] = {}
    for reasoning in gather_object(found):
        chosen.setdefault(reasoning.group, reasoning)  # a group may lie on two ranks
    if len(chosen) < 2 or not _fits(trainer, list(chosen.values())):
        return {}
    scores = cross_scores(trainer, [chosen[group] for group in sorted(chosen)])
    lengths = [len(item.ids) - item.num_before for _, item in sorted(chosen.items())]
    if not all(math.isfinite(value) for row in scores for value in row):
        return {}
    information, retrieval = mutual_information(scores, lengths)
    return {"mutual_information": information, "retrieval_accuracy": retrieval}


def _fits(trainer: Any, reasonings: Sequence[Reasoning]) -> bool:
    """Whether the longest reasoning fits behind the longest prompt, which no trajectory has shown."""
    limit = context_length(trainer.accelerator.unwrap_model(trainer.model).config)
    length = max(len(item.prompt_ids) for item in reasonings) + max(len(item.ids) for item in reasonings)
    if limit is None or length <= limit:
        return True
    if is_main_process():
        logger.warning(
            "Step %d has no mutual_information: the longest prompt and the longest first turn have %d tokens "
            "together, and the model's context is %d. Shorter turns (max_tokens_per_turn) or prompts would fit.",
            trainer.state.global_step,
            length,
            limit,
        )
    return False


def first_reasoning(trajectory: Trajectory, tokenizer: Any, group: int) -> Reasoning:
    """The reasoning of the first turn; the whole turn where it has none that the chat format tells apart.

    Args:
        trajectory: whose first turn has a token.
        tokenizer: of the policy.
        group: number of its group.
    """
    turn = trajectory.turns[0]
    sampled = trajectory.completion_ids[turn.start : turn.end]
    thought = str(turn.message.get("reasoning_content") or "").strip()
    length = len(sampled)
    if thought and thought in tokenizer.decode(sampled):
        low, high = 1, len(sampled)  # the fewest tokens that spell the reasoning
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if thought in tokenizer.decode(sampled[:middle]) else (middle + 1, high)
        length = low
    ids = trajectory.completion_ids[: turn.start + length]
    return Reasoning(group=group, prompt_ids=trajectory.prompt_ids, ids=ids, num_before=turn.start)


@torch.no_grad()
def cross_scores(trainer: Any, reasonings: Sequence[Reasoning]) -> list[list[float]]:
    """(P, P) the sum of the log-probs of reasoning i after prompt j. All ranks must call it.

    Args:
        trainer: whose policy scores, in the layout of its update.
        reasonings: P of them, the same on all ranks.
    """
    accelerator, num = trainer.accelerator, len(reasonings)
    pairs = [(i, j) for i in range(num) for j in range(num)]
    share = -(-len(pairs) // accelerator.num_processes)
    start = accelerator.process_index * share
    own = [pairs[place % len(pairs)] for place in range(start, start + share)]  # the last rank's may be repeated
    own.sort(key=lambda pair: len(reasonings[pair[0]].ids) + len(reasonings[pair[1]].prompt_ids))
    size = trainer.args.per_device_train_batch_size
    scores: dict[tuple[int, int], float] = {}
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for place in range(0, len(own), size):
            chunk = own[place : place + size]
            rows = [(reasonings[j].prompt_ids, reasonings[i].ids, reasonings[i].num_before) for i, j in chunk]
            scores |= dict(zip(chunk, _sums(trainer, rows), strict=True))
    for other in gather_object([scores]):
        scores |= other
    return [[scores[i, j] for j in range(num)] for i in range(num)]


def _sums(trainer: Any, rows: Sequence[tuple[list[int], list[int], int]]) -> list[float]:
    """Sums of log-probs of one forward pass; a row is a prompt, a completion, and how much of that is not scored."""
    num_prompt = max(len(prompt) for prompt, _, _ in rows)
    length = max(len(ids) for _, ids, _ in rows)
    pad = trainer._tokenizer.pad_token_id
    input_ids, attention, scored = [], [], []
    for prompt, ids, num_before in rows:
        left, right = num_prompt - len(prompt), length - len(ids)
        input_ids.append([*[pad] * left, *prompt, *ids, *[pad] * right])
        attention.append([*[0] * left, *[1] * (len(prompt) + len(ids)), *[0] * right])
        scored.append([*[0] * num_before, *[1] * (len(ids) - num_before), *[0] * right])
    device = trainer.accelerator.device
    log_probs, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.tensor(input_ids, device=device),
        torch.tensor(attention, device=device),
        length,
        batch_size=len(rows),
    )
    mask = torch.tensor(scored, device=device).bool()
    return log_probs.double().masked_fill(~mask, 0.0).sum(dim=1).tolist()
