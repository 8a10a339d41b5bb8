"""A model that is ready to play: loaded once, for as many evaluations as there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.evaluation.loading import load_agent
from agent_r1_trl.generation.base import Generator
from agent_r1_trl.generation.endpoint import Endpoint
from agent_r1_trl.rollout import RolloutLimits, context_length
from agent_r1_trl.rollout.thinking import format_options, settle_thinking


@dataclass(kw_only=True)
class Agent:
    """What an evaluation needs of a model."""

    name: str | None
    """Directory or Hub id; None for a model that was loaded by the caller."""
    generator: Generator
    chat: ChatFormat
    limits: RolloutLimits
    """Those asked for, with the model's context length."""


@dataclass(kw_only=True)
class HostedAgent:
    """What an evaluation needs of a hosted model; see `Agent`."""

    name: str
    """The model and where it is, for results."""
    generator: Endpoint
    limits: RolloutLimits
    chat: None = None


@contextlib.contextmanager
def open_agent(
    model: Any,
    *,
    tokenizer: Any = None,
    use_vllm: bool = False,
    limits: RolloutLimits | None = None,
    dtype: str | None = None,
    chat_template: str | None = None,
    response_template: dict[str, Any] | str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    thinking: str = "keep",
    max_batch_size: int = 64,
    trust_remote_code: bool = False,
) -> Iterator[Agent]:
    """Load a model, on a GPU if there is one, and close its generator at the end; arguments of `evaluate_model`.

    Raises:
        ValueError: there is no such model, or a loaded model comes without `tokenizer`.
    """
    name = None if hasattr(model, "parameters") else str(model)
    if name is not None:
        # vLLM reads a plain checkpoint itself; an adapter is merged into its base on the way in.
        model, tokenizer = load_agent(
            name, dtype=dtype, tokenizer=tokenizer, trust_remote_code=trust_remote_code, to_device=not use_vllm
        )
    if tokenizer is None:
        raise ValueError("tokenizer=None: a loaded model comes without its tokenizer. Pass tokenizer= as well.")
    limits = limits or RolloutLimits()
    thinking, context_policy = settle_thinking(thinking, limits.context_policy)
    limits = replace(limits, context_policy=context_policy)
    eos = getattr(model.generation_config, "eos_token_id", None)
    chat = ChatFormat(
        tokenizer,
        chat_template=chat_template,
        response_template=response_template,
        **format_options(thinking, limits.context_policy, chat_template_kwargs),
        extra_stop_token_ids=[eos] if isinstance(eos, int) else list(eos or []),
    )
    if limits.max_model_length is None:
        limits = replace(limits, max_model_length=context_length(model.config))
    generator = _make_generator(model, chat, tokenizer, use_vllm, limits, max_batch_size)
    try:
        yield Agent(name=name, generator=generator, chat=chat, limits=limits)
    finally:
        generator.close()


def _make_generator(
    model: Any, chat: ChatFormat, tokenizer: Any, use_vllm: bool, limits: RolloutLimits, max_batch_size: int
) -> Generator:
    if use_vllm:
        from agent_r1_trl.generation import VLLMGenerator

        return VLLMGenerator(model, stop_token_ids=chat.stop_token_ids, max_model_len=limits.max_model_length)
    from agent_r1_trl.generation import TransformersGenerator

    return TransformersGenerator(
        model,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=chat.stop_token_ids,
        max_batch_size=max_batch_size,
    )
