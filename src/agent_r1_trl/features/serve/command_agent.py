"""The agent and the environment of `chat` and `serve`, from a command line."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import loading, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.recipe import FILE, config_of
from agent_r1_trl.cli.resolve import resolve_env, resolve_function
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.environments.factory import made_and_closed
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv
from agent_r1_trl.evaluation.agent import Agent, check_model_folder, open_agent
from agent_r1_trl.features.serve.command_arguments import HELP, NO_RECIPE, ConversationArguments
from agent_r1_trl.features.serve.session import refuse_agent
from agent_r1_trl.safe_text import set_rules


def read_conversation_arguments(name: str, argv: Sequence[str]) -> Any:
    """Parse the recipe and the command line of the command `name` of `HELP`.

    Raises:
        UsageError: there is a mistake in either.
    """
    parser = RecipeParser(
        HELP[name].kinds,
        command=f"agent-r1-trl {name}",
        about=HELP[name].about,
        elsewhere=OF_RECIPES,
        private=("use_vllm", "dtype"),  # in a recipe they are about training
    )
    if argv and not argv[0].startswith("-"):
        argv = ["--model_name_or_path", *argv]
    (arguments,) = parser.parse(argv, {} if config_of(argv) else NO_RECIPE)
    set_rules(arguments.secrets.names, arguments.secrets.patterns)
    return arguments


def environment_of(arguments: ConversationArguments) -> Callable[[], Any]:
    """The factory of the environment: that of `env`, one with `tools`, or one without any."""
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


def no_tools_note(arguments: ConversationArguments) -> str:
    """A line for an agent that has been given no environment, and how to give it one; "" for all others."""
    if arguments.env or arguments.tools:
        return ""
    recipe = Path(str(arguments.model_name_or_path)) / FILE
    option = (
        f"--config {shlex.quote(str(recipe))}" if recipe.is_file() else "--env my_env.py:MyEnv, or --config RECIPE"
    )
    return f"The agent has no environment, so no tools. To give it the training's, pass {option}."


@contextlib.contextmanager
def agent_of(arguments: ConversationArguments) -> Iterator[Agent]:
    """The model, loaded."""
    name = arguments.model_name_or_path
    options = {"limits": arguments.rollout_limits(), **arguments.chat_options()}
    with contextlib.ExitStack() as stack:
        with loading(name):
            check_model_folder(str(name), flag="model_name_or_path")
            opened = open_agent(name, use_vllm=arguments.use_vllm, dtype=arguments.dtype, **options)
            agent = stack.enter_context(opened)
        yield agent
