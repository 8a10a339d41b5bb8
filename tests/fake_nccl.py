"""A stand-in for NCCL's library that moves the same bytes over sockets of this machine, from and into host memory.

With it vLLM's real `PyNcclCommunicator` runs without a GPU, in as many processes as a test has: its group, its
addresses and its numbers of elements are real. What does not run is NCCL itself, and the streams of a GPU. A vLLM
server uses it with `--worker-extension-cls tests.fake_nccl_worker.FakeNCCLWorker`.
"""

import contextlib
import ctypes
import hashlib
import secrets
import socket
import struct
import types
import uuid
from typing import ClassVar

import torch

from agent_r1_trl.generation.vllm import weight_transfer

VERSION = 22906
ITEM_BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 1}
"""Of NCCL's data types."""
NUM_BYTES = 128
"""Of the number that members share."""


def read(connection, size):
    """So many bytes."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise RuntimeError("NCCL error: remote process exited")
        data += part
    return data


class FakeNCCLLibrary:
    """The methods of vLLM's `NCCLLibrary` that a communicator calls; a test compares their parameters."""

    refuses = False
    """Fail where members meet."""
    num_left = None
    """How many broadcasts of the trainer work; the next one fails. None for all."""
    broadcasts: ClassVar[list] = []
    """Bytes and rank of each broadcast in this process."""

    def __init__(self, so_file=None):
        self._listeners = {}

    def ncclGetRawVersion(self):
        return VERSION

    def ncclGetVersion(self):
        return "2.29.6"

    def ncclGetUniqueId(self):
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        listener = socket.create_server(("127.0.0.1", 0))
        number = struct.pack("!H", listener.getsockname()[1]) + secrets.token_bytes(NUM_BYTES - 2)
        self._listeners[number] = listener
        return ncclUniqueId.from_buffer_copy(number)

    def ncclCommInitRank(self, world_size, unique_id, rank):
        if self.refuses:
            raise RuntimeError("NCCL error: unhandled system error")
        number = bytes(unique_id)
        members = {}
        if rank == 0:
            with self._listeners.pop(number) as listener:
                listener.settimeout(60)
                while len(members) < world_size - 1:
                    connection, _ = listener.accept()
                    heard = read(connection, NUM_BYTES + 4)
                    if heard[:NUM_BYTES] == number:
                        members[struct.unpack("!I", heard[NUM_BYTES:])[0]] = connection
        else:
            members[0] = socket.create_connection(("127.0.0.1", struct.unpack("!H", number[:2])[0]), timeout=60)
            members[0].sendall(number + struct.pack("!I", rank))
        assert set(members) == (set(range(1, world_size)) if rank == 0 else {0})
        return types.SimpleNamespace(rank=rank, members=members)

    def ncclAllReduce(self, sendbuff, recvbuff, count, datatype, op, comm, stream):
        """Only the exchange: members sum zeros to see that everybody is there."""
        for member in comm.members.values():
            member.sendall(b"\0" * 4)
        for member in comm.members.values():
            read(member, 4)

    def ncclBroadcast(self, sendbuff, recvbuff, count, datatype, root, comm, stream):
        size = count * ITEM_BYTES[datatype]
        self.broadcasts.append((size, comm.rank))
        if comm.rank == root and self.num_left is not None:
            if self.num_left == 0:
                raise RuntimeError("NCCL error: unhandled cuda error")
            type(self).num_left -= 1
        if comm.rank == root:
            data = ctypes.string_at(sendbuff.value, size)
            for member in comm.members.values():
                with contextlib.suppress(OSError):  # NCCL does not say so here, but hangs
                    member.sendall(data)
        else:
            ctypes.memmove(recvbuff.value, read(comm.members[root], size), size)

    def ncclCommDestroy(self, comm):
        self.ncclCommAbort(comm)

    def ncclCommAbort(self, comm):
        for member in comm.members.values():
            member.close()


def digest(weights):
    """Of names, dtypes, shapes and bits, in order."""
    text = hashlib.sha256()
    for name, value in weights:
        text.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        text.update(bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return text.hexdigest()


def describe(device):
    """What `describe_gpu` says on a machine with one GPU per process."""
    return {"nccl": "2.29.6", "gpu": uuid.uuid4().hex}


def install(patch=setattr, *modules):
    """Use it in this process.

    Args:
        patch: `setattr`, or that of pytest's `monkeypatch`.
        modules: others that ask for a process's GPU.
    """
    from vllm.distributed.device_communicators import pynccl

    stream = types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    patch(pynccl, "NCCLLibrary", FakeNCCLLibrary)
    patch(pynccl, "current_stream", lambda: stream)
    for module in (weight_transfer, *modules):
        patch(module, "describe_gpu", describe)
