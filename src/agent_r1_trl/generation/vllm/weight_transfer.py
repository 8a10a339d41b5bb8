"""Weights from the trainer to the workers of vLLM servers, over plain sockets that only this run's workers can join.

Why not one of vLLM's own transfers: each needs a GPU on both sides (NCCL, CUDA IPC), and NCCL refuses two ranks on one
device. Why not gloo: its meeting point knows no password, and one dead member fails the whole group. The price of
sockets: on a GPU the weights pass through host memory, and each worker of a server gets its own copy.

The trainer listens for as long as a transfer lasts. Each worker connects, and both sides prove that they know the
token of this transfer, which the worker got over HTTP. Then a transfer is a row of buckets, each two lengths, a header
of names, dtypes and shapes, and the bytes; an empty one is the end. The lengths travel with the data, so neither side
has to know beforehand what comes, and a policy that is merged layer by layer is never in memory twice.

Not covered: the weights are not encrypted, and whoever reads the network between trainer and servers reads them.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

_BUCKET_BYTES = 64 * 2**20
_HANDSHAKE_S = 10.0
_PATIENCE = 3
"""How many times longer a worker waits than the trainer: for servers that do not join, then for one that hangs."""
_LENGTHS = struct.Struct("!QQ")  # of header and payload
_RANK = struct.Struct("!I")
_DIGEST_BYTES = 32

Named = tuple[str, torch.Tensor]


class TransferError(ConnectionError):
    """The other side of a transfer did not prove who it is, or is gone."""


# -------------------------------------------------------------------- trainer


class WeightSender:
    """Sends weights to the workers that know the token.

    Args:
        host: address of this machine that the workers can reach; only there it listens.
        port: there; 0 for any free one.
        timeout_s: seconds that a worker may take over one bucket.

    Raises:
        OSError: nobody can listen there.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float):
        self._timeout_s = timeout_s
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._tokens: dict[bytes, str] = {}
        self._workers: dict[str, dict[int, socket.socket]] = {}  # server -> rank -> connection
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

    def send(self, weights: Iterable[Named]) -> None:
        """Send every weight, in order, to every worker that has joined; a server that fails is left behind.

        Always iterates to the end: where parameters are sharded, other ranks iterate too.

        Args:
            weights: name and tensor, on any device.
        """
        count = max(1, sum(len(workers) for workers in self._workers.values()))
        with ThreadPoolExecutor(count, "weight-transfer") as pool:
            for bucket in _buckets(weights):
                entries = [(name, str(value.dtype)[6:], list(value.shape)) for name, value in bucket]
                self._send_to_all(
                    pool, json.dumps(entries).encode(), torch.cat([_as_bytes(value) for _, value in bucket])
                )
            self._send_to_all(pool, b"", torch.empty(0, dtype=torch.uint8))

    @property
    def failures(self) -> dict[str, str]:
        """Server -> why the transfer to it broke."""
        with self._changed:
            return dict(self._failures)

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

    def _send_to_all(self, pool: ThreadPoolExecutor, header: bytes, payload: torch.Tensor) -> None:
        data = memoryview(payload.numpy())  # type: ignore[arg-type]

        def send_to(connection: socket.socket) -> None:
            connection.sendall(_LENGTHS.pack(len(header), len(data)) + header)
            connection.sendall(data)

        with self._changed:
            targets = [(server, item) for server, found in self._workers.items() for item in found.values()]
        for server, call in [(server, pool.submit(send_to, item)) for server, item in targets]:
            try:
                call.result()
            except OSError as error:
                with self._changed:
                    self._drop(server, f"{type(error).__name__}: {error}")

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
            rank = _RANK.unpack(_read(connection, _RANK.size))[0]
            with self._changed:
                tokens = dict(self._tokens)
            token = _challenge(connection, tokens, b"trainer", b"worker")
            connection.settimeout(self._timeout_s)
            _keep_alive(connection)
            with self._changed:
                workers = self._workers.setdefault(tokens[token], {})
                if rank in workers or tokens[token] in self._failures:
                    raise TransferError(f"worker {rank} came twice or late")
                workers[rank] = connection
                self._changed.notify_all()
        except (OSError, TransferError):
            connection.close()


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


def receive_weights(host: str, port: int, token: str, *, rank: int, timeout_s: float) -> Iterator[Named]:
    """What `WeightSender.send` sends, one weight at a time, on the CPU.

    Args:
        host: address of the trainer.
        port: there.
        token: of this server in this transfer.
        rank: of this worker.
        timeout_s: of the trainer; it may take three times as long to wait for servers that hang.

    Raises:
        TransferError: the trainer does not know the token, or the connection broke before the end.
        OSError: the trainer cannot be reached.
    """
    with socket.create_connection((host, port), timeout=_HANDSHAKE_S) as connection:
        connection.sendall(_RANK.pack(rank))
        _challenge(connection, {token.encode(): ""}, b"worker", b"trainer")
        connection.settimeout(_PATIENCE * timeout_s)
        _keep_alive(connection)
        while True:
            header_size, payload_size = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
            if header_size == 0:
                return
            entries = json.loads(_read(connection, header_size))
            payload = torch.frombuffer(_read(connection, payload_size), dtype=torch.uint8) if payload_size else None
            start = 0
            for name, dtype_name, shape in entries:
                dtype = getattr(torch, dtype_name)
                end = start + dtype.itemsize * torch.Size(shape).numel()
                if payload is None or end == start:
                    yield name, torch.empty(shape, dtype=dtype)
                else:  # a copy is aligned, a slice need not be
                    yield name, payload[start:end].clone().view(dtype).reshape(shape)
                start = end


# -------------------------------------------------------------------- both sides


def _challenge(connection: socket.socket, tokens: dict[bytes, str], own: bytes, other: bytes) -> bytes:
    """Prove to the other side that we know the token, and have it prove the same.

    The worker proves itself first. Each proof covers the random numbers of both sides and says who speaks, so neither
    an old one nor one's own can be sent back.

    Returns:
        The token that the other side knows, one of `tokens`.
    """
    numbers = {own: secrets.token_bytes(_DIGEST_BYTES)}
    connection.sendall(numbers[own])
    numbers[other] = bytes(_read(connection, _DIGEST_BYTES))
    shared = numbers[b"trainer"] + numbers[b"worker"]

    def proof(token: bytes, speaker: bytes) -> bytes:
        return hmac.digest(token, speaker + shared, "sha256")

    if own == b"worker":
        (token,) = tokens
        connection.sendall(proof(token, own))
    heard = _read(connection, _DIGEST_BYTES)
    known = [token for token in tokens if hmac.compare_digest(heard, proof(token, other))]
    if not known:
        raise TransferError("The other side does not know the token of this transfer.")
    if own == b"trainer":
        connection.sendall(proof(known[0], own))
    return known[0]


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _read(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise TransferError("The other side closed the connection before the end of the transfer.")
        view = view[count:]
    return buffer


def _buckets(weights: Iterable[Named]) -> Iterator[list[Named]]:
    bucket: list[Named] = []
    size = 0
    for name, value in weights:
        if bucket and size + value.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, value))
        size += value.nbytes
    if bucket:
        yield bucket


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
