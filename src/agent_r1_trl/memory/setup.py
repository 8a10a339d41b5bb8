"""How the model is trained: what memory depends on besides the model."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GENERATORS = ("transformers", "vllm", "server")
CRITICS = ("adapter", "head", "model")


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """One run on one kind of machine; the values are those of the recipe and of the launch."""

    dtype: str = "float32"
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
    num_processes: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False

    micro_batch: int = 1
    """Trajectories per forward pass in one process."""
    prompt_tokens: int = 512
    """Of the longest prompt; where contexts are rewritten, the longest beginning of a row (`contexts.py`)."""
    completion_tokens: int = 512
    row_tokens: int | None = None
    """Length of the longest row without padding. None: prompt and completion together."""
    rows_per_trajectory: int = 1
    trajectory_tokens: int | None = None
    """Of all rows of a trajectory without padding. None: those of one row."""
    is_packed: bool = False
    """No padding is computed: `update_layout` packed or shared."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens of a forward pass, unless a row is longer; with a packed layout."""
    update_rows: int | None = None
    """Trajectories of one optimizer step in one process: all that a pass by tokens can hold. None: no limit."""
    critic_prefix: int = 0
    """Tokens that only the critic reads, before each row."""
    gradient_checkpointing: bool = True
    saves_attention_mask: bool = True
    """PyTorch's own attention saves the padding mask once per layer; flash attention has none."""
    reference_model: bool = False
    """A frozen copy for the KL term: full fine-tuning with beta != 0."""
    critic: str | None = None
    """Critic of PPO: 'head', 'adapter' or 'model'; None: no critic."""

    generator: str = "transformers"
    """'transformers', 'vllm' (in this process) or 'server' (on GPUs of its own)."""
    rollout_rows: int = 64
    """Maximum number of sequences per forward pass of the transformers generator."""
    vllm_share: float = 0.3
    """Share of the GPU that vLLM takes in this process."""
    vllm_sleeps: bool = False
    """vLLM frees its memory during the update."""
    gpu_memory_gb: float = 80.0
    """Memory of one GPU in GiB."""

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(BYTES)}. Set dtype to one of them.")
        if self.generator not in GENERATORS:
            raise ValueError(
                f"generator={self.generator!r} must be one of {', '.join(GENERATORS)}. Set generator to one of them."
            )
        if self.critic not in (None, *CRITICS):
            raise ValueError(f"critic={self.critic!r} must be one of {', '.join(CRITICS)}. Set critic to one of them.")
        for name in ("num_processes", "micro_batch", "prompt_tokens", "completion_tokens", "rollout_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1. Set {name} to such a number.")
        if self.max_tokens_per_micro_batch is not None and not self.is_packed:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} has no effect on padded rows. Set "
                "update_layout='packed' or 'shared', or remove it."
            )
        if not self.gpu_memory_gb > 0:
            raise ValueError(f"gpu_memory_gb={self.gpu_memory_gb} must be above 0. Set it to the GiB of one GPU.")

    @property
    def sequence_tokens(self) -> int:
        """Width of a padded micro-batch: the longest prompt beside the longest completion."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def longest_row(self) -> int:
        """Length of the longest row without padding."""
        return self.row_tokens or self.sequence_tokens

    @property
    def pass_tokens(self) -> int:
        """Tokens that the policy computes in one forward pass, at most."""
        return self._tokens(0)

    @property
    def critic_tokens(self) -> int:
        """The same of a critic with a forward pass of its own, which reads `critic_prefix` before each row."""
        return self._tokens(self.critic_prefix)

    def _tokens(self, prefix: int) -> int:
        rows = self.rows_per_trajectory
        if not self.is_packed:
            return self.micro_batch * rows * (prefix + self.sequence_tokens)
        of_trajectory = (self.trajectory_tokens or self.longest_row) + rows * prefix
        if self.max_tokens_per_micro_batch is None:
            return self.micro_batch * of_trajectory
        tokens = max(self.max_tokens_per_micro_batch, self.longest_row + prefix)
        return tokens if self.update_rows is None else min(tokens, self.update_rows * of_trajectory)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stored weight: under mixed precision DeepSpeed stores 16 bits, whatever was loaded."""
        return 2 if self.zero_stage and self.mixed_precision else BYTES[self.dtype]

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in a matrix product."""
        return 2 if self.mixed_precision else BYTES[self.dtype]

    @property
    def uses_autocast(self) -> bool:
        """Whether weights of 4 bytes are cast to 2 for each matrix product."""
        return self.compute_bytes < self.weight_bytes
