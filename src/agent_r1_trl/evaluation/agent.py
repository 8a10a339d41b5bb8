"""A model that is ready to sample: loaded once, for as many evaluations as there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import agent_r1_trl.generation as generation
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.evaluation.loading import load_agent
from agent_r1_trl.generation.base import Generator
from agent_r1_trl.rollout import RolloutLimits, context_length
from agent_r1_trl.rollout.context_policies import STRIP_POLICY


@dataclass(kw_only=True)
class Agent:
    """What an evaluation needs of a model."""

    name: str | None
    """Directory or Hub id, or a hosted model and where it is; None for a model that was loaded by the caller."""
    generator: Generator
    """Or the `Endpoint` of a hosted model."""
    chat: Any
    """`ChatFormat`; None for a hosted model."""
    limits: RolloutLimits
    """Those asked for, with the model's context length."""


@contextlib.contextmanager
def open_agent(
    model: Any,
    *,
    tokenizer: Any = None,
    use_vllm: bool = False,
    limits: RolloutLimits | None = None,
    dtype: str | None = None,
    max_batch_size: int = 64,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    response_template: dict[str, Any] | str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Iterator[Agent]:
    """Load a model, on a GPU if there is one, and close its generator at the end.

    Args:
        model: directory or Hub id of a model or of a PEFT adapter; or a loaded model (then pass `tokenizer`).
        tokenizer: None loads the one saved with the model.
        use_vllm: sample with vLLM in this process instead of transformers.
        limits: of a trajectory; the model's context length is a limit as well.
        dtype: "float32", "bfloat16", ... None: the checkpoint's own on a GPU, float32 on a CPU.
        max_batch_size: maximum number of rows per forward pass (transformers only).
        trust_remote_code: run code that comes with the model.
        chat_template: of `ChatFormat`, like the two that follow.
        response_template: the same.
        chat_template_kwargs: the same.

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
    eos = getattr(model.generation_config, "eos_token_id", None)  # further tokens that end a turn
    chat = ChatFormat(
        tokenizer,
        chat_template=chat_template,
        response_template=response_template,
        chat_template_kwargs=chat_template_kwargs,
        strips_reasoning=limits.context.policy == STRIP_POLICY,
        extra_stop_token_ids=[eos] if isinstance(eos, int) else list(eos or []),
    )
    if limits.max_model_length is None:
        limits = replace(limits, max_model_length=context_length(model.config))
    generator: Generator
    stop_ids = chat.stop_token_ids
    if use_vllm:
        generator = generation.VLLMGenerator(model, stop_token_ids=stop_ids, max_model_len=limits.max_model_length)
    else:
        generator = generation.TransformersGenerator(
            model, pad_token_id=tokenizer.pad_token_id, stop_token_ids=stop_ids, max_batch_size=max_batch_size
        )
    try:
        yield Agent(name=name, generator=generator, chat=chat, limits=limits)
    finally:
        generator.close()
