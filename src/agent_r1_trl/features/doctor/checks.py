"""The doctor's checks of tokenizer, template, parser, masks and prompts, the cheap ones first.

Conversations are rendered twice, as a whole and piece by piece as in a rollout; both must give the same ids. Scripted
conversations go through the real rollout loop, so every sampled id is known beforehand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.checks import (
    Schema,
    broken_prefix,
    differences,
    hidden_parts,
    misread_content,
    speak,
    split_tokens,
)
from agent_r1_trl.chat.errors import ChatFormatError
from agent_r1_trl.chat.format import suggestion
from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.factory import tool_schemas
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, SingleTurnEnv
from agent_r1_trl.features.doctor.agents import examine_agent, is_agent
from agent_r1_trl.features.doctor.environment import DEFAULT_EXAMPLE, NUM_EPISODES, TIMEOUT_S, examine_env
from agent_r1_trl.features.doctor.episodes import Caller, EnvTrial, make_env
from agent_r1_trl.features.doctor.report import Finding, Report, describe_error, has_errors
from agent_r1_trl.generation.scripted import ScriptedGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.rollout.context_policies import STRIP_POLICY
from agent_r1_trl.rollout.limits import context_length
from agent_r1_trl.tools import Tool
from agent_r1_trl.trajectory import Author, Message, StopReason, Trajectory

_NUM_PROMPTS = 64  # examples whose prompts are measured
_START_S = 60.0  # that an environment may take to start on an example
_TURN_TOKENS = 2000  # longer than any scripted turn
_PROBE_TOOL: Schema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "options": {"type": "object", "description": "More about it."},
            },
        },
    },
}
"""Shown to the template if the user names no tools."""
_WORDS = (
    "Paris", "a b", "Zürich", "東京", "🙂🚀", "e\u0301", "x\ny", "a\tb", '"quoted"', "{", "}}", "\\n", "'", "0.1",
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    "integer": (0, 7, -12),
    "number": (0.5, -3, 2),
    "boolean": (True, False),
    "array": ([], [1, 2], ["a", ["ü"]]),
    "object": ({}, {"inner": {"list": ["a", {"b": 1}]}}, {"deep": {"er": {"still": "é"}}}),
}
_OR_TEMPLATE = (
    "Set response_template to the grammar of this template (docs/model-families.md), or pass another chat_template."
)
_STRIP = "Set context='strip_thinking': the policy is then trained on what the server shows."
Start = tuple[list[dict[str, Any]], list[Schema]]


def run_doctor(
    model_or_tokenizer: object,
    *,
    tools: Sequence[Any] | None = None,
    env: object = None,
    examples: Iterable[dict[str, Any]] | None = None,
    max_completion_length: int | None = None,
    trust_remote_code: bool = False,
    num_conversations: int = 24,
    **chat_options: object,
) -> list[Finding]:
    """Examine what a run would use. Whatever is wrong with it becomes a finding, not an exception.

    Args:
        model_or_tokenizer: path or Hub name (no weights are loaded), tokenizer or processor.
        tools: functions or `Tool`s that the run would show to the model, in place of an environment.
        env: environment class, factory or instance.
        examples: rows of the data set; prompts are measured on the first of them.
        max_completion_length: as in the trainer's config; with `examples`, checked against the model's positions.
        trust_remote_code: run code that comes with the model.
        num_conversations: number of scripted conversations to run.
        **chat_options: arguments of `ChatFormat`.

    Returns:
        Findings in the order of the checks; a check that found nothing says so in one line.
    """
    report, of_env = Report(), Report()
    rows = None if examples is None else list(itertools.islice(examples, _NUM_PROMPTS))
    subject = _load_subject(report, model_or_tokenizer, trust_remote_code)
    chat = None if subject is None else _open_chat(report, subject, chat_options)
    env_factory = functools.partial(FunctionToolsEnv, list(tools)) if env is None and tools else env
    starts = _check_environment(of_env, env_factory, rows, chat)
    schemas = _schemas(env_factory, starts)
    if subject is not None and chat is not None:
        needs_tools = bool(schemas) or (tools is None and env is None and chat.supports_tools)
        shown = (schemas or [_PROBE_TOOL]) if needs_tools else None
        _check_tokenizer(report, subject, chat)
        if shown is None or chat.supports_tools:
            _check_template(report, chat, shown)
            if shown is not None:
                _check_parser(report, chat, shown, num_conversations)
            _check_masks(report, chat, shown, num_conversations)
        else:
            _refuse_tools(report, chat, shown)
        _check_prompts(report, chat, starts, subject.max_length, max_completion_length)
    found = (dataclasses.replace(finding, check=f"environment: {finding.check}") for finding in of_env.findings)
    report.findings.extend(found)
    return report.findings


def _check_environment(
    report: Report, env: object, rows: list[dict[str, Any]] | None, chat: ChatFormat | None
) -> list[Start]:
    """Add what `check_env` finds; returns prompts and tools of the rows, or of the calls that an agent made."""
    make = functools.partial(make_env, env)
    if env is not None and is_agent(make, TIMEOUT_S):
        tried = (rows or [DEFAULT_EXAMPLE])[:NUM_EPISODES]
        return examine_agent(report, make, tried, timeout_s=TIMEOUT_S, chat=chat)
    if env is not None:
        try:
            report.findings += examine_env(env, rows)
        except ValueError as error:
            report.error("construction", f"It cannot be checked: {error}", "Pass rows as dicts.")
    return [] if has_errors(report.findings) else _start_rows(report, env or SingleTurnEnv, rows or [])


# ---------------------------------------------------------------- tokenizer and model


@dataclass(kw_only=True)
class Subject:
    """The model under examination: its tokenizer, and what is known about the weights without loading them."""

    tokenizer: Any
    num_embeddings: int | None = None
    max_length: int | None = None
    """Maximum number of positions."""
    eos_token_ids: list[int] | None = None
    """The settings of the generation config; None if there is none."""


def _load_subject(report: Report, given: object, trust_remote_code: bool) -> Subject | None:
    """Read a path or Hub name, or take a tokenizer; None if nothing can be examined."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    given = os.fspath(given) if isinstance(given, os.PathLike) else given
    subject = Subject(tokenizer=given)
    options = {"trust_remote_code": trust_remote_code}
    if isinstance(given, str):
        try:
            subject.tokenizer = AutoTokenizer.from_pretrained(given, **options)
        except Exception as error:  # every loader raises its own
            fix = "Pass a local folder with tokenizer.json, or a Hub name that exists and that you may read."
            if "trust_remote_code" in str(error):
                fix = "Set trust_remote_code=True if you trust the code that comes with it."
            text = f"model={given!r}: its tokenizer cannot be loaded ({str(error).splitlines()[0]})."
            report.error("model", text, fix)
            return None
        with contextlib.suppress(Exception):  # a folder with a tokenizer alone can be examined as well
            text_config = AutoConfig.from_pretrained(given, **options).get_text_config()
            subject.num_embeddings = getattr(text_config, "vocab_size", None)
            subject.max_length = context_length(text_config)
        with contextlib.suppress(Exception):
            eos = GenerationConfig.from_pretrained(given).eos_token_id
            subject.eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    elif not hasattr(given, "apply_chat_template"):
        text = f"model={given!r:.100} is neither a name nor a tokenizer."
        report.error("model", text, "Pass a path or Hub name, or a tokenizer.")
        return None
    tokenizer = getattr(subject.tokenizer, "tokenizer", subject.tokenizer)
    length = getattr(tokenizer, "model_max_length", None)
    if subject.max_length is None and isinstance(length, int) and length < 10**9:  # of some models it is far too low
        subject.max_length = length
    return subject


