"""The metrics of a batch of trajectories. `docs/metrics.md` defines each.

Averages are per trajectory, never per row or token, unless the name says otherwise.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl import GRPOConfig
from trl.trainer.utils import nanstd

from agent_r1_trl.rewards.function import RunningTotal
from agent_r1_trl.safe_text import shown_all
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.trajectory import Author, StopReason, Trajectory
from agent_r1_trl.update.batches import row_means
from agent_r1_trl.update.entries import Inputs

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)


def has_advantage(batch: UpdateBatch, output: Inputs) -> torch.Tensor:
    """(B,) bool, which of this rank's trajectories have a token in the loss with an advantage other than 0."""
    mask = (output["completion_mask"] * output["tool_mask"]).bool()  # (R, T)
    rows = ((output["advantages"] != 0) & mask).any(dim=1)  # (R,)
    return batch.training_rows.total(rows.float()) > 0


def gather_metrics(
    batch: UpdateBatch, output: Inputs, compared: Sequence[Sequence[float]], *, group_size: int
) -> tuple[dict[str, float], int]:
    """Metrics of the trajectories of all ranks, in data order, and the number of prompt and sampled tokens in them.

    `compared`: for each of this rank's, the returns that it is compared by.
    """
    taught = has_advantage(batch, output)
    if batch.is_kept is not None:
        taught = taught & batch.is_kept
    own = [trajectory_record(item, returns) for item, returns in zip(batch.trajectories, compared, strict=True)]
    for record, is_taught in zip(own, taught.tolist(), strict=True):
        record["taught"] = is_taught
    records = gather_object(own)
    metrics = length_metrics(records) | rollout_metrics(records, num_generations=group_size)
    return metrics, sum(record["prompt_length"] + record["length"] for record in records)


RENAMED = {
    "rollout/infrastructure_failure_share": "rollout/lost_share",
    "tools/failure_share": "tools/call_error_share",
    "tools/failures/": "tools/call_errors/",
}
"""Earlier name of a metric, or its beginning -> its name."""


def trajectory_record(trajectory: Trajectory, compared: Sequence[float] | None = None) -> dict[str, Any]:
    """The few numbers that metrics need from one trajectory: small enough to gather over ranks.

    `compared`: the returns that it is compared by; None: its whole return.
    """
    parts: dict[str, float] = defaultdict(float)
    for source in (trajectory.reward_parts, *(turn.reward_parts for turn in trajectory.turns)):
        for name, value in source.items():
            parts[name] += value
    authors, stop = Counter(trajectory.authors), trajectory.stop_reason
    turns, results = trajectory.turns, trajectory.tool_results
    means = {
        "rollout/turns": len(trajectory.env_turns),
        "rollout/rows": 1 + sum(segment.prompt_ids is not None for segment in trajectory.segments),
        "rollout/invalid_turns": sum(turn.is_invalid for turn in turns),
        "rollout/tool_calls": len(results),
        "rollout/truncated_share": stop.is_truncated,
        "rollout/lost_share": stop.is_infrastructure_failure,
        "rollout/unscored_share": not trajectory.is_scored and not stop.is_infrastructure_failure,
        "rollout/replaced_share": bool(trajectory.failed_tries) and not stop.is_infrastructure_failure,
        "rollout/tries": 1 + len(trajectory.failed_tries),
        **{f"stop/{reason.value}": reason is stop for reason in StopReason},
        **{f"tokens/{author.value}": authors[author] for author in Author},
        "time/generate_s": math.fsum(turn.generate_s for turn in turns),
        "time/env_s": math.fsum(turn.env_s for turn in turns),
        **{f"env/{name}": value for name, value in trajectory.numbers.items()},
    }
    return {
        "means": means,
        "reward": trajectory.total_reward,
        "compared": [trajectory.total_reward] if compared is None else list(compared),
        "in_baseline": trajectory.in_baseline,
        "reward_means": {
            "reward/process": trajectory.process_reward,
            "reward/outcome": trajectory.outcome_reward,
            **{f"reward_parts/{name}": value for name, value in parts.items()},
        },
        "too_small": trajectory.is_group_too_small,
        "summaries": [turn.is_truncated for turn in turns if turn.is_summary],
        "calls": [(result.call.name, result.latency_s, result.queue_s, result.is_truncated) for result in results],
        "known_tools": [result.call.name for result in results if result.has_known_name],
        "errors": [result.error.value for result in results if result.error],
        "uncharged": sum(result.is_error and not result.is_charged for result in results),
        "duration_s": trajectory.duration_s,
        "prompt_length": len(trajectory.prompt_ids),
        "length": trajectory.num_action_tokens,  # as TRL counts it
        "is_clipped": stop.is_truncated or not trajectory.completion_ids,
    }


