"""`agent-r1-trl chat`: talk to an agent; it calls its tools, and every token is the one that training would see.

agent-r1-trl chat outputs/my-agent --config recipe.yaml
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE, UsageError, users_mistakes
from agent_r1_trl.features.serve import Conversation, ConversationError, Event
from agent_r1_trl.features.serve.command_arguments import agent_of, environment_of, read_conversation_arguments
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.recording import render_trajectory
from agent_r1_trl.recording.store import encode_line
from agent_r1_trl.safe_text import shown, visible

COMMAND = "agent-r1-trl chat"
COMMANDS = {
    "/help": "show this list",
    "/reset": "begin another conversation",
    "/mask": "show the conversation as training sees it, with its mask",
    "/save FILE": "add the trajectory to a JSONL file, which agent-r1-trl view shows",
    "/quit": "end (so does the end of the input)",
}
SHOWN_CHARS = 2000
"""Characters of one observation that are shown."""


def run(argv: Sequence[str]) -> int:
    """Read messages and answer them; returns the exit code."""
    about = (
        "Talk to an agent: agent-r1-trl chat MODEL. MODEL is the directory of a model, a checkpoint or an adapter, "
        f"or a Hub id. In the chat: {', '.join(COMMANDS)}."
    )
    arguments = read_conversation_arguments(COMMAND, argv, about=about)
    env_factory = environment_of(arguments)
    with agent_of(arguments) as agent:
        screen, how = Screen(), {"params": arguments.params, "seed": arguments.seed, "row": arguments.row or {}}
        with users_mistakes():
            conversation = Conversation(agent, env_factory, on_event=screen.show, **how)
        screen.line(f"{agent.name}; /help lists the commands.")
        with asyncio.Runner() as runner:
            try:
                has_failed = Chat(conversation, screen, runner).run()
            finally:
                runner.run(conversation.close())
    return EXIT_INFRASTRUCTURE if has_failed else 0


class Screen:
    """What happens, on standard output; nothing that a model or a page says can control the terminal."""

    def __init__(self) -> None:
        self._is_inside = False
        for stream in (sys.stdin, sys.stdout):  # what their encoding does not have must not end the chat
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    def show(self, event: Event) -> None:
        """Print an event."""
        if event.kind == "text":
            self.end_line()
            self.write(visible(event.text))
            return
        forms = {
            "call": f"→ {event.name}({_arguments(event.arguments)})",
            "observation": f"{'✗' if event.is_error else '←'} {event.name}: {_cut(event.text)}",
            "prompt": f"[{event.name}] {_cut(event.text)}",
        }
        self.line(forms[event.kind])

    def line(self, text: str) -> None:
        """Print a line of its own."""
        self.end_line()
        self.write(shown(text) + "\n")

    def end_line(self) -> None:
        """Begin a new line, unless one has just begun."""
        if self._is_inside:
            self.write("\n")

    def ask(self) -> str | None:
        """A line of the user without its end; None at the end of the input."""
        self.end_line()
        self.write("> ")
        line = sys.stdin.readline()
        if line and not sys.stdin.isatty():
            self.write(shown(line.rstrip("\n")) + "\n")  # a script's input belongs to the record
        self._is_inside = not line
        return line.rstrip("\r\n") if line else None

    def write(self, text: str) -> None:
        """Print text, which may hold colours, as it is."""
        sys.stdout.write(text)
        sys.stdout.flush()
        self._is_inside = bool(text) and not text.endswith("\n")


class Chat:
    """The loop over the user's lines.

    Args:
        conversation: with the agent.
        screen: where everything is shown.
        runner: of the event loop on which the conversation takes place.
    """

    def __init__(self, conversation: Conversation, screen: Screen, runner: asyncio.Runner) -> None:
        self._conversation, self._screen, self._runner = conversation, screen, runner

    def run(self) -> bool:
        """Answer until the input ends or says so.

        Returns:
            Whether the last message could not be answered, through no fault of the user.
        """
        has_failed = False
        while (line := self._screen.ask()) is not None:
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                break
            if command.startswith("/"):
                self._command(command, rest.strip())
            elif command:
                has_failed = self._say(line)
        self._screen.end_line()
        return has_failed

    def _say(self, text: str) -> bool:
        """Whether a message could not be answered, through no fault of the user."""
        has_failed = False
        try:
            if self._conversation.ended is None:
                self._runner.run(self._conversation.say(text))
        except ConversationError as error:
            has_failed = error.stop_reason.is_infrastructure_failure
            self._screen.line(f"(not answered: {error}; the message is taken back)")
        except KeyboardInterrupt:
            self._screen.line("(interrupted; the message is taken back)")
        except ValueError as error:  # an environment that breaks the protocol
            raise UsageError(str(error)) from error
        if self._conversation.ended is not None:
            self._screen.line(f"(the conversation has ended: {self._conversation.ended}; /reset)")
        return has_failed

    def _command(self, name: str, argument: str) -> None:
        screen, conversation = self._screen, self._conversation
        if name == "/help":
            for command, text in COMMANDS.items():
                screen.line(f"{command:12} {text}")
        elif name == "/reset":
            self._runner.run(conversation.reset())
            screen.line("(a new conversation)")
        elif name not in ("/mask", "/save"):
            screen.line(f"({name} is no command.{did_you_mean(name, ['/save', *COMMANDS])} /help lists them)")
        elif conversation.trajectory is None:
            screen.line("(nothing has been said)")
        elif name == "/mask":
            screen.end_line()
            tokenizer = conversation.agent.chat.tokenizer
            screen.write(render_trajectory(conversation.trajectory, tokenizer, color=sys.stdout.isatty()))
        else:
            self._save(argument)

    def _save(self, path: str) -> None:
        assert self._conversation.trajectory is not None
        try:
            with Path(path).open("ab") as file:
                file.write(encode_line(self._conversation.trajectory, {"step": 0}))
            self._screen.line(f"(saved: agent-r1-trl view {path} --terminal)")
        except OSError as error:
            self._screen.line(f"({path or '/save FILE'}: cannot be written: {error.strerror or error})")


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, dict):
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return str(arguments)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} … ({len(text)} characters)"
