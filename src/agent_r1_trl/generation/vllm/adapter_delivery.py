"""Bring an adapter's files to where a vLLM server can read them: its own machine, or a folder that both see.

A server loads an adapter from a path, and each of its workers reads the files itself. So the workers are asked whether
they see the trainer's folder. If they do not, the files go to them over a transfer's authenticated connections, and
each machine keeps them in its temporary folder, under the same path on all (`worker_extension.py`).

Covered here: which way, and sending. Not covered: writing the trainer's own files (`lora_files.py`), loading them
(`server_routes.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agent_r1_trl.generation.base import GenerationError
from agent_r1_trl.generation.vllm.http_client import HTTPClient, HTTPError
from agent_r1_trl.generation.vllm.lora_files import ADAPTER_FILES
from agent_r1_trl.generation.vllm.server_routes import UnfitServerError, hello, rpc
from agent_r1_trl.generation.vllm.weight_transfer import WeightSender

_FORGET_S = 5.0


class AdapterDelivery:
    """Finds, for each server, the path under which it can load an adapter.

    Args:
        http: client for the requests.
        open_sender: a new transfer, and the address of this machine that the workers can reach.
        may_send: whether this process may open one; only one process has a port for that.
        timeout_s: seconds that a server may take.
        health_timeout_s: seconds that it may take over a question.
    """

    def __init__(
        self,
        http: HTTPClient,
        open_sender: Callable[[], tuple[WeightSender, str]],
        *,
        may_send: bool,
        timeout_s: float,
        health_timeout_s: float,
    ):
        self._http = http
        self._open_sender = open_sender
        self._may_send = may_send
        self._timeout_s = timeout_s
        self._health_timeout_s = health_timeout_s
        self._sees: dict[str, bool] = {}  # URL -> whether the server sees the trainer's folders
        self._sending = asyncio.Lock()  # two transfers at once would need two ports

    async def path_for(self, url: str, folder: Path, *, old: str | None = None) -> str:
        """Path of the adapter's files on the server's machine; they are sent if it does not see `folder`.

        Args:
            url: of the server.
            folder: with the files; its name is the adapter's.
            old: name of the adapter that the server still serves; older ones of this run are removed there.

        Raises:
            HTTPError: the server does not answer, or waits for another process to send the files.
            UnfitServerError: its workers cannot keep the files.
        """
        if url not in self._sees:
            self._sees[url] = await self._asked(url, folder)
        if self._sees[url]:
            return str(folder)
        if not self._may_send:
            raise HTTPError(f"{url} does not see {folder}, and the first process has not sent the adapter there yet")
        async with self._sending:
            workers = await hello(self._http, url, timeout_s=self._health_timeout_s)
            paths = {answer["path"] for answer in await asyncio.to_thread(self._send, url, len(workers), folder, old)}
        if len(paths) > 1:
            raise UnfitServerError(
                f"The workers of {url} have different temporary folders ({', '.join(sorted(paths))}), and vLLM loads "
                "an adapter from one path. Set TMPDIR to the same folder for all of them."
            )
        return paths.pop()

    async def forget(self, name: str) -> None:
        """Have the servers remove what was sent to them, if they still answer."""
        for url, sees in self._sees.items():
            if not sees and self._may_send:
                with contextlib.suppress(HTTPError, GenerationError):
                    await rpc(self._http, url, "agent_r1_forget", name, None, timeout_s=_FORGET_S)

    async def _asked(self, url: str, folder: Path) -> bool:
        """Whether all workers of the server see the folder; so we assume of one whose workers cannot be asked."""
        try:
            file = str(folder / ADAPTER_FILES[0])
            answers = await rpc(self._http, url, "agent_r1_sees", file, timeout_s=self._health_timeout_s)
        except UnfitServerError:
            return True
        return all(answer["sees"] for answer in answers)

    def _send(self, url: str, num_workers: int, folder: Path, old: str | None) -> list[dict[str, Any]]:
        sender, host = self._open_sender()
        try:
            arguments = (host, sender.port, sender.expect(url), self._timeout_s, folder.name, old)
            call = self._http.start(rpc(self._http, url, "agent_r1_adapter", *arguments, timeout_s=self._timeout_s))
            sender.wait_for({url: (num_workers, call.done)})
            sender.send((name, _content(folder / name)) for name in ADAPTER_FILES)
            failure = sender.failures.get(url)
            try:
                return call.result(1.0 if failure else self._timeout_s)
            except TimeoutError as error:
                call.cancel()
                raise HTTPError(f"the adapter did not reach {url} ({failure or 'no answer'})") from error
        finally:
            sender.close()


def _content(file: Path) -> torch.Tensor:
    """(num_bytes,) uint8."""
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