def rollout_metrics(records: Sequence[dict[str, Any]], *, num_generations: int) -> dict[str, float]:
    """Metrics of N trajectories in data order; consecutive runs of `num_generations` are one group.

    Trajectories outside the baseline count in `stop/*` and `rollout/*`, not in rewards.
    """
    if not records:
        return {}
    metrics = _reward_metrics(records, num_generations)
    of_all = [record["means"] for record in records]
    for name in dict.fromkeys(name for means in of_all for name in means):
        metrics[name] = _mean([means[name] for means in of_all if name in means])
    if metrics["rollout/rows"] == 1:
        del metrics["rollout/rows"]
    if summaries := [is_cut for record in records for is_cut in record["summaries"]]:
        metrics["rollout/summaries"] = len(summaries) / len(records)
        metrics["rollout/summary_truncated"] = _mean(summaries)
    metrics["time/longest_trajectory_s"] = max(record["duration_s"] for record in records)
    return metrics | _tool_metrics(records)


def length_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """TRL's `completions/*` of all trajectories."""
    lengths = [float(record["length"]) for record in records]
    ended = [float(record["length"]) for record in records if not record["is_clipped"]] or [0.0]
    metrics = {"completions/clipped_ratio": _mean([record["is_clipped"] for record in records])}
    for kind, values in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{kind}length"] = _mean(values)
        metrics[f"completions/min_{kind}length"] = min(values)
        metrics[f"completions/max_{kind}length"] = max(values)
    return metrics


def _reward_metrics(records: Sequence[dict[str, Any]], num_generations: int) -> dict[str, float]:
    means_of = [record["reward_means"] for record in records if record["in_baseline"]]
    sources = sorted({name for means in means_of for name in means})
    metrics = {}
    for name in ("reward/process", "reward/outcome", *sources):
        metrics[name] = _mean([means.get(name, 0.0) for means in means_of])
    groups = [records[start : start + num_generations] for start in range(0, len(records), num_generations)]
    metrics["group/too_small_share"] = _mean([any(record["too_small"] for record in group) for group in groups])
    compared = []
    for group in groups:
        members = [record for record in group if record["in_baseline"]]
        if len(members) > 1:
            compared.append(members)
    if not compared:
        return metrics
    spreads = [spread([record["compared"] for record in group]) for group in compared]
    metrics["group/reward_std"] = _mean([std for std, _ in spreads])
    metrics["group/zero_variance_share"] = _mean([not differs for _, differs in spreads])
    if all(record.get("taught") is not None for record in records):
        metrics["group/taught_share"] = _mean([any(record["taught"] for record in group) for group in compared])
    return metrics


def spread(group: Sequence[Sequence[float]]) -> tuple[float, bool]:
    """The standard deviation of the returns of a group's n members, and whether it is more than rounding.

    Each member has C returns; their variances are added up.

    >>> spread([[0.0, 1.0], [2.0, 1.0]])
    (1.4142135623730951, True)
    """
    stds, differs = [], False
    for column in zip(*group, strict=True):
        std = statistics.stdev(column)
        differs = differs or std > 1e-6 * max(abs(value) for value in column)
        stds.append(std)
    return math.hypot(*stds), differs


