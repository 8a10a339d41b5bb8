"""The doctor's trial: rows of the recipe are sampled as in its training, and it says whether there is a start.

Every setting is the recipe's, reward functions included: the trainer samples and scores them as one evaluation, and no
weight changes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence

from transformers import PrinterCallback, ProgressCallback

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.train import load_data, make_task, make_trainer, read_arguments
from agent_r1_trl.features.doctor.report import Report, describe_error
from agent_r1_trl.trainers.metrics import spread
from agent_r1_trl.trajectory import Trajectory

FEW_CALLS, FEW_GROUPS = 0.5, 0.1
"""Shares of valid calls and of groups that differ below which a training has little to begin with."""
WARM_UP = "Warm the model up on demonstrations (docs/warm-up.md)"


def examine_start(report: Report, flags: Sequence[str], num_prompts: int) -> None:
    """Sample rows of the training data, and add what a training would begin with.

    Args:
        report: takes the findings.
        flags: the recipe, and the model in its place, as options of `train`.
        num_prompts: rows of the data, evenly spaced: neighbours are often alike.

    Raises:
        UsageError: there is a mistake in the recipe, or it names no data set.
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--output_dir", folder, "--record_trajectories", "none", "--report_to", "none", "--progress", "none"]
        script_args, args, model_args = read_arguments([*flags, *quiet])
        rows, _ = load_data(script_args)
        if rows is None:
            raise UsageError("--num_prompts: the recipe names no data set to take rows from. Set dataset_name.")
        args.num_generations_eval = args.num_generations
        args.eval_temperature = args.temperature
        args.per_device_eval_batch_size = args.num_generations * num_prompts
        try:
            trainer = make_trainer(
                script_args,
                args,
                model_args,
                **make_task(script_args),
                train_dataset=rows,
                eval_dataset=rows.select(spaced(len(rows), num_prompts)),
            )
            trainer.remove_callback(ProgressCallback)
            trainer.remove_callback(PrinterCallback)
            try:
                trainer.evaluate()
                found = list(trainer.last_trajectories)
            finally:
                trainer.rollouts.close()
        except UsageError:
            raise
        except Exception as error:  # loading, sampling and scoring run other people's code
            report.error("start", describe_error(error, limit=1000), "Follow the message.")
            return
    report_start(report, found, group_size=args.num_generations, temperature=args.temperature)


def spaced(num_rows: int, num_prompts: int) -> list[int]:
    """Places of `num_prompts` rows (all, if there are fewer), evenly spaced over the data."""
    num = min(num_rows, num_prompts)
    return [place * num_rows // num for place in range(num)]


def report_start(report: Report, trajectories: Sequence[Trajectory], *, group_size: int, temperature: float) -> None:
    """Add the shares of valid calls and of success, and whether members of a group earn differently.

    Args:
        report: takes the findings.
        trajectories: whole groups, one after the other.
        group_size: trajectories of one prompt.
        temperature: at which they were sampled.
    """
    counted = [item for item in trajectories if item.in_baseline]
    if not counted:
        text = f"None of {len(trajectories)} trajectories was scored."
        report.error("start", text, "agent-r1-trl eval --config recipe.yaml says what fails.")
        return
    _report_calls(report, counted)
    solved = statistics.fmean(item.is_solved for item in counted)
    mean = statistics.fmean(item.total_reward for item in counted)
    how = f"of {len(counted)} trajectories at temperature {temperature:g}"
    text = f"{solved:.0%} {how} are solved; their mean reward is {mean:.3g}."
    if solved == 0:
        report.warning("success", text, f"{WARM_UP}, or begin with easier rows.")
    report.ok("success", text)
    if group_size > 1:
        groups = [trajectories[start : start + group_size] for start in range(0, len(trajectories), group_size)]
        _report_groups(report, groups, solved)


def _report_calls(report: Report, trajectories: Sequence[Trajectory]) -> None:
    results = [result for item in trajectories for result in item.tool_results]
    if not results:
        text = f"No call in {len(trajectories)} trajectories. Fine for tasks without tools."
        report.warning("calls", text, f"If there are tools, name them in the system prompt. {WARM_UP}.")
        return
    valid = statistics.fmean(not result.is_charged for result in results)
    text = f"{valid:.0%} of {len(results)} calls are valid, {len(results) / len(trajectories):.1f} a trajectory."
    if valid < FEW_CALLS:
        report.warning("calls", text, f"{WARM_UP}.")
    report.ok("calls", text)


def _report_groups(report: Report, groups: Sequence[Sequence[Trajectory]], solved: float) -> None:
    rewards = [[[item.total_reward] for item in group if item.in_baseline] for group in groups]
    compared = [group for group in rewards if len(group) > 1]
    num = sum(differs for _, differs in map(spread, compared))
    text = f"{num} of {len(compared)} groups have differing rewards"
    if num >= max(1, FEW_GROUPS * len(compared)):
        report.ok("groups", f"{text}: GRPO has something to work with.")
        return
    fix = "Raise num_generations or temperature."
    if solved < FEW_GROUPS:
        fix = f"{WARM_UP}, take easier rows, or raise num_generations."
    elif solved > 1 - FEW_GROUPS:
        fix = "Take harder rows: these are solved."
    report.warning("groups", f"{text}: GRPO learns from nothing else.", fix)