def _check_tokenizer(report: Report, subject: Subject, chat: ChatFormat) -> None:
    """The vocabulary fits the embeddings, and a served model would stop."""
    tokenizer = chat.tokenizer
    last_id = max([len(chat.tokenizer) - 1, *chat.tokenizer.added_tokens_decoder])
    if subject.num_embeddings is not None and last_id >= subject.num_embeddings:
        text = (
            f"The tokenizer's last id is {last_id}, and the model has {subject.num_embeddings} embeddings: it crashes."
        )
        fix = "model.resize_token_embeddings(len(tokenizer)), or use the tokenizer that belongs to the model."
        report.error("tokenizer", text, fix)
    ends = ", ".join(tokenizer.convert_ids_to_tokens(chat.turn_end_ids))
    stops = {*(subject.eos_token_ids or ()), tokenizer.eos_token_id}
    if subject.eos_token_ids is not None and not stops & set(chat.turn_end_ids):
        text = f"Rollouts stop at {ends}, but neither eos_token nor the generation config: the model would run on."
        fix = f"model.generation_config.eos_token_id = {[*subject.eos_token_ids, *chat.turn_end_ids]}"
        report.warning("tokenizer", text, fix)
    sizes = f" of {subject.num_embeddings} embeddings" if subject.num_embeddings else ""
    report.ok("tokenizer", f"{last_id + 1} ids{sizes}; turns end with {ends}.")


