"""`agent-r1-trl serve`: serve a trained model with vLLM, or with --agent the agent with its tools.

agent-r1-trl serve outputs/my-agent
agent-r1-trl serve outputs/my-agent --agent --config recipe.yaml
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.arguments import EvalArguments, read_mapping
from agent_r1_trl.cli.conversation_arguments import (
    NO_RECIPE_ABOUT,
    ONE_MODEL,
    ConversationArguments,
    with_model_flag,
)
from agent_r1_trl.cli.errors import InfrastructureError, UsageError, model_problem, run_command
from agent_r1_trl.rollout.limits import RolloutSettings, check_seconds

COMMAND = "agent-r1-trl serve"
ABOUT = (
    "Serve a trained model: agent-r1-trl serve MODEL. MODEL is the directory of a model, a checkpoint or an adapter, "
    "or a Hub id. vLLM serves it in OpenAI's protocol, and clients bring the tools. With --agent, the agent is served "
    f"with tools of its own: each request plays a whole rollout. {NO_RECIPE_ABOUT}"
)
_EVAL = EvalArguments.__dataclass_fields__


@dataclass
class AddressArguments:
    """Where it is served."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address; 0.0.0.0 for other machines. No password."})
    port: int = field(default=8000, metadata={"help": "Port; with --agent, 0 for a free one."})
    served_name: str | None = field(
        default=None, metadata={"help": "Name of the model for clients. None: the last part of MODEL."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port={self.port}: must be from 0 to 65535. Pass such a number.")


@dataclass
class ServeArguments(AddressArguments):
    """Settings of `serve` without --agent."""

    model_name_or_path: str | None = field(default=None, metadata=ONE_MODEL)
    merged_dir: str | None = field(
        default=None,
        metadata={
            "help": "Where an adapter is merged into its base: a directory that does not exist yet. None: a temporary "
            "one. The adapter stays as it is."
        },
    )
    tool_parser: str | None = field(
        default=None, metadata={"help": "Tool parser of vLLM; 'none' for no calls. None: that of the model's family."}
    )
    vllm_options: str | None = field(
        default=None,
        metadata={
            "help": "Further options of vLLM's server, as one text: '--max-model-len 8192'. With a single word write "
            "--vllm_options=--enforce-eager."
        },
    )
    start_timeout: float = field(default=900.0, metadata={"help": "Seconds that vLLM may take to start."})
    trust_remote_code: bool = field(default=False, metadata=_EVAL["trust_remote_code"].metadata)
    chat_template: str | None = field(default=None, metadata=_EVAL["chat_template"].metadata)
    response_template: dict[str, Any] | str | None = field(default=None, metadata=_EVAL["response_template"].metadata)
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=_EVAL["chat_template_kwargs"].metadata
    )
    thinking: str = field(default="keep", metadata=_EVAL["thinking"].metadata)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = read_mapping("chat_template_kwargs", self.chat_template_kwargs)
        check_seconds("start_timeout", self.start_timeout)
        if not self.model_name_or_path:
            raise UsageError("MODEL: not set. Pass the directory or the Hub id of a model.")
        if self.port == 0:
            raise UsageError("port=0: vLLM takes no free port by itself. Pass a number from 1 to 65535.")


@dataclass
class AgentServeArguments(ConversationArguments, AddressArguments):
    """Settings of `serve --agent`."""

    def __post_init__(self) -> None:
        ConversationArguments.__post_init__(self)
        AddressArguments.__post_init__(self)


def run(argv: Sequence[str]) -> int:
    """Serve until told to end; returns the exit code."""
    from agent_r1_trl.cli.options import options_of, show_help

    def options() -> list[dict[str, Any]]:
        return options_of(
            Address=AddressArguments,
            Model=ServeArguments,
            **{"Limits of a request, with --agent": RolloutSettings, "With --agent": ConversationArguments},
        )

    if show_help(COMMAND, argv, ABOUT, options):
        return 0
    if "--agent" in argv:
        return serve_agent([item for item in argv if item != "--agent"])
    return serve_model(argv)


# ---------------------------------------------------------------- the agent


def serve_agent(argv: Sequence[str]) -> int:
    """Serve the agent with its tools."""
    from agent_r1_trl.cli.conversation_arguments import agent_of, environment_of, read_conversation_arguments
    from agent_r1_trl.cli.recipe import read_recipe, split_config

    config, _ = split_config(argv)
    if config is not None:
        read_recipe(config)
    arguments = read_conversation_arguments(f"{COMMAND} --agent", argv, AgentServeArguments)
    env_factory = environment_of(arguments)
    from agent_r1_trl.conversation.agent_server import EVERY_ADDRESS, AgentServer
    from agent_r1_trl.tools.retrieval.server import serve_app

    if arguments.host in EVERY_ADDRESS:
        print(
            f"warning: --host {arguments.host}: whoever reaches this machine can use the agent and its tools, without "
            "a password. Pass --host 127.0.0.1 unless the network is your own.",
            file=sys.stderr,
            flush=True,
        )
    with agent_of(arguments) as agent:
        name = arguments.served_name or Path(str(agent.name)).name
        try:
            server = AgentServer(
                agent, env_factory, name=name, params=arguments.params, seed=arguments.seed, row=arguments.row,
                host=arguments.host,
            )  # fmt: skip
        except ValueError as error:
            raise UsageError(str(error)) from error

        def show(place: Mapping[str, Any]) -> None:
            print(how_to_ask(f"http://{place['host']}:{place['port']}", name), flush=True)

        try:
            serving = serve_app(server.app(), arguments.host, arguments.port, show, handler_cancellation=True)
            asyncio.run(serving)
        except OSError as error:
            raise _cannot_listen(arguments, error) from error
    return 0


# ---------------------------------------------------------------- vLLM


def serve_model(argv: Sequence[str]) -> int:
    """Serve the model with vLLM."""
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.conversation.vllm_process import (
        ServerEndedError,
        has_vllm,
        running,
        server_command,
        wait_until_ready,
    )
    from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    elsewhere = (EvalArguments, AgentServeArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig)
    modes = {"--agent": (AgentServeArguments,)}
    parser = RecipeParser((ServeArguments,), command=COMMAND, elsewhere=elsewhere, modes=modes)
    (arguments,) = parser.parse(with_model_flag(argv))
    if not has_vllm():
        raise UsageError(
            "vLLM is not installed. Install it (on Linux): pip install 'agent-r1-trl[vllm]', or serve the agent with "
            "--agent."
        )
    import torch

    is_cpu = not torch.cuda.is_available()
    url = f"http://{'127.0.0.1' if arguments.host == '0.0.0.0' else arguments.host}:{arguments.port}"
    _check_free(arguments)
    with _terminated_like_interrupted(), tempfile.TemporaryDirectory() as folder:
        model, chat = _plain_model(arguments, Path(folder))
        chosen = _parser_of(arguments, chat)
        name = arguments.served_name or Path(arguments.model_name_or_path).name
        command = server_command(
            model, chat, name=name, host=arguments.host, port=arguments.port, tool_parser=chosen,
            template_file=Path(folder) / "template.jinja", is_cpu=is_cpu,
            options=[*(["--trust-remote-code"] if arguments.trust_remote_code else []),
                     *shlex.split(arguments.vllm_options or "")],
        )  # fmt: skip
        print(f"starting vLLM, tool parser {chosen or 'none'}: {shlex.join(command)}", file=sys.stderr, flush=True)
        with running(command, is_cpu=is_cpu) as process:
            try:
                wait_until_ready(process, url, arguments.start_timeout)
                print(how_to_ask(url, name), flush=True)
                process.wait()
                raise ServerEndedError(f"vLLM's server has ended with exit code {process.returncode}")
            except ServerEndedError as error:
                raise InfrastructureError(f"{error}. What it printed is above. Correct what it names.") from error
            except KeyboardInterrupt:
                return 0


def _parser_of(arguments: ServeArguments, chat: Any) -> str | None:
    """The tool parser asked for, or that of the family; None without one, which is said."""
    from agent_r1_trl.conversation.vllm_process import choose_parser

    if arguments.tool_parser is not None:
        return None if arguments.tool_parser == "none" else arguments.tool_parser
    parser = choose_parser(chat)
    if parser.name is None:
        print(f"Without tool calls: {parser.reason}. --tool_parser NAME sets one of vLLM's.", file=sys.stderr)
    return parser.name


def _plain_model(arguments: ServeArguments, folder: Path) -> tuple[str, Any]:
    """A model that vLLM can read, merged if need be, and its chat format."""
    from transformers import AutoTokenizer

    from agent_r1_trl.chat import ChatFormat
    from agent_r1_trl.evaluation.loading import check_model_folder, is_adapter_of_the_hub
    from agent_r1_trl.merging import merge_model

    model = str(arguments.model_name_or_path)
    try:
        if check_model_folder(model, flag="model_name_or_path") or is_adapter_of_the_hub(model):
            merged = arguments.merged_dir or str(folder / "merged")
            print(f"merging the adapter into its base, in {merged}", file=sys.stderr, flush=True)
            merge_model(model, merged, trust_remote_code=arguments.trust_remote_code)
            model = merged
        elif arguments.merged_dir:
            raise UsageError(f"merged_dir={arguments.merged_dir!r}: {model} is no adapter. Remove merged_dir.")
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=arguments.trust_remote_code)
        chat = ChatFormat(
            tokenizer,
            chat_template=arguments.chat_template,
            response_template=arguments.response_template,
            chat_template_kwargs=arguments.chat_template_kwargs or None,  # type: ignore[arg-type]
            thinking=arguments.thinking,
        )
    except OSError as error:
        raise UsageError(model_problem(arguments.model_name_or_path, error)) from error
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    return model, chat


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the server as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_free(arguments: ServeArguments) -> None:
    """Refuse a port that is taken, before the model is loaded and somebody else's server is taken for ours."""
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((arguments.host, arguments.port))
        except OSError as error:
            raise _cannot_listen(arguments, error) from error


def _cannot_listen(arguments: AddressArguments, error: OSError) -> InfrastructureError:
    return InfrastructureError(
        f"--host {arguments.host} --port {arguments.port}: cannot listen there ({error.strerror or error}). Pass "
        "another port."
    )


def how_to_ask(url: str, name: str) -> str:
    """A curl line and a snippet of Python that ask the server."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    curl = f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    python = f"""\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(model={json.dumps(name)}, messages=[{{"role": "user", "content": "Hello"}}])
print(answer.choices[0].message.content)"""
    return f"{name}: {url}/v1\n\n{curl}\n\n{python}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.serve`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
