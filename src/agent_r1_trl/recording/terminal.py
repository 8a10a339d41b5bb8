"""A trajectory on the terminal: its tokens with the mask in colour, its rewards and its tool calls.

Blue: sampled by the policy, mask 1. Orange: environment. Grey: chat template. Text of a model or of a web page cannot
control the terminal: control characters are shown as symbols.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agent_r1_trl.safe_text import visible
from agent_r1_trl.trajectory import USAGE, Author, StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from agent_r1_trl.recording.store import Record


class Span(NamedTuple):
    """Consecutive tokens of one author and one turn."""

    text: str
    author: Author
    turn_id: int
    """-1 for tokens that the policy did not sample."""


def decode_spans(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """Decode the prompt and the spans of the completion, in order, each by itself."""
    ids = iter(trajectory.completion_ids)
    spans = [
        Span(_decode(tokenizer, [next(ids) for _ in tokens]), author, turn_id)
        for (author, turn_id), tokens in groupby(zip(trajectory.authors, trajectory.turn_ids, strict=True))
    ]
    return _decode(tokenizer, trajectory.prompt_ids), spans


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text; bytes that form no character, as where a limit cut one, become one U+FFFD."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return re.sub("\ufffd+", "\ufffd", str(text))


STYLES = {Author.POLICY: "color(32)", Author.TEMPLATE: "color(244)", Author.ENVIRONMENT: "color(166)"}
"""Blue, grey and orange, which colour-blind eyes tell apart (green and this orange they do not), on dark and light."""
PROMPT_CHARS, RESULT_CHARS = 2000, 160
"""Longest prompt and result of a call that are shown whole."""


def render_trajectory(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase | None = None,
    width: int | None = None,
    *,
    color: bool = True,
    note: str = "",
) -> str:
    """Render a trajectory as text.

    Args:
        trajectory: what to show.
        tokenizer: decodes the ids; None: show the parsed messages instead of the tokens.
        width: in columns; None: that of the terminal.
        color: use ANSI colours; without them, action tokens stand between ⟦ and ⟧.
        note: stands below the figures, such as `explain.describe`.
    """
    has_tokens = tokenizer is not None and not trajectory.is_hosted
    body = _tokens(trajectory, tokenizer, color) if has_tokens else _messages(trajectory)
    parts = [_header(trajectory), *([visible(note)] if note else []), *body, *_calls(trajectory)]
    if trajectory.info:
        parts.append(
            _text(("info  ", "bold"), "  ".join(f"{name}={value!r}" for name, value in trajectory.info.items()))
        )
    return render(parts, width=width, color=color)


def render(parts: Iterable[RenderableType], *, width: int | None = None, color: bool = True) -> str:
    """Rich renderables as a string."""
    import io

    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((100, 24)).columns,
        force_terminal=color,
        force_jupyter=False,  # in a notebook rich would display the parts and leave the string empty
        no_color=not color,
        color_system="256" if color else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _text(*parts: str | tuple[str, str]) -> Text:
    """Texts, some with a style, made safe to show."""
    from rich.text import Text

    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((visible(text), style) for text, style in pairs))


def _sum_of_rewards(trajectory: Trajectory) -> str:
    return (
        f"{trajectory.total_reward:+.3f} = turns {trajectory.process_reward:+.3f} + "
        f"outcome {trajectory.outcome_reward:+.3f}{_parts(trajectory.reward_parts)}"
    )


def _header(trajectory: Trajectory) -> Text:
    reason = trajectory.stop_reason
    is_failure = trajectory.stop_reason.is_infrastructure_failure
    num_summaries = len(trajectory.turns) - len(trajectory.env_turns)
    head: list[str | tuple[str, str]] = [
        (f"{trajectory.example_id or 'trajectory'} · generation {trajectory.generation}\n", "bold"),
        ("stop: ", "dim"),
        (reason.value, "red" if is_failure else "yellow" if reason is not StopReason.DONE else "default"),
        ("   reward: ", "dim"),
        _sum_of_rewards(trajectory) if trajectory.is_scored else "none: nothing scored it",
        (f"   turns: {len(trajectory.env_turns)}", "dim"),
        (f"   summaries: {num_summaries}" if num_summaries else "", "dim"),
        (f"   {trajectory.duration_s:.2f} s\ntokens: ", "dim"),
    ]
    if trajectory.is_hosted:
        counts = trajectory.info[USAGE].items()
        head.append("  ".join(f"{count} {name}" for name, count in counts) or "not counted")
    else:
        for author, style in STYLES.items():
            mask = " (mask 1)" if author is Author.POLICY else ""
            count = sum(item is author for item in trajectory.authors)
            head.append((f"{count} {author.value}{mask}  ", style))
        rows = f"   rows: {len(trajectory.rows)}" if trajectory.segments else ""
        head.append((f"{len(trajectory.prompt_ids)} prompt{rows}", "dim"))
    return _text(*head, (f"\n{trajectory.error}" if trajectory.error else "", "red"))


def _tokens(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, color: bool) -> list[RenderableType]:
    prompt, spans = decode_spans(trajectory, tokenizer)
    half = PROMPT_CHARS // 2
    if len(prompt) > PROMPT_CHARS:
        prompt = f"{prompt[:half]}\n… {len(prompt) - 2 * half} characters …\n{prompt[-half:]}"
    parts: list[RenderableType] = [_rule("prompt"), _text((prompt.rstrip("\n"), "dim"))]
    shown: set[int] = set()
    texts: list[tuple[str, str]] = []
    for span in [*spans, None]:
        if (span is None or (span.turn_id >= 0 and span.turn_id not in shown)) and texts:
            section = _text(*texts)
            section.rstrip()
            parts += [section] if section else []
            texts = []
        if span is None:
            break
        if span.turn_id >= 0 and span.turn_id not in shown:
            shown.add(span.turn_id)
            parts.append(_turn_rule(trajectory, span.turn_id))
        text = span.text.replace("\n", "↵\n")  # so that the mask of a newline is visible too
        is_marked = not color and span.author is Author.POLICY
        texts.append((f"⟦{text}⟧" if is_marked else text, STYLES[span.author]))
    # A turn in which nothing was sampled has no tokens, so its rule comes last.
    return parts + [_turn_rule(trajectory, index) for index in range(len(trajectory.turns)) if index not in shown]


def _messages(trajectory: Trajectory) -> list[RenderableType]:
    why = "of a hosted model: there are no token ids" if trajectory.is_hosted else "no tokenizer: no tokens, no mask"
    parts: list[RenderableType] = [_rule(f"messages ({why})")]
    parts += [_text((_line(message), "dim")) for message in trajectory.prompt_messages]
    for index, turn in enumerate(trajectory.turns):
        asked = [turn.summary_request] if turn.summary_request is not None else []
        parts.append(_turn_rule(trajectory, index))
        parts += [_text((_line(message), STYLES[Author.ENVIRONMENT])) for message in asked]
        parts.append(_text((_content(turn.message), STYLES[Author.POLICY])))
        parts += [_text((_line(message), STYLES[Author.ENVIRONMENT])) for message in turn.observations]
    return parts


def _calls(trajectory: Trajectory) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for index, turn in enumerate(trajectory.turns):
        for result in turn.tool_results:
            arguments = result.call.arguments
            if isinstance(arguments, dict):
                arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            parts.append(
                _text(
                    (f"turn {index + 1}  ", "bold"),
                    _cut(f"{result.call.name or '?'}({arguments})"),
                    (f"  {result.latency_s * 1000:.0f} ms", "dim"),
                    (f"  call error: {result.error_label}" if result.is_error else "", "red"),
                    ("  cut" if result.is_truncated else "", "yellow"),
                    f"\n  → {_cut(' '.join(result.content.split()))}",
                )
            )
    return parts


def _turn_rule(trajectory: Trajectory, index: int) -> RenderableType:
    turn = trajectory.turns[index]
    kind = "summary" if turn.is_summary else "turn"
    parts = [f"{kind} {index + 1}", f"reward {turn.reward:+.3f}{_parts(turn.reward_parts)}"]
    if trajectory.advantages is not None and turn.end > turn.start:
        values = trajectory.advantages[turn.start : turn.end]
        parts.append(f"advantage {math.fsum(values) / len(values):+.3f}")
    opened = [item for item in trajectory.segments if item.start == turn.start and item.prompt_ids]
    if opened:
        parts.append(f"after a new context of {len(opened[-1].prompt_ids or ())} tokens")
    flags = []
    if turn.is_truncated:
        flags.append("cut")
    if turn.is_invalid:
        flags.append("invalid")
    num_errors = _num_call_errors(turn)
    if num_errors:
        flags.append(f"{num_errors} call error{'s' if num_errors > 1 else ''}")
    return _rule(" · ".join([*parts, *flags]), style="red" if flags else "default")


def _rule(title: str, style: str = "default") -> RenderableType:
    from rich.rule import Rule

    return Rule(_text((title, style)), align="left", style="dim")


def summary_table(records: Sequence[Record], example: str | None = None) -> Table:
    """A table with one line per trajectory.

    Args:
        records: what it lists.
        example: that all of them are of: a title, and narrower lines.
    """
    from rich import box
    from rich.table import Table

    title, hidden = (_text(example), ("calls", "call errors", "tokens")) if example else (None, ())
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", collapse_padding=True)
    for row, record in enumerate(records):
        item = record.trajectory
        cells: dict[str, str | Text] = {
            "step": f"{'eval ' if record.split == 'eval' else ''}{record.step}",
            "index": str(record.index),
            "example": _text(f"{'' if example else item.example_id}#{item.generation}"),
            "stop": item.stop_reason.value,
            "turns": str(len(item.env_turns)),
            "calls": str(len(item.tool_results)),
            "call errors": str(sum(map(_num_call_errors, item.turns))),
            "tokens": str(
                item.info[USAGE].get("completion_tokens", "-") if item.is_hosted else len(item.completion_ids)
            ),
            "reward": f"{item.total_reward:+.3f}",
            "outcome": f"{item.outcome_reward:+.3f}",
        }
        for name in cells if row == 0 else ():
            justify: Literal["left", "right"] = "left" if name in ("example", "stop") else "right"
            if name not in hidden:  # the example is the first to be cut, where the lines are too long
                table.add_column(
                    name, justify=justify, no_wrap=name != "example", min_width=7 if name == "example" else None
                )
        table.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    return table


def _line(message: dict[str, Any]) -> str:
    return f"{message.get('role')}: {_content(message)}"


def _content(message: dict[str, Any]) -> str:
    texts = [str(message.get("reasoning_content") or ""), str(message.get("content") or "")]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        texts.append(f"→ {function.get('name')}({function.get('arguments')})")
    if message.get("malformed_tool_call"):
        texts.append(f"(malformed call: {message['malformed_tool_call']})")
    return "\n".join(item for item in texts if item)


def _parts(parts: dict[str, float]) -> str:
    return f" ({', '.join(f'{name} {value:+.3f}' for name, value in parts.items())})" if parts else ""


def _num_call_errors(turn: Turn) -> int:
    return sum(result.is_error for result in turn.tool_results)


def _cut(text: str) -> str:
    return text if len(text) <= RESULT_CHARS else text[: RESULT_CHARS - 1] + "…"
