"""The agent behind a conversation: a model that is loaded here, or one that a vLLM server holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from agent_r1_trl.evaluation.agent import Agent, make_chat
from agent_r1_trl.rollout import RolloutLimits

START_TIMEOUT_S = 20.0
"""Seconds that a server may take to answer at all; one that is still loading its model is waited for as long."""


@contextlib.contextmanager
def served_agent(
    url: str,
    *,
    tokenizer: str | None = None,
    limits: RolloutLimits | None = None,
    trust_remote_code: bool = False,
    **chat_options: Any,
) -> Iterator[Agent]:
    """An agent whose tokens a running vLLM server samples, with whatever weights it has.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        tokenizer: directory or Hub id; None: what the server says it was started with.
        limits: of a conversation; the server's context length is one as well.
        trust_remote_code: whether code that comes with the tokenizer may run.
        **chat_options: of `make_chat`.

    Raises:
        ValueError: the URL is none.
        GenerationError: there is no vLLM server at the URL.
        OSError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer, GenerationConfig

    from agent_r1_trl.generation import VLLMServerGenerator

    name = tokenizer or _model_of(url)
    loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    eos: Any = None
    with contextlib.suppress(OSError):  # without such a file the tokenizer's ends of a turn are all there are
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    chat, limits = make_chat(loaded, limits, eos, **chat_options)
    generator = VLLMServerGenerator([url], stop_token_ids=chat.stop_token_ids, startup_timeout_s=START_TIMEOUT_S)
    try:
        yield Agent(name=name, generator=generator, chat=chat, limits=limits.within(generator.max_model_length))
    finally:
        generator.close()


def _model_of(url: str) -> str:
    """The directory or Hub id that a server was started with."""
    from agent_r1_trl.generation.vllm.find_servers import check_urls, wait_for_servers
    from agent_r1_trl.generation.vllm.http_client import HTTPClient

    (url,) = check_urls([url])
    http = HTTPClient()
    try:
        card = http.run(wait_for_servers(http, [url], START_TIMEOUT_S))[url]
    finally:
        http.close()
    return str(card.get("root") or card["id"])