# ---------------------------------------------------------------- template


def _open_chat(report: Report, subject: Subject, options: dict[str, Any]) -> ChatFormat | None:
    """The chat format; None, and an error in the report, if the tokenizer or its template cannot be used."""
    try:
        return ChatFormat(subject.tokenizer, extra_stop_token_ids=subject.eos_token_ids or (), **options)
    except ChatFormatError as error:
        report.error("chat template", error.problem, error.fix)
    except Exception as error:  # a template or tokenizer may fail in any way
        fix = "Load it with AutoTokenizer.from_pretrained and try apply_chat_template on one message."
        report.error("chat template", f"The tokenizer cannot be used ({describe_error(error)}).", fix)
    return None


def _check_template(report: Report, chat: ChatFormat, tools: Sequence[Schema] | None) -> None:
    """The template preserves prefixes over whole conversations, renders prompts faithfully and shows the tools."""
    try:
        _check_rendering(report, chat, tools)
        _check_appending(report, chat, tools)
    except Exception as error:
        text = f"The template fails on an ordinary conversation ({describe_error(error)})."
        report.error("chat template", text, suggestion(chat.tokenizer, chat.chat_template))
    tokens = ", ".join(chat.tokenizer.convert_ids_to_tokens(chat.stop_token_ids))
    shows = "renders tool conversations" if chat.supports_tools else "has no tool calls (none are used)"
    report.ok("chat template", f"Prefix preserving, {shows}; a turn stops at {tokens}.")


def _refuse_tools(report: Report, chat: ChatFormat, tools: Sequence[Schema]) -> None:
    """Say why a format without tool calls cannot be used with tools."""
    problem = "It cannot show tools, and there are some."
    fix = suggestion(chat.tokenizer, chat.chat_template)
    try:
        chat.encode_prompt([{"role": "user", "content": "."}], tools)
    except ChatFormatError as error:
        problem, fix = error.problem, error.fix
    report.error("chat template", problem, fix)


def _check_rendering(report: Report, chat: ChatFormat, tools: Sequence[Schema] | None) -> None:
    messages = [{"role": "user", "content": '\nTwo words: "naïve" 東京 \n'}]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False, "tools": chat.template.no_tools}
    options |= {"chat_template": chat.plain_template or chat.chat_template, **chat.chat_template_kwargs}
    if list(chat.tokenizer.apply_chat_template(messages, **options)) != chat.encode_prompt(messages):
        text = "A prompt's ids are not those of apply_chat_template: the tokenizer does more than tokenizer.json says."
        fix = "Save the tokenizer with save_pretrained and load that folder with AutoTokenizer."
        report.error("chat template", text, fix)
    if split := split_tokens(chat, tools):
        text = f"It writes {', '.join(split)}, no token of the tokenizer but several: a tool result could open a turn."
        fix = "Use the chat template that belongs to the tokenizer, or the tokenizer that belongs to the template."
        report.error("chat template", text, fix)
    if (content := misread_content(chat)) is not None:
        text = f"A reply that says 'said.' is read as {content!r}: rewards and environments would see that."
        report.error("parser", text, _OR_TEMPLATE)
    for name, missing in hidden_parts(chat, tools or ()).items():
        text = f"The prompt does not show {', '.join(missing)} of the tool {name!r}: no model can know how to call it."
        report.error("chat template", text, "Use a template that renders the whole schema ({{ tool | tojson }}).")


