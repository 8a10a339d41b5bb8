"""One connection of a weight transfer: both sides prove that they know its token, then frames come.

A frame is two lengths, a header in JSON and a payload; an empty frame is the end. The payload itself is sent and read
by the caller, who may have another way for it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("!QQ")  # of header and payload
_DIGEST_BYTES = 32


class TransferError(ConnectionError):
    """The other side of a transfer did not prove who it is, or is gone."""


def challenge(connection: socket.socket, tokens: dict[bytes, str], own: bytes, other: bytes) -> bytes:
    """Prove to the other side that we know the token, and have it prove the same.

    The worker proves itself first. Each proof covers the random numbers of both sides and says who speaks, so neither
    an old one nor one's own can be sent back.

    Args:
        connection: to the other side.
        tokens: that we accept, as keys.
        own: `b"trainer"` or `b"worker"`.
        other: the other one of the two.

    Returns:
        The token that the other side knows, one of `tokens`.

    Raises:
        TransferError: it knows none of them.
    """
    numbers = {own: secrets.token_bytes(_DIGEST_BYTES)}
    connection.sendall(numbers[own])
    numbers[other] = bytes(read(connection, _DIGEST_BYTES))
    shared = numbers[b"trainer"] + numbers[b"worker"]

    def proof(token: bytes, speaker: bytes) -> bytes:
        return hmac.digest(token, speaker + shared, "sha256")

    if own == b"worker":
        (token,) = tokens
        connection.sendall(proof(token, own))
    heard = read(connection, _DIGEST_BYTES)
    known = [token for token in tokens if hmac.compare_digest(heard, proof(token, other))]
    if not known:
        raise TransferError("The other side does not know the token of this transfer.")
    if own == b"trainer":
        connection.sendall(proof(known[0], own))
    return known[0]


def keep_alive(connection: socket.socket) -> None:
    """Send small frames at once, and notice when the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send_frame(connection: socket.socket, header: Any, payload_size: int = 0) -> None:
    """Announce a payload of so many bytes; a header of None is the end."""
    text = b"" if header is None else json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(text), payload_size) + text)


def read_frame(connection: socket.socket) -> tuple[Any, int]:
    """Header (None: the end) and size of the payload.

    Raises:
        TransferError: the other side closed the connection.
    """
    header_size, payload_size = _LENGTHS.unpack(read(connection, _LENGTHS.size))
    return (json.loads(read(connection, header_size)) if header_size else None), payload_size


def read(connection: socket.socket, size: int) -> bytearray:
    """So many bytes; see `read_frame`."""
    buffer = bytearray(size)
    read_into(connection, memoryview(buffer))
    return buffer


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fill the buffer; see `read_frame`."""
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise TransferError("The other side closed the connection before the end of the transfer.")
        view = view[count:]


def has_data(connection: socket.socket) -> bool:
    """Whether something can be read, be it the end; never waits."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def is_gone(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection; never waits."""
    try:
        return has_data(connection) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):  # ValueError: closed on this side
        return True
