"""SearchQAEnv: a multi-hop question, a `search` tool, a final answer.

env = functools.partial(SearchQAEnv, "corpus.jsonl", metric="em", top_k=3)
env = functools.partial(SearchQAEnv, "http://10.0.0.7:8010", metric="em", top_k=5)
row = {"question": "...", "answer": ["Oslo"], "evidence": ["no-capital", "no-highest-point"]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.rewards import (
    check_golds,
    exact_match,
    extract_answer,
    f1_score,
    format_reward,
    normalize_answer,
    strip_reasoning,
)
from agent_r1_trl.settings import Count, Finite, Flag, OneOf
from agent_r1_trl.tools import Passage, tool
from agent_r1_trl.tools.search import RetrieverSource, open_retriever, render_passages, shown_text
from agent_r1_trl.trajectory import Message, StopReason, ToolCall, ToolResult, Trajectory

GOLD_COLUMNS = ("answer", "answers", "golden_answers", "gold")
OUTCOMES = ("sum", "strict", "composite")
METRICS = {"em": exact_match, "f1": f1_score}


class SearchQAEnv(ToolEnv):
    """The model answers a question after searching a corpus as often as it needs to.

    A row has the column `question` (or `prompt`), the gold answer or answers in `answer` (texts or numbers), and
    optionally `evidence`: the passages that a correct line of reasoning needs, each by its id, by a text that it
    contains, or by a mapping with `id`, `title` or `text`.

    A search earns `tool_call_reward` if it finds a relevant passage that this trajectory had not seen before. The
    row's evidence is relevant; in a row without evidence, every passage is. The outcome is one of

    - "sum": `failure_reward + metric * (success_reward - failure_reward)`, plus `format_reward` for a well-formed
      final answer;
    - "strict": the same without the part for the form, and the metric counts as 0 where the final answer is not well
      formed;
    - "composite" (that of Agent-R1's released code): `-1 + form + (metric if form == 1 else 0)`, where the form is 0.5
      for each turn whose calls could be run and for a well-formed final answer, at most 1. So a search and a
      well-formed answer make the metric count.

    Info: `prediction`, `em`, `f1`, `valid_answer`, `gold`.

    Args:
        retriever: what is searched: the path of a JSONL corpus (which is indexed once per process), the address of a
            server, a mapping with `url` or `path` and options, or an object with a method `search`; see
            `open_retriever`.
        outcome: "sum", "strict" or "composite".
        metric: "em" (exact match) or "f1".
        answer_tag: True if the answer is the text in `<answer>...</answer>`, False if it is the whole final text.
        top_k: passages per search.
        max_passage_chars: maximum length of a passage's text in a result.
        format_reward: reward of a well-formed final answer, for the outcome "sum".
        useless_search_reward: reward of a search that finds nothing new and relevant.
        **settings: settings of `ToolEnv`.

    Raises:
        ValueError: there is no retriever, or a setting is unknown or out of range.
    """

    on_resume = "replay"  # searching again finds the same
    system_prompt = (
        "Answer the question. Use the search tool to find the facts you need, one step at a time. When you know the "
        "answer, give it as short as possible between <answer> and </answer>, for example <answer>Paris</answer>."
    )
    plain_system_prompt = (
        "Answer the question. Use the search tool to find the facts you need, one step at a time. When you know the "
        "answer, reply with the answer only, as short as possible."
    )

    outcome: Annotated[str, OneOf(*OUTCOMES)] = "sum"
    metric: Annotated[str, OneOf(*METRICS)] = "em"
    answer_tag: Flag = True
    top_k: Count = 3
    max_passage_chars: Count = 500
    format_reward: Finite = 0.1
    useless_search_reward: Finite = 0.0

    def __init__(self, retriever: RetrieverSource, **settings: Any) -> None:
        self.retriever = open_retriever(retriever)
        super().__init__(**settings)
        if not self.answer_tag and self.system_prompt == SearchQAEnv.system_prompt:
            self.system_prompt = self.plain_system_prompt

    @tool(sequential=False, backend=True)
    def search(self, query: str) -> str:
        """Search a collection of documents and return the passages that match best.

        Args:
            query: The words to look for.
        """
        passages = self.retriever.search(query, self.top_k)
        self._passages[query] = passages
        return render_passages(passages, self.max_passage_chars)

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start with a question.

        Raises:
            ValueError: the row has no question or no gold answer.
        """
        messages = super().reset(example)
        self.golds = read_golds(example)
        self._evidence = read_evidence(example.get("evidence"), getattr(self.retriever, "get", None))
        self._passages: dict[str, list[Passage]] = {}
        self._found: set[Any] = set()
        return messages

    def process_reward(self, call: ToolCall, result: ToolResult) -> float:
        """`tool_call_reward` for a search that finds something new and relevant, else `useless_search_reward`.

        Calls of further tools, of a subclass or of `tools`, earn what they earn in any `ToolEnv`.
        """
        if call.name != "search":
            return super().process_reward(call, result)
        arguments = call.arguments if isinstance(call.arguments, dict) else {}
        new = self._relevant(self._passages.get(str(arguments.get("query")), [])) - self._found
        self._found |= new
        return self.tool_call_reward if new else self.useless_search_reward

    def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """See the class; the parts are `answer` and `format`."""
        scores = self.score_answer(trajectory)
        trajectory.info.update(scores)
        metric, valid = scores[self.metric], scores["valid_answer"]
        if self.outcome == "composite":
            num_formed = valid + sum(1 for turn in trajectory.turns if turn.tool_results and not turn.is_invalid)
            form = min(1.0, 0.5 * num_formed)
            parts = {"answer": metric if form == 1 else 0.0, "format": form - 1.0}
            return sum(parts.values()), parts
        if self.outcome == "strict":
            metric *= valid
        parts = {"answer": self.failure_reward + metric * (self.success_reward - self.failure_reward)}
        if self.format_reward and self.outcome == "sum":
            parts["format"] = self.format_reward * valid
        return sum(parts.values()), parts

    def score_answer(self, trajectory: Trajectory) -> dict[str, Any]:
        """Prediction ("" if there is no final answer), em, f1, valid_answer (1.0 or 0.0) and the gold answers."""
        text = trajectory.final_text if trajectory.stop_reason is StopReason.DONE else ""
        prediction = (extract_answer(text) if self.answer_tag else strip_reasoning(text)) or ""
        return {
            "prediction": prediction,
            "gold": self.golds,
            "em": exact_match(prediction, self.golds) if prediction else 0.0,
            "f1": f1_score(prediction, self.golds) if prediction else 0.0,
            "valid_answer": format_reward(text, tag="answer" if self.answer_tag else None),
        }

    def _relevant(self, passages: list[Passage]) -> set[Any]:
        """The gain from these passages: items of the evidence, or ids where the row has no evidence."""
        if not self._evidence:
            return {passage.id for passage in passages}
        found = set()
        for item in self._evidence:
            if any(item.is_found_in(passage, self.max_passage_chars) for passage in passages):
                found.add(item)
        return found


def read_golds(example: dict[str, Any]) -> list[str]:
    """The gold answers of a row.

    Raises:
        ValueError: the row has none.
    """
    for column in GOLD_COLUMNS:
        if example.get(column) is not None:
            return check_golds(example[column])
    raise ValueError(
        f"SearchQAEnv.reset: the example has the columns {sorted(example)}, but no gold answer: name its column "
        f"{' or '.join(map(repr, GOLD_COLUMNS))}."
    )


# -------------------------------------------------------------------- evidence


class Evidence(NamedTuple):
    """A passage that a correct line of reasoning needs; what is "" does not matter."""

    id: str = ""
    title: str = ""
    text: str = ""

    def is_found_in(self, passage: Passage, max_chars: int) -> bool:
        """Whether it is this passage, and what has to be read is within its first `max_chars` characters."""
        if self.id and self.id != passage.id:
            return False
        if self.title and normalize_answer(self.title) != normalize_answer(passage.title):
            return False
        if not self.text:
            return True
        wanted = normalize_answer(self.text)
        read = normalize_answer(f"{passage.title} {shown_text(passage)[:max_chars]}")
        return bool(wanted) and f" {wanted} " in f" {read} "


def read_evidence(value: object, get: Callable[[str], Passage | None] | None) -> frozenset[Evidence]:
    """The items of a row's `evidence`.

    Args:
        value: None, an item or a list of items. An item is a mapping with `id`, `title` or `text`, or a string: the id
            of a passage or a text that a passage contains. Items that are None or empty do not count.
        get: finds a passage by its id. Without it (a retriever elsewhere), a string without a space is an id.

    Raises:
        ValueError: a mapping has none of them.
    """
    if value is None:
        return frozenset()
    items = [value] if isinstance(value, str | Mapping) or not hasattr(value, "__iter__") else value
    found = set()
    for item in items:
        if item is None or not str(item).strip():  # a list that was filled up
            continue
        if isinstance(item, Mapping):
            named = {name: str(item[name]).strip() for name in Evidence._fields if item.get(name) is not None}
            if not any(named.values()):
                raise ValueError(f"evidence: {item!r:.200} has no 'id', 'title' or 'text'. Give it one of them.")
        else:
            is_id = get(str(item)) is not None if get is not None else " " not in str(item).strip()
            named = {"id" if is_id else "text": str(item)}
        found.add(Evidence(**named))
    return frozenset(found)
