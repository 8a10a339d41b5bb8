"""A trajectory on the terminal: its tokens with the mask in colour, its rewards and its tool calls.

Green: sampled by the policy, mask 1. Yellow: chat template. Blue: environment. Text of a model or of a web page cannot
control the terminal: control characters are shown as symbols.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agent_r1_trl.safe_text import visible
from agent_r1_trl.trajectory import USAGE, Author, StopReason, ToolResult, Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from agent_r1_trl.recording.store import Record


UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one author and one turn."""

    text: str
    author: Author
    turn_id: int
    """-1 for tokens that the policy did not sample."""
    start: int
    end: int


def decode_spans(trajectory: Trajectory, tokenizer: Any) -> tuple[str, list[Span]]:
    """Decode the prompt and the spans of the completion, in order.

    A character whose bytes belong to two spans is part of the later one; bytes that form no character become one
    U+FFFD.
    """
    num_prompt = len(trajectory.prompt_ids)
    ids = [*trajectory.prompt_ids, *trajectory.completion_ids]
    full = _decode(tokenizer, ids)
    bounds = _bounds(trajectory)
    cuts = _cut_positions(tokenizer, ids, [num_prompt, *(num_prompt + end for _, end in bounds)], full)
    first = cuts[0]
    if bounds:
        cuts[-1] = len(full)
    spans = []
    for (start, end), left, right in zip(bounds, cuts, cuts[1:], strict=False):
        text = _collapse(full[left : max(left, right)])
        spans.append(Span(text, trajectory.authors[start], trajectory.turn_ids[start], start, end))
    return _collapse(full[:first]), spans


def _bounds(trajectory: Trajectory) -> list[tuple[int, int]]:
    """[start, end) of each span."""
    keys = list(zip(trajectory.authors, trajectory.turn_ids, strict=True))
    starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    return list(zip(starts, [*starts[1:], len(keys)], strict=True)) if keys else []


def _cut_positions(tokenizer: Any, ids: list[int], ends: Sequence[int], full: str) -> list[int]:
    """`_cut_position` at each of the growing `ends`; every id is decoded a few times, however many ends there are."""
    cuts: list[int] = []
    start = 0
    for index, end in enumerate(ends):
        found = None
        if index:
            # Decoded from the end before last on: where a decoder looks at the ids before, these are there.
            before, after = (_decode(tokenizer, ids[start:stop]).rstrip(UNKNOWN) for stop in (ends[index - 1], end))
            added = after[len(before) :]
            if after.startswith(before) and full.startswith(added, cuts[-1]):
                found = cuts[-1] + len(added)
            start = ends[index - 1]
        cuts.append(_cut_position(tokenizer, ids[:end], full) if found is None else found)
    return cuts


def _cut_position(tokenizer: Any, ids: Sequence[int], full: str) -> int:
    """Length of the part of `full` that the first ids make up."""
    head = _decode(tokenizer, ids).rstrip(UNKNOWN)
    if full.startswith(head):
        return len(head)
    # Not a prefix, for example because the decoder cleans up spaces: take the longest common prefix.
    return next((i for i, (a, b) in enumerate(zip(head, full, strict=False)) if a != b), min(len(head), len(full)))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _collapse(text: str) -> str:
    while UNKNOWN * 2 in text:
        text = text.replace(UNKNOWN * 2, UNKNOWN)
    return text


STYLES = {Author.POLICY: "green", Author.TEMPLATE: "yellow", Author.ENVIRONMENT: "blue"}
PROMPT_CHARS = 2000
RESULT_CHARS = 160


def render_trajectory(
    trajectory: Trajectory, tokenizer: Any = None, width: int | None = None, *, color: bool = True, note: str = ""
) -> str:
    """Render a trajectory as text.

    Args:
        trajectory: what to show.
        tokenizer: decodes the ids; None: show the parsed messages instead of the tokens.
        width: in columns; None: that of the terminal.
        color: use ANSI colours; without them, action tokens stand between ⟦ and ⟧.
        note: stands below the figures, such as `explain_advantage`.
    """
    parts: list[RenderableType] = [_header(trajectory), *([visible(note)] if note else [])]
    has_tokens = tokenizer is not None and not trajectory.is_hosted
    parts += _tokens(trajectory, tokenizer, color) if has_tokens else _messages(trajectory)
    footer = _footer(trajectory)
    return render([*parts, footer] if footer else parts, width=width, color=color)


def render(parts: Iterable[RenderableType], *, width: int | None = None, color: bool = True) -> str:
    """Rich renderables as a string."""
    import io

    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((100, 24)).columns,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- parts


