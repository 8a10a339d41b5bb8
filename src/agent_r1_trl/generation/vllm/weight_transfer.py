"""Weights from the trainer to the workers of vLLM servers, over connections that only this run's workers can open.

The trainer listens for as long as a transfer lasts. Each worker connects, and both sides prove that they know the
token of this transfer, which the worker got over HTTP. Then come frames, each two lengths, a header in JSON and a
payload; an empty frame is the end. A frame tells the names, dtypes and shapes of some weights (`weight_stream.py`), so
neither side has to know beforehand what comes, and a policy that is merged layer by layer is never in memory twice.

The payload follows on the same connection, or, where trainer and server have GPUs that can do so, over NCCL
(`nccl_group.py`); the frames then only announce it. Over connections, weights on a GPU pass through host memory, and
each worker of a server gets its own copy.

Not covered: the weights are not encrypted, and whoever reads the network between trainer and servers reads them.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from agent_r1_trl.generation.vllm.nccl_group import GroupError, NCCLGroup, open_group
from agent_r1_trl.generation.vllm.transfer_connection import (
    TransferError,
    challenge,
    has_data,
    is_gone,
    keep_alive,
    read,
    read_frame,
    read_into,
    send_frame,
)
from agent_r1_trl.generation.vllm.weight_stream import Named, Piece, pack, parts, unpack

PROTOCOL = 2
"""Of the frames; trainer and server must have the same."""
_HANDSHAKE_S = 10.0
_MEETING_S = 60.0  # for the members of an NCCL group
_PATIENCE = 3
"""How many times longer a worker waits than the trainer: for servers that do not join, then for one that hangs."""
_RANK = struct.Struct("!I")


# -------------------------------------------------------------------- trainer


class WeightSender:
    """Sends weights to the workers that know the token.

    Args:
        host: address of this machine that the workers can reach; only there it listens.
        port: there; 0 for any free one.
        timeout_s: seconds that a worker may take over one part (16 MiB).

    Raises:
        OSError: nobody can listen there.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float):
        self._timeout_s = timeout_s
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._tokens: dict[bytes, str] = {}
        self._workers: dict[str, dict[int, socket.socket]] = {}  # server -> rank -> connection
        self._groups: dict[str, NCCLGroup] = {}  # server -> what its payloads go over instead
        self._failures: dict[str, str] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="weight-transfer", daemon=True).start()

    def expect(self, server: str) -> str:
        """The token with which the workers of a server can join."""
        token = secrets.token_hex(32)
        with self._changed:
            self._tokens[token.encode()] = server
        return token

    def wait_for(self, servers: dict[str, tuple[int, Callable[[], bool]]]) -> None:
        """Return when all workers of all servers have joined; servers that are not there in time have failed.

        Args:
            servers: server -> number of its workers, and whether it has failed already (see `failures`).
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            for server, (size, has_failed) in servers.items():
                while len(self._workers.get(server, {})) < size:
                    if has_failed() or time.monotonic() > deadline:
                        self._drop(server, "not all of its workers connected")
                        break
                    self._changed.wait(0.05)

    def open_groups(self, servers: Collection[str], device: torch.device) -> dict[str, str]:
        """Let the payloads for these servers go over NCCL; their workers have joined.

        Args:
            servers: whose workers are on GPUs that can form a group with ours (`reason_against`).
            device: our GPU.

        Returns:
            Server -> why it cannot be: its payloads go over the connections after all.
        """
        joined = [server for server in servers if server in self._workers]
        with ThreadPoolExecutor(max(1, len(joined)), "nccl") as pool:
            reasons = dict(zip(joined, pool.map(lambda server: self._meet(server, device), joined), strict=True))
        return {server: reason for server, reason in reasons.items() if reason is not None}

    def send(self, weights: Iterable[Named], *, device: torch.device | None = None) -> None:
        """Send every weight, in order, to every worker that has joined; a server that fails is left behind.

        Always iterates to the end: where parameters are sharded, other ranks iterate too.

        Args:
            weights: name and tensor, on any device.
            device: of the groups, if there are any.
        """
        count = max(1, sum(len(workers) for workers in self._workers.values()))
        with ThreadPoolExecutor(count, "weight-transfer") as pool:
            for piece in pack(weights, device=device):
                self._send_piece(pool, piece)
            self._to_workers(pool, lambda server, connection: send_frame(connection, None))

    @property
    def failures(self) -> dict[str, str]:
        """Server -> why the transfer to it broke."""
        with self._changed:
            return dict(self._failures)

    def drop(self, server: str, reason: str) -> None:
        """Send nothing more to a server."""
        with self._changed:
            self._drop(server, reason)

    def close(self) -> None:
        """Stop listening and close the connections; a worker in the middle of a transfer sees that it broke."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._changed:
            for server in list(self._workers):
                self._drop(server, "the transfer ended")

    def _drop(self, server: str, reason: str) -> None:
        self._failures.setdefault(server, reason)
        for connection in self._workers.pop(server, {}).values():
            connection.close()
        group = self._groups.pop(server, None)
        if group is not None:
            group.close()

    # ---------------------------------------------------------------- what is sent

    def _send_piece(self, pool: ThreadPoolExecutor, piece: Piece) -> None:
        payload = piece.payload
        headers = {way: {"weights": piece.entries, "way": way} for way in ("nccl", "connection")}
        with self._changed:
            groups = dict(self._groups)
        if groups and payload.is_cuda:  # other threads read it
            torch.cuda.current_stream(payload.device).synchronize()

        def announce(server: str, connection: socket.socket) -> None:
            send_frame(connection, headers["nccl" if server in groups else "connection"], len(payload))

        self._to_workers(pool, announce)
        broadcasts = {server: pool.submit(self._broadcast, server, group, payload) for server, group in groups.items()}
        if self._workers.keys() - groups.keys():
            for part in parts(payload):
                self._to_workers(pool, _sends(part.cpu()), without=groups)
        for server, broadcast in broadcasts.items():
            self._settle(server, broadcast.result)

    def _to_workers(
        self,
        pool: ThreadPoolExecutor,
        action: Callable[[str, socket.socket], None],
        *,
        without: Collection[str] = (),
    ) -> None:
        """Do something for every worker at once; a server with one that fails is dropped."""
        with self._changed:
            targets = [
                (server, connection)
                for server, found in self._workers.items()
                if server not in without
                for connection in found.values()
            ]
        calls = [(server, pool.submit(action, server, connection)) for server, connection in targets]
        for server, call in calls:
            self._settle(server, call.result)

    def _settle(self, server: str, result: Callable[[], Any]) -> None:
        try:
            result()
        except OSError as error:
            self.drop(server, f"{type(error).__name__}: {error}")

    # ---------------------------------------------------------------- NCCL

    def _meet(self, server: str, device: torch.device) -> str | None:
        """Form a group with a server's workers; or say why not, or drop a server that no longer answers."""
        workers = [connection for _, connection in sorted(self._workers[server].items())]
        is_shared = False
        answers: dict[socket.socket, str | None] = {}

        def share(number: bytes) -> bytes:
            nonlocal is_shared
            is_shared = True
            for place, connection in enumerate(workers, 1):
                send_frame(connection, {"nccl": number.hex(), "rank": place, "size": len(workers) + 1})
            return number

        def has_refused() -> bool:
            for connection in workers:
                if is_shared and connection not in answers and has_data(connection):
                    answers[connection] = read_frame(connection)[0]["error"]
            return any(answers.values())

        group, reason = None, None
        try:
            try:
                group = open_group(0, len(workers) + 1, device, share, timeout_s=_MEETING_S, is_hopeless=has_refused)
            except GroupError as error:
                reason = str(error)
            for connection in workers:
                if is_shared and connection not in answers:
                    connection.settimeout(_MEETING_S + _HANDSHAKE_S)
                    answers[connection] = read_frame(connection)[0]["error"]
                    connection.settimeout(self._timeout_s)
        except (OSError, TypeError, KeyError) as error:
            self.drop(server, f"it did not say whether it can use NCCL ({type(error).__name__}: {error})")
            reason = None
        refusals = sorted({answer for answer in answers.values() if answer})
        reason = "; ".join(refusals) or reason
        if group is not None and (reason is not None or server not in self._workers):
            group.close()
        elif group is not None:
            self._groups[server] = group
        return reason if server in self._workers else None

    def _broadcast(self, server: str, group: NCCLGroup, payload: torch.Tensor) -> None:
        connections = list(self._workers.get(server, {}).values())
        for part in parts(payload):
            group.broadcast(
                part, timeout_s=self._timeout_s, is_broken=lambda: any(is_gone(item) for item in connections)
            )

    # ---------------------------------------------------------------- who may join

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._admit, args=(connection,), name="weight-transfer", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Let a worker in that knows the token of its server; close the connection to any other."""
        try:
            connection.settimeout(_HANDSHAKE_S)
            rank = _RANK.unpack(read(connection, _RANK.size))[0]
            with self._changed:
                tokens = dict(self._tokens)
            token = challenge(connection, tokens, b"trainer", b"worker")
            connection.settimeout(self._timeout_s)
            keep_alive(connection)
            with self._changed:
                workers = self._workers.setdefault(tokens[token], {})
                if rank in workers or tokens[token] in self._failures:
                    raise TransferError(f"worker {rank} came twice or late")
                workers[rank] = connection
                self._changed.notify_all()
        except (OSError, TransferError):
            connection.close()


def _sends(part: torch.Tensor) -> Callable[[str, socket.socket], None]:
    data = memoryview(part.numpy())  # type: ignore[arg-type]
    return lambda server, connection: connection.sendall(data)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=64)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), backlog=64)  # a name that leads here from elsewhere, as a container's


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# -------------------------------------------------------------------- worker


def receive_weights(
    host: str, port: int, token: str, *, rank: int, timeout_s: float, device: torch.device | None = None
) -> Iterator[Named]:
    """What `WeightSender.send` sends, one weight at a time: on the CPU, or, what came over NCCL, on `device`.

    Args:
        host: address of the trainer.
        port: there.
        token: of this server in this transfer.
        rank: of this worker.
        timeout_s: of the trainer; it may take three times as long to wait for servers that hang.
        device: GPU of this worker; None without one.

    Raises:
        TransferError: the trainer does not know the token, or the connection broke before the end.
        GroupError: the same of an NCCL group.
        OSError: the trainer cannot be reached.
    """
    group: NCCLGroup | None = None
    with socket.create_connection((host, port), timeout=_HANDSHAKE_S) as connection:
        connection.sendall(_RANK.pack(rank))
        challenge(connection, {token.encode(): ""}, b"worker", b"trainer")
        connection.settimeout(_PATIENCE * timeout_s)
        keep_alive(connection)
        try:
            while True:
                header, size = read_frame(connection)
                if header is None:
                    return
                if "nccl" in header:
                    group, error = _join(header, device)
                    send_frame(connection, {"error": error})
                elif header["way"] == "nccl":
                    assert group is not None and device is not None
                    payload = torch.empty(size, dtype=torch.uint8, device=device)
                    _receive_broadcast(group, connection, payload, _PATIENCE * timeout_s)
                    yield from unpack(Piece(header["weights"], payload))
                else:
                    payload = torch.empty(size, dtype=torch.uint8)
                    read_into(connection, memoryview(payload.numpy()))  # type: ignore[arg-type]
                    yield from unpack(Piece(header["weights"], payload))
                payload = torch.empty(0)  # one piece at a time
        finally:
            if group is not None:
                group.close()


def _join(header: dict[str, Any], device: torch.device | None) -> tuple[NCCLGroup | None, str | None]:
    """The group that the trainer asks this worker into, or why there is none."""
    if device is None:
        return None, "this worker has no GPU"
    number = bytes.fromhex(header["nccl"])
    try:
        group = open_group(header["rank"], header["size"], device, lambda _: number, timeout_s=_MEETING_S)
    except GroupError as error:
        return None, str(error)
    return group, None


def _receive_broadcast(group: NCCLGroup, connection: socket.socket, payload: torch.Tensor, timeout_s: float) -> None:
    for part in parts(payload):
        group.broadcast(part, timeout_s=timeout_s, is_broken=lambda: is_gone(connection))
