"""A step of a training on 8 machines of 8 GPUs, on paper: rollout, weights to the servers, update.

    python benchmarks/scaling_model.py

Nothing here is measured. It is the arithmetic behind docs/hardware.md, which explains every formula: figures of data
sheets, assumptions with a name, and what follows from them. Change one in the constants below and run it again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine of 8 H100 SXM; from NVIDIA's data sheet, and one ConnectX-7 for each GPU."""

    gpus: int = 8
    flops: float = 989e12
    """bf16, dense, per GPU and second."""
    hbm_bytes: float = 80e9
    hbm_rate: float = 3.35e12
    """Bytes per second."""
    nvlink_rate: float = 450e9
    """Bytes per second, GPU and direction (900 GB/s both ways)."""
    nic_rate: float = 50e9
    """Bytes per second, GPU and direction (400 Gb/s)."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What no data sheet says."""

    update_mfu: float = 0.35
    """Share of the peak that an update reaches."""
    prefill_mfu: float = 0.4
    """Share of the peak at which a server reads prompts and observations."""
    decode_hbm_share: float = 0.7
    """Share of the memory's rate that decoding reaches."""
    link_share: float = 0.8
    """Share of a link's rate that a large transfer reaches."""
    decode_overhead_s: float = 0.003
    """Of each decoding step: launches, sampling, the all-reduces of tensor parallelism."""
    tail: float = 2.0
    """Tokens of the longest trajectory over those of the mean one."""
    tool_s: float = 1.0
    """Seconds of a turn's tools, in the longest trajectory."""
    server_memory_share: float = 0.9
    """Of a server's memory, for weights and KV cache."""
    tokens_per_micro_batch: int = 16384
    """Tokens of a forward and backward pass on each GPU."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A dense model with 16-bit weights."""

    name: str
    params: float
    layers: int
    kv_heads: int
    head_dim: int = 128
    gpus_per_server: int

    @property
    def weight_bytes(self) -> float:
        """Of the whole model."""
        return 2 * self.params

    @property
    def kv_bytes(self) -> float:
        """Of one token in the KV cache: keys and values, 16 bits each."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The trajectories of one step; tokens of a mean one."""

    trajectories: int = 512
    turns: int = 4
    prompt: int = 500
    sampled: int = 1500
    observed: int = 1500

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.sampled + self.observed


QWEN_7B = Policy(name="7B", params=7.6e9, layers=28, kv_heads=4, gpus_per_server=1)
QWEN_32B = Policy(name="32B", params=32.8e9, layers=64, kv_heads=8, gpus_per_server=2)
"""Shapes of Qwen2.5's configurations."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines, some of whose GPUs sample while the others train."""

    machines: int = 8
    sampling_gpus: int = 32
    hardware: Hardware = Hardware()
    assumed: Assumptions = Assumptions()

    @property
    def training_gpus(self) -> int:
        """The others."""
        return self.machines * self.hardware.gpus - self.sampling_gpus


def decode_step_s(policy: Policy, batch: Batch, cluster: Cluster, num_rows: float) -> float:
    """Seconds in which a server samples one token for each of its rows."""
    hardware, assumed, gpus = cluster.hardware, cluster.assumed, policy.gpus_per_server
    context = batch.prompt + (batch.sampled + batch.observed) / 2
    memory_s = (policy.weight_bytes + num_rows * context * policy.kv_bytes) / (
        gpus * hardware.hbm_rate * assumed.decode_hbm_share
    )
    compute_s = 2 * policy.params * num_rows / (gpus * hardware.flops * assumed.prefill_mfu)
    return max(memory_s, compute_s) + assumed.decode_overhead_s


def rollout_s(policy: Policy, batch: Batch, cluster: Cluster) -> float:
    """Seconds until the last trajectory has ended: waves of decoding, the tail alone, reading, tools."""
    hardware, assumed, gpus = cluster.hardware, cluster.assumed, policy.gpus_per_server
    rows = batch.trajectories * gpus / cluster.sampling_gpus
    cache = gpus * hardware.hbm_bytes * assumed.server_memory_share - policy.weight_bytes
    waves = math.ceil(rows / (cache / (batch.length * policy.kv_bytes)))
    decoding = waves * batch.sampled * decode_step_s(policy, batch, cluster, rows / waves)
    straggling = (assumed.tail - 1) * batch.sampled * decode_step_s(policy, batch, cluster, 1)
    read = 2 * policy.params * batch.trajectories * (batch.prompt + batch.observed)
    reading = read / (cluster.sampling_gpus * hardware.flops * assumed.prefill_mfu)
    return decoding + straggling + reading + batch.turns * assumed.tool_s


