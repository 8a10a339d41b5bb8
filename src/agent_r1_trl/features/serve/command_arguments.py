"""The settings of `chat` and `serve`: a model, an environment, and the limits of a recipe."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_trl.cli.arguments import ENV_HELP, ENV_KWARGS_HELP, ENV_OR_TOOLS, SamplingArguments
from agent_r1_trl.cli.errors import loading, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.recipe import config_of
from agent_r1_trl.cli.resolve import resolve_env, resolve_function
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.environments.factory import made_and_closed
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv
from agent_r1_trl.evaluation.agent import Agent, check_model_folder, open_agent
from agent_r1_trl.features.serve.session import refuse_agent
from agent_r1_trl.generation import SamplingParams
from agent_r1_trl.safe_text import set_rules
from agent_r1_trl.settings import Clash, setting

NO_RECIPE = {"max_turns": 100, "max_completion_length": 8192}
"""Limits of a conversation without a recipe."""


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


def read_conversation_arguments(
    command: str, argv: Sequence[str], kind: type = ConversationArguments, *, about: str = ""
) -> Any:
    """Parse the recipe and the command line of `command`, whose settings are the dataclass `kind`.

    Raises:
        UsageError: there is a mistake in either.
    """
    parser = RecipeParser(
        (kind,),
        command=command,
        about=f"{about} Without a recipe {' and '.join(f'{name} is {value}' for name, value in NO_RECIPE.items())}.",
        elsewhere=OF_RECIPES,
        private=("use_vllm", "dtype"),  # in a recipe they are about training
    )
    if argv and not argv[0].startswith("-"):
        argv = ["--model_name_or_path", *argv]
    (arguments,) = parser.parse(argv, {} if config_of(argv) else NO_RECIPE)
    set_rules(arguments.secrets.names, arguments.secrets.patterns)
    return arguments


def environment_of(arguments: ConversationArguments) -> Callable[[], Any]:
    """What makes the environment: that of `env`, one with `tools`, or one without any."""
    if arguments.env:
        made_by = resolve_env(arguments.env, arguments.env_kwargs)  # type: ignore[arg-type]
        with users_mistakes(), made_and_closed(made_by) as env:
            refuse_agent(env)
        return made_by
    if not arguments.tools:
        return ToolEnv
    factory = functools.partial(FunctionToolsEnv, [resolve_function("tools", path) for path in arguments.tools])
    with users_mistakes():
        factory()
    return factory


@contextlib.contextmanager
def agent_of(arguments: ConversationArguments) -> Iterator[Agent]:
    """The model, loaded."""
    name, options = arguments.model_name_or_path, {"limits": arguments.rollout_limits(), **arguments.chat_options()}
    with contextlib.ExitStack() as stack:
        with loading(name):
            check_model_folder(str(name), flag="model_name_or_path")
            opened = open_agent(name, use_vllm=arguments.use_vllm, dtype=arguments.dtype, **options)
            agent = stack.enter_context(opened)
        yield agent
