"""Trajectories as blocks of bytes that a page unpacks one by one, and an index of all of them.

A block holds whole groups, about 65,536 tokens, deflated:

    u32 length of the head | head (JSON) | ids, 3 planes | float16, 2 planes | float32, 4 planes

A plane holds one byte of each number, which deflates better than the numbers side by side. Ids are indices into the
vocabulary of the page, which holds each used token once. A column has a number for each token that the policy sampled,
in the order of time: `[kind, offset]` with the bytes of a number as kind, 2 or 4; `[0, value]` where all are equal,
`[1, factor, last]` where each is the critic's value of the next token times a factor.
Texts of messages stand in blocks of their own, for the search; heads hold the lengths of parts, in UTF-16 units.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_r1_trl.features.inspector.token_bytes import TokenBytes
from agent_r1_trl.recording import Record
from agent_r1_trl.recording.store import MAX_FLOAT16
from agent_r1_trl.safe_text import dump_json
from agent_r1_trl.trajectory import Author, Trajectory, Turn

if TYPE_CHECKING:
    from agent_r1_trl.recording.explain import Explanation

BLOCK_TOKENS = 65_536
TEXT_CHARS = 4_000_000
AUTHORS = list(Author)
SIGNS = ("+ ", "- ", "* ", "/ ", "= ")
TITLE_CHARS = 80
EXACT = ("advantage", "return", "value", "sum")
"""Columns of 16 bits of mantissa: parts of sums."""
_FLAGS = "lost call_errors invalid truncated unsolved untrained same masked rows gap"
FLAGS = tuple(_FLAGS.split())
"""Bits of `flags` in the index, from the lowest. `gap`: the recorded advantage is not the explained one."""


def deflate(data: bytes) -> str:
    """Raw deflate, as base64."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return base64.b64encode(packer.compress(data) + packer.flush()).decode("ascii")


class Vocabulary:
    """The tokens that a page shows, by the order in which they came up."""

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.special: list[int] = []
        self._tables: dict[TokenBytes, dict[int, int]] = defaultdict(dict)

    def indices(self, source: TokenBytes, ids: Sequence[int]) -> np.ndarray:
        """(n,) places in the vocabulary."""
        table = self._tables[source]
        for token_id in set(ids).difference(table):
            table[token_id] = len(self.tokens)
            if source.is_special(token_id):
                self.special.append(len(self.tokens))
            self.tokens.append(source(token_id)[:65_535])
        return np.fromiter((table[token_id] for token_id in ids), np.uint32, len(ids))

    def packed(self) -> dict[str, Any]:
        """Bytes of all tokens and their lengths, for the page."""
        lengths = np.array([len(token) for token in self.tokens], "<u2").tobytes()
        return {"bytes": deflate(b"".join(self.tokens)), "lengths": deflate(lengths), "special": self.special}


@dataclass
class Block:
    """The parts of one block."""

    items: list[dict[str, Any]] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    floats: dict[int, list[np.ndarray]] = field(default_factory=lambda: {2: [], 4: []})
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # of prompts and contexts
    num_ids: int = 0
    num_floats: dict[int, int] = field(default_factory=lambda: {2: 0, 4: 0})

    def add_ids(self, indices: np.ndarray) -> list[int]:
        """Place and length among the ids of the block."""
        place = [self.num_ids, len(indices)]
        self.ids.append(indices)
        self.num_ids += len(indices)
        return place

    def add_column(self, name: str, values: np.ndarray) -> list[Any]:
        """See the head of the file; values (n,) float32."""
        if not len(values) or np.array_equal(values, np.broadcast_to(values[:1], values.shape), equal_nan=True):
            return [0, rounded(values[0]) if len(values) else None]
        bits: np.ndarray
        largest = np.nanmax(np.abs(values), initial=0.0)
        if name in EXACT or not largest < MAX_FLOAT16:
            kind, bits = 4, (values.astype("<f4").view("<u4") + np.uint32(0x80)) & np.uint32(0xFFFFFF00)
        else:
            kind, bits = 2, values.astype("<f2").view("<u2")
        place = self.num_floats[kind]
        self.floats[kind].append(bits)
        self.num_floats[kind] += len(bits)
        return [kind, place]

    def packed(self) -> str:
        """The block as it stands in the page."""
        counts = {"ids": self.num_ids, "f2": self.num_floats[2], "f4": self.num_floats[4]}
        head = dump_json({**counts, "items": self.items}, ensure_ascii=True).encode("ascii")
        parts = [struct.pack("<I", len(head)), head, _planes(self.ids, "<u4")[: 3 * self.num_ids]]
        parts += [_planes(self.floats[2], "<u2"), _planes(self.floats[4], "<u4")]
        return deflate(b"".join(parts))


