"""TRL's own reward metrics and table of completions, with the numbers that are trained on.

TRL computes them from the reward functions' values and its own advantages, before ours are known.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.utils import nanstd

from agent_r1_trl.safe_text import shown_all
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batching import row_means


def correct_trl_logs(
    metrics: dict[str, list[float]],
    logs: dict[str, Any],
    trajectories: Sequence[Trajectory],
    output: dict[str, Any],
    args: Any,
    accelerator: Any,
    group_size: int,
) -> None:
    """Replace the last entries of `reward`, `reward_std`, `frac_reward_zero_std`, and of the table.

    The table gets the advantages that are trained on; its texts cannot control a terminal and hold no secrets.

    Args:
        metrics: TRL's, of training or evaluation.
        logs: TRL's columns of the table.
        trajectories: this rank's B.
        output: TRL's batch of their rows, with our masks and advantages.
        args: of the trainer.
        accelerator: of the trainer.
        group_size: trajectories of one prompt, which are consecutive rows.
    """
    returns = torch.tensor([item.total_reward for item in trajectories], device=output["advantages"].device)
    returns = accelerator.gather(returns.masked_fill(~output["in_baseline"], torch.nan))  # (N,)
    for name, value in return_metrics(returns, group_size=group_size, scale_rewards=args.scale_rewards).items():
        metrics[name][-1] = value
    mask = output["completion_mask"] * output["tool_mask"]  # (B, T)
    replace_last(logs["advantages"], accelerator.gather(row_means(output["advantages"], mask)).tolist())
    for column in (logs["prompt"], logs["completion"], *logs["extra"].values()):  # shown on the terminal
        replace_last(column, shown_all(list(column)[-len(returns) :]))


def return_metrics(returns: torch.Tensor, *, group_size: int, scale_rewards: str) -> dict[str, float]:
    """Mean and standard deviation of the returns, and the share of rows whose group has no spread, as TRL counts it.

    Args:
        returns: (N,) of all ranks, in data order; NaN for rows outside the baseline.
        group_size: trajectories of one prompt, which are consecutive rows.
        scale_rewards: with `batch`, the standard deviation of the batch stands for that of every group.
    """
    std = nanstd(returns)
    if scale_rewards == "batch":
        stds = std.unsqueeze(0)
    else:
        stds = nanstd(returns.view(-1, group_size), dim=1) if group_size > 1 else torch.zeros_like(returns)
    return {
        "reward": returns.nanmean().item(),
        "reward_std": std.item(),
        "frac_reward_zero_std": torch.isclose(stds, torch.zeros_like(stds)).float().mean().item(),
    }


TOKEN_MEANS = ("entropy", "kl", "clip_ratio/", "cispo_clip_ratio", "vespo/")
"""Beginnings of the names of TRL's means over the tokens of a micro-batch."""


def drop_token_means(metrics: dict[str, list[float]], *, in_rewards: bool) -> None:
    """Take TRL's means over the tokens of a micro-batch back: it had no token in the loss, and TRL wrote 0.

    Args:
        metrics: TRL's, whose NaN do not enter the averages that are logged.
        in_rewards: whether `kl` is not one of them, because the KL term stands in the rewards.
    """
    for name, values in metrics.items():
        if values and name.startswith(TOKEN_MEANS) and name != "entropy_coef" and not (in_rewards and name == "kl"):
            values[-1] = float("nan")


def replace_last(column: deque[Any], values: Sequence[Any]) -> None:
    """Put `values` in the place of the last ones; a full column has dropped the first of them."""
    for _ in range(min(len(column), len(values))):
        column.pop()
    column.extend(values)


def write_as_text(column: deque[Any]) -> None:
    """Write the conversations of a column of `log_completions` as text; a table of wandb takes no lists of messages.

    What is text already stays.
    """
    for index, value in enumerate(column):
        if isinstance(value, list):
            column[index] = "\n".join(_line(message) for message in value)


def with_plain_types(column: deque[Any]) -> None:
    """Make a column of `log_completions` one that a Parquet file can hold, whatever tools and functions put into it.

    What a tool call's `arguments`, a message's `content` and other nested values are differs from row to row: they
    become JSON. A column of a user's own whose values are of several types, or nested, becomes text.
    """
    kinds = {type(value) for value in column if value is not None}
    is_mixed = len(kinds) > 1 and not kinds <= {int, float}
    for index, value in enumerate(column):
        if isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value):
            column[index] = [{key: _plain(key, part) for key, part in message.items()} for message in value]
        elif value is not None and not isinstance(value, str) and (is_mixed or isinstance(value, dict | list | tuple)):
            column[index] = _json(value)


def _plain(key: str, value: Any) -> Any:
    if key != "tool_calls" or not isinstance(value, list):
        return value if value is None or isinstance(value, str) else _json(value)
    return [
        {name: {part: _plain(part, item) for part, item in value.items()} if isinstance(value, dict) else value
         for name, value in call.items()}
        for call in value
    ]  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _line(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    written = [_json(call.get("function", call)) for call in calls]
    content = message.get("content")
    said = content if isinstance(content, str) else _json(content)
    return " ".join(part for part in (f"{message.get('role')}:", said if content else "", *written) if part)
