"""The estimate: one line with a formula for each thing in memory.

The peak of one GPU is what always lies there plus the larger of what the update and the rollout add. Sources:
Rajbhandari et al. 2020 (ZeRO, 16 bytes per parameter and what each stage divides), Dettmers et al. 2023 (QLoRA, bits
per weight), DeepSpeed's defaults for its buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1_trl.memory.activations import activation_bytes, head_bytes, token_bytes
from agent_r1_trl.memory.setup import MemorySetup
from agent_r1_trl.memory.shape import ModelShape

GIB = 1024**3
CONTEXT_BYTES = GIB
"""Allowance for the CUDA context and the workspaces of cuBLAS and NCCL."""
ZERO_BUCKET = 500_000_000
"""Number of elements in DeepSpeed's buffer for gradients in flight."""
ZERO3_LIVE = 1_050_000_000
"""Maximum number of parameters that ZeRO-3 keeps gathered, including those it prefetches."""
TIGHT = 0.9
"""Above this share of the GPU, fragmentation may decide whether the run fits."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing in memory."""

    name: str
    bytes: float
    formula: str
    phase: str = "always"
    place: str = "gpu"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """All lines of one run, per GPU; those with place 'host' count main memory, per process."""

    lines: tuple[Line, ...]
    gpu_memory_gb: float
    problems: tuple[str, ...] = ()
    """Reasons why the run fails whatever the sum is."""

    def total(self, phase: str, place: str = "gpu") -> float:
        """Bytes that one phase adds."""
        return sum(line.bytes for line in self.lines if line.phase == phase and line.place == place)

    @property
    def peak(self) -> float:
        """Maximum number of bytes on one GPU."""
        return self.total("always") + max(self.total("update"), self.total("rollout"))

    @property
    def host(self) -> float:
        """Bytes of main memory per process."""
        return sum(line.bytes for line in self.lines if line.place == "host")

    @property
    def verdict(self) -> str:
        """'fits', 'tight' or 'does not fit'."""
        share = self.peak / (self.gpu_memory_gb * GIB)
        if self.problems:
            return "does not fit"
        return "fits" if share <= TIGHT else "tight" if share <= 1 else "does not fit"


def estimate_memory(shape: ModelShape, setup: MemorySetup) -> Estimate:
    """Estimate the memory of a run.

    Raises:
        ValueError: the settings cannot be trained together.
    """
    _check(shape, setup)
    lines = [
        _weights(shape, setup),
        *_policy(shape, setup),
        *_critic(shape, setup),
        *_reference(shape, setup),
        *_communication(shape, setup),
        *_update(shape, setup),
        *_rollout(shape, setup),
        Line(name="CUDA context, workspaces", bytes=CONTEXT_BYTES, formula="allowance"),
    ]
    return Estimate(lines=tuple(lines), gpu_memory_gb=setup.gpu_memory_gb, problems=_problems(shape, setup))


def _check(shape: ModelShape, setup: MemorySetup) -> None:
    if setup.quantization and not shape.num_adapter_parameters:
        raise ValueError(
            f"load_in_{setup.quantization}=True trains nothing: a quantised base is frozen. Set use_peft=True as well."
        )
    if setup.critic == "adapter" and not shape.num_adapter_parameters:
        raise ValueError("critic='adapter' needs LoRA. Set use_peft=True, or critic='head' or critic='model'.")


def _problems(shape: ModelShape, setup: MemorySetup) -> tuple[str, ...]:
    share, weights = setup.vllm_share * setup.gpu_memory_gb * GIB, 2 * shape.num_parameters
    if setup.generator != "vllm" or share > weights:
        return ()
    return (
        f"vllm_gpu_memory_utilization={setup.vllm_share:g} is {share / GIB:.1f} GiB, and vLLM's own weights in 16 "
        f"bits take {weights / GIB:.1f}. Raise it, or use a vLLM server on other GPUs.",
    )


# -------------------------------------------------------------------- what is always there


def _weights(shape: ModelShape, setup: MemorySetup) -> Line:
    plain, size = shape.num_parameters, setup.weight_bytes
    total, formula = float(plain * size), f"{_count(plain)} x {size} bytes"
    if setup.quantization:
        per_weight = _quantized_bytes(setup)
        rest = plain - shape.num_linear_parameters
        total = shape.num_linear_parameters * per_weight + rest * size
        formula = f"{_count(shape.num_linear_parameters)} x {per_weight:.3f} + {_count(rest)} x {size} bytes"
    return Line(
        name="weights",
        bytes=total / _split(setup, 3),
        formula=formula + _over(setup, 3),
        place="host" if setup.offload_parameters else "gpu",
    )


