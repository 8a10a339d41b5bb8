"""`agent-r1-trl serve`: serve an agent with its tools, in OpenAI's protocol.

agent-r1-trl serve outputs/my-agent --config recipe.yaml
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_r1_trl.cli.errors import users_mistakes
from agent_r1_trl.cli.web import serve_app
from agent_r1_trl.features.serve.agent_server import EVERY_ADDRESS, AgentServer
from agent_r1_trl.features.serve.command_agent import (
    agent_of,
    environment_of,
    no_tools_note,
    read_conversation_arguments,
)


def run(argv: Sequence[str]) -> int:
    """Serve until told to end; returns the exit code."""
    arguments = read_conversation_arguments("serve", argv)
    env_factory = environment_of(arguments)
    if arguments.host in EVERY_ADDRESS:
        warning = (
            f"warning: --host {arguments.host}: whoever reaches this machine can use the agent and its tools, without "
            "a password. Pass --host 127.0.0.1 unless the network is your own."
        )
        print(warning, file=sys.stderr, flush=True)
    if note := no_tools_note(arguments):
        print(note, file=sys.stderr, flush=True)
    with agent_of(arguments) as agent:
        name = arguments.served_name or Path(str(agent.name)).name
        with users_mistakes():
            server = AgentServer(
                agent, env_factory, name=name, params=arguments.params, seed=arguments.seed, row=arguments.row or {},
                host=arguments.host,
            )  # fmt: skip

        serve_app(
            server.app(), arguments.host, arguments.port, lambda url: print(how_to_ask(url, name), flush=True),
            handler_cancellation=True,
        )  # fmt: skip
    return 0


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
