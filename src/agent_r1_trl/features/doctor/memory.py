"""The memory that a training run needs on each GPU, line by line and by formula, before anything is loaded.

The peak of one GPU is what always lies there plus the larger of what the update and the rollout add. Sources:
Rajbhandari et al. 2020 (ZeRO: what each stage divides), Dettmers et al. 2023 (QLoRA: bits per weight), DeepSpeed's
defaults for its buffers. Tests compare the formulas with real tensors of tiny models, and with autograd's list of what
it saved; that list does not replace them, because it cannot be had for a GPU without one.

Covered: dense decoders, with and without LoRA. Not covered: the activations of mixtures of experts and vision towers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from agent_r1_trl.rollout.limits import COUNTING_POLICIES, SUMMARISE, RolloutSettings, context_length
from agent_r1_trl.settings import Count, OneOf, Positive, check_settings

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PHASES = ("always", "update", "rollout")
CONTEXT_BYTES = GIB  # an allowance for the CUDA context and the workspaces of cuBLAS and NCCL
ZERO_BUCKET, ZERO3_LIVE = 500_000_000, 1_050_000_000  # numbers in flight, and parameters gathered at a time, at most
TIGHT = 0.9  # above this share of the GPU, fragmentation may decide whether the run fits
HEAD_TILE = (4096, 32768)  # tokens and vocabulary of TRL's tiles of logits, which never exist all at once
NOTE_TOKENS, REQUEST_TOKENS = 16, 128  # of the note for an observation left out, of the request for a summary


# ---------------------------------------------------------------- the model


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model and of its adapters."""

    num_parameters: int
    """Parameters of the base model; tied weights count once."""
    num_linear_parameters: int
    """Weights of the linear layers without the head, which a quantised base keeps in 4 or 8 bits."""
    num_head_parameters: int
    """0 if the head is tied to the embedding."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_head_norms: bool = False
    """Whether queries and keys are normalised per head (Qwen3)."""
    max_positions: int | None = None
    """Tokens that a context of the model can hold; None if its configuration does not say."""
    num_adapter_parameters: int = 0
    """Parameters that LoRA adds and trains; 0: the whole model is trained."""
    num_whole_parameters: int = 0
    """Parameters that `lora_modules_to_save` trains besides."""
    num_adapter_inputs: int = 0
    """Sum of the input features of all adapted layers."""


def read_shape(config: Any, peft_config: Any = None) -> ModelShape:
    """Read the sizes of a model from its configuration, on the meta device: no weight is read or allocated.

    Args:
        config: transformers' configuration of a causal language model.
        peft_config: configuration of LoRA; None: the whole model is trained.
    """
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head, text = model.get_output_embeddings(), config.get_text_config()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    sizes = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_linear_parameters": sum(module.weight.numel() for module in linear),
        "num_head_parameters": 0 if head.weight is model.get_input_embeddings().weight else head.weight.numel(),
        "has_head_norms": any(name.endswith("q_norm") for name, _ in model.named_modules()),
    }
    if peft_config is not None:  # attached by peft itself, so that all of its options count
        adapted = get_peft_model(model, peft_config, low_cpu_mem_usage=True)  # adapters on the meta device, too
        trained = {name: item.numel() for name, item in adapted.named_parameters() if item.requires_grad}
        whole = sum(count for name, count in trained.items() if ".modules_to_save." in name)
        inputs = (getattr(module, "in_features", 0) for module in adapted.modules() if hasattr(module, "lora_A"))
        sizes |= {"num_adapter_parameters": sum(trained.values()) - whole, "num_whole_parameters": whole}
        sizes["num_adapter_inputs"] = sum(inputs)
    return ModelShape(
        **sizes,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        max_positions=context_length(text),
    )


# ---------------------------------------------------------------- the run


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """One run on one kind of machine; the values are those of the recipe and of the launch.

    Raises:
        ValueError: names a value that cannot be, the rule and the cure.
    """

    dtype: Annotated[str, OneOf(*BYTES)] = "float32"
    """dtype of the loaded weights."""
    mixed_precision: bool = False
    """bf16 or fp16: matrix products in 16 bits. DeepSpeed then keeps the weights in 16 bits too."""
    quantization: str | None = None
    """'4bit' or '8bit', for the frozen base under LoRA; None: not quantised."""
    nested_quantization: bool = False
    optimizer_bytes: int = 8
    """Bytes of Adam's two states per parameter: 8, or 2 for the 8-bit variants."""

    zero_stage: int = 0
    """Stage of DeepSpeed's ZeRO; 0: one process, or data parallel."""
    num_processes: Count = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False

    micro_batch: Count = 1
    """Trajectories per forward pass in one process."""
    prompt_tokens: Count = 512
    """Tokens of the longest prompt; where contexts are rewritten, of the longest beginning of a row."""
    completion_tokens: Count = 512
    row_tokens: int | None = None
    """Length of the longest row without padding. None: prompt and completion together."""
    rows_per_trajectory: int = 1
    trajectory_tokens: int | None = None
    """Tokens of all rows of a trajectory without padding. None: those of one row."""
    update_layout: str = "padded"
    max_tokens_per_micro_batch: int | None = None
    """Tokens of a forward pass, unless a row is longer; with a packed layout."""
    update_rows: int | None = None
    """Trajectories of one optimizer step in one process: all that a pass by tokens can hold. None: no limit."""
    critic_prefix: int = 0
    """Tokens that only the critic reads, before each row."""
    gradient_checkpointing: bool = True
    has_attention_masks: bool = True
    """PyTorch's own attention needs masks of padding and shared prefixes; flash and flex attention need none."""
    reference_model: bool = False
    """A frozen copy for the KL term: full fine-tuning with beta != 0."""
    critic: Annotated[str, OneOf("adapter", "head", "model")] | None = None
    """Critic of PPO; None: no critic."""

    generator: Annotated[str, OneOf("transformers", "vllm", "server")] = "transformers"
    """vllm: in this process; server: vLLM on GPUs of its own."""
    rollout_rows: Count = 64
    """Maximum number of sequences per forward pass of the transformers generator."""
    vllm_share: float = 0.3
    """Share of the GPU that vLLM takes in this process."""
    vllm_sleeps: bool = False
    """vLLM frees its memory during the update."""
    gpu_memory_gb: Positive = 80.0
    """Memory of one GPU in GiB."""

    def __post_init__(self) -> None:
        check_settings(self)
        limit = self.max_tokens_per_micro_batch
        if limit is not None and not self.is_packed:
            cure = "Set update_layout='packed' or 'shared', or remove it."
            raise ValueError(f"max_tokens_per_micro_batch={limit} has no effect on padded rows. {cure}")

    @property
    def is_packed(self) -> bool:
        """Whether no padding is computed."""
        return self.update_layout in ("packed", "shared")

    @property
    def sequence_tokens(self) -> int:
        """Width of a padded micro-batch: the longest prompt beside the longest completion."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def longest_row(self) -> int:
        """Length of the longest row without padding."""
        return self.row_tokens or self.sequence_tokens

    def pass_tokens(self, prefix: int = 0) -> int:
        """Maximum number of tokens in one forward pass of a model that reads `prefix` tokens before each row."""
        rows = self.rows_per_trajectory
        if not self.is_packed:
            return self.micro_batch * rows * (prefix + self.sequence_tokens)
        of_trajectory = (self.trajectory_tokens or self.longest_row) + rows * prefix
        if self.max_tokens_per_micro_batch is None:
            return self.micro_batch * of_trajectory
        tokens = max(self.max_tokens_per_micro_batch, self.longest_row + prefix)
        return tokens if self.update_rows is None else min(tokens, self.update_rows * of_trajectory)

    @property
    def scored_tokens(self) -> int:
        """Maximum number of completion tokens in a pass; in one by tokens, few may belong to prompts."""
        if self.max_tokens_per_micro_batch is not None:
            return self.pass_tokens()
        return min(self.micro_batch * self.rows_per_trajectory * self.completion_tokens, self.pass_tokens())

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stored weight: under mixed precision DeepSpeed stores 16 bits, whatever was loaded."""
        return 2 if self.zero_stage and self.mixed_precision else BYTES[self.dtype]

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in a matrix product."""
        return 2 if self.mixed_precision else BYTES[self.dtype]


def row_bounds(limits: RolloutSettings, prompt_tokens: int) -> dict[str, int]:
    """Find how long and how many the rows of a trajectory are at most, also where a policy rewrites contexts.

    The bounds hold for two trajectories at once: one whose every turn is as long as the limits allow, and one that
    makes `max_turns` turns of equal length. What the chat template adds around messages is left out. How many rows
    strip_thinking and policies of the user's own make is not known: they count as one row of full length.

    Args:
        limits: of the rollout; `max_completion_length` is a number.
        prompt_tokens: length of the longest prompt.

    Returns:
        The values of a `MemorySetup`, by their names there.

    >>> from agent_r1_trl.rollout import RolloutLimits
    >>> row_bounds(RolloutLimits(max_completion_length=900), prompt_tokens=100)["row_tokens"]
    1000
    """
    most, policy = limits.max_completion_length, limits.context.policy
    assert most is not None
    if policy not in (*COUNTING_POLICIES, "step"):
        whole = prompt_tokens + most
        return _rows(prompt_tokens if policy == "keep" else whole, most, whole)
    longest, told = limits.max_tokens_per_turn or most, limits.max_observation_tokens
    equal = -(-most // limits.max_turns)
    turn = min(longest, equal)
    one = _bounds(limits, prompt_tokens, most, longest, told)
    other = _bounds(limits, prompt_tokens, most, turn, min(told, equal - turn))
    return {name: max(one[name], other[name]) for name in one}


def _rows(opening: int, completion: int, tokens: int, rows: int = 1) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "row_tokens", "rows_per_trajectory", "trajectory_tokens")
    return dict(zip(names, (opening, completion, tokens, rows, rows * tokens), strict=True))


def _bounds(limits: RolloutSettings, start: int, most: int, turn: int, observation: int) -> dict[str, int]:
    """The rows of `most` tokens in equal turns of `turn`, each answered by `observation` tokens."""
    limit, kept, both = limits.context.tokens, limits.context.turns or 1, max(1, turn + observation)
    num_turns = max(1, min(limits.max_turns, -(-most // both)))
    end, whole = 0, start + most  # what may follow the last turn of a row; a context that is never rewritten
    if limits.context.policy == SUMMARISE:
        written = limits.context.summary_tokens or 0
        opening = start + written + both
        end = observation + REQUEST_TOKENS + written
        full = max(opening, min(start + written + (limits.context.turns or num_turns) * both, limit or start + most))
        first, per_row = (max(1, -(-(full - begun) // both)) for begun in (start, opening))
    else:
        whole = start + min(most, num_turns * both)
        window = opening = start + kept * both
        full = max(limit or 0, window)
        first = 1 if limits.context.policy == "step" else (full - start) // both + 1
        per_row = 1 if limit is None else (full - window) // both + 1
        if limits.context.policy == "drop_observations":  # of which notes stay, so that it fills up with every row
            opening += max(0, num_turns - kept) * (turn + min(observation, NOTE_TOKENS))
            full, per_row = max(full, opening), 1
    rows = 1 + max(0, -(-(num_turns - first) // per_row))
    tokens = min(whole, full + turn + end)
    return _rows(min(whole, opening) if rows > 1 else start, min(most, tokens - start), tokens, rows)


# ---------------------------------------------------------------- the estimate


class Line(NamedTuple):
    """One thing in memory; of phase 'always', 'update' or 'rollout', on the 'gpu' or the 'host'."""

    name: str
    bytes: float
    formula: str
    phase: str = "always"
    place: str = "gpu"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """All lines of one run, per GPU; those with place 'host' per process."""

    lines: tuple[Line, ...]
    gpu_memory_gb: float
    problems: tuple[str, ...] = ()
    """Reasons why the run fails whatever the sum is."""

    def total(self, phase: str) -> float:
        """Bytes that one phase adds on the GPU."""
        return sum(line.bytes for line in self.lines if line.phase == phase and line.place == "gpu")

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
        return "does not fit" if self.problems or share > 1 else "fits" if share <= TIGHT else "tight"


def estimate_memory(shape: ModelShape, setup: MemorySetup) -> Estimate:
    """Estimate the memory of a run.

    Raises:
        ValueError: the settings cannot be trained together.
    """
    if setup.quantization and not shape.num_adapter_parameters:
        raise ValueError(
            f"load_in_{setup.quantization}=True trains nothing: a quantised base is frozen. Set use_peft=True as well."
        )
    if setup.critic == "adapter" and not shape.num_adapter_parameters:
        raise ValueError("critic='adapter' needs LoRA. Set use_peft=True, or critic='head' or critic='model'.")
    lines = [*_states(shape, setup), *_update(shape, setup), *_rollout(shape, setup)]
    share, weights = setup.vllm_share * setup.gpu_memory_gb * GIB, 2 * shape.num_parameters
    problem = (
        f"vllm_gpu_memory_utilization={setup.vllm_share:g} is {share / GIB:.1f} GiB, and vLLM's own weights in 16 "
        f"bits take {weights / GIB:.1f}. Raise it, or use a vLLM server on other GPUs."
    )
    problems = (problem,) if setup.generator == "vllm" and share <= weights else ()
    return Estimate(lines=tuple(lines), gpu_memory_gb=setup.gpu_memory_gb, problems=problems)


def _states(shape: ModelShape, setup: MemorySetup) -> Iterator[Line]:
    """Weights, gradients, optimizer, and the buffers that processes talk through."""
    size, adapter = setup.weight_bytes, shape.num_adapter_parameters
    quantized = shape.num_linear_parameters if setup.quantization else 0
    # bitsandbytes, 8 bits: int8; 4 bits: a scale of 4 bytes per 64 weights; nested: of 1 byte, and 4 per 256 of those.
    per_weight = 1.0 if setup.quantization == "8bit" else 0.5 + (1 + 4 / 256 if setup.nested_quantization else 4) / 64
    rest, parts = shape.num_parameters - quantized, setup.num_processes if setup.zero_stage == 3 else 1
    text = (f"{_count(quantized)} x {per_weight:.3f} + " if quantized else "") + f"{_count(rest)} x {size} bytes"
    total, place = (quantized * per_weight + rest * size) / parts, "host" if setup.offload_parameters else "gpu"
    yield Line("weights", total, text + (f" / {parts}" if parts > 1 else ""), place=place)
    if setup.reference_model and not adapter:
        yield _numbers("reference model", shape.num_parameters, size, setup, stage=3, place=place)

    # peft keeps adapters in float32, TRL's QLoRA in bfloat16, DeepSpeed in its own type.
    of_adapter, head = size if setup.zero_stage else 2 if setup.quantization else 4, shape.hidden_size + 1
    trained = [
        ("policy", "adapter", adapter, of_adapter),
        ("whole modules", "weights", shape.num_whole_parameters, size),
    ]
    trained = trained if adapter else [("policy", "", shape.num_parameters, size)]
    critics = {
        None: ("", 0, 0),
        "head": ("head", head, 4),
        "adapter": ("adapter, head", adapter + shape.num_whole_parameters + head, of_adapter),
        "model": ("model, head", shape.num_parameters - shape.num_head_parameters + head, size),
    }
    gradients, host = 0.0, "host" if setup.offload_optimizer else "gpu"
    for who, weights, count, each in [*trained, ("critic", *critics[setup.critic])]:
        if not count:
            continue
        if weights:
            yield _numbers(f"{who}: {weights}", count, each, setup, stage=3)
        gradients += count * each
        yield _numbers(f"{who}: gradients", count, each, setup, stage=2, phase="update", place=host)
        states, note = min(setup.optimizer_bytes, 2 * each), ""
        if setup.zero_stage:  # moves a float32 copy of its part, whatever the weights are
            states, note = 4 + setup.optimizer_bytes, f" (a float32 copy, {setup.optimizer_bytes} of states)"
        yield _numbers(f"{who}: Adam", count, states, setup, stage=1, place=host, note=note)

    if setup.num_processes > 1 and not setup.zero_stage:
        yield Line("DDP buckets", gradients, "a second copy of every gradient")
    elif setup.num_processes > 1:
        yield Line("ZeRO buffer", ZERO_BUCKET * size, f"{_count(ZERO_BUCKET)} x {size} bytes", "update")
        if setup.zero_stage == 3:
            live = min(shape.num_parameters, ZERO3_LIVE)
            yield Line("ZeRO-3 gathered", live * size, f"{_count(live)} x {size} bytes at a time, at most", "update")
    yield Line("CUDA context, workspaces", CONTEXT_BYTES, "allowance")


def _numbers(
    name: str, count: int, size: int, setup: MemorySetup, *, stage: int, note: str = "", **where: str
) -> Line:
    """`count` numbers of `size` bytes, which ZeRO divides from `stage` on."""
    parts = setup.num_processes if setup.zero_stage >= stage else 1
    text = f"{_count(count)} x {size} bytes{note}" + (f" / {parts}" if parts > 1 else "")
    return Line(name, count * size / parts, text, **where)


def _update(shape: ModelShape, setup: MemorySetup) -> Iterator[Line]:
    tokens, scored, layers = setup.pass_tokens(), setup.scored_tokens, shape.num_layers
    has_own_graph = setup.critic in ("adapter", "model")
    also = setup.pass_tokens(setup.critic_prefix) if has_own_graph else 0
    in_full, rows = token_bytes(shape, setup), f"{tokens} + the critic's {also} tokens" if also else f"{tokens} tokens"
    per_token, text = in_full * layers, f"{rows} x {layers} layers x {_count(in_full)} bytes"
    if setup.gradient_checkpointing:
        stored = shape.hidden_size * setup.weight_bytes
        per_token = stored * layers + in_full
        text = f"{rows} x ({layers} layers x {_count(stored)} + one layer in full, {_count(in_full)} bytes)"
    yield Line("activations", (tokens + also) * per_token, text, "update")
    if setup.update_layout == "shared" and setup.has_attention_masks:
        total = scored * setup.longest_row * setup.compute_bytes * (2 if has_own_graph else 1)
        text = f"{scored} tokens behind shared prefixes x {setup.longest_row} keys x {setup.compute_bytes} bytes"
        yield Line("attention masks", total, text + (" x 2: policy and critic" if has_own_graph else ""), "update")
    tile = min(scored, HEAD_TILE[0]) * min(shape.vocab_size, HEAD_TILE[1])
    head = 0 if shape.num_adapter_parameters else shape.vocab_size * shape.hidden_size
    total = tile * (setup.compute_bytes + 8) + 4 * (scored * shape.hidden_size + head)
    text = "one tile of logits, with two float32 copies; float32 gradients of hidden states and head"
    yield Line("log-probabilities", total, text, "update")
    if setup.compute_bytes < setup.weight_bytes and not setup.quantization:
        count = shape.num_linear_parameters + shape.vocab_size * shape.hidden_size
        count = (2 if has_own_graph else 1) * (count // layers if setup.gradient_checkpointing else count)
        yield Line("autocast", count * 2, f"{_count(count)} x 2 bytes: 16-bit copies of float32 weights", "update")


def token_bytes(shape: ModelShape, setup: MemorySetup) -> float:
    """Bytes that one decoder layer saves for each token, for the backward pass.

    Each of the two norms saves its input in float32, the normalised vector and the scaled one; attention saves q, the
    repeated k and v, and its output twice (before and after the heads are joined); the gated MLP four vectors of its
    inner width. Frozen layers save no input; each adapter saves its own input and the mask of its dropout.
    """
    inner, outer = setup.compute_bytes, setup.weight_bytes
    heads, joined = shape.num_heads + shape.num_kv_heads, shape.num_heads * shape.head_dim
    # Packed rows share their masks among all layers.
    mask = setup.sequence_tokens * inner if setup.has_attention_masks and not setup.is_packed else 0
    common = 4 * shape.num_heads + mask
    if not shape.num_adapter_parameters:
        head_norms = heads * shape.head_dim * (4 + inner) if shape.has_head_norms else 0
        norms = 2 * shape.hidden_size * (4 + outer + inner) + head_norms
        return common + norms + 5 * joined * inner + 4 * shape.intermediate_size * inner
    norms = 4 * (2 * shape.hidden_size + (heads * shape.head_dim if shape.has_head_norms else 0))
    adapters = shape.num_adapter_inputs / shape.num_layers * ((inner if inner < outer else 4) + 1)
    return common + norms + 4 * joined * inner + 3 * shape.intermediate_size * inner + adapters


def _rollout(shape: ModelShape, setup: MemorySetup) -> Iterator[Line]:
    if setup.generator == "server":
        yield Line("vLLM", 0, "on the server's GPUs", "rollout")
    elif setup.generator == "vllm":
        text = f"{setup.vllm_share:g} x {setup.gpu_memory_gb:g} GiB: its weights and KV cache"
        total = setup.vllm_share * setup.gpu_memory_gb * GIB
        yield Line("vLLM", total, text, "rollout" if setup.vllm_sleeps else "always")
    else:
        if setup.zero_stage == 3 and setup.num_processes > 1:
            whole = _numbers("", shape.num_parameters, setup.weight_bytes, setup, stage=9)
            yield Line("ZeRO-3 gathered to generate", whole.bytes, f"{whole.formula}: the whole model", "rollout")
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * setup.compute_bytes
        # `generation/local/kv_cache.py` keeps spare columns on both sides, so that it seldom moves.
        columns = setup.longest_row + 2 * max(64, setup.longest_row // 4)
        text = f"{setup.rollout_rows} rows x {columns} tokens, spare ones included, x {_count(per_token)} bytes"
        yield Line("KV cache", setup.rollout_rows * columns * per_token, text, "rollout")


def _count(number: float) -> str:
    """A number with a unit.

    >>> _count(1_543_714_304), _count(494_032_768), _count(28_672), _count(12)
    ('1.544 B', '494.0 M', '28.7 k', '12')
    """
    for size, unit, digits in ((1e9, "B", 3), (1e6, "M", 1), (1e3, "k", 1)):
        if abs(number) >= size:
            return f"{number / size:.{digits}f} {unit}"
    return f"{number:.0f}"


# ---------------------------------------------------------------- what would make it smaller


class Saving(NamedTuple):
    """A change of the recipe or of the launch, and the peak of one GPU after it, in bytes."""

    change: str
    peak: float


def find_savings(shape: ModelShape, setup: MemorySetup) -> list[Saving]:
    """Find the changes that lower the peak, each tried alone, the largest saving first.

    LoRA is not among them, because it changes the model: estimate it with --use_peft.
    """
    limit = setup.longest_row + setup.critic_prefix
    layout = "" if setup.is_packed else "update_layout: packed, "
    packed = {"update_layout": setup.update_layout if setup.is_packed else "packed"}
    changes: dict[str, dict[str, Any]] = {
        "per_device_train_batch_size: 1, with more gradient_accumulation_steps": {"micro_batch": 1},
        "gradient_checkpointing: true": {"gradient_checkpointing": True},
        "optim: adamw_bnb_8bit": {"optimizer_bytes": 2},
        "attn_implementation: flash_attention_2": {"has_attention_masks": False},
        "a vLLM server on other GPUs": {"generator": "server"},
        "vllm_enable_sleep_mode: true": {"vllm_sleeps": True},
        f"{layout}max_tokens_per_micro_batch: {limit}": packed | {"max_tokens_per_micro_batch": limit},
    }
    if setup.num_processes > 1:
        changes |= {f"zero{stage}.yaml": {"zero_stage": stage} for stage in (1, 2, 3) if stage > setup.zero_stage}
    if shape.num_adapter_parameters and not setup.quantization:
        changes["load_in_4bit: true"] = {"quantization": "4bit"}
        changes["dtype: bfloat16 (of the frozen base)"] = {"dtype": "bfloat16"}
    if setup.critic is not None:
        changes["critic: head"] = {"critic": "head"}
    now = estimate_memory(shape, setup).peak
    peaks = {change: estimate_memory(shape, replace(setup, **values)).peak for change, values in changes.items()}
    return sorted((Saving(*item) for item in peaks.items() if item[1] < now), key=lambda saving: saving.peak)