def _check_appending(report: Report, chat: ChatFormat, tools: Sequence[Schema] | None) -> None:
    """Prompt + reply + observation + reply + ... must be what the template renders for the whole conversation."""
    found = differences(chat, tools)
    if broken := broken_prefix(found):
        fix = suggestion(chat.tokenizer, chat.chat_template)
        report.error("chat template", f"Not prefix preserving: {broken}.", fix)
        return
    if chat.reasoning_rule is not None:
        report.ok("chat template", "Reasoning is dropped before each turn where the template drops it.")
        return
    # With a forced opener only turns with reasoning can agree; the last difference is theirs.
    difference, place = found[[*found][-1]]
    if difference and len(found) > 1:
        keep = [name for name in ("preserve_thinking", "clear_thinking") if name in chat.chat_template]
        switch = f"chat_template_kwargs={{'{keep[0]}': {keep[0].startswith('preserve')}}} or " if keep else ""
        text = "The template changes reasoning once something follows"
        fix = f"{_STRIP} Or pass {switch}a chat_template that keeps reasoning"
    elif place == "empty reasoning":
        text = "The template leaves the empty reasoning of its generation prompt out of earlier turns"
        fix = f"{_STRIP} Or pass a chat_template that writes it in every turn"
    else:
        text = "The template writes earlier messages in another way in a longer conversation"
        fix = "Pass a chat_template that leaves earlier messages alone"
    if difference or place == "empty reasoning":
        text = f"{text}: {difference}. A rollout keeps its ids, a server with this template renders others."
        report.warning("chat template", text, f"{fix}, and serve the model with it.")


# ---------------------------------------------------------------- parser and masks


@dataclass
class _Scene:
    """A scripted conversation, which takes the environment's part itself."""

    prompt: list[Message]
    tools: list[Tool]
    turns: list[list[int]] = field(default_factory=list)
    """The ids to sample in each turn."""
    observations: list[list[Message]] = field(default_factory=list)
    num_steps: int = 0

    def reset(self, example: dict[str, Any]) -> list[Message]:
        return self.prompt

    def step(self, message: Message) -> StepResult:
        self.num_steps += 1
        return StepResult(self.observations[self.num_steps - 1], 0.0, self.num_steps == len(self.turns), {})

    def close(self) -> None:
        """Nothing to free."""


def _check_parser(report: Report, chat: ChatFormat, tools: Sequence[Schema], num_calls: int) -> None:
    """Calls with random arguments, rendered by the template, must be read back; the first three are plain."""

    def text_of(calls: list[dict[str, Any]]) -> str:
        # Tokenizers with a normaliser compose accents; that is not the parser's doing.
        return _folded(json.dumps([call["function"] for call in calls], ensure_ascii=False, sort_keys=True))

    rng = random.Random(0)
    wrong = []
    for index in range(num_calls):
        calls = _calls(chat, rng, tools, index, is_plain=index < 3)
        try:
            message = chat.parse(chat.encode_reply(_assistant(calls)), tools=tools)
            found = text_of(message.get("tool_calls", []))
        except Exception as error:
            message, found = {}, describe_error(error)
        if found != text_of(calls):
            wrong.append((index, text_of(calls), message.get("malformed_tool_call") or found))
    if wrong:
        index, written, read = wrong[0]
        text = f"{len(wrong)} of {num_calls} rendered calls are not read back as they were written"
        text += f"; {written[:150]} gave {read[:150]}."
        if index < 3:
            report.error("parser", text, _OR_TEMPLATE)
        else:
            fix = "Keep arguments of tools simple: this format cannot carry every JSON value."
            report.warning("parser", text, fix)
    report.ok("parser", f"{num_calls} calls with unicode and nested JSON are read back as they were written.")


def _check_masks(report: Report, chat: ChatFormat, tools: Sequence[Schema] | None, num_conversations: int) -> None:
    """Run scripted conversations and compare the masks with the ids that were sampled."""
    rng = random.Random(0)
    num_tokens = 0
    for _ in range(num_conversations):
        scene = _scene(chat, rng, tools)
        try:
            trajectory = _roll_out(chat, scene)
        except Exception as error:
            text = f"A rollout of a scripted conversation raised {describe_error(error)}."
            report.error("masks", text, suggestion(chat.tokenizer, chat.chat_template))
            return
        _check_trajectory(report, chat, scene, trajectory)
        num_tokens += len(trajectory.completion_ids)
    text = "mask 1 exactly on what was sampled; special tokens in tool text stay text."
    report.ok("masks", f"{num_conversations} conversations, {num_tokens} tokens: {text}")