def _quantized_bytes(setup: MemorySetup) -> float:
    """bitsandbytes: a scale of 4 bytes per 64 weights; nested: 1 byte, and 4 per 256 of those. 8 bits: int8."""
    if setup.quantization == "8bit":
        return 1.0
    return 0.5 + (1 / 64 + 4 / (64 * 256) if setup.nested_quantization else 4 / 64)


def _policy(shape: ModelShape, setup: MemorySetup) -> list[Line]:
    if not shape.num_adapter_parameters:
        return _trained("policy", shape.num_parameters, setup.weight_bytes, setup, weights=None)
    lines = _trained("policy", shape.num_adapter_parameters, _adapter_bytes(setup), setup, weights="adapter")
    if shape.num_whole_parameters:
        lines += _trained("whole modules", shape.num_whole_parameters, setup.weight_bytes, setup, weights="weights")
    return lines


def _adapter_bytes(setup: MemorySetup) -> int:
    """Of one number of an adapter: peft keeps them in float32, TRL's QLoRA in bfloat16, DeepSpeed in its own type."""
    if setup.zero_stage:
        return setup.weight_bytes
    return 2 if setup.quantization else 4


def _trained(who: str, count: int, size: int, setup: MemorySetup, *, weights: str | None) -> list[Line]:
    """Weights (None: counted elsewhere), gradients and optimizer state of `count` numbers of `size` bytes."""
    plain = f"{_count(count)} x {size} bytes"
    lines = []
    if weights:
        total = count * size / _split(setup, 3)
        lines.append(Line(name=f"{who}: {weights}", bytes=total, formula=plain + _over(setup, 3)))
    place = "host" if setup.offload_optimizer else "gpu"
    lines.append(
        Line(
            name=f"{who}: gradients",
            bytes=count * size / _split(setup, 2),
            formula=plain + _over(setup, 2),
            phase="update",
            place=place,
        )
    )
    states: int = min(setup.optimizer_bytes, 2 * size)
    text = f"{states} bytes"
    if setup.zero_stage:  # moves a float32 copy of its part, whatever the weights are
        states = 4 + setup.optimizer_bytes
        text = f"(4 float32 copy + {setup.optimizer_bytes} states) bytes"
    lines.append(
        Line(
            name=f"{who}: Adam",
            bytes=count * states / _split(setup, 1),
            formula=f"{_count(count)} x {text}" + _over(setup, 1),
            place=place,
        )
    )
    return lines


def _critic(shape: ModelShape, setup: MemorySetup) -> list[Line]:
    head = shape.hidden_size + 1
    if setup.critic == "head":
        return _trained("critic", head, 4, setup, weights="head")
    if setup.critic == "adapter":
        count = shape.num_adapter_parameters + shape.num_whole_parameters + head
        return _trained("critic", count, _adapter_bytes(setup), setup, weights="adapter, head")
    if setup.critic == "model":  # trained in full, whatever the policy is
        count = shape.num_parameters - shape.num_head_parameters + head
        return _trained("critic", count, setup.weight_bytes, setup, weights="model, head")
    return []


def _reference(shape: ModelShape, setup: MemorySetup) -> list[Line]:
    if not setup.reference_model or shape.num_adapter_parameters:
        return []
    formula = f"{_count(shape.num_parameters)} x {setup.weight_bytes} bytes" + _over(setup, 3)
    total = shape.num_parameters * setup.weight_bytes / _split(setup, 3)
    place = "host" if setup.offload_parameters else "gpu"
    return [Line(name="reference model", bytes=total, formula=formula, place=place)]


def _communication(shape: ModelShape, setup: MemorySetup) -> list[Line]:
    if setup.num_processes == 1:
        return []
    size = setup.weight_bytes
    if not setup.zero_stage:
        total = sum(
            line.bytes for line in (*_policy(shape, setup), *_critic(shape, setup)) if "gradients" in line.name
        )
        return [Line(name="DDP buckets", bytes=total, formula="a second copy of every gradient")]
    lines = [
        Line(
            name="ZeRO buffer",
            bytes=ZERO_BUCKET * size,
            formula=f"{_count(ZERO_BUCKET)} x {size} bytes (reduce_bucket_size)",
            phase="update",
        )
    ]
    if setup.zero_stage == 3:
        live = min(shape.num_parameters, ZERO3_LIVE)
        text = f"{_count(live)} x {size} bytes: parameters gathered at a time, at most"
        lines.append(Line(name="ZeRO-3 gathered", bytes=live * size, formula=text, phase="update"))
    return lines


