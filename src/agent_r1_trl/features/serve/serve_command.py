"""`agent-r1-trl serve`: serve a trained model with vLLM, or with --agent the agent with its tools.

agent-r1-trl serve outputs/my-agent
agent-r1-trl serve outputs/my-agent --agent --config recipe.yaml
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.cli.arguments import CommandArguments, TemplateArguments
from agent_r1_trl.cli.errors import DependencyError, UsageError, model_problem, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.web import Port, listen, serve_app
from agent_r1_trl.evaluation.loading import check_model_folder, is_adapter_of_the_hub
from agent_r1_trl.features.serve.agent_server import EVERY_ADDRESS, AgentServer
from agent_r1_trl.features.serve.command_arguments import (
    MODEL_HELP,
    ConversationArguments,
    agent_of,
    environment_of,
    read_conversation_arguments,
    with_model_flag,
)
from agent_r1_trl.features.serve.merging import merge_model
from agent_r1_trl.features.serve.vllm_process import (
    ServerEndedError,
    choose_parser,
    has_vllm,
    running,
    server_command,
    wait_until_ready,
)
from agent_r1_trl.settings import Clash, Seconds, setting

COMMAND = "agent-r1-trl serve"
ABOUT = (
    "Serve a trained model: agent-r1-trl serve MODEL. MODEL is the directory of a model, a checkpoint or an adapter, "
    "or a Hub id. vLLM serves it in OpenAI's protocol, and clients bring the tools. With --agent, the agent is served "
    "with tools of its own: each request plays a whole rollout; --agent --help lists its settings."
)


@dataclass
class AddressArguments(CommandArguments):
    """Where it is served."""

    host: str = setting("127.0.0.1", "Address; 0.0.0.0 for other machines. No password.")
    port: Port = setting(8000, "Port; with --agent, 0 for a free one.")
    served_name: str | None = setting(None, "Name of the model for clients. None: the last part of MODEL.")


@dataclass
class ServeArguments(AddressArguments, TemplateArguments):
    """Settings of `serve` without --agent."""

    CLASHES = (
        Clash(
            "model_name_or_path", lambda c: not c.model_name_or_path, "MODEL is not set. Pass a directory or Hub id."
        ),
        Clash("port", lambda c: c.port == 0, "vLLM takes no free port by itself. Pass a number from 1 to 65535."),
    )

    model_name_or_path: str | None = setting(None, MODEL_HELP, aliases=["--model"])
    tool_parser: str | None = setting(
        None, "Tool parser of vLLM; 'none' for no calls. None: that of the model's family."
    )
    vllm_options: str | None = setting(
        None,
        "Further options of vLLM's server, as one text: '--max-model-len 8192'. With a single word write "
        "--vllm_options=--enforce-eager.",
    )
    start_timeout: Seconds | None = setting(900.0, "Seconds that vLLM may take to start.")


@dataclass
class AgentServeArguments(ConversationArguments, AddressArguments):
    """Settings of `serve --agent`."""


def run(argv: Sequence[str]) -> int:
    """Serve until told to end; returns the exit code."""
    if "--agent" in argv:
        return serve_agent([item for item in argv if item != "--agent"])
    return serve_model(argv)


# ---------------------------------------------------------------- the agent


def serve_agent(argv: Sequence[str]) -> int:
    """Serve the agent with its tools."""
    arguments = read_conversation_arguments(f"{COMMAND} --agent", argv, AgentServeArguments, about=ABOUT)
    env_factory = environment_of(arguments)
    if arguments.host in EVERY_ADDRESS:
        warning = (
            f"warning: --host {arguments.host}: whoever reaches this machine can use the agent and its tools, without "
            "a password. Pass --host 127.0.0.1 unless the network is your own."
        )
        print(warning, file=sys.stderr, flush=True)
    with agent_of(arguments) as agent:
        name = arguments.served_name or Path(str(agent.name)).name
        with users_mistakes():
            server = AgentServer(
                agent, env_factory, name=name, params=arguments.params, seed=arguments.seed, row=arguments.row or {},
                host=arguments.host,
            )  # fmt: skip

        def show(url: str) -> None:
            print(how_to_ask(url, name), flush=True)

        serve_app(server.app(), arguments.host, arguments.port, show, handler_cancellation=True)
    return 0


# ---------------------------------------------------------------- vLLM


def serve_model(argv: Sequence[str]) -> int:
    """Serve the model with vLLM."""
    elsewhere = (AgentServeArguments, *OF_RECIPES)
    modes = {"--agent": (AgentServeArguments,)}
    parser = RecipeParser((ServeArguments,), command=COMMAND, about=ABOUT, elsewhere=elsewhere, modes=modes)
    (arguments,) = parser.parse(with_model_flag(argv))
    if not has_vllm():
        raise UsageError(
            "vLLM is not installed. Install it (on Linux): pip install 'agent-r1-trl[vllm]', or serve the agent with "
            "--agent."
        )
    is_cpu = not torch.cuda.is_available()
    url = f"http://{'127.0.0.1' if arguments.host == '0.0.0.0' else arguments.host}:{arguments.port}"
    listen(arguments.host, arguments.port).close()  # a taken port is refused before the model is loaded
    with _terminated_like_interrupted(), tempfile.TemporaryDirectory() as folder:
        with users_mistakes():
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
                raise DependencyError(f"{error}. What it printed is above. Correct what it names.") from error
            except KeyboardInterrupt:
                return 0


def _parser_of(arguments: ServeArguments, chat: Any) -> str | None:
    """The tool parser asked for, or that of the family; None without one, which is said."""
    if arguments.tool_parser is not None:
        return None if arguments.tool_parser == "none" else arguments.tool_parser
    parser = choose_parser(chat)
    if parser.name is None:
        print(f"Without tool calls: {parser.reason}. --tool_parser NAME sets one of vLLM's.", file=sys.stderr)
    return parser.name


def _plain_model(arguments: ServeArguments, folder: Path) -> tuple[str, Any]:
    """A model that vLLM can read, merged if need be, and its chat format."""
    model = str(arguments.model_name_or_path)
    try:
        if check_model_folder(model, flag="model_name_or_path") or is_adapter_of_the_hub(model):
            merged = str(folder / "merged")
            print(f"merging the adapter into its base, in {merged}", file=sys.stderr, flush=True)
            merge_model(model, merged, trust_remote_code=arguments.trust_remote_code)
            model = merged
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=arguments.trust_remote_code)
        options = {name: value for name, value in arguments.chat_options().items() if name != "trust_remote_code"}
        return model, ChatFormat(tokenizer, **options)
    except OSError as error:
        raise UsageError(model_problem(arguments.model_name_or_path, error)) from error


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the server as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