def _scene(chat: ChatFormat, rng: random.Random, tools: Sequence[Schema] | None) -> _Scene:
    """One to four turns that call tools, say something or are truncated, and a last answer."""
    # Its function is never called: the scene answers itself.
    shown = [Tool(lambda **arguments: "", schema=schema) for schema in tools or ()]
    scene = _Scene([{"role": "user", "content": _text(chat, rng)}], shown)
    for number in range(rng.randint(1, 4)):
        kind = rng.choice(["call", "call", "truncated", "text"] if tools else ["truncated", "text"])
        calls = _calls(chat, rng, tools or (), number) if kind == "call" else []
        words = {"role": "assistant", "content": rng.choice(_WORDS) + "."}
        reply = speak(chat, _assistant(calls) if calls else words)
        scene.turns.append((reply[:-1] or reply) if kind == "truncated" else reply)
        told: list[Message] = [
            {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": _text(chat, rng)}
            for call in calls
        ]
        scene.observations.append(told or [{"role": "user", "content": _text(chat, rng)}])
    scene.turns.append(chat.encode_reply({"role": "assistant", "content": "Done."}))
    scene.observations.append([])
    return scene


def _calls(
    chat: ChatFormat, rng: random.Random, tools: Sequence[Schema], number: int, *, is_plain: bool = False
) -> list[dict[str, Any]]:
    def value(spec: object) -> Any:
        kind = spec.get("type") if isinstance(spec, dict) else None
        return rng.choice(_VALUES[kind] if isinstance(kind, str) and kind in _VALUES else _WORDS)

    calls = []
    for index in range(1 if is_plain else rng.choice([1, 1, 2, 3])):
        schema = rng.choice(list(tools))["function"]
        properties = schema.get("parameters", {}).get("properties", {}) or {"query": {}}
        values = {name: "x" if is_plain else value(spec) for name, spec in properties.items()}
        function = {"name": schema["name"], "arguments": values}
        calls.append({"type": "function", "id": f"c{number:06d}{index:02d}", "function": function})
    try:
        chat.encode_reply(_assistant(calls))
        several = chat.encode_reply(_assistant(calls)) != chat.encode_reply(_assistant(calls[:1]))
    except Exception:  # Llama 3 renders one call per turn, GPT-OSS the first of them
        several = False
    return calls if several else calls[:1]


def _assistant(calls: list[dict[str, Any]]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _text(chat: ChatFormat, rng: random.Random) -> str:
    """Random words, JSON and control tokens of the format, spelled out as a hostile tool result would."""
    spellings = list(chat.encoder.control_ids) or [""]
    parts = [
        rng.choice([rng.choice(_WORDS), rng.choice(spellings), json.dumps(rng.choice(_VALUES["object"]))])
        for _ in range(6)
    ]
    return "result " + " ".join(parts) + " end"


def _roll_out(chat: ChatFormat, scene: _Scene) -> Trajectory:
    generator = ScriptedGenerator(lambda request: scene.turns[request.index], stop_token_ids=chat.stop_token_ids)
    limits = RolloutLimits(
        max_turns=len(scene.turns),
        max_completion_length=10 * _TURN_TOKENS,
        max_tokens_per_turn=_TURN_TOKENS,
        max_observation_tokens=_TURN_TOKENS,
        context="keep" if chat.reasoning_rule is None else STRIP_POLICY,  # type: ignore[arg-type]
    )
    with contextlib.closing(RolloutRunner(lambda: scene, generator, chat, limits)) as runner:
        return runner.run([RolloutRequest(example={})])[0]


def _check_trajectory(report: Report, chat: ChatFormat, scene: _Scene, trajectory: Trajectory) -> None:
    ids = trajectory.completion_ids
    rewritten = {part.start: part.prompt_ids or [] for part in trajectory.segments}
    sampled = [token_id for token_id, mask in zip(ids, trajectory.action_mask, strict=True) if mask]
    is_done = trajectory.stop_reason is StopReason.DONE
    if not is_done or sampled != [token_id for turn in scene.turns for token_id in turn]:
        wrong = "The tokens with mask 1 are not those that were sampled."
        stopped = f"A scripted conversation ended with {trajectory.stop_reason.value} ({trajectory.error})."
        fix = "Report it with the template: this is a fault of the package or of a template's special case."
        report.error("masks", wrong if is_done else stopped, fix)
        return
    heard = [token_id for token_id, who in zip(ids, trajectory.authors, strict=True) if who is Author.ENVIRONMENT]
    if forged := set(chat.encoder.control_ids.values()) & set(heard):
        names = ", ".join(chat.tokenizer.convert_ids_to_tokens(sorted(forged)))
        text = f"Tool text contains control tokens ({names}): a tool result could open a turn."
        report.error("masks", text, "Use a template that puts contents into its text as they are.")
    # Every observation must arrive word for word (or as a JSON string) between its turn and the next.
    for turn, following, told in zip(trajectory.turns, trajectory.turns[1:], scene.observations, strict=False):
        text = _folded(chat.encoder.to_text(rewritten.get(turn.end, []) + ids[turn.end : following.start]))
        for observation in told:
            words = _folded(observation["content"])
            if words not in text and json.dumps(words, ensure_ascii=False)[1:-1] not in text:
                fix = "Use a template that leaves contents alone, and a tokenizer that can spell them."
                text = f"An observation does not arrive as it was sent: {words[:80]!r} became {text[:160]!r}."
                report.warning("masks", text, fix)
                return


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text)


# ---------------------------------------------------------------- prompts


def _start_rows(report: Report, env: object, rows: list[dict[str, Any]]) -> list[Start]:
    """Prompt and tool schemas of every row, as a rollout sees them. A row that cannot be started is reported.

    An environment may choose its tools in `reset`, so the tools of the class say little about the prompts.
    """
    starts: list[Start] = []
    trial = EnvTrial(rows=rows, caller=Caller(_START_S), make=functools.partial(make_env, env))
    with contextlib.closing(trial.caller), contextlib.closing(trial):
        for number, row in enumerate(rows):
            _, started = trial.start(row)
            if started.failure:
                text = f"Row {number} of the data set cannot be started: {started.failure}."
                report.error("reset", text, "Correct or drop the row: reset must work for every one.")
                break
            starts.append(started.value)
    return starts


def _schemas(env: object, starts: list[Start]) -> list[Schema]:
    """Schemas of the tools of all rows, each once; those of a fresh environment where no row was started."""
    found = [schema for _, schemas in starts for schema in schemas]
    if not found and env is not None:
        found = tool_schemas(functools.partial(make_env, env))
    by_name: dict[str, Schema] = {}
    for schema in reversed(found):
        by_name[schema["function"]["name"]] = schema  # of several, the first one stays
    return list(reversed(by_name.values()))


def _check_prompts(
    report: Report, chat: ChatFormat, starts: list[Start], limit: int | None, max_completion_length: int | None
) -> None:
    """Lengths of real prompts against the model's positions."""
    try:
        lengths = [len(chat.encode_prompt(messages, schemas or None)) for messages, schemas in starts]
    except ChatFormatError as error:
        report.error("prompts", error.problem, error.fix)
        return
    if not lengths:
        return
    longest = max(lengths)
    if limit is not None and longest >= limit:
        text = f"The longest of {len(lengths)} prompts has {longest} tokens, the model {limit} positions."
        report.error("prompts", text, "Shorten the prompts, drop those rows, or take a model with a longer context.")
    elif limit is not None and max_completion_length is not None and longest + max_completion_length > limit:
        text = f"max_completion_length={max_completion_length} after a prompt of {longest} exceeds {limit} positions."
        report.warning("prompts", text, f"Set max_completion_length to at most {limit - longest}.")
    known = f" of {limit} positions" if limit is not None else "; how many the model has is not known"
    report.ok("prompts", f"{len(lengths)} prompts, {min(lengths)} to {longest} tokens{known}.")