def transfer_s(policy: Policy, cluster: Cluster) -> float:
    """Seconds in which rank 0 sends one copy of all weights to each server, through its own link."""
    hardware = cluster.hardware
    link = hardware.nvlink_rate if cluster.machines == 1 else hardware.nic_rate
    num_servers = cluster.sampling_gpus // policy.gpus_per_server
    return num_servers * policy.weight_bytes / (link * cluster.assumed.link_share)


def gather_s(policy: Policy, cluster: Cluster) -> float:
    """Seconds of one all-gather of all weights (ZeRO-3): across machines on all NICs, inside one over NVLink."""
    hardware, machines = cluster.hardware, max(1.0, cluster.training_gpus / cluster.hardware.gpus)
    across = policy.weight_bytes * (1 - 1 / machines) / (hardware.gpus * hardware.nic_rate)
    inside = policy.weight_bytes * (1 - 1 / hardware.gpus) / hardware.nvlink_rate
    return max(across, inside) / cluster.assumed.link_share


def update_s(policy: Policy, batch: Batch, cluster: Cluster) -> tuple[float, float]:
    """Seconds of arithmetic, and of ZeRO-3's traffic if nothing of it overlapped with that."""
    tokens = batch.trajectories * batch.length
    flops = (2 + 8) * policy.params * tokens  # old log-probs; forward, again for checkpointing, backward
    rate = cluster.training_gpus * cluster.hardware.flops * cluster.assumed.update_mfu
    micro_batches = math.ceil(tokens / (cluster.training_gpus * cluster.assumed.tokens_per_micro_batch))
    return flops / rate, (1 + 3) * micro_batches * gather_s(policy, cluster)


def step(policy: Policy, batch: Batch, cluster: Cluster) -> dict[str, float | str]:
    """Seconds of the parts of a step, and of the whole, one after the other and overlapped; the longest part."""
    compute, traffic = update_s(policy, batch, cluster)
    parts = {
        "rollout": rollout_s(policy, batch, cluster),
        "transfer": transfer_s(policy, cluster),
        "update": compute + traffic,
    }
    overlapped = max(parts["rollout"], parts["update"]) + parts["transfer"]
    longest = max(parts, key=lambda name: parts[name])
    return {**parts, "traffic": traffic, "in_turn": sum(parts.values()), "overlapped": overlapped, "longest": longest}


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


NAMES = ("rollout", "transfer", "update", "traffic", "in_turn", "overlapped")


def _cells(found: dict[str, float | str]) -> list[str]:
    return [*(f"{found[name]:.1f}" for name in NAMES), str(found["longest"])]


HEAD = ["rollout", "transfer", "update", "of it traffic", "in turn", "overlapped", "longest"]


def split_table() -> str:
    """64 GPUs, split in other ways."""
    rows = []
    for policy in (QWEN_7B, QWEN_32B):
        for sampling in (8, 16, 32, 48):
            found = step(policy, Batch(), Cluster(sampling_gpus=sampling))
            rows.append([policy.name, f"{sampling} + {64 - sampling}", *_cells(found)])
    return table(["model", "sampling + training", *HEAD], rows)


def growth_table() -> str:
    """From one machine to eight, half of the GPUs sampling, with as many trajectories for each machine."""
    rows = []
    for policy in (QWEN_7B, QWEN_32B):
        for machines in (1, 2, 4, 8):
            cluster = Cluster(machines=machines, sampling_gpus=4 * machines)
            fits = 16 * policy.params / cluster.training_gpus < 0.9 * cluster.hardware.hbm_bytes
            found = step(policy, replace(Batch(), trajectories=64 * machines), cluster)
            cells = _cells(found) if fits else ["does not fit", *[""] * (len(HEAD) - 1)]
            rows.append([policy.name, str(machines), *cells])
    return table(["model", "machines", *HEAD], rows)


def assumptions_table() -> str:
    """Every figure that the others rest on."""
    groups = {"data sheet": Hardware(), "assumed": Assumptions(), "batch": Batch()}
    rows = [
        [f"`{name}`", f"{value:g}", source]
        for source, group in groups.items()
        for name, value in asdict(group).items()
    ]
    return table(["name", "value", "source"], rows)


if __name__ == "__main__":
    for text in (assumptions_table(), split_table(), growth_table()):
        print(f"{text}\n")
