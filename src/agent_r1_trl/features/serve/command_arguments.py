"""The settings of `chat` and `serve`: a model, an environment, and the limits of a recipe. Nothing heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_r1_trl.cli.arguments import ENV_HELP, ENV_KWARGS_HELP, ENV_OR_TOOLS, SamplingArguments
from agent_r1_trl.cli.options import HelpPage
from agent_r1_trl.cli.web import Port
from agent_r1_trl.generation import SamplingParams
from agent_r1_trl.settings import Clash, setting

NO_RECIPE = {"max_turns": 100, "max_completion_length": 8192}
"""Limits of a conversation without a recipe."""
CHAT_COMMANDS = {
    "/help": "show this list",
    "/reset": "begin another conversation",
    "/mask": "show the conversation as training sees it, with its mask",
    "/save FILE": "add the trajectory to a JSONL file, which agent-r1-trl view shows",
    "/quit": "end (so does the end of the input)",
}


@dataclass
class ConversationArguments(SamplingArguments):
    """Settings of a conversation; those of a recipe have the same names."""

    CLASHES = (
        ENV_OR_TOOLS,
        Clash("env_kwargs env", lambda c: c.env_kwargs and not c.env, "nothing takes them. Set env, or remove them."),
        Clash(
            "model_name_or_path",
            lambda c: not c.model_name_or_path,
            "MODEL is not set. Pass the directory or the Hub id of a model.",
        ),
    )

    model_name_or_path: str | None = setting(
        None, "Model or PEFT adapter: a directory or a Hub id.", aliases=["--model"]
    )
    env: str | None = setting(None, ENV_HELP)
    env_kwargs: dict[str, Any] | str | None = setting(None, ENV_KWARGS_HELP)
    tools: list[str] | None = setting(None, "Instead of env: import paths of functions, such as my_module:search.")
    row: dict[str, Any] | str | None = setting(
        None, "Columns of the row that the environment reads beside the first message: '{size: 4}'."
    )

    @property
    def params(self) -> SamplingParams:
        """How tokens are drawn."""
        return SamplingParams(temperature=self.eval_temperature)


@dataclass
class ServeArguments(ConversationArguments):
    """Settings of `serve`."""

    host: str = setting("127.0.0.1", "Address; 0.0.0.0 for other machines. No password.")
    port: Port = setting(8000, "Port; 0 for a free one.")
    served_name: str | None = setting(None, "Name of the model for clients. None: the last part of MODEL.")


_MODEL = "MODEL is the directory of a model, a checkpoint or an adapter, or a Hub id."
_LIMITS = f"Without a recipe {' and '.join(f'{name} is {value}' for name, value in NO_RECIPE.items())}."
HELP = {
    "chat": HelpPage(
        f"Talk to an agent: agent-r1-trl chat MODEL. {_MODEL} In the chat: {', '.join(CHAT_COMMANDS)}. {_LIMITS}",
        (ConversationArguments,),
    ),
    "serve": HelpPage(
        f"Serve an agent with its tools: agent-r1-trl serve MODEL. {_MODEL} Each request in OpenAI's protocol runs a "
        "whole rollout. The model alone, for clients that bring the tools, is served by vLLM "
        f"(docs/chat-and-serving.md). {_LIMITS}",
        (ServeArguments,),
    ),
}
"""Command -> its `--help`."""
