"""How fast do weights reach the worker of a vLLM server, and how much memory does that take besides the model?

    python benchmarks/weight_transfer.py [--json]

Two processes on this machine, each with a model's weights in bfloat16: the sender as in a trainer, the receiver as in
a worker, which copies each weight into its own. Beside the transfer of this project stand, on the same bytes and in
turns: a plain copy in memory (`copy_` of every weight), a bare connection that only reads into a buffer, and gloo's
broadcast of every weight into its place. vLLM's loading and NCCL are left out.

Besides wall time the processor time of both processes is kept, which other programs disturb less. Memory is the
largest resident size of a process during a transfer over that before it.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import check_at_least, make_parser, print_table, report

from agent_r1_trl.generation.vllm.weight_stream import PART_BYTES, Named
from agent_r1_trl.generation.vllm.weight_transfer import WeightSender, receive_weights

SIZES = {
    # width, layers, intermediate size, width of keys and of values, vocabulary
    "tiny": (64, 2, 128, 32, 500),
    "0.5B": (896, 24, 4864, 128, 151_936),
    "1.5B": (1536, 28, 8960, 256, 151_936),
}
"""Of Qwen2.5's models, whose embeddings are tied; and one for tests."""
WAYS = ("transfer", "copy", "bare", "gloo")
MIB = 2**20