def _header(trajectory: Trajectory) -> Text:
    from rich.text import Text

    counts = {author: sum(item is author for item in trajectory.authors) for author in Author}
    name = f"{trajectory.example_id or 'trajectory'} · generation {trajectory.generation}"
    text = Text().append(visible(name) + "\n", style="bold")
    reason = trajectory.stop_reason
    style = "red" if reason.is_infrastructure_failure else "yellow" if reason is not StopReason.DONE else "default"
    text.append("stop: ", style="dim").append(reason.value, style=style)
    text.append("   reward: ", style="dim").append(f"{trajectory.total_reward:+.3f}")
    text.append(
        f" = turns {trajectory.process_reward:+.3f} + outcome {trajectory.outcome_reward:+.3f}"
        f"{_parts(trajectory.reward_parts)}"
    )
    num_summaries = len(trajectory.turns) - len(trajectory.env_turns)
    text.append(f"   turns: {len(trajectory.env_turns)}", style="dim")
    text.append(f"   summaries: {num_summaries}" if num_summaries else "", style="dim")
    text.append(f"   {trajectory.duration_s:.2f} s\n", style="dim")
    text.append("tokens: ", style="dim")
    if trajectory.is_hosted:
        text.append("  ".join(f"{count} {name}" for name, count in trajectory.info[USAGE].items()) or "not counted")
        return _with_error(text, trajectory)
    text.append(f"{counts[Author.POLICY]} policy (mask 1)", style=STYLES[Author.POLICY]).append("  ")
    text.append(f"{counts[Author.TEMPLATE]} template", style=STYLES[Author.TEMPLATE]).append("  ")
    text.append(f"{counts[Author.ENVIRONMENT]} environment", style=STYLES[Author.ENVIRONMENT])
    text.append(f"  {len(trajectory.prompt_ids)} prompt", style="dim")
    if trajectory.segments:
        text.append(f"   rows: {len(trajectory.rows)}", style="dim")
    return _with_error(text, trajectory)


def _with_error(text: Text, trajectory: Trajectory) -> Text:
    return text.append("\n" + visible(trajectory.error), style="red") if trajectory.error else text


def _tokens(trajectory: Trajectory, tokenizer: Any, color: bool) -> list[RenderableType]:
    from rich.text import Text

    prompt, spans = decode_spans(trajectory, tokenizer)
    parts: list[RenderableType] = [_rule("prompt")]
    parts.append(Text(visible(_middle_cut(prompt, PROMPT_CHARS)).rstrip("\n"), style="dim"))
    text = Text()
    shown: set[int] = set()
    for span in spans:
        if span.turn_id >= 0 and span.turn_id not in shown:
            shown.add(span.turn_id)
            parts += _non_empty(text)
            parts.append(_turn_rule(trajectory, span.turn_id))
            text = Text()
        _append(text, span, color)
    parts += _non_empty(text)
    # A turn in which nothing was sampled has no tokens, so its rule comes last.
    parts += [_turn_rule(trajectory, index) for index in range(len(trajectory.turns)) if index not in shown]
    return parts


def _non_empty(text: Text) -> list[Text]:
    text.rstrip()
    return [text] if text else []


def _append(text: Text, span: Span, color: bool) -> None:
    shown = visible(span.text).replace("\n", "↵\n")  # so that the mask of a newline is visible too
    if not color and span.author is Author.POLICY:
        shown = f"⟦{shown}⟧"
    text.append(shown, style=STYLES[span.author])


def _messages(trajectory: Trajectory) -> list[RenderableType]:
    from rich.text import Text

    why = "of a hosted model: there are no token ids" if trajectory.is_hosted else "no tokenizer: no tokens, no mask"
    parts: list[RenderableType] = [_rule(f"messages ({why})")]
    for message in trajectory.prompt_messages:
        parts.append(Text(visible(f"{message.get('role')}: {_content(message)}"), style="dim"))
    for index, turn in enumerate(trajectory.turns):
        parts.append(_turn_rule(trajectory, index))
        if turn.summary_request is not None:
            asked = visible(f"user: {_content(turn.summary_request)}")
            parts.append(Text(asked, style=STYLES[Author.ENVIRONMENT]))
        parts.append(Text(visible(_content(turn.message)), style=STYLES[Author.POLICY]))
        for message in turn.observations:
            parts.append(
                Text(visible(f"{message.get('role')}: {_content(message)}"), style=STYLES[Author.ENVIRONMENT])
            )
    return parts


