"""Evaluation in the course of a training: which row is which, and metrics over all rows at once.

TRL averages over batches, so that the rows of a last, smaller batch would weigh more than the others; and accelerate
fills the last batch of several processes up with rows from the beginning, which would count twice. Evaluation without
a trainer is in `agent_r1_trl.evaluation`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.rollout.failures import FailureCause, count_causes, describe_causes, failure_of
from agent_r1_trl.trainers.callbacks import is_main_process
from agent_r1_trl.trainers.log_means import SeenMetrics, complete, has_own_mean, logged_mean
from agent_r1_trl.trainers.metrics import length_metrics, rollout_metrics, trajectory_record
from agent_r1_trl.trajectory import Trajectory

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)


def _explain_missing(best: str, metrics: Mapping[str, float]) -> str:
    """Why no checkpoint can be the best one, and which metrics there are."""
    names = sorted(name.removeprefix("eval_") for name in metrics if name.startswith("eval_"))
    return (
        f"metric_for_best_model={best!r}: the evaluation logs no such metric.{did_you_mean(best, names)} Set "
        f"metric_for_best_model to one that it logs: {', '.join(names)}."
    )


class EvaluationRows:
    """The outcome of the rows of one evaluation, on all ranks.

    Args:
        num_rows: of the data set, each as often as it is sampled; None if it does not say.
    """

    def __init__(self, num_rows: int | None = None) -> None:
        self.num_rows = num_rows
        self.first_row = 0
        """Index of the first row of the present batch, in the order of the data set."""
        self.trajectories: list[Trajectory] = []
        """This rank's, without repetitions."""
        self._batch_sizes: list[int] = []
        self._rewards: list[torch.Tensor] = []
        self._failures: list[FailureCause | None] = []
        self._records: list[dict[str, Any]] = []

    @property
    def has_failed(self) -> bool:
        """Whether there were rows, and every trajectory was lost."""
        return bool(self._failures) and None not in self._failures

    def take_rewards(self, values: torch.Tensor, trajectories: Sequence[Trajectory], *, rank: int) -> None:
        """Take in the (N, F) rewards of a batch of all ranks; those of repeated rows become NaN, and score nothing.

        The trajectories are this rank's.
        """
        num_new = self._num_new(len(values))
        values[num_new:] = torch.nan
        for trajectory in trajectories[max(0, num_new - rank * len(trajectories)) :]:
            trajectory.is_scored = False
        self._rewards.append(values[:num_new].detach().clone())

    def take(
        self, trajectories: Sequence[Trajectory], *, rank: int, compared: Sequence[Sequence[float]] | None = None
    ) -> list[Trajectory]:
        """Take in this rank's trajectories of a batch, which ends it; returns those that are no repetition.

        `compared` has the returns that each is compared by. All ranks must call it.
        """
        returns = [None] * len(trajectories) if compared is None else compared
        records = [trajectory_record(item, found) for item, found in zip(trajectories, returns, strict=True)]
        failures = [failure_of(item) for item in trajectories]
        rows = gather_object([*zip(records, failures, strict=True)])
        num_new = self._num_new(len(rows))
        self._records += [record for record, _ in rows[:num_new]]
        self._failures += [failure for _, failure in rows[:num_new]]
        self._batch_sizes.append(num_new)
        self.first_row += len(rows)
        own = list(trajectories[: max(0, num_new - rank * len(trajectories))])
        self.trajectories += own
        return own

    def _num_new(self, num_rows: int) -> int:
        """How many of the present batch's rows are no repetition."""
        return num_rows if self.num_rows is None else max(0, min(num_rows, self.num_rows - self.first_row))

    def metrics(
        self, per_batch: dict[str, list[float]], *, names: Sequence[str], group_size: int
    ) -> dict[str, list[float]]:
        """The metrics of the whole evaluation, a list of one value each.

        Args:
            per_batch: what TRL logged, one value for each batch.
            names: of F reward functions.
            group_size: trajectories of one prompt.
        """
        metrics = {name: [self._mean_over_batches(values)] for name, values in per_batch.items() if values}
        if not self._records:
            return metrics
        exact = length_metrics(self._records) | rollout_metrics(self._records, num_generations=group_size)
        values = torch.cat(self._rewards)  # (N, F)
        totals = [record["reward"] if record["in_baseline"] else math.nan for record in self._records]
        exact["reward"] = torch.tensor(totals).nanmean().item()
        for name in names:  # functions of one name share a metric, as in TRL
            columns = [index for index, other in enumerate(names) if other == name]
            exact[f"rewards/{name}/mean"] = values[:, columns].nanmean(dim=0).nanmean().item()
        return metrics | {name: [value] for name, value in exact.items()}

    def _mean_over_batches(self, values: list[float]) -> float:
        """The mean over batches, weighted by their rows or tokens; NaN says that a batch has no value."""
        if has_own_mean(values):
            return logged_mean(values)
        sizes = self._batch_sizes if len(values) == len(self._batch_sizes) else [1] * len(values)
        pairs = [(value, size) for value, size in zip(values, sizes, strict=True) if not math.isnan(value)]
        total = sum(size for _, size in pairs)
        return sum(value * size for value, size in pairs) / total if total else math.nan

    def warn_of_failures(self) -> None:
        """Say what failed, and loudly if it was everything."""
        causes = count_causes(self._failures)
        if causes and is_main_process():
            logger.log(
                logging.ERROR if self.has_failed else logging.WARNING,
                "%d of the %d trajectories of this evaluation were lost, %s: %s.",
                sum(cause.count for cause in causes),
                len(self._failures),
                "so that it has no reward" if self.has_failed else "and are excluded from its reward",
                describe_causes(causes),
            )


