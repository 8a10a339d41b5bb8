"""vLLM's OpenAI server for a trained model: which tool parser and template it needs, and the process itself.

Covered here: the command, waiting, ending. Not covered: servers of trainers (`agent_r1_trl.generation.vllm`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.chat.grammars import GRAMMARS

PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm47",
    "mistral": "mistral",
    "deepseek": "deepseek_v31",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "seed": "seed_oss",
    "lfm2": "lfm2",
    "command": "cohere_command3",
}
"""Our grammar -> vLLM's tool parser that reads the same calls. vLLM brings none for `nemotron_nano`."""
_MARKS = {
    "<|channel|>": "openai",
    "<|tool_call>": "gemma4",
    "<|start_header_id|>": "llama3_json",
}
"""What a template contains -> parser, for the families that TRL's grammars read."""
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_CPU_OPTIONS = ("--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill")
END_TIMEOUT_S = 20.0


class ServerEndedError(RuntimeError):
    """The server has ended, or does not answer in time."""


@dataclass(frozen=True)
class Parser:
    """vLLM's tool parser for a model; without one, why."""

    name: str | None
    reason: str = ""


def choose_parser(chat: ChatFormat) -> Parser:
    """The tool parser of vLLM that reads the calls of this model."""
    if not chat.supports_tools:
        return Parser(None, "the chat template cannot show tools")
    grammar = next((name for name, known in GRAMMARS.items() if known == chat.grammar), None)
    if grammar in PARSERS:
        return Parser(PARSERS[grammar])
    marked = next((parser for mark, parser in _MARKS.items() if mark in chat.chat_template), None)
    if grammar is None and marked is not None:
        return Parser(marked)
    if grammar is None and _is_hermes(chat.grammar):
        return Parser("hermes")
    if grammar is None:
        return Parser(None, "its calls are read by a grammar of its own")
    return Parser(None, f"vLLM has no tool parser for calls in the form {grammar!r}")


def _is_hermes(grammar: dict[str, Any]) -> bool:
    """Whether a grammar of the model's own reads calls as JSON between <tool_call> and </tool_call>."""
    calls = grammar.get("fields", {}).get("tool_calls") or {}
    begins = str(calls.get("open") or calls.get("open_pattern") or "").startswith("<tool_call>")
    ends = str(calls.get("close") or calls.get("close_pattern") or "").startswith("</tool_call>")
    return begins and ends and calls.get("content") in ("json", "json_call")


def server_command(
    model: str,
    chat: ChatFormat,
    *,
    name: str,
    host: str,
    port: int,
    tool_parser: str | None,
    template_file: Path,
    is_cpu: bool,
    options: Sequence[str] = (),
) -> list[str]:
    """The command of the server.

    Args:
        model: directory or Hub id of a plain model.
        chat: its format, whose template the server is given: the one that training used.
        name: under which clients ask for it.
        host: address to listen at.
        port: to listen at.
        tool_parser: of vLLM; None for a server that reads no calls.
        template_file: where the template is written, if the tokenizer has another.
        is_cpu: whether there is no GPU.
        options: further ones, which come last and win.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", name, "--host", host, "--port", str(port)]
    if tool_parser is not None:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
    if chat.template_to_save != chat.tokenizer.chat_template:
        template_file.write_text(chat.chat_template, encoding="utf-8")
        command += ["--chat-template", str(template_file)]
    if chat.chat_template_kwargs:
        command += ["--default-chat-template-kwargs", json.dumps(chat.chat_template_kwargs)]
    return [*command, *(_CPU_OPTIONS if is_cpu else ()), *options]


@contextlib.contextmanager
def running(command: Sequence[str], *, is_cpu: bool) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server, which ends with this block and with this process.

    What it prints goes to standard error.
    """
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", **(_ON_CPU if is_cpu else {})}
    on_start = None
    if sys.platform == "linux":
        from agent_r1_trl.rollout.processes import die_with_parent

        on_start = functools.partial(die_with_parent, signal.SIGTERM)
    process = subprocess.Popen(
        command,
        env={**defaults, **os.environ},
        stdout=sys.stderr.fileno(),
        start_new_session=True,  # Ctrl-C is this process's, which ends the server
        preexec_fn=on_start,
    )
    try:
        yield process
    finally:
        _end(process)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> None:
    """Return as soon as the server answers.

    Raises:
        ServerEndedError: it has ended, or does not answer within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerEndedError(f"vLLM's server has ended with exit code {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise ServerEndedError(f"vLLM's server does not answer after {timeout_s:g} s")


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, timeout_s in ((signal.SIGTERM, END_TIMEOUT_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(timeout_s)
            break
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has started itself
