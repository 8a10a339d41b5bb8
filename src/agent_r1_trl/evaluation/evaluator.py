"""Evaluation: the training rollout, greedy or sampled, on every example of a data set.

For example:

    result = evaluate_model("outputs/my-agent", MyEnv, dataset, limits=RolloutLimits(max_turns=4))
    result.metrics["exact_match"], result.intervals["exact_match"]
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.evaluation.agent import open_agent
from agent_r1_trl.evaluation.result import EvaluationResult, example_sums
from agent_r1_trl.features import feature
from agent_r1_trl.generation.base import Generator, SamplingParams
from agent_r1_trl.generation.endpoint import Endpoint
from agent_r1_trl.rollout import (
    RolloutLimits,
    RolloutRequest,
    RolloutRunner,
    check_some_rolled_out,
    describe_sampling,
    rollout_requests,
)
from agent_r1_trl.rollout.failures import count_causes, describe_causes, failure_of
from agent_r1_trl.rollout.hosted import HostedRunner
from agent_r1_trl.rollout.limits import deciding_limits
from agent_r1_trl.rollout.requests import row_digest
from agent_r1_trl.settings import Count, CountOrZero, check_value
from agent_r1_trl.trajectory import StopReason, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0.0)
_NO_MATTER = ("max_concurrency", "watchdog_interval", "stall_timeout")
"""Limits that a start which goes on with a journal may change."""


def evaluate(
    generator: Generator | Endpoint,
    env_factory: Callable[[], Any],
    chat: ChatFormat | None,
    examples: Iterable[Mapping[str, Any]],
    *,
    limits: RolloutLimits | None = None,
    params: SamplingParams = GREEDY,
    num_generations: int = 1,
    seed: int = 0,
    retry_failed: int = 0,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    identity: Mapping[str, Any] | None = None,
    keep_going: bool = False,
) -> EvaluationResult:
    """Roll out every example and score what happened.

    Args:
        generator: samples turns, or is a hosted model.
        env_factory: makes a fresh environment per trajectory. Every number it leaves in `trajectory.info` is a metric.
        chat: the model's chat format; None for a hosted model.
        examples: rows of the data set.
        limits: of every trajectory; use those of the training for comparable figures.
        params: greedy by default.
        num_generations: attempts per example; a metric is the mean over those that did not fail.
        seed: for sampling, environments and bootstrap.
        retry_failed: how often a trajectory that was lost for no fault of the policy is sampled again.
        on_trajectory: called with each trajectory as it ends, from another thread.
        journal: file that keeps every turn, from which `replay_evaluation` evaluates again.
        resume: go on with that file if there is one: what it holds is not sampled again, but for trajectories that
            failed for no fault of the policy.
        identity: JSON data that the trajectories depend on, such as the model's name; it must be that of the journal.
        keep_going: an error of the environment that would be raised (a bug in `outcome_reward`, a result of the wrong
            form) ends its trajectory alone, as an `environment_error`, and a result in which all failed is one.

    Raises:
        ValueError: no examples, `num_generations` below 1, a negative `retry_failed`, or the journal to go on with is
            of other settings.
        NothingRolledOutError: no trajectory could be sampled, unless `keep_going`; the message lists the causes.
    """
    check_value("retry_failed", retry_failed, CountOrZero)
    requests = _requests(examples, num_generations, seed)
    limits = limits or RolloutLimits()
    how: dict[str, Any] = {"retry_failed": retry_failed, "on_trajectory": on_trajectory, "keep_going": keep_going}
    if isinstance(generator, Endpoint):
        runner: RolloutRunner = HostedRunner(env_factory, generator, limits, params, **how)
    elif chat is None:
        raise ValueError("chat=None: only a hosted model comes without a chat format. Pass ChatFormat(tokenizer).")
    else:
        runner = RolloutRunner(env_factory, generator, chat, limits, params, **how)
    log = None
    if journal is not None:
        others = {name: value for name, value in asdict(limits).items() if name not in (*_NO_MATTER, "context")}
        spent = others | deciding_limits(limits)  # `context.turns` by itself, as a replay compares it
        header = {"size": len(requests), "params": asdict(params), "limits": spent, **(identity or {})}
        log = _open_log(Path(journal), header, resume=resume)
    start = time.perf_counter()
    try:
        trajectories = runner.run(requests, journal=log)
    finally:
        runner.close()
        if log is not None:
            log.close()
    settings = {
        "played": describe_sampling(params, num_generations, limits),
        "temperature": params.temperature,
        "seed": seed,
        "limits": asdict(limits),
    }
    return _result(requests, trajectories, num_generations, seed, settings, start, may_all_fail=keep_going)


def _open_log(path: Path, header: dict[str, Any], *, resume: bool) -> Any:
    journal = feature("journal", f"journal={str(path)!r}")
    recorded = journal.read_rollout(path) if resume else None
    if recorded is None:
        return journal.RolloutLog(path, header)
    now = {"version": journal.VERSION, **json.loads(journal.dump(header))}
    before = {name: value for name, value in recorded.header.items() if name != "kind"}
    if now != before:
        name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        raise ValueError(
            f"the evaluation that was stopped ({path}) had other settings: {name} was {before.get(name)!r:.300} and "
            f"is now {now.get(name)!r:.300}. Set it back to go on, pass --no_resume to begin anew, or pass another "
            "output_dir."
        )
    log = journal.RolloutLog(path, header, recorded=recorded, repeats_failed=True)
    ends = [StopReason(item.end["stop_reason"]) for item in recorded.trajectories if item.end is not None]
    ended = sum(not reason.is_infrastructure_failure for reason in ends)
    logger.warning("Going on with %s: %d of %d trajectories have been sampled.", path, ended, header["size"])
    return log


def replay_evaluation(
    replay: str | Path,
    examples: Iterable[Mapping[str, Any]],
    *,
    num_generations: int = 1,
    seed: int = 0,
    keep_going: bool = False,
    limits: RolloutLimits | None = None,
) -> EvaluationResult:
    """An evaluation from its journal, without model, tools and environment: the same trajectories, scores and figures.

    Args:
        replay: the journal, or the output directory that holds it.
        examples: as for `evaluate`, like what follows; they must be those of the recorded evaluation.
        num_generations: the same.
        seed: the same.
        keep_going: the same.
        limits: that the trajectories must have had; None: any. A `max_model_length` of None, which is then the
            model's, is not compared.

    Raises:
        ReplayError: there is no journal, or it is that of another evaluation; names what differs first.
    """
    requests = _requests(examples, num_generations, seed)
    start = time.perf_counter()
    wanted = deciding_limits(limits) if limits is not None else {}
    wanted = {name: value for name, value in wanted.items() if value is not None or name != "max_model_length"}
    replayed = feature("journal", f"journal.replay={str(replay)!r}").JournalReplay(replay)
    trajectories = replayed.replay(requests, limits=wanted)
    settings = {"replay": str(replay), "seed": seed}
    return _result(requests, trajectories, num_generations, seed, settings, start, may_all_fail=keep_going)


def _requests(examples: Iterable[Mapping[str, Any]], num_generations: int, seed: int) -> list[RolloutRequest]:
    rows = [dict(example) for example in examples]
    if not rows:
        raise ValueError("examples is empty: there is nothing to evaluate. Pass at least one row.")
    check_value("num_generations", num_generations, Count)
    attempts = [row for row in rows for _ in range(num_generations)]
    return rollout_requests(attempts, first_row=0, group_size=num_generations, seed=seed, step=None)


def _result(
    requests: list[RolloutRequest],
    trajectories: list[Trajectory],
    num_generations: int,
    seed: int,
    settings: dict[str, Any],
    start: float,
    *,
    may_all_fail: bool = False,
) -> EvaluationResult:
    if not may_all_fail:
        check_some_rolled_out(trajectories)
    if causes := count_causes(map(failure_of, trajectories)):
        logger.warning(
            "%d of %d trajectories were lost and are scored nowhere but in lost_rate: %s.",
            sum(cause.count for cause in causes),
            len(trajectories),
            describe_causes(causes),
        )
    groups = [trajectories[i : i + num_generations] for i in range(0, len(trajectories), num_generations)]
    return EvaluationResult.from_rows(
        list(map(example_sums, groups)),
        example_ids=[trajectory.example_id for trajectory in trajectories[::num_generations]],
        reset_seeds=[request.reset_seed for request in requests[::num_generations]],
        row_digests=[row_digest(request.example) for request in requests[::num_generations]],
        seed=seed,
        num_generations=num_generations,
        trajectories=trajectories,
        duration_s=time.perf_counter() - start,
        settings=settings,
        failures=describe_causes(causes),
    )


def evaluate_model(
    model: str | PreTrainedModel,
    env_factory: Callable[[], Any],
    examples: Iterable[Mapping[str, Any]],
    *,
    limits: RolloutLimits | None = None,
    **options: Any,
) -> EvaluationResult:
    """Load a model with `open_agent` and `evaluate` it; both take what is not named here from the `options`."""
    names = inspect.signature(evaluate).parameters.keys() & options.keys()
    loading = {name: value for name, value in options.items() if name not in names}
    with open_agent(model, limits=limits, **loading) as agent:
        settings = {"limits": agent.limits, **{name: options[name] for name in names}}
        result = evaluate(agent.generator, env_factory, agent.chat, examples, **settings)
    result.settings = {"model": agent.name, "use_vllm": bool(loading.get("use_vllm")), **result.settings}
    return result
