"""What does an optimizer step cost when `sampling.filter_groups` keeps a quarter of the groups?

    python benchmarks/filter_cost.py [--json]

Eight groups of four trajectories in float32, of which two groups have returns that differ: `top_fraction` 0.25
keeps these. One optimizer step is four micro-batches: choosing the groups, moving rows, forward, loss, backward,
clipping and AdamW. Rollout, rewards and advantages are left out; both sides are handed the same scored batch.

One trainer makes full and filtered steps in turns, so that what else the machine does hits both alike, and the ratio
is the median over these pairs. Besides wall time the processor time of all threads is kept, which other programs
disturb less. GRPO first, then PPO with a critic of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report
from datasets import Dataset
from train_step import KEY_HEADS, SHAPES, VOCABULARY, make_batch, optimizer_step
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from agent_r1_trl import ToolEnv
from agent_r1_trl.features.sampling.settings import SamplingSettings
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig, MultiTurnPPOTrainer

TRAINERS = {
    "grpo": (MultiTurnGRPOTrainer, MultiTurnGRPOConfig),
    "ppo": (MultiTurnPPOTrainer, MultiTurnPPOConfig),
}
KEPT = 0.25


def make_trainer(args: argparse.Namespace, kind: str, folder: str) -> Any:
    """A trainer on random weights, ready for `optimizer_step`."""
    torch.manual_seed(args.seed)
    shape = SHAPES[args.model] | {"num_key_value_heads": KEY_HEADS[args.model]}
    trainer_class, config_class = TRAINERS[kind]
    num_rows = args.groups * args.group_size
    trainer = trainer_class(
        model=Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY[args.model], tie_word_embeddings=True, **shape)),
        args=config_class(
            output_dir=folder, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-5, max_steps=1,
            per_device_train_batch_size=num_rows // 4, gradient_accumulation_steps=4, num_generations=args.group_size,
            bf16=False, use_cpu=True, max_completion_length=args.longest, update_layout=args.layout, seed=args.seed,
            record_trajectories="none", gradient_checkpointing=False, sampling={"filter_groups": "top_fraction"},
        ),
        reward_funcs=lambda completions, **_: [0.0],
        env=ToolEnv,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * args.groups),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )  # fmt: skip
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped.train()
    trainer.current_gradient_accumulation_steps = 4
    return trainer


def score(args: argparse.Namespace, kind: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """A scored batch, and what of its trajectories the filter reads: only every fourth group has spread."""
    batch = make_batch(argparse.Namespace(**vars(args), rows="ragged", trainer=kind))
    rewards = [
        float(member % 2) if group % round(1 / KEPT) == 0 else 1.0
        for group in range(args.groups)
        for member in range(args.group_size)
    ]
    rolled_out = [SimpleNamespace(total_reward=reward, reward_parts={}, in_baseline=True) for reward in rewards]
    return batch, rolled_out


def timed_step(trainer: Any, batch: dict[str, torch.Tensor], rolled_out: list[Any], size: int) -> tuple[float, float]:
    """Wall and processor seconds of one step, with whatever the filter is set to."""
    start, processor_start = time.perf_counter(), time.process_time()
    rollout = SimpleNamespace(
        trajectories=rolled_out, in_baseline=batch["in_baseline"], position=SimpleNamespace(group_size=size)
    )
    is_kept = trainer.features["group_filter"].keep(rollout)
    optimizer_step(trainer, {**batch, **({} if is_kept is None else {"is_kept": is_kept})})
    return time.perf_counter() - start, time.process_time() - processor_start


def measure(args: argparse.Namespace, kind: str) -> dict[str, float]:
    """The figures of one trainer."""
    be_quiet()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args, kind, folder)
        batch, rolled_out = score(args, kind)
        pairs = []
        for repeat in range(args.repeats + 1):
            seconds = {}
            for is_filtered in (True, False) if repeat % 2 else (False, True):
                rule = {"filter_groups": "top_fraction", "filter_value": KEPT} if is_filtered else {}
                trainer.features["group_filter"].settings = SamplingSettings(**rule)
                seconds[is_filtered] = timed_step(trainer, batch, rolled_out, args.group_size)
            pairs.append((*seconds[False], *seconds[True]))
    full, full_processor, kept, kept_processor = zip(*pairs[1:], strict=True)  # the first steps allocate
    tokens = (batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)).float()
    is_kept = torch.arange(args.groups).repeat_interleave(args.group_size) % round(1 / KEPT) == 0
    return {
        "ratio": statistics.median(b / a for a, b in zip(full, kept, strict=True)),
        "processor_ratio": statistics.median(b / a for a, b in zip(full_processor, kept_processor, strict=True)),
        "full_s": statistics.median(full),
        "filtered_s": statistics.median(kept),
        "full_processor_s": statistics.median(full_processor),
        "filtered_processor_s": statistics.median(kept_processor),
        "token_share": float(tokens[is_kept].sum() / tokens.sum()),
    }


def run_all(args: argparse.Namespace) -> dict[str, float]:
    """The figures of both trainers, by `<trainer>_<figure>`."""
    return {f"{kind}_{name}": value for kind in TRAINERS for name, value in measure(args, kind).items()}


def show(result: dict[str, float], args: argparse.Namespace) -> None:
    """Print one row per trainer."""
    names = ("ratio", "processor_ratio", "full_s", "filtered_s", "full_processor_s", "filtered_processor_s")
    rows = [(kind, *(f"{result[f'{kind}_{name}']:.2f}" for name in (*names, "token_share"))) for kind in TRAINERS]
    headings = ("trainer", "ratio", "processor", "full s", "filtered s", "processor s", "filtered", "tokens")
    print_table(f"{KEPT:.0%} of the groups kept, {args.model} model, {args.layout} layout", headings, rows)


def parse_arguments() -> argparse.Namespace:
    """Settings; the defaults are those of the published figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small", help="shape of the random-weights model")
    parser.add_argument("--groups", type=int, default=8, help="prompts, a multiple of 4")
    parser.add_argument("--group-size", type=int, default=4, help="trajectories per prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--median", type=float, default=64, help="median completion length")
    parser.add_argument("--sigma", type=float, default=0.4, help="sigma of the completion lengths")
    parser.add_argument("--longest", type=int, default=192, help="cap of the completion lengths")
    parser.add_argument("--observations", type=float, default=0.25, help="share of observation tokens")
    parser.add_argument("--layout", default="padded", choices=("padded", "grouped"), help="update_layout")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    check_at_least(parser, args, 1, "prompt", "longest", "repeats")
    check_at_least(parser, args, 2, "group_size")
    if args.groups < 4 or args.groups % 4:
        parser.error("--groups must be a multiple of 4, of which one in four is kept")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    report(run_all(arguments), arguments, show)
