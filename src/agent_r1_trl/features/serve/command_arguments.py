"""The settings of `chat` and of `serve --agent`: a model, an environment, and the limits of a recipe."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1_trl.cli.arguments import ENV_HELP, ENV_OR_TOOLS, PlayArguments, TaskArguments
from agent_r1_trl.cli.errors import UsageError, model_problem, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.recipe import split_config
from agent_r1_trl.cli.resolve import resolve_env, resolve_function
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv
from agent_r1_trl.evaluation.agent import Agent, make_chat, open_agent
from agent_r1_trl.evaluation.loading import check_model_folder
from agent_r1_trl.generation import SamplingParams
from agent_r1_trl.rollout import RolloutLimits
from agent_r1_trl.safe_text import set_rules
from agent_r1_trl.settings import Clash, setting

START_TIMEOUT_S = 20.0
"""Seconds that a server may take to answer at all; one that is still loading its model is waited for as long."""
MODEL_HELP = "Model or PEFT adapter: a directory or a Hub id."
NO_RECIPE = {"max_turns": 100, "max_completion_length": 8192}
"""Limits of a conversation without a recipe."""
NO_RECIPE_ABOUT = f"Without a recipe {' and '.join(f'{name} is {value}' for name, value in NO_RECIPE.items())}."


@dataclass
class ConversationArguments(PlayArguments):
    """Settings of a conversation; those of a recipe have the same names."""

    CLASHES = (
        ENV_OR_TOOLS,
        Clash("env_kwargs env", lambda c: c.env_kwargs and not c.env, "nothing takes them. Set env, or remove them."),
        Clash("server use_vllm", lambda c: c.server and c.use_vllm, "the server has the model. Remove one of them."),
        Clash("server dtype", lambda c: c.server and c.dtype, "the server has the model. Remove one of them."),
        Clash(
            "model_name_or_path server",
            lambda c: not (c.model_name_or_path or c.server),
            "MODEL is not set. Pass the directory or the Hub id of a model, or --server with the URL of one.",
        ),
    )

    model_name_or_path: str | None = setting(None, MODEL_HELP, aliases=["--model"])
    server: str | None = setting(
        None,
        "URL of a running vLLM server that samples, in place of a model in this process. The model then only names "
        "the tokenizer; not set, the server is asked for it.",
    )
    env: str | None = setting(None, ENV_HELP)
    env_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=TaskArguments.__dataclass_fields__["env_kwargs"].metadata
    )
    tools: list[str] | None = setting(None, "Instead of env: import paths of functions, such as my_module:search.")
    row: dict[str, Any] | str | None = setting(
        None, "Columns of the row that the environment reads beside the first message: '{size: 4}'."
    )

    @property
    def params(self) -> SamplingParams:
        """How tokens are drawn."""
        return SamplingParams(temperature=self.eval_temperature)


def with_model_flag(argv: Sequence[str]) -> list[str]:
    """The arguments with a leading MODEL as an option."""
    if argv and not argv[0].startswith("-"):
        return ["--model_name_or_path", *argv]
    return list(argv)


def read_conversation_arguments(
    command: str, argv: Sequence[str], kind: type = ConversationArguments, *, about: str = ""
) -> Any:
    """Parse the recipe and the command line.

    Args:
        command: as the user typed it.
        argv: its arguments.
        kind: the dataclass of its settings.
        about: what the command does.

    Raises:
        UsageError: there is a mistake in either.
    """
    parser = RecipeParser(
        (kind,),
        command=command,
        about=f"{about} {NO_RECIPE_ABOUT}",
        elsewhere=OF_RECIPES,
        private=("use_vllm", "dtype"),  # in a recipe they are about training
    )
    config, _ = split_config(argv)
    (arguments,) = parser.parse(with_model_flag(argv), {} if config else NO_RECIPE)
    set_rules(arguments.secrets.names, arguments.secrets.patterns)
    return arguments


def environment_of(arguments: ConversationArguments) -> Callable[[], Any]:
    """What makes the environment: that of `env`, one with `tools`, or one without any.

    Raises:
        UsageError: it cannot be made.
    """
    if arguments.env:
        return resolve_env(arguments.env, arguments.env_kwargs)  # type: ignore[arg-type]
    if not arguments.tools:
        return ToolEnv
    factory = functools.partial(FunctionToolsEnv, [resolve_function("tools", path) for path in arguments.tools])
    with users_mistakes():
        factory()
    return factory


@contextlib.contextmanager
def agent_of(arguments: ConversationArguments) -> Iterator[Agent]:
    """The model, loaded or behind a server.

    Raises:
        UsageError: it cannot be loaded.
        GenerationError: the server does not answer.
    """
    name, options = arguments.model_name_or_path, {"limits": arguments.rollout_limits(), **arguments.chat_options()}
    with contextlib.ExitStack() as stack:
        try:
            with users_mistakes():
                if arguments.server:
                    opened = served_agent(arguments.server, tokenizer=name, **options)
                else:
                    check_model_folder(str(name), flag="model_name_or_path")
                    opened = open_agent(name, use_vllm=arguments.use_vllm, dtype=arguments.dtype, **options)
                agent = stack.enter_context(opened)
        except OSError as error:
            raise UsageError(model_problem(name, error)) from error
        yield agent


@contextlib.contextmanager
def served_agent(
    url: str,
    *,
    tokenizer: str | None = None,
    limits: RolloutLimits | None = None,
    trust_remote_code: bool = False,
    **chat_options: Any,
) -> Iterator[Agent]:
    """An agent whose tokens a running vLLM server samples, with whatever weights it has.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        tokenizer: directory or Hub id; None: what the server says it was started with.
        limits: of a conversation; the server's context length is one as well.
        trust_remote_code: whether code that comes with the tokenizer may run.
        **chat_options: of `make_chat`.

    Raises:
        ValueError: the URL is none.
        GenerationError: there is no vLLM server at the URL.
        OSError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer, GenerationConfig

    from agent_r1_trl.generation import VLLMServerGenerator

    name = tokenizer or _model_of(url)
    loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    eos: Any = None
    with contextlib.suppress(OSError):  # without such a file the tokenizer's ends of a turn are all there are
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    chat, limits = make_chat(loaded, limits, eos, **chat_options)
    generator = VLLMServerGenerator([url], stop_token_ids=chat.stop_token_ids, startup_timeout_s=START_TIMEOUT_S)
    try:
        yield Agent(name=name, generator=generator, chat=chat, limits=limits.within(generator.max_model_length))
    finally:
        generator.close()


def _model_of(url: str) -> str:
    """The directory or Hub id that a server was started with."""
    from agent_r1_trl.generation.vllm.find_servers import check_urls, wait_for_servers
    from agent_r1_trl.generation.vllm.http_client import HTTPClient

    (url,) = check_urls([url])
    http = HTTPClient()
    try:
        card = http.run(wait_for_servers(http, [url], START_TIMEOUT_S))[url]
    finally:
        http.close()
    return str(card.get("root") or card["id"])
