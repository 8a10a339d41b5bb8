"""`agent-r1-trl chat`: talk to an agent; it calls its tools, and every token is the one that training would see.

agent-r1-trl chat outputs/my-agent --config recipe.yaml
"""

from __future__ import annotations

import asyncio
import functools
import shlex
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE, users_mistakes
from agent_r1_trl.features.serve import Conversation, ConversationError, Event
from agent_r1_trl.features.serve.command_agent import (
    agent_of,
    environment_of,
    no_tools_note,
    read_conversation_arguments,
)
from agent_r1_trl.features.serve.command_arguments import CHAT_COMMANDS
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.recording import render_trajectory
from agent_r1_trl.recording.store import encode_line
from agent_r1_trl.safe_text import shown, visible
from agent_r1_trl.tools.event_loop import shared_loop

COMMAND = "agent-r1-trl chat"
SHOWN_CHARS = 2000
"""Characters of one observation that are shown."""


def run(argv: Sequence[str]) -> int:
    """Read messages and answer them; returns the exit code."""
    arguments = read_conversation_arguments("chat", argv)
    env_factory = environment_of(arguments)
    with agent_of(arguments) as agent:
        screen = Screen()
        how = {"params": arguments.params, "seed": arguments.seed, "row": arguments.row or {}}
        with users_mistakes():
            conversation = Conversation(agent, env_factory, on_event=screen.show, **how)
        screen.line(f"{agent.name}; /help lists the commands.")
        if note := no_tools_note(arguments):
            screen.line(note)
        wait_for = functools.partial(_wait_for, shared_loop().loop)
        try:
            return _answer_all(conversation, screen, wait_for)
        finally:
            wait_for(conversation.close())


def _wait_for(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
    """Wait for a coroutine that runs on a loop; Ctrl-C cancels it, and waits for its end."""
    has_ended = threading.Event()

    async def start() -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(lambda task: has_ended.set())
        return task

    task = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        has_ended.wait()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        has_ended.wait()
        raise
    task.result()


class Screen:
    """The conversation on standard output; nothing that a model or a page says can control the terminal."""

    def __init__(self) -> None:
        self._is_inside = False
        """Whether the last line has not ended."""
        for stream in (sys.stdin, sys.stdout):  # what their encoding does not have must not end the chat
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    def show(self, event: Event) -> None:
        """Print an event."""
        if event.kind == "text":
            self.write(visible(event.text), on_new_line=True)
            return
        forms = {
            "call": f"→ {event.name}({_arguments(event.arguments)})",
            "observation": f"{'✗' if event.is_error else '←'} {event.name}: {_cut(event.text)}",
            "prompt": f"[{event.name}] {_cut(event.text)}",
        }
        self.line(forms[event.kind])

    def line(self, text: str) -> None:
        """Print a line of its own."""
        self.write(shown(text) + "\n", on_new_line=True)

    def ask(self) -> str | None:
        """A line of the user without its end; None at the end of the input."""
        self.write("> ", on_new_line=True)
        line = sys.stdin.readline()
        if not line or not sys.stdin.isatty():
            self.write(shown(line.rstrip("\n")) + "\n")  # a script's input belongs to the record
        self._is_inside = False
        return line.rstrip("\r\n") if line else None

    def write(self, text: str, *, on_new_line: bool = False) -> None:
        """Print text, which may hold colours, as it is."""
        sys.stdout.write("\n" * (on_new_line and self._is_inside) + text)
        sys.stdout.flush()
        self._is_inside = bool(text) and not text.endswith("\n")


def _answer_all(conversation: Conversation, screen: Screen, wait_for: Callable[[Any], None]) -> int:
    """Answer until the input ends or says so; returns the exit code, which is about the last message."""
    exit_code = 0
    while (line := screen.ask()) is not None:
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            break
        if command == "/reset":
            wait_for(conversation.reset())
            screen.line("(a new conversation)")
        elif command.startswith("/"):
            _command(conversation, screen, command, rest.strip())
        elif command:
            exit_code = _say(conversation, screen, wait_for, line)
    return exit_code


def _say(conversation: Conversation, screen: Screen, wait_for: Callable[[Any], None], text: str) -> int:
    exit_code = 0
    if conversation.ended is not None:
        wait_for(conversation.reset())
        screen.line("(a new conversation)")
    try:
        with users_mistakes():  # an environment may break the protocol
            wait_for(conversation.say(text))
    except ConversationError as error:
        exit_code = EXIT_INFRASTRUCTURE if error.stop_reason.is_infrastructure_failure else 0
        screen.line(f"(not answered: {error}; the message is taken back)")
    except KeyboardInterrupt:
        screen.line("(interrupted; the message is taken back)")
    if conversation.ended is not None:
        screen.line(f"(the conversation has ended: {conversation.ended}; your next message begins another)")
    return exit_code


def _command(conversation: Conversation, screen: Screen, name: str, argument: str) -> None:
    if name == "/help":
        for command, text in CHAT_COMMANDS.items():
            screen.line(f"{command:12} {text}")
    elif name not in ("/mask", "/save"):
        screen.line(f"({name} is no command.{did_you_mean(name, ['/save', *CHAT_COMMANDS])} /help lists them)")
    elif conversation.trajectory is None:
        screen.line("(nothing has been said)")
    elif name == "/mask":
        tokenizer = conversation.agent.chat.tokenizer
        text = render_trajectory(conversation.trajectory, tokenizer, color=sys.stdout.isatty())
        screen.write(text, on_new_line=True)
    else:
        try:
            if Path(argument).suffix != ".jsonl":  # that of no file which view would show
                raise OSError("its name must end in .jsonl")
            with Path(argument).open("ab") as file:
                file.write(encode_line(conversation.trajectory, {"step": 0}))
            screen.line(f"(saved: agent-r1-trl view {shlex.quote(argument)} --terminal)")
        except OSError as error:
            screen.line(f"({argument or '/save FILE'}: cannot be written: {error.strerror or error})")


def _arguments(arguments: object) -> str:
    if isinstance(arguments, dict):
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return str(arguments)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} … ({len(text)} characters)"