def _footer(trajectory: Trajectory) -> Text:
    """Tool calls, then the environment's `info`."""
    from rich.text import Text

    text = Text()
    for index, turn in enumerate(trajectory.turns):
        for result in turn.tool_results:
            _append_call(text, index, result)
    if trajectory.info:
        text.append("info  ", style="bold")
        text.append(visible("  ".join(f"{name}={value!r}" for name, value in trajectory.info.items())))
    text.rstrip()
    return text


def _append_call(text: Text, turn: int, result: ToolResult) -> None:
    arguments = result.call.arguments
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    text.append(f"turn {turn}  ", style="bold")
    text.append(visible(_cut(f"{result.call.name or '?'}({arguments})", RESULT_CHARS)))
    text.append(f"  {result.latency_s * 1000:.0f} ms", style="dim")
    if result.error:
        text.append(f"  failed: {result.error.value}", style="red")
    if result.is_truncated:
        text.append("  cut", style="yellow")
    text.append("\n  → " + visible(_cut(" ".join(result.content.split()), RESULT_CHARS)) + "\n")


def _turn_rule(trajectory: Trajectory, index: int) -> RenderableType:
    turn = trajectory.turns[index]
    kind = "summary" if turn.is_summary else "turn"
    title = f"{kind} {index} · reward {turn.reward:+.3f}{_parts(turn.reward_parts)}"
    if trajectory.advantages is not None and turn.end > turn.start:
        values = trajectory.advantages[turn.start : turn.end]
        title += f" · advantage {math.fsum(values) / len(values):+.3f}"
    opened = [item for item in trajectory.segments if item.start == turn.start and item.prompt_ids]
    title += f" · after a new context of {len(opened[-1].prompt_ids or ())} tokens" if opened else ""
    flags = [name for name, is_set in (("cut", turn.is_truncated), ("invalid", turn.is_invalid)) if is_set]
    failures = _num_failures(turn)
    flags += [f"{failures} failed call{'s' if failures > 1 else ''}"] if failures else []
    return _rule(" · ".join([title, *flags]), style="red" if flags else "default")


def _rule(title: str, style: str = "default") -> RenderableType:
    from rich.rule import Rule
    from rich.text import Text

    return Rule(Text(visible(title), style=style), align="left", style="dim")


# ---------------------------------------------------------------- many trajectories


_COLUMNS = ("step", "index", "example", "stop", "turns", "calls", "failed", "tokens", "reward", "outcome")


def summary_table(records: Sequence[Record], example: str | None = None) -> Table:
    """A table with one line per trajectory.

    Args:
        records: what it lists.
        example: that all of them are of: a title, and narrower lines.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    title, left_out = (Text(visible(example)), ("calls", "failed", "tokens")) if example else (None, ())
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", collapse_padding=True)
    names = [name for name in _COLUMNS if name not in left_out]
    for name in names:
        justify: Literal["left", "right"] = "left" if name in ("example", "stop") else "right"
        is_cut = name == "example"  # the first to be, where the lines are too long
        table.add_column(name, justify=justify, no_wrap=not is_cut, min_width=7 if is_cut else None)
    for record in records:
        item = record.trajectory
        cells: tuple[str | Text, ...] = (
            f"{'eval ' if record.split == 'eval' else ''}{record.step}",
            str(record.index),
            Text(visible(f"{'' if example else item.example_id}#{item.generation}")),
            item.stop_reason.value,
            str(len(item.env_turns)),
            str(len(item.tool_results)),
            str(sum(map(_num_failures, item.turns))),
            str(item.info[USAGE].get("completion_tokens", "-") if item.is_hosted else len(item.completion_ids)),
            f"{item.total_reward:+.3f}",
            f"{item.outcome_reward:+.3f}",
        )
        table.add_row(*(cell for name, cell in zip(_COLUMNS, cells, strict=True) if name in names))
    return table


# ---------------------------------------------------------------- text


def _content(message: dict[str, Any]) -> str:
    texts = [str(message.get("reasoning_content") or ""), str(message.get("content") or "")]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        texts.append(f"→ {function.get('name')}({function.get('arguments')})")
    if message.get("malformed_tool_call"):
        texts.append(f"(malformed call: {message['malformed_tool_call']})")
    return "\n".join(item for item in texts if item)


def _parts(parts: dict[str, float]) -> str:
    return visible(f" ({', '.join(f'{name} {value:+.3f}' for name, value in parts.items())})") if parts else ""


def _num_failures(turn: Turn) -> int:
    return sum(result.is_error for result in turn.tool_results)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _middle_cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