def _tool_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    calls = [call for record in records for call in record["calls"]]
    errors = Counter(error for record in records for error in record["errors"])
    num_read = len(calls) - errors["malformed"]  # to TRL, what cannot be read is no call
    num_uncharged = sum(record["uncharged"] for record in records)
    metrics = {
        "tools/call_error_share": sum(errors.values()) / len(calls) if calls else 0.0,
        "tools/uncharged_share": num_uncharged / len(calls) if calls else 0.0,
        "tools/call_frequency": num_read / len(records),
        "tools/failure_frequency": (sum(errors.values()) - errors["malformed"]) / num_read if num_read else 0.0,
    }
    metrics |= {f"tools/call_errors/{kind}": count / len(records) for kind, count in sorted(errors.items())}
    for name in sorted({name for record in records for name in record["known_tools"]}):
        of_tool = [(latency, wait, is_cut) for tool, latency, wait, is_cut in calls if tool == name]
        latencies, waits, cuts = zip(*of_tool, strict=True)
        metrics[f"tools/{name}/calls"] = len(latencies) / len(records)
        metrics[f"tools/{name}/latency_s"] = _mean(latencies)
        metrics[f"tools/{name}/latency_max_s"] = max(latencies)
        metrics[f"tools/{name}/queue_s"] = _mean(waits)
        metrics[f"tools/{name}/truncated_share"] = _mean(cuts)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def log_rewards(trainer: MultiTurnTrainer, batch: UpdateBatch, output: Inputs) -> None:
    """TRL's reward metrics and its table of completions, of all ranks, with what is trained on. All must call it.

    The table's texts cannot control a terminal and hold no secrets.
    """
    accelerator = trainer.accelerator
    metrics = trainer._metrics[trainer._mode]
    logs = trainer._logs
    values = accelerator.gather(batch.reward_values)  # (N, F)
    returns = torch.tensor([item.total_reward for item in batch.trajectories], device=values.device)
    returns = accelerator.gather(returns.masked_fill(~batch.in_baseline, torch.nan))  # (N,)
    for index, name in enumerate(trainer.reward_func_names):
        metrics[f"rewards/{name}/mean"].append(values[:, index].nanmean().item())
        metrics[f"rewards/{name}/std"].append(nanstd(values[:, index]).item())
        logs["rewards"][name].extend(values[:, index].tolist())
    size, scale = trainer._group_size, trainer.args.scale_rewards
    for name, value in return_metrics(returns, group_size=size, scale_rewards=scale).items():
        metrics[name].append(value)
    rows, mask = batch.training_rows, output["completion_mask"] * output["tool_mask"]  # (R, T)
    advantages = row_means(rows.to_time(output["advantages"]), rows.to_time(mask))
    logs["advantages"].extend(accelerator.gather(advantages).tolist())
    logs["prompt"].extend(shown_all(gather_object([item.prompt_messages for item in batch.trajectories])))
    logs["completion"].extend(shown_all(gather_object(batch.completions)))
    names = {*logs["extra"], *gather_object(list(batch.extra_columns))}  # also of batches that had none
    for name in sorted(names):  # the same order on all ranks
        column = batch.extra_columns.get(name, [None] * len(batch.rows))
        logs["extra"][name].extend(shown_all(gather_object(column)))
        logs["extra"][name].extendleft([None] * (len(logs["prompt"]) - len(logs["extra"][name])))
    _log_pending(trainer)


