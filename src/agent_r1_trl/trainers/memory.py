"""The memory that a training run needs on each GPU, line by line and by formula, before anything is loaded.

The peak of one GPU is what always lies there plus the larger of what the update and the rollout add. Sources:
Rajbhandari et al. 2020 (ZeRO: what each stage divides), Dettmers et al. 2023 (QLoRA: bits per weight), DeepSpeed's
defaults for its buffers, accelerate's source for what FSDP2 gathers together. Tests compare the formulas with real
tensors of tiny models, and with autograd's list of what it saved.

Covered: dense decoders, with and without LoRA. Not covered: the activations of mixtures of experts and vision towers,
and how many rows a context policy makes of a trajectory (it counts as one row).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch

from agent_r1_trl.critic.attach import base_causal_lm, is_critic_name
from agent_r1_trl.rollout.limits import context_length
from agent_r1_trl.settings import Clash, Count, OneOf, Positive, Rule, check_settings, find_clashes, refuse

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig, PreTrainedModel

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PHASES = ("always", "update", "rollout")
CONTEXT_BYTES = GIB  # an allowance for the CUDA context and the workspaces of cuBLAS and NCCL
ZERO_BUCKET, ZERO3_LIVE = 500_000_000, 1_050_000_000  # numbers in flight, and parameters gathered at a time, at most
TIGHT = 0.9  # above this share of the GPU, fragmentation may decide whether the run fits
HEAD_TILE = (4096, 32768)  # tokens and vocabulary of TRL's tiles of logits, which never exist all at once
LEAST_TOKENS, MOST_TOKENS = 1024, 32768
"""Bounds of the limit that `max_tokens_per_micro_batch: auto` takes; it is a multiple of the first."""
ENOUGH_TOKENS = 16384
"""Tokens of a micro-batch beyond which a GPU gains little, as far as it was measured (benchmarks/RESULTS.md)."""


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
    """Parameters that LoRA trains, whole modules included; 0: the whole model is trained."""
    num_adapter_inputs: int = 0
    """Sum of the input features of all adapted layers."""


def read_shape(config: PretrainedConfig, peft_config: PeftConfig | None = None) -> ModelShape:
    """Read the sizes of a model from its configuration, on the meta device: no weight is read or allocated.

    Args:
        config: transformers' configuration of a causal language model.
        peft_config: configuration of LoRA; None: the whole model is trained.
    """
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if peft_config is not None:  # attached by peft itself, so that all of its options count
        return shape_of(get_peft_model(model, peft_config, low_cpu_mem_usage=True))  # adapters on the meta device, too
    return shape_of(model)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Sizes of a causal LM, perhaps with adapters and a critic; weights that are sharded or in 4 bits count whole.

    Raises:
        AttributeError: its configuration lacks a size, as that of a model without attention does.
    """
    base = base_causal_lm(model)
    is_adapted = base is not model
    embedding = base.get_input_embeddings()
    head = base.get_output_embeddings()
    text = base.config.get_text_config()
    num_parameters = num_adapter_parameters = 0
    for name, parameter in base.named_parameters():
        if is_critic_name(name):
            continue
        if is_adapted and parameter.requires_grad:
            num_adapter_parameters += _numbers_in(parameter)
        elif not is_adapted or not _is_of_adapter(name):
            num_parameters += _numbers_in(parameter)
    modules = dict(base.named_modules())
    head_name = next(name for name, module in modules.items() if module is head)
    num_linear_parameters = num_adapter_inputs = 0
    for name, module in modules.items():
        if is_critic_name(name):
            continue
        if hasattr(module, "lora_A"):
            num_adapter_inputs += getattr(module, "in_features", 0)
        elif isinstance(module, torch.nn.Linear) and not name.startswith(head_name) and not _is_of_adapter(name):
            num_linear_parameters += _numbers_in(module.weight)
    return ModelShape(
        num_parameters=num_parameters,
        num_linear_parameters=num_linear_parameters,
        num_head_parameters=0 if head.weight is embedding.weight else _numbers_in(head.weight),
        has_head_norms=any(name.endswith("q_norm") for name in modules),
        num_adapter_parameters=num_adapter_parameters,
        num_adapter_inputs=num_adapter_inputs,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab_size=text.vocab_size,
        max_positions=context_length(text),
    )


