"""The settings of `chat` and of `serve --agent`: a model, an environment, and the limits of a recipe."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.arguments import EvalArguments, TaskArguments, TrainArguments, read_mapping
from agent_r1_trl.cli.errors import (
    InfrastructureError,
    UsageError,
    infrastructure_errors,
    model_problem,
)
from agent_r1_trl.rollout.limits import RolloutSettings
from agent_r1_trl.safe_text import SECRET_NAMES, check_rules, set_rules

if TYPE_CHECKING:
    from agent_r1_trl.evaluation.agent import Agent
    from agent_r1_trl.generation import SamplingParams

_EVAL = EvalArguments.__dataclass_fields__
ONE_MODEL = {"help": "Model or PEFT adapter: a directory or a Hub id.", "aliases": ["--model"]}
NO_RECIPE = {"max_turns": 100, "max_completion_length": 8192}
"""Limits of a conversation without a recipe."""
NO_RECIPE_ABOUT = f"Without a recipe {' and '.join(f'{name} is {value}' for name, value in NO_RECIPE.items())}."


@dataclass
class ConversationArguments(RolloutSettings):
    """Settings of a conversation; those of a recipe have the same names."""

    model_name_or_path: str | None = field(default=None, metadata=ONE_MODEL)
    server: str | None = field(
        default=None,
        metadata={
            "help": "URL of a running vLLM server that samples, in place of a model in this process. The model then "
            "only names the tokenizer; not set, the server is asked for it."
        },
    )
    env: str | None = field(default=None, metadata=TaskArguments.__dataclass_fields__["env"].metadata)
    env_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=TaskArguments.__dataclass_fields__["env_kwargs"].metadata
    )
    tools: list[str] | None = field(
        default=None, metadata={"help": "Instead of env: import paths of functions, such as my_module:search."}
    )
    row: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Columns of the row that the environment reads beside the first message: '{size: 4}'."},
    )
    eval_temperature: float = field(default=0.0, metadata=_EVAL["eval_temperature"].metadata)
    seed: int = field(default=42, metadata={"help": "Seed of sampling and environments."})
    use_vllm: bool = field(default=False, metadata=_EVAL["use_vllm"].metadata)
    dtype: str | None = field(default=None, metadata=_EVAL["dtype"].metadata)
    trust_remote_code: bool = field(default=False, metadata=_EVAL["trust_remote_code"].metadata)
    max_completion_length: int | None = field(default=512, metadata=_EVAL["max_completion_length"].metadata)
    secret_names: str = field(default=SECRET_NAMES, metadata=_EVAL["secret_names"].metadata)
    secret_patterns: list[str] | None = field(default=None, metadata=_EVAL["secret_patterns"].metadata)
    chat_template: str | None = field(default=None, metadata=_EVAL["chat_template"].metadata)
    response_template: dict[str, Any] | str | None = field(default=None, metadata=_EVAL["response_template"].metadata)
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=_EVAL["chat_template_kwargs"].metadata
    )
    thinking: str = field(default="keep", metadata=_EVAL["thinking"].metadata)

    def __post_init__(self) -> None:
        self.env_kwargs = read_mapping("env_kwargs", self.env_kwargs)
        self.row = read_mapping("row", self.row)
        self.chat_template_kwargs = read_mapping("chat_template_kwargs", self.chat_template_kwargs)
        if self.env and self.tools:
            raise UsageError(f"env={self.env!r} with tools={self.tools}: an environment has its own. Remove one.")
        if not self.env and self.env_kwargs:
            raise UsageError(f"env_kwargs={self.env_kwargs}: there is no env to take them. Set env, or remove them.")
        if self.server and (self.use_vllm or self.dtype):
            name = "use_vllm" if self.use_vllm else f"dtype={self.dtype}"
            raise UsageError(f"server={self.server!r} with {name}: the server has the model. Remove one of them.")
        if not self.model_name_or_path and not self.server:
            raise UsageError(
                "MODEL: not set. Pass the directory or the Hub id of a model, or --server with the URL of one."
            )
        if not self.eval_temperature >= 0:
            raise UsageError(f"eval_temperature={self.eval_temperature}: must be >= 0. Set it to 0 (greedy) or more.")
        self.check_limits()
        check_rules(self.secret_names, self.secret_patterns)

    @property
    def params(self) -> SamplingParams:
        """How tokens are drawn."""
        from agent_r1_trl.generation import SamplingParams

        return SamplingParams(temperature=self.eval_temperature)


def with_model_flag(argv: Sequence[str]) -> list[str]:
    """The arguments with a leading MODEL as an option."""
    if argv and not argv[0].startswith("-"):
        return ["--model_name_or_path", *argv]
    return list(argv)


def read_conversation_arguments(command: str, argv: Sequence[str], kind: type = ConversationArguments) -> Any:
    """Parse the recipe and the command line.

    Args:
        command: as the user typed it.
        argv: its arguments.
        kind: the dataclass of its settings.

    Raises:
        UsageError: there is a mistake in either.
    """
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.cli.recipe import split_config
    from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    parser = RecipeParser(
        (kind,),
        command=command,
        elsewhere=(EvalArguments, TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig),
        private=("use_vllm", "dtype"),  # in a recipe they are about training
    )
    config, _ = split_config(argv)
    (arguments,) = parser.parse(with_model_flag(argv), {} if config else NO_RECIPE)
    set_rules(arguments.secret_names, arguments.secret_patterns)
    return arguments


def environment_of(arguments: ConversationArguments) -> Callable[[], Any]:
    """What makes the environment: that of `env`, one with `tools`, or one without any.

    Raises:
        UsageError: it cannot be made.
    """
    from agent_r1_trl.cli.resolve import resolve_env, resolve_function
    from agent_r1_trl.environments import ToolEnv
    from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv

    if arguments.env:
        return resolve_env(arguments.env, arguments.env_kwargs)  # type: ignore[arg-type]
    if not arguments.tools:
        return ToolEnv
    factory = functools.partial(FunctionToolsEnv, [resolve_function("tools", path) for path in arguments.tools])
    try:
        factory()
    except ValueError as error:
        raise UsageError(f"tools={arguments.tools}: {error}") from error
    return factory


@contextlib.contextmanager
def agent_of(arguments: ConversationArguments) -> Iterator[Agent]:
    """The model, loaded or behind a server.

    Raises:
        UsageError: it cannot be loaded.
        InfrastructureError: the server does not answer.
    """
    from agent_r1_trl.conversation.opening import served_agent
    from agent_r1_trl.evaluation.agent import open_agent
    from agent_r1_trl.evaluation.loading import check_model_folder

    options: dict[str, Any] = {
        "limits": arguments.rollout_limits(),
        "chat_template": arguments.chat_template,
        "response_template": arguments.response_template,
        "chat_template_kwargs": arguments.chat_template_kwargs or None,
        "thinking": arguments.thinking,
        "trust_remote_code": arguments.trust_remote_code,
    }
    with contextlib.ExitStack() as stack:
        try:
            if arguments.server:
                opened = served_agent(arguments.server, tokenizer=arguments.model_name_or_path, **options)
            else:
                check_model_folder(arguments.model_name_or_path, flag="model_name_or_path")  # type: ignore[arg-type]
                more: dict[str, Any] = {"use_vllm": arguments.use_vllm, "dtype": arguments.dtype}
                opened = open_agent(arguments.model_name_or_path, **more, **options)
            agent = stack.enter_context(opened)
        except OSError as error:
            raise UsageError(model_problem(arguments.model_name_or_path, error)) from error
        except infrastructure_errors() as error:
            raise InfrastructureError(
                f"--server {arguments.server}: {error}" if arguments.server else str(error)
            ) from error
        except ValueError as error:
            raise UsageError(str(error)) from error
        yield agent