def _log_pending(trainer: MultiTurnTrainer) -> None:
    """Metrics that functions gave to `log_metric`, over all ranks."""
    accelerator, pending = trainer.accelerator, trainer._pending_metrics
    kinds = []
    for name, given in pending.items():
        kinds.append((name, any(isinstance(value, RunningTotal) for value in given)))
    # Sorted: the same order on all ranks, and a total on any rank is one.
    for name, is_total in dict(sorted(gather_object(kinds))).items():
        given = pending.get(name, [])
        stats = torch.tensor([sum(given), len(given)], dtype=torch.float32, device=accelerator.device)
        total, count = accelerator.gather(stats).view(-1, 2).sum(dim=0).tolist()
        mean = total / count
        trainer._metrics[trainer._mode][name].append(RunningTotal(mean) if is_total else mean)
    pending.clear()


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


def write_as_text(column: deque[Any]) -> None:
    """Make a column of `log_completions` one that every tracker and a Parquet file can hold.

    Conversations become text. What users gave to `log_extra` becomes JSON where it is nested or of several types.
    """
    kinds = {type(value) for value in column if value is not None}
    is_mixed = len(kinds) > 1 and not kinds <= {int, float}
    for index, value in enumerate(column):
        if value is None or isinstance(value, str):
            continue
        if isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value):
            column[index] = "\n".join(_line(message) for message in value)
        elif is_mixed or isinstance(value, dict | list | tuple):
            column[index] = _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _line(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    written = [_json(call.get("function", call)) for call in calls]
    content = message.get("content")
    said = content if isinstance(content, str) else _json(content)
    return " ".join(part for part in (f"{message.get('role')}:", said if content else "", *written) if part)


# -------------------------------------------------------------------- rounding
# Weights are about 0.02. There bfloat16's next number is 1.2e-4 away, so that an update of Adam, whose size is the
# learning rate, is lost whenever it is below half of that; nothing adds up over the steps. Of a model in bfloat16 at a
# learning rate of 1e-6, 2% of the weights had moved after 20 steps and no weight of a norm. DeepSpeed keeps a float32
# copy and is not warned of.

LEAST_RATE = 1e-4
"""Smallest learning rate at which most weights in bfloat16 move."""
REMEDY = (
    "Set dtype: float32 (with bf16: true the model still computes in 16 bits), or train an adapter (use_peft: true; "
    "with load_in_4bit also learning_rate: 1.0e-4), or launch with DeepSpeed, which keeps a float32 copy."
)


def rounding_problem(dtype: torch.dtype | str, learning_rate: float) -> str:
    """Why weights of a dtype are hardly trained at a learning rate; empty if they are.

    >>> rounding_problem("bfloat16", 1e-3), rounding_problem("float32", 1e-6)
    ('', '')
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float16") or learning_rate >= LEAST_RATE:
        return ""
    return (
        f"The trained weights are in {name} and the learning rate is {learning_rate:g}: most updates are smaller than "
        "what 16 bits resolve and are rounded away, so the run hardly trains."
    )


def problem_of_recipe(recipe: Mapping[str, Any]) -> str:
    """The `rounding_problem` of a recipe, as far as its settings tell; those that are missing have their defaults.

    Adapters are float32, unless the base is quantised: TRL then casts them to bfloat16.
    """
    if recipe.get("use_peft") and not (recipe.get("load_in_4bit") or recipe.get("load_in_8bit")):
        return ""
    dtype = "bfloat16" if recipe.get("use_peft") else recipe.get("dtype", "float32")
    return rounding_problem(dtype, float(recipe.get("learning_rate", GRPOConfig.learning_rate)))


class RoundingWarning(TrainerCallback):
    """Says once, when training begins, if rounding will undo most of it."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: object,
    ) -> None:
        """The optimizer has been made; its groups may be anywhere in their schedule."""
        if optimizer is None or args.deepspeed_plugin is not None or not state.is_world_process_zero:
            return
        found = (
            rounding_problem(parameter.dtype, group.get("initial_lr", group["lr"]))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )
        if problem := next(filter(None, found), ""):
            logger.warning("%s %s", problem, REMEDY)