class EvaluatingTrainer(GRPOTrainer):
    """TRL's trainer, whose evaluation counts every row of the data set once."""

    env_factory: Any
    features: Any
    last_trajectories: list[Trajectory]

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.evaluation = EvaluationRows()
        """The evaluation in flight, or the last one."""
        self._eval_prefix = "eval"
        """The prefix of the last evaluation's metrics, `metric_key_prefix`; of several sets, `eval_NAME`."""
        self._seen_metrics = SeenMetrics()
        super().__init__(*args, **kwargs)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Any:
        return RepeatSampler(eval_dataset, mini_repeat_count=self.num_generations_eval, shuffle=False)

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """TRL's evaluation; if everything failed, it is worse than any other one (`metric_for_best_model`).

        Raises:
            ValueError: in training, it has no such metric.
        """
        metrics = super().evaluate(*args, **kwargs)
        best = self.args.metric_for_best_model
        if best is None:
            return metrics
        name = f"eval_{best.removeprefix('eval_')}"
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ()
        own = [prefix for key in sets if name.startswith(f"{(prefix := f'eval_{key}')}_")]
        if max(own, key=len, default="eval") == self._eval_prefix:  # else it is of another one of several data sets
            is_missing = metrics[name] is None if name in metrics else self.evaluation.has_failed
            if is_missing:
                metrics[name] = math.nan  # transformers compares it with the best so far
            elif name not in metrics and self.is_in_train:
                raise ValueError(_explain_missing(best, metrics))
        return metrics

    def evaluation_loop(self, dataloader: DataLoader, *args: object, **kwargs: Any) -> Any:
        """The Trainer's loop, which leaves the random numbers of the training as they were."""
        self._eval_prefix = kwargs.get("metric_key_prefix", "eval")
        dataset = dataloader.dataset
        num_rows = len(dataset) * self.num_generations_eval if hasattr(dataset, "__len__") else None
        self.evaluation = EvaluationRows(num_rows)
        self._metrics["eval"].clear()
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        self.last_trajectories = self.evaluation.trajectories
        logged, names = self._metrics["eval"], self.reward_func_names
        logged.update(self.evaluation.metrics(logged, names=names, group_size=self.num_generations_eval))
        self.evaluation.warn_of_failures()
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, of means over all tokens and rollouts since the last one (`log_means.py`).

        Of several evaluation sets, the metrics of each have its name, as its loss has.
        """
        mode, prefix = ("train", "") if self.model.training else ("eval", f"{self._eval_prefix}_")
        complete(self._metrics[mode], self._seen_metrics.read(self.state.log_history, prefix))
        if not self.model.training:  # TRL would call all of them eval_
            logs.update(self._take_metrics())
        super().log(logs, start_time)

    def _take_metrics(self) -> dict[str, Any]:
        """Pending metrics of the last evaluation, under its prefix; None for a metric without values."""
        taken: dict[str, Any] = {}
        for name, values in self._metrics["eval"].items():
            mean = logged_mean(values)
            taken[f"{self._eval_prefix}_{name}"] = None if math.isnan(mean) else mean
        self._metrics["eval"].clear()
        return taken

    def predict(self, *args: object, **kwargs: object) -> Any:
        """The Trainer's, whose metrics hold those of the rollout as well; they are not logged."""
        output = super().predict(*args, **kwargs)
        output.metrics.update(self._take_metrics())
        return output