# -------------------------------------------------------------------- what the update and the rollout add


def _update(shape: ModelShape, setup: MemorySetup) -> list[Line]:
    graphs = 2 if setup.critic in ("adapter", "model") else 1
    per_token = token_bytes(shape, setup)
    rows = _pass_words(setup)
    if setup.gradient_checkpointing:
        stored = shape.hidden_size * setup.weight_bytes
        text = (
            f"{rows} x ({shape.num_layers} layers x {_count(stored)} + one layer in full, {_count(per_token)} bytes)"
        )
    else:
        text = f"{rows} x {shape.num_layers} layers x {_count(per_token)} bytes"
    total, also = activation_bytes(shape, setup), ""
    if graphs == 2:
        total += activation_bytes(shape, setup, setup.critic_tokens)
        also = " x 2: policy and critic"
        if more := setup.critic_tokens - setup.pass_tokens:
            also += f", which reads {more} tokens of critic_context besides"
    lines = [
        Line(name="activations", bytes=total, formula=text + also, phase="update"),
        Line(
            name="log-probabilities",
            bytes=head_bytes(shape, setup),
            formula="one tile of logits, float32 gradients of hidden states and head",
            phase="update",
        ),
    ]
    if setup.uses_autocast and not setup.quantization:
        count = shape.num_matmul_parameters
        count //= shape.num_layers if setup.gradient_checkpointing else 1
        text = f"{_count(count)} x 2 bytes: 16-bit copies of float32 weights"
        lines.append(Line(name="autocast", bytes=graphs * count * 2, formula=text, phase="update"))
    return lines


def _rollout(shape: ModelShape, setup: MemorySetup) -> list[Line]:
    if setup.generator == "server":
        return [Line(name="vLLM", bytes=0, formula="on the server's GPUs", phase="rollout")]
    if setup.generator == "vllm":
        total = setup.vllm_share * setup.gpu_memory_gb * GIB
        text = f"{setup.vllm_share:g} x {setup.gpu_memory_gb:g} GiB: its weights and KV cache"
        return [Line(name="vLLM", bytes=total, formula=text, phase="rollout" if setup.vllm_sleeps else "always")]
    lines = []
    if setup.zero_stage == 3 and setup.num_processes > 1:
        whole = shape.num_parameters * setup.weight_bytes
        text = (
            f"{_count(shape.num_parameters)} x {setup.weight_bytes} bytes: the whole model while transformers generate"
        )
        lines.append(Line(name="ZeRO-3 gathered to generate", bytes=whole, formula=text, phase="rollout"))
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * setup.compute_bytes
    text = f"{setup.rollout_rows} rows x {setup.longest_row} tokens x {_count(per_token)} bytes"
    total = setup.rollout_rows * setup.longest_row * per_token
    return [*lines, Line(name="KV cache", bytes=total, formula=text, phase="rollout")]


# -------------------------------------------------------------------- words


def _pass_words(setup: MemorySetup) -> str:
    if setup.max_tokens_per_micro_batch is not None:
        return f"{setup.pass_tokens} tokens a pass"
    rows = f" x {setup.rows_per_trajectory} rows" if setup.rows_per_trajectory > 1 else ""
    if setup.is_packed:
        return f"{setup.micro_batch}{rows}, {setup.pass_tokens} tokens without padding,"
    return f"{setup.micro_batch}{rows} x {setup.sequence_tokens} tokens"


def _split(setup: MemorySetup, stage: int) -> int:
    """Number of processes over which ZeRO splits what its `stage` splits."""
    return setup.num_processes if setup.zero_stage >= stage else 1


def _over(setup: MemorySetup, stage: int) -> str:
    parts = _split(setup, stage)
    return f" / {parts}" if parts > 1 else ""


def _count(number: float) -> str:
    """A number with a unit.

    >>> _count(1_543_714_304), _count(494_032_768), _count(28_672), _count(12)
    ('1.544 B', '494.0 M', '28.7 k', '12')
    """
    for size, unit, digits in ((1e9, "B", 3), (1e6, "M", 1), (1e3, "k", 1)):
        if abs(number) >= size:
            return f"{number / size:.{digits}f} {unit}"
    return f"{number:.0f}"
