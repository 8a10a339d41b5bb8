"""What does a critic cost in memory: PPO's critics against GRPO with LoRA.

    python benchmarks/critic_memory.py [--json]

Four trainers, one after the other, each makes one real optimizer step: GRPO without a critic, and PPO with
`critic="head"`, `"adapter"` and `"model"`. Just after the step, before the gradients are dropped, the bytes of all
parameters, gradients and Adam moments are added up. The same for all: the base model (SmolLM2-135M's shape with
random weights), the policy's LoRA adapter (rank 16 on all linear layers), the prompts and the
optimizer. `critic="model"` is the trainer's default for it: a backbone of its own that is trained as a whole.

Not counted: activations. The adapter and the model run a second forward in the same graph, the head does not.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report, rounded
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

from agent_r1_trl import ToolEnv
from agent_r1_trl.trainers import (
    MultiTurnGRPOConfig,
    MultiTurnGRPOTrainer,
    MultiTurnPPOConfig,
    MultiTurnPPOTrainer,
)

KINDS = ("grpo", "head", "adapter", "model")
PARTS = ("parameters", "gradients", "Adam")
BATCH_SIZE = 2


class LengthEnv(ToolEnv):
    """Something to be rewarded for: the ids of the answer."""

    def outcome_reward(self, trajectory: Any) -> float:
        """Any number will do."""
        return float(sum(trajectory.completion_ids) % 5)


class CountBytes(TrainerCallback):
    """Adds up what is there when a step was made and its gradients still stand."""

    def __init__(self) -> None:
        self.parts: dict[str, int] = {}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called between `optimizer.step()` and `zero_grad()`."""
        parameters = list(kwargs["model"].parameters())
        moments = [
            value for state in kwargs["optimizer"].state.values() for value in state.values() if torch.is_tensor(value)
        ]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.parts = {
            name: num_bytes(tensors) for name, tensors in zip(PARTS, (parameters, gradients, moments), strict=True)
        }


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages, shared ones (tied embeddings, say) once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def make_policy(num_layers: int) -> LlamaForCausalLM:
    """SmolLM2-135M's shape, random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=num_layers,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        )
    )  # fmt: skip


def measure(kind: str, args: argparse.Namespace, output_dir: str) -> dict[str, int]:
    """Bytes by part after one step of GRPO, or of PPO with this critic."""
    is_grpo = kind == "grpo"
    config_class = MultiTurnGRPOConfig if is_grpo else MultiTurnPPOConfig
    trainer_class = MultiTurnGRPOTrainer if is_grpo else MultiTurnPPOTrainer
    config = config_class(
        output_dir=output_dir,
        per_device_train_batch_size=BATCH_SIZE,
        num_generations=BATCH_SIZE if is_grpo else 1,
        max_completion_length=8,
        max_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        record_trajectories="none",
        disable_tqdm=True,
        beta=0.0,
        **({} if is_grpo else {"critic": kind}),
    )
    counter = CountBytes()
    trainer = trainer_class(
        model=make_policy(args.layers).to(getattr(torch, args.dtype)),
        args=config,
        env=LengthEnv,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(4)]),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        peft_config=LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[counter],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return counter.parts


def run(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Bytes by kind and part."""
    be_quiet()
    result = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            result[kind] = measure(kind, args, folder)
        gc.collect()
    return result


def over_grpo(result: dict[str, dict[str, int]], kind: str) -> float:
    """How many times GRPO's bytes."""
    return sum(result[kind].values()) / sum(result["grpo"].values())


def ratios(result: dict[str, dict[str, int]]) -> dict[str, float]:
    """The JSON line."""
    return rounded({f"{kind}_over_grpo": over_grpo(result, kind) for kind in ("adapter", "model")})


def show(result: dict[str, dict[str, int]], args: argparse.Namespace) -> None:
    """Print the result as a table."""
    rows = []
    for kind, parts in result.items():
        sizes = [parts[part] / 2**20 for part in PARTS]
        numbers = (f"{size:.1f}" for size in (*sizes, sum(sizes)))
        rows.append(("GRPO" if kind == "grpo" else f"PPO, {kind}", *numbers, f"{over_grpo(result, kind):.3f}"))
    title = f"MiB after one step, {args.layers} layers in {args.dtype}, LoRA rank {args.rank}"
    print_table(title, ("", *PARTS, "all", "times GRPO"), rows)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=30, help="of the base model (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of both adapters (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the base model's weights; peft keeps adapters in float32 (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    check_at_least(parser, args, 1, "layers", "rank")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    report(run(args), args, show, figures=ratios)


if __name__ == "__main__":
    main()
