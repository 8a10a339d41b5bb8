"""An agent that is a command line: a program in any language, in a process group that ends with its trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

MAX_ERROR_CHARS = 500


async def run_command(command: Sequence[str], door: Any, example: dict[str, Any]) -> Any:
    """Run a program for one trajectory; returns the last line that it writes, as JSON if it is some.

    It finds the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and the row as JSON in its input.

    Raises:
        RuntimeError: it ended with another exit code than 0.
    """
    found = {"OPENAI_BASE_URL": door.base_url, "OPENAI_API_KEY": door.api_key, "OPENAI_MODEL": door.model}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*command, **pipes, env=os.environ | found, start_new_session=True)
    try:
        row = json.dumps(example, ensure_ascii=False, default=str).encode(errors="replace")
        output, errors = await process.communicate(row)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await process.communicate()  # so that its pipes are closed
    if process.returncode:
        told = errors.decode(errors="replace").strip()[-MAX_ERROR_CHARS:]
        raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}. {told}")
    last = next(reversed(output.decode(errors="replace").strip().splitlines()), "")
    with contextlib.suppress(ValueError):
        return json.loads(last)
    return last
