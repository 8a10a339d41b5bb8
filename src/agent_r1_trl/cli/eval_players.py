"""What plays the rows of `eval`: a model that is loaded here, or a hosted one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import InfrastructureError, UsageError
from agent_r1_trl.safe_text import rules

if TYPE_CHECKING:
    from agent_r1_trl.cli.arguments import EvalArguments
    from agent_r1_trl.cli.eval_plan import PlannedRow
    from agent_r1_trl.evaluation.agent import Agent, HostedAgent
    from agent_r1_trl.generation import SamplingParams
    from agent_r1_trl.rollout import RolloutLimits

_NO_CONTEXT: dict[str, Any] = {
    "context_policy": "keep",
    "context_turns": None,
    "context_tokens": None,
    "summary_tokens": None,
    "summary_prompt": None,
}
"""A hosted model reads every turn so far."""
_NO_FILTERS: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""OpenAI's protocol has no such settings."""
_OF_LOADED = (
    "use_vllm", "dtype", "trust_remote_code", "generation_batch_rows", "chat_template", "response_template",
    "chat_template_kwargs", "thinking", "max_concurrency",
)  # fmt: skip
"""Settings of models that are loaded here."""


def check_flags(arguments: EvalArguments, argv: Sequence[str]) -> None:
    """Refuse flags that have no effect on a hosted model. In a recipe they are those of the trained model.

    Raises:
        UsageError: names the flag and the cure.
    """
    if not arguments.endpoint:
        return
    flags = {item.removeprefix("--").partition("=")[0].replace("-", "_") for item in argv if item.startswith("--")}
    if "endpoint" in flags and not {"model", "models", "model_name_or_path"} & flags:
        raise UsageError("--model: not set. Pass the name that the model has at the endpoint.")
    is_alone = "base" not in (arguments.baselines or ())
    for name in (*_NO_CONTEXT, *_NO_FILTERS, *(_OF_LOADED if is_alone else ())):
        if name in flags:
            cure = "Remove it."
            if name in _NO_FILTERS:
                cure = f"Remove it; for a server that takes it, pass --endpoint_options '{{{name}: ...}}'."
            elif name == "max_concurrency":
                cure = "Pass --endpoint_concurrency instead."
            raise UsageError(f"--{name} has no effect on a hosted model. {cure}")


def limits_of(arguments: EvalArguments, *, is_hosted: bool) -> RolloutLimits:
    """The limits of a trajectory."""
    limits = arguments.rollout_limits()
    if not is_hosted:
        return limits
    return replace(limits, **_NO_CONTEXT, max_concurrency=arguments.endpoint_concurrency)


def sampling_params(arguments: EvalArguments, *, is_hosted: bool = False) -> SamplingParams:
    """How tokens are drawn."""
    from agent_r1_trl.generation import SamplingParams

    params = SamplingParams(
        temperature=arguments.eval_temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p or 0.0,
        repetition_penalty=arguments.repetition_penalty,
    )
    return replace(params, **_NO_FILTERS) if is_hosted else params


@contextlib.contextmanager
def opened(arguments: EvalArguments, row: PlannedRow) -> Iterator[Agent | HostedAgent]:
    """What plays a row, until the end of the block.

    Raises:
        UsageError: the hosted model refuses key, name or address.
        InfrastructureError: it has no credit left.
    """
    limits = limits_of(arguments, is_hosted=row.is_hosted)
    if not row.is_hosted:
        with _loaded(arguments, row.model, limits) as agent:
            yield agent
        return
    from agent_r1_trl.evaluation.agent import HostedAgent
    from agent_r1_trl.generation.endpoint import EndpointUnusableError

    endpoint = arguments.make_endpoint(str(row.model))
    try:
        yield HostedAgent(name=f"{endpoint.model} at {endpoint.url}", generator=endpoint, limits=limits)
    except EndpointUnusableError as error:
        raise (UsageError if error.is_mistake else InfrastructureError)(str(error)) from error


def hosted_settings(endpoint: Any) -> dict[str, Any]:
    """What a result says about a hosted model, beside its name: options, and the requests of the row."""
    counts = dict(endpoint.counts)
    endpoint.counts.clear()
    return {"endpoint": endpoint.url, "endpoint_options": rules().mask_all(endpoint.options), "requests": counts}


def _loaded(arguments: EvalArguments, model: str | None, limits: RolloutLimits) -> Any:
    from agent_r1_trl.evaluation import open_agent

    return open_agent(
        model,
        use_vllm=arguments.use_vllm,
        limits=limits,
        dtype=arguments.dtype,
        chat_template=arguments.chat_template,
        response_template=arguments.response_template,
        chat_template_kwargs=arguments.chat_template_kwargs or None,  # type: ignore[arg-type]
        thinking=arguments.thinking,
        max_batch_size=arguments.generation_batch_rows,
        trust_remote_code=arguments.trust_remote_code,
    )