def _planes(arrays: list[np.ndarray], kind: str) -> bytes:
    joined = np.concatenate([*arrays, np.zeros(0, kind)]).astype(kind)
    return joined.view("u1").reshape(-1, joined.itemsize).T.tobytes()


def rounded(value: object) -> float | None:
    """A number for the index, of 6 significant digits; None for what is no finite number."""
    is_number = isinstance(value, int | float | np.number) and bool(np.isfinite(value))
    return float(f"{value:.6g}") if is_number else None


class TextBlocks:
    """Blocks of text, and what stands where."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self._parts: list[str] = []
        self._length = 0

    def add(self, parts: list[str]) -> tuple[list[int], list[int]]:
        """Block, start and length of all parts; and the length of each, in UTF-16 units."""
        if self._length > TEXT_CHARS:
            self.close()
        cleaned = [part.encode("utf-8", "replace").decode("utf-8") for part in parts]  # no lone surrogates
        lengths = [len(part.encode("utf-16-le")) // 2 for part in cleaned]
        place = [len(self.blocks), self._length, sum(lengths)]
        self._parts += cleaned
        self._length += place[2]
        return place, lengths

    def close(self) -> None:
        """End the block."""
        if self._parts:
            self.blocks.append(deflate("".join(self._parts).encode("utf-8")))
        self._parts, self._length = [], 0


class Packer:
    """Puts trajectories into blocks; `index` has a list for each column, with a place for each trajectory."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.texts = TextBlocks()
        self.vocabulary = Vocabulary()
        self.index: dict[str, list[Any]] = defaultdict(list)
        self.examples: dict[str, int] = {}
        self.tags: dict[tuple[tuple[str, str], ...], int] = {}
        """Values of an example's columns, as pairs of name and text."""
        self.titles: dict[str, int] = {}
        """What groups are called: by the `id` of their row, else by their question (`title_of`)."""
        self.stops: dict[str, int] = {}
        self.worst_ratio = (0.0, 0)
        """Largest size of a `log_ratio`, and the place of its trajectory in the index."""
        self._samples: dict[str, list[np.ndarray]] = defaultdict(list)
        self._block = Block()

    def add(self, run: int, records: list[Record], source: TokenBytes, facts: dict[str, Any]) -> None:
        """Pack a step of run 0, or of the other, 1; `facts` are what the run wrote of the step (`read_steps`)."""
        for number, group in numbered_groups(records):
            self._add_group(run, number, group, source, facts)
            if self._block.num_ids >= BLOCK_TOKENS:
                self.close()

    def close(self) -> None:
        """End the block."""
        if self._block.items:
            self.blocks.append(self._block.packed())
            self._block = Block()

    @property
    def size(self) -> int:
        """Bytes so far."""
        return sum(map(len, self.blocks)) + sum(map(len, self.texts.blocks)) + self.texts._length // 3

    def scales(self) -> dict[str, float]:
        """Column -> the number with the full colour: the 99th percentile of its size, rounded up."""
        found = {name: np.abs(np.concatenate(parts)) for name, parts in self._samples.items()}
        return {name: _nice(np.percentile(values, 99)) for name, values in found.items() if len(values)}

    def _add_group(self, run: int, number: int, group: list[Record], source: TokenBytes, facts: Any) -> None:
        rewards = {round(record.trajectory.total_reward, 9) for record in group if record.trajectory.in_baseline}
        for record, found in zip(group, explained(group, facts), strict=True):
            item, is_policy = record.trajectory, np.array(record.trajectory.action_mask, bool)
            columns = {name: values for name, values in columns_of(record, is_policy).items() if len(values)}
            for name, values in columns.items():
                self._sample(name, values[np.isfinite(values)])
            texts, parts = texts_of(item)
            place, lengths = self.texts.add(texts)
            for part, length in zip(parts, lengths, strict=True):
                part.append(length)
            advantage = columns.get("advantage")
            entries = {
                "run": run,
                "eval": int(record.split == "eval"),
                "step": record.step,
                "group": number,
                "generation": item.generation,
                "example": self.examples.setdefault(item.example_id, len(self.examples)),
                "title": self.titles.setdefault(title_of(item), len(self.titles)),
                "tags": self.tags.setdefault(tuple(item.tags.items()), len(self.tags)),
                "stop": self.stops.setdefault(item.stop_reason.value, len(self.stops)),
                "reward": rounded(item.total_reward) if item.in_baseline else None,
                "advantage": rounded(advantage.mean()) if advantage is not None else None,
                "flags": flags_of(record, len(group) > 1 and len(rewards) == 1, found),
                "turns": len(item.turns),
                "tokens": len(item.completion_ids),
                "policy": int(is_policy.sum()),
                "seconds": round(item.duration_s, 3),
                "block": len(self.blocks),
                "slot": len(self._block.items),
                **dict(zip(("text_block", "text_start", "text_length"), place, strict=True)),
            }
            for name, entry in entries.items():
                self.index[name].append(entry)
            self._block.items.append(self._head(record, source, found, columns) | {"texts": parts})

    def _sample(self, name: str, values: np.ndarray) -> None:
        self._samples[name].append(values[:: max(1, len(values) // 64)])
        if name == "log_ratio" and len(values) and (size := float(np.abs(values).max())) > self.worst_ratio[0]:
            self.worst_ratio = (round(size, 4), len(self.index["run"]))

    def _head(
        self, record: Record, source: TokenBytes, found: Explanation | None, columns: dict[str, np.ndarray]
    ) -> dict[str, Any]:
        item, block = record.trajectory, self._block
        packed: dict[bytes, list[Any]] = {}

        def column(name: str, values: np.ndarray | None) -> list[Any]:
            if values is None:
                return []
            if name == "sum" and (shifted := shifted_column(values, columns.get("value"))):
                return shifted
            key = values.tobytes()
            packed[key] = packed.get(key) or block.add_column(name, values)
            return packed[key]

        def context(ids: list[int] | None) -> list[int] | None:
            key = tuple(ids or ())
            if ids and key not in block.places:
                block.places[key] = block.add_ids(self.vocabulary.indices(source, ids))
            return block.places[key] if ids else None

        return {
            "prompt": context(item.prompt_ids) or [0, 0],
            "completion": block.add_ids(self.vocabulary.indices(source, item.completion_ids)),
            "authors": [n for author, run in groupby(item.authors) for n in (AUTHORS.index(author), len(list(run)))],
            "turns": [_turn(turn) for turn in item.turns],
            "segments": [[part.start, part.row, context(part.prompt_ids)] for part in item.segments],
            "badges": badges_of(item),
            "process": rounded(item.process_reward),
            "parts": [[str(name), rounded(value)] for name, value in item.reward_parts.items()],
            "info": [[str(name), _text(value)] for name, value in item.info.items()],
            "error": item.error or "",
            "rendered": item.rendered,
            "tries": [str(text) for text in item.failed_tries],
            "columns": {name: column(name, values) for name, values in columns.items()},
            "how": [record.estimator or "", record.scale or ""],
            "why": found
            and {
                "lines": [[label, rounded(value)] for label, value in found.lines],
                "tokens": [[label, *column("sum", x)] for label, x in token_sums(item, found)],
                "gap": rounded(found.max_gap),
            },
        }


def title_of(item: Trajectory) -> str:
    """The name of a trajectory's example, for people: its question where the row has no `id` of its own.

    Without an `id` the name is a digest, which is the same for all rows of an environment that makes its own prompts.
    """
    if not re.fullmatch("[0-9a-f]{16}", item.example_id):
        return item.example_id
    asked = [_text(message.get("content") or "") for message in item.prompt_messages if message.get("role") == "user"]
    return " ".join(asked[-1].split())[:TITLE_CHARS] if asked and asked[-1].strip() else item.example_id


def numbered_groups(records: list[Record]) -> Iterator[tuple[int, list[Record]]]:
    """The groups of a step, each with its number; counted where an older record has none."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    seen: Counter[Any] = Counter()
    for record in records:
        item = record.trajectory
        key: Any = (record.split, record.group, item.example_id, item.is_replaced)
        # Without numbers, in an older record, the second trajectory of a generation opens another group.
        seen[key, item.generation] += record.group is None
        groups[key, seen[key, item.generation]].append(record)
    counted: Counter[str] = Counter()
    for group in groups.values():
        number = counted[group[0].split] if group[0].group is None else group[0].group
        counted[group[0].split] += 1
        yield number, sorted(group, key=lambda record: record.trajectory.generation)


def columns_of(record: Record, is_policy: np.ndarray) -> dict[str, np.ndarray]:
    """Name -> (num policy tokens,) float32."""
    item = record.trajectory
    found = {"logprob": item.logprobs, "advantage": item.advantages if record.split == "train" else None}
    own = {name: np.array(values, np.float32)[is_policy] for name, values in found.items() if values is not None}
    return own | {name: np.asarray(values, np.float32) for name, values in record.columns.items()}


def explained(group: list[Record], facts: dict[str, Any]) -> list[Explanation | None]:
    """Where the advantages of each member come from; None for evaluations, older records, unknown estimators."""
    if not facts or group[0].split != "train":
        return [None] * len(group)
    from agent_r1_trl.recording.explain import explain_group  # loads torch

    return explain_group(group, facts)


def token_sums(item: Trajectory, found: Explanation) -> Iterator[tuple[str, np.ndarray | None]]:
    """Label and (num policy tokens,) float32 of the parts of the tokens' own sums; NaN for tokens without one.

    None for what the page works out: results, and what is added last in the last sum, since that is the advantage.
    """
    has_sum, is_policy = np.array(found.mask, bool), np.array(item.action_mask, bool)
    added, is_known = -1, found.max_gap <= found.tolerance
    for index, (label, value) in enumerate(found.of_tokens):
        added = index if label[:2] == "+ " else added if label[:2] in SIGNS else -1  # there another sum begins
        is_known &= bool(np.isfinite(np.asarray(value)).all())
    for index, (label, value) in enumerate(found.of_tokens):
        values = np.broadcast_to(np.asarray(value, np.float32), has_sum.shape)
        is_open = label[:2] == "= " or (is_known and index == added)
        yield label, None if is_open else np.where(has_sum, values, np.float32(np.nan))[is_policy]


def shifted_column(values: np.ndarray, others: np.ndarray | None) -> list[Any] | None:
    """`[1, factor, last]` where each but the last is the number after it in another column times a factor."""
    if others is None or len(values) < 2 or not others[1]:
        return None
    factor = rounded(values[0] / others[1])
    is_shifted = factor is not None and np.allclose(values[:-1], factor * others[1:], rtol=1e-5)
    return [1, factor, rounded(values[-1])] if is_shifted else None


def flags_of(record: Record, is_same: bool, found: Explanation | None) -> int:
    """The `FLAGS` of a trajectory, as bits."""
    item, in_loss = record.trajectory, record.in_loss
    if in_loss is None:  # an older record
        in_loss = item.in_baseline and not item.is_replaced and any(item.advantages or [])
    is_lost = item.stop_reason.is_infrastructure_failure
    is_set = {
        "lost": is_lost,
        "call_errors": any(result.is_error for result in item.tool_results),
        "invalid": any(turn.is_invalid for turn in item.turns),
        "truncated": item.stop_reason.is_truncated,
        "unsolved": not (item.is_solved or is_lost),
        "untrained": record.split == "train" and not in_loss,
        "same": is_same,
        "masked": record.is_masked,
        "rows": bool(item.segments),
        "gap": found is not None and found.max_gap > found.tolerance,
    }
    return sum(1 << bit for bit, name in enumerate(FLAGS) if is_set[name])


def badges_of(item: Trajectory) -> list[list[Any]]:
    """Position of a token, label and value of each reward on it, as `Trajectory.token_rewards` places them."""
    positions = [position for position, mask in enumerate(item.action_mask) if mask]
    if not positions:
        return []
    found: list[list[Any]] = []
    for turn in item.turns:
        at = positions[max(0, bisect_left(positions, turn.end) - 1)]
        found += [[at, name, value] for name, value in _named(turn.reward_parts, turn.reward, "turn")]
    return found + [[positions[-1], *pair] for pair in _named(item.reward_parts, item.outcome_reward, "outcome")]


def _named(parts: dict[str, float], total: float, name: str) -> list[tuple[str, float | None]]:
    pairs = [(str(part), value) for part, value in parts.items() if value] or ([(name, total)] if total else [])
    return [(part, rounded(value)) for part, value in pairs]


def texts_of(item: Trajectory) -> tuple[list[str], list[list[Any]]]:
    """The texts of a conversation in order, and for each its turn (-1: the prompt), role and kind.

    Kinds: `text`, `reasoning`, `malformed`. TextBlocks of an assistant's calls stand in the head.
    """
    messages = [(-1, message) for message in item.prompt_messages]
    for index, turn in enumerate(item.turns):
        asked = [turn.summary_request] if turn.summary_request is not None else []
        messages += [(index, message) for message in [*asked, turn.message, *turn.observations]]
    texts, parts = [], []
    names = {"reasoning": "reasoning_content", "text": "content", "malformed": "malformed_tool_call"}
    for index, message in messages:
        for kind, name in names.items():
            if text := _text(message.get(name) or ""):
                texts.append(text + "\n")
                parts.append([index, str(message.get("role")), kind])
    return texts, parts


def _turn(turn: Turn) -> dict[str, Any]:
    calls = [
        {
            "name": result.call.name or "?",
            "arguments": _arguments(result.call.arguments),
            "ms": round(result.latency_s * 1000),
            "error": result.error_label,
            "attempts": result.attempts,
            "cut": result.is_truncated,
        }
        for result in turn.tool_results
    ]
    asked = [call.get("function", call) for call in turn.message.get("tool_calls") or [] if isinstance(call, dict)]
    not_made = [{"name": str(part.get("name")), "arguments": _arguments(part.get("arguments"))} for part in asked]
    return {
        "span": [turn.start, turn.end],
        "reward": rounded(turn.reward),
        "calls": calls or not_made,
        "flags": ["cut"] * turn.is_truncated + ["invalid"] * turn.is_invalid,
        "summary": turn.is_summary,
        "rendered": turn.rendered,
        "weights": turn.versions,
    }


def _arguments(value: object) -> list[list[str]] | str:
    return [[str(name), _text(item)] for name, item in value.items()] if isinstance(value, dict) else _text(value)


def _text(value: object) -> str:
    if isinstance(value, list) and all(isinstance(part, dict) and "text" in part for part in value):
        return "\n".join(str(part["text"]) for part in value)
    return value if isinstance(value, str) else dump_json(value)


def _nice(value: float) -> float:
    """The next larger number of one digit or 1.5; 1 for 0.

    >>> _nice(0.866), _nice(1.38), _nice(0.0)
    (0.9, 1.5, 1.0)
    """
    if not value > 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    digits = next(digit for digit in (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9, 10) if value <= digit * power * (1 + 1e-9))
    return float(f"{digits * power:.3g}")