def _is_of_adapter(name: str) -> bool:
    return "lora_" in name or ".modules_to_save." in name


def _numbers_in(parameter: torch.Tensor) -> int:
    """Numbers of a parameter as a whole: ZeRO-3 leaves a part of it here, and bitsandbytes packs two into a byte."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return math.prod(packed.shape)
    return max(parameter.numel(), getattr(parameter, "ds_numel", 0))


CLASHES = (
    Clash(
        "load_in_4bit load_in_8bit",
        lambda c: c.weight_bits and c.is_fsdp,
        "FSDP2 does not split a quantised base. Pass accelerate_config: ddp.yaml, or remove it.",
    ),
    Clash(
        "max_tokens_per_micro_batch",
        lambda c: c.max_tokens_per_micro_batch is not None and not c.is_packed,
        "has no effect on padded rows. Set update_layout='packed' or 'shared', or remove it.",
    ),
    Clash(
        "load_in_4bit load_in_8bit",
        lambda c: c.weight_bits and not c.shape.num_adapter_parameters,
        "a quantised base is frozen, so nothing would be trained. Set use_peft=True as well.",
    ),
    Clash(
        "critic",
        lambda c: c.critic == "adapter" and not c.shape.num_adapter_parameters,
        "needs LoRA. Set use_peft=True, or critic='head' or critic='model'.",
    ),
    Clash(
        "vllm_gpu_memory_utilization",
        lambda c: c.use_vllm and c.vllm_mode == "colocate" and c.vllm_bytes <= 2 * c.shape.num_parameters,
        "that share of {c.gpu_memory_gb:g} GiB does not hold vLLM's own weights in 16 bits. Raise it, or use a vLLM "
        "server on other GPUs.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """One run on one kind of machine; what is called as in a recipe is the recipe's.

    Raises:
        ValueError: names a value that cannot be, the rule and the fix.
    """

    shape: ModelShape
    dtype: Annotated[str, OneOf(*BYTES)] = "float32"
    mixed_precision: bool = False
    """bf16 or fp16: matrix products in 16 bits. DeepSpeed then keeps the weights in 16 bits too."""
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    optim: Annotated[str, Rule("a variant of Adam, such as 'adamw_torch'", lambda name: "adam" in name)] = "adamw"
    zero_stage: int = 0
    """Stage of DeepSpeed's ZeRO; 0: one process, data parallel, or FSDP2."""
    is_fsdp: bool = False
    """FSDP2: everything is split, as in stage 3, and trained weights are stored in float32 under mixed precision."""
    num_processes: Count = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False

    per_device_train_batch_size: Count = 1
    prompt_tokens: Count = 512
    """Tokens of the longest prompt."""
    max_completion_length: Count = 512
    update_layout: str = "padded"
    max_tokens_per_micro_batch: Count | None = None
    update_rows: int | None = None
    """Trajectories of one optimizer step in one process: all that a micro-batch by tokens can hold. None: no limit."""
    gradient_checkpointing: bool = True
    attn_implementation: str | None = None
    beta: float = 0.0
    critic: Annotated[str, OneOf("adapter", "head", "model")] | None = None
    """Critic of PPO; None: no critic."""

    use_vllm: bool = False
    vllm_mode: Annotated[str, OneOf("colocate", "server")] = "colocate"
    generation_batch_rows: Count = 64
    vllm_gpu_memory_utilization: float = 0.3
    vllm_enable_sleep_mode: bool = False
    gpu_memory_gb: Positive = 80.0
    """Memory of one GPU in GiB."""

    def __post_init__(self) -> None:
        check_settings(self)
        refuse(find_clashes(self, CLASHES))

    @property
    def is_packed(self) -> bool:
        """Whether no padding is computed."""
        return self.update_layout in ("packed", "shared")

    @property
    def needs_masks(self) -> bool:
        """PyTorch's own attention needs masks of padding; flash and flex attention need none."""
        return self.attn_implementation in (None, "sdpa", "eager")

    @property
    def weight_bits(self) -> float:
        """Bits of a quantised weight, with a scale of 4 bytes for 64 weights of 4 bits; 0: not quantised."""
        return 4 + 32 / 64 if self.load_in_4bit else 8 if self.load_in_8bit else 0

    @property
    def vllm_bytes(self) -> float:
        """VLLM's memory for its weights and its cache."""
        return self.vllm_gpu_memory_utilization * self.gpu_memory_gb * GIB

    @property
    def row_tokens(self) -> int:
        """Length of the longest row: the longest prompt and the longest completion."""
        return self.prompt_tokens + self.max_completion_length

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum number of tokens in one micro-batch."""
        if self.max_tokens_per_micro_batch is None:
            return self.per_device_train_batch_size * self.row_tokens
        tokens = max(self.max_tokens_per_micro_batch, self.row_tokens)  # a row that is longer stands alone
        return tokens if self.update_rows is None else min(tokens, self.update_rows * self.row_tokens)

    @property
    def scored_tokens(self) -> int:
        """Maximum number of completion tokens in a micro-batch; in one by tokens, few may belong to prompts."""
        if self.max_tokens_per_micro_batch is not None:
            return self.micro_batch_tokens
        return self.per_device_train_batch_size * self.max_completion_length

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stored weight: under mixed precision DeepSpeed stores 16 bits, whatever was loaded.

        accelerate stores what FSDP2 trains in 32 bits then.
        """
        if self.mixed_precision and self.zero_stage:
            return 2
        is_upcast = self.mixed_precision and self.is_fsdp and not self.shape.num_adapter_parameters
        return 4 if is_upcast else BYTES[self.dtype]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a number between two layers: the weights' own, which FSDP2 gathers in the type it computes in."""
        return self.compute_bytes if self.is_fsdp else self.weight_bytes

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in a matrix product."""
        return 2 if self.mixed_precision else BYTES[self.dtype]


class Line(NamedTuple):
    """One thing in the memory of a GPU; of phase 'always', 'update' or 'rollout'."""

    name: str
    bytes: float
    phase: str = "always"
    is_loaded: bool = False
    """Whether it is there before the first update."""


def estimate_memory(setup: MemorySetup) -> list[Line]:
    """All lines of a run, per GPU. What is offloaded to main memory has none."""
    return [*_states(setup, setup.shape), *_update(setup, setup.shape), *_rollout(setup, setup.shape)]


def find_peak(lines: Iterable[Line]) -> float:
    """Maximum number of bytes on one GPU: what is always there, and the larger of update and rollout."""
    totals = _totals(lines)
    return totals["always"] + max(totals["update"], totals["rollout"])


def _totals(lines: Iterable[Line]) -> dict[str, float]:
    totals = dict.fromkeys(PHASES, 0.0)
    for line in lines:
        totals[line.phase] += line.bytes
    return totals


def judge(peak: float, gpu_memory_gb: float) -> str:
    """'fits', 'tight' or 'does not fit'."""
    share = peak / (gpu_memory_gb * GIB)
    return "does not fit" if share > 1 else "fits" if share <= TIGHT else "tight"


class TokenLimit(NamedTuple):
    """A limit of tokens per micro-batch."""

    tokens: int
    peak: float
    """Bytes that the update needs with it."""
    fits: bool


def find_token_limit(setup: MemorySetup, other_bytes: float = 0.0) -> TokenLimit:
    """The largest limit of tokens with which the update fits, for a layout without padding.

    The rollout does not count, since no limit changes what it needs; nor do rows that are longer than the limit.

    Args:
        setup: of the run; its own limit is not read.
        other_bytes: bytes of the GPU that are occupied and have no line in the estimate.
    """
    room = TIGHT * setup.gpu_memory_gb * GIB - other_bytes
    for tokens in range(MOST_TOKENS, LEAST_TOKENS - 1, -LEAST_TOKENS):
        prompt = min(setup.prompt_tokens, tokens // 2)
        candidate = replace(
            setup,
            max_tokens_per_micro_batch=tokens,
            prompt_tokens=prompt,
            max_completion_length=min(setup.max_completion_length, tokens - prompt),
            update_rows=None,
        )
        totals = _totals(estimate_memory(candidate))
        peak = totals["always"] + totals["update"]
        if peak <= room:
            return TokenLimit(tokens, peak + other_bytes, fits=True)
    return TokenLimit(LEAST_TOKENS, peak + other_bytes, fits=False)


def is_checkpointing_needless(setup: MemorySetup, other_bytes: float = 0.0) -> bool:
    """Whether a run with gradient checkpointing would fit without it, in micro-batches large enough for a GPU."""
    if not setup.gradient_checkpointing:
        return False
    tokens = setup.max_tokens_per_micro_batch
    if tokens is not None:
        tokens = min(tokens, ENOUGH_TOKENS)
    without = replace(setup, gradient_checkpointing=False, max_tokens_per_micro_batch=tokens)
    return find_peak(estimate_memory(without)) + other_bytes <= TIGHT * setup.gpu_memory_gb * GIB


def _states(setup: MemorySetup, shape: ModelShape) -> Iterator[Line]:
    """Weights, gradients, optimizer, and the buffers that processes talk through."""

    def parts(stage: int) -> int:  # into which ZeRO, or FSDP2, divides something from a stage on
        return setup.num_processes if setup.is_fsdp or setup.zero_stage >= stage else 1

    size = setup.weight_bytes
    adapter = shape.num_adapter_parameters
    head = shape.hidden_size + 1
    quantized = shape.num_linear_parameters if setup.weight_bits else 0
    if not setup.offload_parameters:
        rest = shape.num_parameters - quantized
        yield Line("weights", (quantized * setup.weight_bits / 8 + rest * size) / parts(3), is_loaded=True)
        if setup.beta and not adapter:  # with an adapter, the base is the reference model
            yield Line("reference model", shape.num_parameters * size / parts(3), is_loaded=True)

    # peft keeps adapters in float32, TRL's QLoRA in bfloat16, DeepSpeed in its own type.
    of_adapter = size if setup.zero_stage else 2 if setup.weight_bits else 4
    trained = {
        "policy": ("adapter", adapter, of_adapter) if adapter else ("", shape.num_parameters, size),
        "critic": {
            None: ("", 0, 0),
            "head": ("head", head, 4),
            "adapter": ("adapter, head", adapter + head, of_adapter),
            "model": ("model, head", shape.num_parameters - shape.num_head_parameters + head, size),
        }[setup.critic],
    }
    of_adam = 2 if "8bit" in setup.optim else 8  # bytes of both states
    for who, (added, count, each) in trained.items():
        if count and added and not (setup.is_fsdp and setup.offload_parameters):
            yield Line(f"{who}: {added}", count * each / parts(3), is_loaded=True)
        if count and not setup.offload_optimizer:
            yield Line(f"{who}: gradients", count * each / parts(2), "update")
            # ZeRO moves a float32 copy of its part, whatever the weights are.
            states = 4 + of_adam if setup.zero_stage else min(of_adam, 2 * each)
            yield Line(f"{who}: Adam", count * states / parts(1))

    if setup.num_processes > 1 and setup.is_fsdp:
        yield Line("FSDP2: weights gathered at a time", _gathered_bytes(setup, shape), "update")
    elif setup.num_processes > 1 and not setup.zero_stage:
        gradients = sum(count * each for _, count, each in trained.values())
        yield Line("DDP buckets: a second copy of every gradient", gradients)
    elif setup.num_processes > 1:
        yield Line("ZeRO buffer", ZERO_BUCKET * size, "update")
        if setup.zero_stage == 3:
            yield Line("ZeRO-3: weights gathered at a time", min(shape.num_parameters, ZERO3_LIVE) * size, "update")
    yield Line("CUDA context, workspaces", CONTEXT_BYTES, is_loaded=True)


def _gathered_bytes(setup: MemorySetup, shape: ModelShape) -> float:
    """What FSDP2 has whole during the update: the head, beside it a layer and the next one or the embedding.

    accelerate keeps the head, with an embedding that is tied to it, gathered between forward and backward. Gradients
    are added up in float32, of one layer or one end at a time.
    """
    ends = shape.vocab_size * shape.hidden_size
    embedding = ends if shape.num_head_parameters else 0
    layer = (shape.num_parameters - ends - embedding) / shape.num_layers
    weights = (ends + max(2 * layer, embedding)) * setup.compute_bytes
    if shape.num_adapter_parameters:
        return weights
    return weights + max(layer, ends) * (setup.compute_bytes + 4)


def _update(setup: MemorySetup, shape: ModelShape) -> Iterator[Line]:
    scored, layers = setup.scored_tokens, shape.num_layers
    graphs = 2 if setup.critic in ("adapter", "model") else 1  # the policy's, and one of the critic's own
    per_token = token_bytes(setup)
    if setup.gradient_checkpointing:  # the inputs of all layers, and one layer in full
        per_token += shape.hidden_size * setup.hidden_bytes * layers
    else:
        per_token *= layers
    yield Line(
        f"activations of {setup.micro_batch_tokens:,} tokens", graphs * setup.micro_batch_tokens * per_token, "update"
    )
    if setup.update_layout == "shared":  # every row gathers the keys and values of its prefix
        rows = -(-scored // setup.max_completion_length)
        in_layer = 2 * shape.num_kv_heads * shape.head_dim * setup.compute_bytes
        kept_layers = 1 if setup.gradient_checkpointing else layers
        gathered = rows * setup.prompt_tokens * in_layer * kept_layers
        yield Line("keys and values behind prefixes", graphs * gathered, "update")
    # A tile of logits with two float32 copies; float32 gradients of hidden states and head.
    tile = min(scored, HEAD_TILE[0]) * min(shape.vocab_size, HEAD_TILE[1])
    head = 0 if shape.num_adapter_parameters else shape.vocab_size * shape.hidden_size
    total = tile * (setup.compute_bytes + 8) + 4 * (scored * shape.hidden_size + head)
    yield Line("log-probabilities", total, "update")
    if setup.compute_bytes < setup.weight_bytes and not setup.weight_bits and not setup.is_fsdp:
        count = shape.num_linear_parameters + shape.vocab_size * shape.hidden_size
        count = graphs * (count // layers if setup.gradient_checkpointing else count)
        yield Line("autocast: 16-bit copies of float32 weights", count * 2, "update")


def token_bytes(setup: MemorySetup) -> float:
    """Bytes that one decoder layer saves for each token, for the backward pass.

    Each of the two norms saves its input in float32, the normalised vector and the scaled one; attention saves q, the
    repeated k and v, and its output twice (before and after the heads are joined); the gated MLP four vectors of its
    inner width. Frozen layers save no input; each adapter saves its own input and the mask of its dropout.
    """
    shape = setup.shape
    inner = setup.compute_bytes
    outer = setup.hidden_bytes
    joined = shape.num_heads * shape.head_dim
    in_head_norms = (shape.num_heads + shape.num_kv_heads) * shape.head_dim if shape.has_head_norms else 0
    mask = setup.row_tokens * inner if setup.needs_masks and not setup.is_packed else 0
    common = 4 * shape.num_heads + mask
    if not shape.num_adapter_parameters:
        norms = 2 * shape.hidden_size * (4 + outer + inner) + in_head_norms * (4 + inner)
        return common + norms + 5 * joined * inner + 4 * shape.intermediate_size * inner
    norms = 4 * (2 * shape.hidden_size + in_head_norms)
    adapters = shape.num_adapter_inputs / shape.num_layers * ((inner if inner < outer else 4) + 1)
    return common + norms + 4 * joined * inner + 3 * shape.intermediate_size * inner + adapters


def _rollout(setup: MemorySetup, shape: ModelShape) -> Iterator[Line]:
    if setup.use_vllm:
        if setup.vllm_mode == "colocate":
            phase = "rollout" if setup.vllm_enable_sleep_mode else "always"
            yield Line("vLLM: its weights and KV cache", setup.vllm_bytes, phase, is_loaded=True)
        return
    if setup.zero_stage == 3 and setup.num_processes > 1:
        yield Line("ZeRO-3: the whole model, to generate", shape.num_parameters * setup.weight_bytes, "rollout")
    if setup.is_fsdp and setup.num_processes > 1:
        yield Line("FSDP2: the whole model, to generate", shape.num_parameters * setup.compute_bytes, "rollout")
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * setup.compute_bytes
    # `generation/local/decoding.py` keeps spare columns, so that it seldom moves.
    columns = setup.row_tokens + max(64, setup.row_tokens // 4)
    rows = setup.generation_batch_rows
    yield Line(f"KV cache of {rows} x {columns:,} tokens", rows * columns * per_token, "rollout")
