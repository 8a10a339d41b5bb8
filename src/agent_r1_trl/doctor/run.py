"""The doctor's checks in order, the cheap ones first."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.doctor.conversations import check_masks, check_parser
from agent_r1_trl.doctor.environment.caller import Caller
from agent_r1_trl.doctor.environment.check import examine_env
from agent_r1_trl.doctor.environment.construction import env_factory
from agent_r1_trl.doctor.environment.tools import check_tools, list_tools
from agent_r1_trl.doctor.report import Finding, Report
from agent_r1_trl.doctor.subject import Subject, check_tokenizer, load_subject
from agent_r1_trl.doctor.template import PROBE_TOOL, Schema, check_template, open_chat
from agent_r1_trl.doctor.versions import check_versions
from agent_r1_trl.rollout import EnvSession, RolloutRequest
from agent_r1_trl.tools import as_tool

# Number of examples whose prompts are measured.
_NUM_PROMPTS = 64
# Seconds that an environment may take to start on an example.
_START_S = 60.0
Start = tuple[list[dict[str, Any]], list[Schema]]


def run_doctor(
    model_or_tokenizer: Any,
    *,
    tools: Sequence[Any] | None = None,
    env: Any = None,
    examples: Iterable[dict[str, Any]] | None = None,
    tokenizer: Any = None,
    chat_template: str | None = None,
    response_template: dict[str, Any] | str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    thinking: str = "keep",
    max_completion_length: int | None = None,
    max_model_length: int | None = None,
    trust_remote_code: bool = False,
    num_conversations: int = 24,
    seed: int = 0,
) -> list[Finding]:
    """Examine what a run would use. Whatever is wrong with it becomes a finding, not an exception.

    Args:
        model_or_tokenizer: path or Hub name (no weights are loaded), tokenizer, processor, or model.
        tools: functions or `Tool`s that the run would show to the model.
        env: environment class, factory or instance.
        examples: rows of the data set; the environment's prompts are measured on the first of them.
        tokenizer: needed for a model whose config does not name its folder.
        chat_template: as in the trainer's config.
        response_template: as in the trainer's config.
        chat_template_kwargs: as in the trainer's config.
        thinking: as in the trainer's config.
        max_completion_length: as in the trainer's config; with `examples`, checked against the model's positions.
        max_model_length: assume this many positions instead of the model's.
        trust_remote_code: run code that comes with the model.
        num_conversations: number of scripted conversations to play.
        seed: seed of the scripts.

    Returns:
        Findings in the order of the checks; a check that found nothing says so in one line.
    """
    report = Report()
    check_versions(report)
    rows = None if examples is None else list(itertools.islice(examples, _NUM_PROMPTS))
    schemas = _check_tools(report, tools)
    starts = _starts(env, rows, schemas)
    schemas += _env_schemas(env, starts)
    subject = load_subject(report, model_or_tokenizer, tokenizer, trust_remote_code=trust_remote_code)
    if subject is not None:
        if max_model_length is not None:
            subject.max_length = max_model_length
        chat = open_chat(
            report,
            subject.tokenizer,
            chat_template=chat_template,
            response_template=response_template,
            chat_template_kwargs=chat_template_kwargs,
            thinking=thinking,
            extra_stop_token_ids=subject.eos_token_ids or (),
        )
        if chat is not None:
            needs_tools = bool(schemas) or (tools is None and env is None and chat.supports_tools)
            shown = (schemas or [PROBE_TOOL]) if needs_tools else None
            check_tokenizer(report, subject, chat)
            check_template(report, chat, shown)
            if shown is not None and chat.supports_tools:
                check_parser(report, chat, shown, num_calls=num_conversations, seed=seed)
            if shown is None or chat.supports_tools:
                check_masks(report, chat, shown, num_conversations=num_conversations, seed=seed)
            _check_prompts(report, chat, subject, starts, max_completion_length)
    _check_env(report, env, rows)
    return report.findings


def _check_tools(report: Report, tools: Sequence[Any] | None) -> list[Schema]:
    if tools is None:
        return []
    usable = check_tools(report, tools)
    report.ok("tools", list_tools(usable))
    return [tool.schema for tool in usable]


def _starts(env: Any, rows: list[dict[str, Any]] | None, tools: list[Schema]) -> list[Start] | None:
    """Prompt and tool schemas of every row, as a rollout sees them; None if a `reset` fails, and `check_env` says why.

    An environment may choose its tools in `reset`, so the tools of the class say little about the prompts.
    """
    if env is None:
        prompts = [row.get("prompt") for row in rows or []]
        return [(prompt, tools) for prompt in prompts if isinstance(prompt, list)]

    async def start(row: dict[str, Any]) -> Start:
        session = EnvSession(factory, truncate=lambda text, max_tokens: text[: 4 * max_tokens])
        try:
            return await session.reset(RolloutRequest(example=row))
        finally:
            if session.env is not None:
                await session.close()

    caller = Caller(_START_S)
    try:
        factory = env_factory(env)
        started = [caller.call("reset", start(row)) for row in rows or []]
    except Exception:
        return None
    finally:
        caller.close()
    return None if any(item.failure for item in started) else [item.value for item in started]


def _env_schemas(env: Any, starts: list[Start] | None) -> list[Schema]:
    """Schemas of the tools of all rows, each once; those of a fresh environment where no row was started."""
    if env is None:
        return []
    found = [schema for _, schemas in starts or [] for schema in schemas]
    if not found:
        with contextlib.suppress(Exception):
            found = [as_tool(item).schema for item in getattr(env_factory(env)(), "tools", None) or ()]
    return list({schema["function"]["name"]: schema for schema in reversed(found)}.values())[::-1]


def _check_env(report: Report, env: Any, rows: list[dict[str, Any]] | None) -> None:
    if env is None:
        return
    try:
        findings = examine_env(env, rows)
    except Exception as error:
        report.error("environment", f"It cannot be checked: {error}", "Pass a class or factory, and rows as dicts.")
        return
    for finding in findings:
        report.findings.append(dataclasses.replace(finding, check=f"environment: {finding.check}"))


def _check_prompts(
    report: Report, chat: ChatFormat, subject: Subject, starts: list[Start] | None, max_completion_length: int | None
) -> None:
    """Lengths of real prompts against the model's positions."""
    if not starts:
        return
    lengths = []
    for messages, schemas in starts:
        try:
            lengths.append(len(chat.encode_prompt(messages, schemas or None)))
        except ChatFormatError as error:
            report.error("prompts", error.problem, error.cure)
            return
        except Exception:  # no messages at all: check_env's business as well
            return
    longest, limit = max(lengths), subject.max_length
    if limit is not None and longest >= limit:
        report.error(
            "prompts",
            f"The longest of {len(lengths)} prompts has {longest} tokens, the model {limit} positions.",
            "Shorten the prompts, drop those rows, or take a model with a longer context.",
        )
    elif limit is not None and max_completion_length is not None and longest + max_completion_length > limit:
        report.warning(
            "prompts",
            f"max_completion_length={max_completion_length} and the longest prompt ({longest} tokens) exceed the "
            f"model's {limit} positions.",
            f"Set max_completion_length to at most {limit - longest}.",
        )
    known = f" of {limit} positions" if limit is not None else ""
    report.ok("prompts", f"{len(lengths)} prompts, {min(lengths)} to {longest} tokens{known}.")
