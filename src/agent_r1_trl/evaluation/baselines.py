"""Baselines for an agent: the same questions, scored by the same environment, without its tools.

- `closed_book`: the question alone, one answer
- `naive_rag`: one search with the question, the passages in the prompt, one answer

The third baseline, `base`, is another model in the environment as it is, and needs nothing from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent_r1_trl.environments import SearchQAEnv, ToolEnv
from agent_r1_trl.environments.base import StepResult
from agent_r1_trl.environments.factory import made_and_closed
from agent_r1_trl.rollout import RolloutLimits
from agent_r1_trl.tools import InfrastructureError, Tool, as_tool, shared_pool
from agent_r1_trl.tools.base import shown_tool
from agent_r1_trl.tools.pool import own_thread
from agent_r1_trl.trajectory import Message, ToolCall, ToolResult

if TYPE_CHECKING:
    pass

NAIVE_RAG = "naive_rag"
SEARCH = "search"
"""Name of the tool that `naive_rag` calls."""
_THREADS = 256
_TAGGED = "Give the answer as short as possible between <answer> and </answer>, for example <answer>Paris</answer>."
_PLAIN = "Reply with the answer only, as short as possible."


def check_baseline(name: str, env_factory: Callable[[], Any], env: str) -> None:
    """Refuse a baseline of an environment, named by the setting `env`, without tools to take away or to search with.

    Raises:
        ValueError: it has none.
    """
    with made_and_closed(env_factory) as made:
        tools = [shown_tool(item).name for item in getattr(made, "tools", None) or ()]
        is_tool_env = isinstance(made, ToolEnv)
    if not is_tool_env or not tools or (name == NAIVE_RAG and SEARCH not in tools):
        needed = f"a tool {SEARCH!r}, which it asks once" if name == NAIVE_RAG else "a ToolEnv with tools to take away"
        raise ValueError(
            f"baselines={name!r} needs {needed}; {env} has only {', '.join(tools) or 'none'}. Remove {name} from "
            "baselines, or choose an environment with such tools (search_qa)."
        )


KEEP_ALL: dict[str, Any] = {"context": "keep"}
"""Limits with which the model reads every turn so far."""


def one_answer_limits(limits: RolloutLimits) -> RolloutLimits:
    """The limits with a single turn, whose context nothing rewrites."""
    keeps: dict[str, Any] = KEEP_ALL if limits.context.policy != "strip_thinking" else {"context": "strip_thinking"}
    return replace(limits, max_turns=1, **keeps)


class OneAnswerEnv:
    """An environment whose tools are taken away: one prompt, one answer, scored as the environment scores it.

    The retrieval of `naive_rag` counts as a tool call of the turn. It earns nothing. The system message is that of the
    environment; `SearchQAEnv`'s default loses its sentence about the tool.

    Args:
        env: the environment; whatever is not defined here is its own.
        searches: put what its search tool finds for the question into the prompt (`naive_rag`).
        max_passage_tokens: of the model, that the passages may take.
    """

    tools = ()
    on_resume = "replay"
    truncate_text: Callable[[str, int], str] | None = None

    def __init__(self, env: Any, *, searches: bool = False, max_passage_tokens: int | None = None) -> None:
        self.env = env
        self._searches = searches
        self._max_passage_tokens = max_passage_tokens
        self._found: list[ToolResult] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["env"], name)

    async def reset(self, example: Mapping[str, Any]) -> list[Message]:
        """The environment's prompt, with passages where it searches."""
        messages = await _call(self.env.reset, example)
        messages = [dict(message) for message in messages]
        defaults = (SearchQAEnv.system_prompt, SearchQAEnv.plain_system_prompt)
        if isinstance(self.env, SearchQAEnv) and messages[0].get("content") in defaults:
            task = "Answer the question" + (" with the help of the passages." if self._searches else ".")
            messages[0]["content"] = f"{task} {_TAGGED if self.env.answer_tag else _PLAIN}"
        if not self._searches:
            return messages
        question = messages[-1].get("content")
        if messages[-1].get("role") != "user" or not isinstance(question, str):
            raise ValueError(
                "naive_rag searches with the text of the last message, which must be the user's. Leave naive_rag out."
            )
        passages = await self._search(question)
        messages[-1] = {**messages[-1], "content": f"Passages:\n{passages}\n\nQuestion: {question}"}
        return messages

    async def _search(self, question: str) -> str:
        (found,) = [item for item in map(as_tool, self.env.tools) if item.name == SEARCH]
        parameters = found.schema["function"]["parameters"]
        names = [*parameters.get("required", ()), *parameters.get("properties", {}), "query"]
        (result,) = self._found = await self.env.executor.execute(
            [ToolCall(name=SEARCH, arguments={names[0]: question}, id="naive_rag")]
        )
        if result.is_error:
            raise InfrastructureError(f"the search of naive_rag failed: {result.content}")
        if self.truncate_text is None or self._max_passage_tokens is None:
            return result.content
        return self.truncate_text(result.content, self._max_passage_tokens)

    async def step(self, message: Message) -> StepResult:
        """The answer ends the episode; an attempt at a call, or a turn that was cut, is no answer."""
        is_answer = not any(message.get(name) for name in ("tool_calls", "malformed_tool_call", "cut_off"))
        observations: list[Message] = []
        if not is_answer:
            observations = [{"role": "user", "content": "Answer."}]
        info = {"tool_results": self._found, "reward_parts": {}, "is_invalid": not is_answer}
        return StepResult(observations, 0.0, is_answer, info)

    async def close(self) -> None:
        """Close the environment and its tools."""
        if callable(getattr(self.env, "close", None)):
            await _call(self.env.close)
        for item in getattr(self.env, "tools", None) or ():
            if isinstance(item, Tool) and type(item).close is not Tool.close:
                await _call(item.close)


async def _call(method: Callable[..., Any], *arguments: object) -> Any:
    """A method that may be plain and slow, or async."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    result = await shared_pool(_THREADS).run(lambda: method(*arguments), thread=own_thread.get())
    return await result if inspect.isawaitable(result) else result
