"""Protection against failures, outages, rollouts that teach nothing, numbers that are not finite, and signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1_trl.trainers.construction import TrainRows


def make_callbacks(config: Any, train_dataset: TrainRows) -> list[Any]:
    """All are on in every run; the age of weights is looked at where rollouts run ahead."""
    from agent_r1_trl.features.reliability.age import AgeGuard
    from agent_r1_trl.features.reliability.failures import FailureBudget
    from agent_r1_trl.features.reliability.learning import LearningReport
    from agent_r1_trl.features.reliability.nonfinite import NumberWatch
    from agent_r1_trl.features.reliability.signals import RunGuard
    from agent_r1_trl.features.reliability.tool_watch import ToolWatch

    failures, outages = config.failures, config.outages
    has_shares = config.rollouts_ahead and config.vllm_importance_sampling_correction
    ages = [AgeGuard(failures.min_effective_share)] if has_shares else []
    watches = []
    if config.watch_by is not None:
        from agent_r1_trl.features.reliability.parts import PartWatch, check_parts

        check_parts(train_dataset, config.watch_by)
        watches.append(PartWatch(config.watch_by))
    return [
        RunGuard(),
        ToolWatch(outages.max_failure_rise, outages.min_calls, outages.max_wait),
        FailureBudget(failures.max_share, failures.window),
        NumberWatch(failures.max_nonfinite_steps, config.output_dir),
        *ages,
        LearningReport(config.output_dir, records=config.record_trajectories != "none"),
        *watches,
    ]


def signals_raise() -> Any:
    """While it lasts, signals end a command in good order."""
    from agent_r1_trl.features.reliability import signal_handlers

    return signal_handlers.signals_raise()