def main() -> None:
    """Measure, and print a table."""
    report(measure(args := parse_arguments()), args, show)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Settings, checked."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SIZES, default="0.5B", help="shapes of the weights (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each way (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process (default: %(default)s)")
    args = parser.parse_args(arguments)
    check_at_least(parser, args, 1, "repeats", "threads")
    return args


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Medians over the repeats; in each, every way has one turn."""
    torch.set_num_threads(args.threads)
    weights = list(make_weights(args.model))
    size = sum(value.nbytes for _, value in weights)
    ours, theirs = get_context("spawn").Pipe()
    receiver = get_context("spawn").Process(target=receive, args=(theirs, args.model, args.threads), daemon=True)
    receiver.start()
    join_gloo(ours)
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for repeat in range(args.repeats + 1):  # the first one warms up
        for way in WAYS:
            found = run(way, weights, ours)
            runs[way] += [found] if repeat else []
    ours.send(None)
    receiver.join()
    figures = {"megabytes": size / MIB}
    for way in WAYS:
        figures[f"{way}_gb_per_s"] = size / 1e9 / statistics.median(item.seconds for item in runs[way])
        figures[f"{way}_processor_s"] = statistics.median(item.processor_s for item in runs[way])
    for way in WAYS[1:]:
        pairs = list(zip(runs[way], runs["transfer"], strict=True))
        figures[f"speed_over_{way}"] = statistics.median(a.seconds / b.seconds for a, b in pairs)
        figures[f"processor_over_{way}"] = statistics.median(b.processor_s / a.processor_s for a, b in pairs)
    figures["sender_extra_mib"] = max(item.sender_extra for item in runs["transfer"]) / MIB
    figures["receiver_extra_mib"] = max(item.receiver_extra for item in runs["transfer"]) / MIB
    return figures


def make_weights(model: str) -> Iterator[Named]:
    """Name and weight, in a model's order."""
    width, num_layers, intermediate, key_width, vocabulary = SIZES[model]
    shapes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (key_width, width)}
    shapes |= {"self_attn.v_proj": (key_width, width), "self_attn.o_proj": (width, width)}
    shapes |= {"mlp.gate_proj": (intermediate, width), "mlp.up_proj": (intermediate, width)}
    shapes |= {"mlp.down_proj": (width, intermediate)}
    yield "model.embed_tokens.weight", torch.full((vocabulary, width), 0.5, dtype=torch.bfloat16)
    for layer in range(num_layers):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", torch.full(shape, float(layer), dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", torch.ones(width, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(width, dtype=torch.bfloat16)


# ---------------------------------------------------------------- the sender


class Run(NamedTuple):
    """One way, once."""

    seconds: float
    """Until the receiver has the weights."""
    processor_s: float
    """Of both processes."""
    sender_extra: int
    """Bytes of memory besides the weights."""
    receiver_extra: int


def run(way: str, weights: list[Named], receiver: Connection) -> Run:
    """Send the weights."""
    before = reset_peak()
    receiver.send(way)
    receiver.recv()  # it is ready
    start, processor_start = time.perf_counter(), time.process_time()
    SENDING[way](weights, receiver)
    processor_s = time.process_time() - processor_start
    receiver_processor_s, receiver_extra = receiver.recv()
    seconds = time.perf_counter() - start
    return Run(seconds, processor_s + receiver_processor_s, peak() - before, receiver_extra)


def send_transfer(weights: list[Named], receiver: Connection) -> None:
    """As a trainer sends to one server with one worker."""
    sender = WeightSender("127.0.0.1", 0, timeout_s=120)
    receiver.send((sender.port, sender.expect("server")))
    sender.wait_for({"server": (1, lambda: False)})
    sender.send(weights)
    sender.close()


def send_copy(weights: list[Named], receiver: Connection) -> None:
    """Nothing: the receiver copies what it has."""


def send_bare(weights: list[Named], receiver: Connection) -> None:
    """The same bytes, straight into a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        for _, value in weights:
            connection.sendall(memoryview(value.reshape(-1).view(torch.uint8).numpy()))


def send_gloo(weights: list[Named], receiver: Connection) -> None:
    """One broadcast for each weight."""
    for _, value in weights:
        torch.distributed.broadcast(value, src=0)


SENDING: dict[str, Callable[[list[Named], Connection], None]] = {
    "transfer": send_transfer,
    "copy": send_copy,
    "bare": send_bare,
    "gloo": send_gloo,
}


def join_gloo(receiver: Connection) -> None:
    """Form a group with the receiver."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    receiver.send(store.port)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=2)


# ---------------------------------------------------------------- the receiver


def receive(sender: Connection, model: str, threads: int) -> None:
    """Take the weights, in whatever way the sender names, until it names none."""
    torch.set_num_threads(threads)
    store = torch.distributed.TCPStore("127.0.0.1", sender.recv(), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=1, world_size=2)
    own = dict(make_weights(model))
    source = {name: value.clone() for name, value in own.items()}
    while (way := sender.recv()) is not None:
        before = reset_peak()
        sender.send("ready")
        start = time.process_time()
        take(way, own, source, sender)
        sender.send((time.process_time() - start, peak() - before))


def take(way: str, own: dict[str, torch.Tensor], source: dict[str, torch.Tensor], sender: Connection) -> None:
    """Fill `own` once."""
    if way == "transfer":
        port, token = sender.recv()
        for name, value in receive_weights("127.0.0.1", port, token, rank=0, timeout_s=120):
            own[name].copy_(value)
    elif way == "copy":
        for name, value in source.items():
            own[name].copy_(value)
    elif way == "bare":
        buffer = memoryview(bytearray(PART_BYTES))
        with socket.create_connection(("127.0.0.1", sender.recv())) as connection:
            while connection.recv_into(buffer):
                pass
    else:
        for value in own.values():
            torch.distributed.broadcast(value, src=0)


# ---------------------------------------------------------------- memory and results


def reset_peak() -> int:
    """Forget this process's largest resident size, and say what it is now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The largest resident size since then."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def show(figures: dict[str, Any], args: argparse.Namespace) -> None:
    """The table."""
    names = {
        "transfer": "this project's transfer",
        "copy": "plain copy in memory",
        "bare": "bare connection, bytes only read",
        "gloo": "gloo, a broadcast per weight",
    }
    rows = [
        (
            names[way],
            f"{figures[f'{way}_gb_per_s']:.2f}",
            f"{figures[f'{way}_processor_s']:.2f}",
            f"{figures.get(f'speed_over_{way}', 1.0):.2f}",
            f"{figures.get(f'processor_over_{way}', 1.0):.2f}",
        )
        for way in WAYS
    ]
    title = (
        f"{figures['megabytes']:.0f} MiB of weights ({args.model}); besides, the sender took "
        f"{figures['sender_extra_mib']:.0f} MiB and the receiver {figures['receiver_extra_mib']:.0f} MiB"
    )
    print_table(
        title, ["way", "GB/s", "processor s", "the transfer's speed over it", "its processor time over it"], rows
    )


if __name__ == "__main__":
    main()
