"""What does an optimizer step cost: TRL's as shipped against ours, on ragged trajectories.

    python benchmarks/train_step.py [--json]
    python benchmarks/train_step.py --trainer ppo --layouts padded packed [--json]
    python benchmarks/train_step.py --rows forks --layouts padded shared [--json]

Four groups of eight trajectories in float32: a prompt of 512 tokens per group, completions of log-normal length
(median 256, sigma 0.6, at most 2,048), of which a part are observations that nothing is trained on. One optimizer step
is four micro-batches of eight rows: forward, loss, backward, clipping and AdamW. Rollouts are left out: both trainers
are handed the same batch in the place of `_generate_and_score_completions` and shuffle and split it as they do.

With `--rows forks` each of the 32 trajectories splits into 1 to 10 rows, 168 in all: the context of a row repeats the
one before up to a place in its last quarter. All trajectories of a group begin with its prompt.

TRL's side is `trl.GRPOTrainer`, ours is `MultiTurnGRPOTrainer` with each `update_layout`, or with `--trainer ppo`
`MultiTurnPPOTrainer`, which is compared with its own padded rows. The layout `tokens` is `shared` with
`max_tokens_per_micro_batch`. All of them start from the same weights and see the same rows in the same optimizer
step, so the loss of their first step and the norm of its gradients must be the same (1e-4 relative), or the benchmark
fails.

`bound` is a lower bound for layouts with TRL's fused head, and `over_bound` a layout's processor time over its. In
place of each micro-batch of `shared` it computes as many tokens (each distinct token of the prefix tree once), of
which as many are scored: causal rows of random ids, so long that a query has as many keys on average as in the tree;
rounding never adds a token. Forward, mean negative log-likelihood and backward call the model plainly, with its own
attention and no mask; clipping and AdamW are the others'. Left out are what the tree costs (keys and values copied
for each branch, masked halves of squares computed), GRPO's loss and metrics, the Trainer's micro-steps, and dealing
rows out. Its loss is another one and is not compared.

Every trainer runs in a process of its own, as often as `--rounds` says and in turns with the others, so that a busy
minute of the machine meets all of them; the figures are medians. The peak memory is the largest resident set of the
process (`ru_maxrss`), interpreter, libraries and weights included; `step_memory` is what of it came with the steps,
above the resident set right before them. Besides wall time the processor time of all threads is kept, which other
programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report, run_alone
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

LAYOUTS = ("trl", "padded", "grouped", "packed", "shared", "tokens", "bound")
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
"""Qwen2's architecture with random weights; the last two have the shapes of Qwen2.5-0.5B and 7B."""
KEY_HEADS = {"tiny": 1, "small": 2, "0.5b": 2, "7b": 4}
VOCABULARY = {"tiny": 512, "small": 4096, "0.5b": 151_936, "7b": 152_064}


# ---------------------------------------------------------------- the batch


def draw_lengths(count: int, *, median: float, sigma: float, longest: int, seed: int) -> list[int]:
    """Log-normal completion lengths, cut at `longest`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = median * torch.exp(sigma * torch.randn(count, generator=generator))
    return drawn.round().clamp(1, longest).int().tolist()


def num_rows(args: argparse.Namespace) -> int:
    """Rows of a generation batch."""
    trajectories = args.groups * args.group_size
    return sum(map(num_forks, range(trajectories))) if args.rows == "forks" else trajectories


def num_forks(trajectory: int) -> int:
    """Rows of a trajectory with `--rows forks`."""
    return trajectory % 10 + 1


def draw_contexts(
    args: argparse.Namespace, prompts: torch.Tensor, lengths: list[int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded on the left, of what stands before each completion."""
    vocabulary, contexts = VOCABULARY[args.model], []
    if args.rows == "ragged":
        contexts = list(prompts.repeat_interleave(args.group_size, dim=0))
    else:
        for trajectory in range(args.groups * args.group_size):
            context = prompts[trajectory // args.group_size]
            for _ in range(num_forks(trajectory)):
                contexts.append(context)
                longer = torch.randint(1, vocabulary, (lengths[len(contexts) - 1],), generator=generator)
                whole = torch.cat([context, longer])
                end = int(torch.randint(len(whole) * 3 // 4, len(whole) + 1, (), generator=generator))
                context = whole[: max(end, args.prompt)]
    width = max(len(context) for context in contexts)
    ids, mask = torch.zeros(2, len(contexts), width, dtype=torch.long)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :], mask[row, width - len(context) :] = context, 1
    return ids, mask


def make_batch(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """A generation batch as the trainers make them, before it is shuffled."""
    generator = torch.Generator().manual_seed(args.seed)
    rows = num_rows(args)
    lengths = draw_lengths(rows, median=args.median, sigma=args.sigma, longest=args.longest, seed=args.seed)
    vocabulary = VOCABULARY[args.model]
    prompts = torch.randint(1, vocabulary, (args.groups, args.prompt), generator=generator)
    completion_mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()  # (B, T)
    # Observations stand in stretches of 32 tokens; the first stretch is the policy's.
    stretches = torch.rand(rows, max(lengths) // 32 + 1, generator=generator) >= args.observations
    stretches[:, 0] = True
    tool_mask = stretches.repeat_interleave(32, dim=1)[:, : max(lengths)].long() * completion_mask
    advantages = torch.randn(rows, generator=generator)
    prompt_ids, prompt_mask = draw_contexts(args, prompts, lengths, generator)
    of_critic = {}
    if args.trainer == "ppo":
        of_critic = {"returns": advantages.unsqueeze(1) * tool_mask, "old_values": torch.zeros(tool_mask.shape)}
        of_critic |= {"value_mask": tool_mask.bool(), "num_value_items": tool_mask.sum()}
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(1, vocabulary, completion_mask.shape, generator=generator) * completion_mask,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": advantages.unsqueeze(1) * tool_mask,
        "num_items_in_batch": tool_mask.sum(),
        "in_baseline": torch.ones(rows, dtype=torch.bool),
        "is_first_row": torch.ones(rows, dtype=torch.bool),
        "tokens_in_other_rows": torch.zeros(rows, dtype=torch.long),
        **of_critic,
    }


# ---------------------------------------------------------------- one trainer, in its own process


def model_config(args: argparse.Namespace) -> Qwen2Config:
    """The configuration of the model."""
    shape = SHAPES[args.model] | {"num_key_value_heads": KEY_HEADS[args.model]}
    return Qwen2Config(vocab_size=VOCABULARY[args.model], tie_word_embeddings=True, **shape)


def make_model(args: argparse.Namespace, device: str) -> Any:
    """Random weights; large ones are made where they will stay, small ones are the same on every device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, args.dtype))
    try:
        with torch.device("cpu" if args.model in ("tiny", "small") else device):
            model = Qwen2ForCausalLM._from_config(model_config(args), attn_implementation=args.attention)
    finally:
        torch.set_default_dtype(before)
    return model.to(device)


def make_trainer(args: argparse.Namespace, layout: str, folder: str) -> Any:
    """TRL's trainer, or ours with a layout, on the same random weights."""
    from trl import GRPOConfig, GRPOTrainer

    from agent_r1_trl import ToolEnv
    from agent_r1_trl.trainers import (
        MultiTurnGRPOConfig,
        MultiTurnGRPOTrainer,
        MultiTurnPPOConfig,
        MultiTurnPPOTrainer,
    )

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(args, device)
    options = {
        "output_dir": folder, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-5,
        "per_device_train_batch_size": args.micro_batch, "num_generations": args.group_size, "max_steps": 1,
        "gradient_accumulation_steps": num_rows(args) // args.micro_batch, "bf16": args.autocast,
        "max_completion_length": args.longest, "gradient_checkpointing": args.checkpointing, "seed": args.seed,
        "use_cpu": device == "cpu",
    }  # fmt: skip
    peft_config = None
    if args.lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, target_modules="all-linear")
    common = {
        "model": model,
        "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * num_rows(args)),
        "processing_class": AutoTokenizer.from_pretrained(MODEL),
        "peft_config": peft_config,
    }
    if layout == "trl":
        return GRPOTrainer(args=GRPOConfig(**options), reward_funcs=lambda completions, **_: [0.0], **common)
    options["update_layout"] = "shared" if layout in ("tokens", "bound") else layout
    options["max_tokens_per_micro_batch"] = args.max_tokens if layout == "tokens" else None
    make_config, make = MultiTurnGRPOConfig, MultiTurnGRPOTrainer
    if args.trainer == "ppo":
        make_config, make = MultiTurnPPOConfig, MultiTurnPPOTrainer
        options |= {"critic": args.critic, "num_generations": 1}
    config = make_config(**options, record_trajectories="none")
    return make(args=config, reward_funcs=lambda completions, **_: [0.0], env=ToolEnv, **common)


def hand_over(trainer: Any, batch: dict[str, torch.Tensor]) -> None:
    """Let the trainer's next rollout be this batch."""

    def generate(inputs: Any) -> dict[str, torch.Tensor]:
        num = len(batch["prompt_ids"])
        rows = SimpleNamespace(index=torch.arange(num))  # a row is a trajectory
        trainer.last_batch = SimpleNamespace(trajectories=[None] * num, training_rows=rows)
        return batch

    trainer._step, trainer._generate_and_score_completions = 0, generate


def optimizer_step(trainer: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """One optimizer step on a rollout that stands ready; its loss, and the norm of all gradients."""
    hand_over(trainer, batch)
    micro_steps = range(trainer.args.gradient_accumulation_steps)
    return apply_gradients(trainer, (trainer.training_step(trainer.model_wrapped, [], None) for _ in micro_steps))


def apply_gradients(trainer: Any, losses: Iterator[torch.Tensor]) -> tuple[float, float]:
    """Clipping and AdamW once all of `losses`, each with its backward pass, are computed; their sum, and the norm."""
    loss = sum(map(float, losses))
    norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss, float(norm)


def bound_sizes(trainer: Any, batch: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """Of each micro-batch of `shared`: number and length of the rows of `bound`, and how many tokens each scores."""
    hand_over(trainer, batch)
    trainer._prepare_inputs([])
    sizes = []
    for inputs in trainer._buffered_inputs:
        packed = trainer.layout.plan_of(inputs).batch
        num_tokens, num_scored = packed.input_ids.shape[1], packed.labels.shape[1]
        pairs = 0.0  # of a query and a key
        for part in packed.layout.segments:
            own = part.end - part.start
            pairs += own * (sum(end - start for start, end in part.prefix) + (own + 1) / 2)
        rows = math.ceil(num_tokens / (2 * pairs / num_tokens - 1))  # a causal row of L tokens has L (L + 1) / 2
        sizes.append((rows, num_tokens // rows, max(1, num_scored // rows)))
    return sizes


def bound_step(trainer: Any, sizes: list[tuple[int, int, int]]) -> tuple[float, float]:
    """An optimizer step on random rows of these sizes, without a trainer's work; loss and norm as `optimizer_step`."""
    from agent_r1_trl.critic.attach import base_causal_lm

    backbone = base_causal_lm(trainer.accelerator.unwrap_model(trainer.model_wrapped)).base_model

    def losses() -> Iterator[torch.Tensor]:
        for rows, length, kept in sizes:
            ids = torch.randint(1, trainer.model.config.vocab_size, (rows, length), device=trainer.accelerator.device)
            hook = backbone.register_forward_hook(functools.partial(keep_last, kept))  # what the head reads
            loss = trainer.model_wrapped(input_ids=ids, shift_labels=ids[:, -kept:], fused_lm_head=True).loss
            hook.remove()
            trainer.accelerator.backward(loss / len(sizes))
            yield loss.detach() / len(sizes)

    return apply_gradients(trainer, losses())


def keep_last(num: int, module: Any, args: Any, output: Any) -> Any:
    """A hook: hidden states of the last `num` tokens of each row."""
    output.last_hidden_state = output.last_hidden_state[:, -num:]
    return output


def prepare(args: argparse.Namespace, layout: str, folder: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A trainer that is ready for `optimizer_step`, and its batch on its device."""
    trainer = make_trainer(args, layout, folder)
    if args.checkpointing:  # transformers does so in `train`
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
        assert trainer.model.is_gradient_checkpointing
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer, {name: value.to(trainer.accelerator.device) for name, value in make_batch(args).items()}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step, bytes at the peak, loss and gradient norm of the first step; of the trainer `args.only`."""
    be_quiet()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer, batch = prepare(args, args.only, folder)
        device = trainer.accelerator.device
        step = functools.partial(optimizer_step, trainer, batch)
        if args.only == "bound":
            step = functools.partial(bound_step, trainer, bound_sizes(trainer, batch))
            trainer.model.set_attn_implementation(args.attention)
        before = memory(device)["now"]
        seconds, processor_seconds, first = [], [], (0.0, 0.0)
        for repeat in range(args.repeats + 1):
            torch.manual_seed(args.seed + repeat)  # the same shuffle for every trainer
            start, processor_start = time.perf_counter(), time.process_time()
            result = step()
            first = first if repeat else result
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            processor_seconds.append(time.process_time() - processor_start)
        peak = memory(device)["peak"]
    return {
        "seconds": statistics.median(seconds[1:]),  # the first step allocates
        "processor_seconds": statistics.median(processor_seconds[1:]),
        "peak": peak,
        "step_memory": peak - before,
        "loss": first[0],
        "grad_norm": first[1],
        "action_tokens": float(batch["tool_mask"].sum()),
        "all_tokens": float(batch["prompt_mask"].sum() + batch["completion_mask"].sum()),
    }


def memory(device: torch.device) -> dict[str, float]:
    """Bytes in use now and at the peak: of the process on a CPU, of torch's allocator on a GPU."""
    if device.type == "cuda":
        return {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "now": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


# ---------------------------------------------------------------- all of them


def run_all(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The figures of every layout, medians over the rounds; each run has its own process.

    Raises:
        RuntimeError: a layout's loss or gradients are not those of the first.
    """
    rounds = [
        {layout: run_alone(__file__, [*args.given, "--only", layout]) for layout in args.layouts}
        for _ in range(args.rounds)
    ]
    base = rounds[0][args.layouts[0]]
    for layout in args.layouts:
        for name in () if layout == "bound" else ("loss", "grad_norm"):  # it has other tokens
            value = rounds[0][layout][name]
            if not math.isclose(value, base[name], rel_tol=args.tolerance):
                raise RuntimeError(
                    f"{layout}: {name} {value} is not that of {args.layouts[0]}, {base[name]}: the two did not do the "
                    "same work"
                )
    return {
        layout: {name: statistics.median(figures[layout][name] for figures in rounds) for name in base}
        for layout in args.layouts
    }


def ratios(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """The JSON line: every layout's own figures, and what they are against the first layout."""
    base = next(iter(figures.values()))
    result = {"action_tokens": base["action_tokens"]}
    for layout, row in figures.items():
        result[f"{layout}_speedup"] = base["seconds"] / row["seconds"]
        result[f"{layout}_processor_speedup"] = base["processor_seconds"] / row["processor_seconds"]
        result[f"{layout}_memory_ratio"] = row["peak"] / base["peak"]
        result[f"{layout}_step_memory_ratio"] = row["step_memory"] / base["step_memory"]
        result[f"{layout}_tokens_per_s"] = row["action_tokens"] / row["seconds"]
        result[f"{layout}_processor_s"] = row["processor_seconds"]
        result[f"{layout}_peak_mb"] = row["peak"] / 1e6
        result[f"{layout}_step_mb"] = row["step_memory"] / 1e6
        if "bound" in figures:
            result[f"{layout}_over_bound"] = row["processor_seconds"] / figures["bound"]["processor_seconds"]
    return result


def show(result: dict[str, float], args: argparse.Namespace) -> None:
    """Print one row per layout."""
    columns = {
        "tokens_per_s": ("tokens/s", "{:.0f}"),
        "speedup": ("speed", "{:.2f}"),
        "processor_s": ("CPU s", "{:.1f}"),
        "processor_speedup": ("CPU speed", "{:.2f}"),
        "peak_mb": ("peak MB", "{:.0f}"),
        "step_mb": ("steps MB", "{:.0f}"),
        "step_memory_ratio": ("ratio", "{:.2f}"),
    }
    if "bound" in args.layouts:
        columns["over_bound"] = ("/ bound", "{:.2f}")
    print_table(
        f"{args.model} model, {args.dtype}, {result['action_tokens']:.0f} action tokens a step; ratios against "
        f"{args.layouts[0]}",
        ("layout", *(heading for heading, _ in columns.values())),
        [
            (layout, *(form.format(result[f"{layout}_{name}"]) for name, (_, form) in columns.items()))
            for layout in args.layouts
        ],
    )


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Settings; the defaults are those of the published figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small", help="shape of the random-weights model")
    parser.add_argument("--trainer", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--critic", choices=("head", "adapter", "model"), default="model", help="of --trainer ppo")
    parser.add_argument("--rows", choices=("ragged", "forks"), default="ragged", help="what a trajectory becomes")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch, in the layout 'tokens'")
    parser.add_argument("--groups", type=int, default=4, help="prompts")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories per prompt")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows per forward")
    parser.add_argument("--prompt", type=int, default=512, help="tokens per prompt")
    parser.add_argument("--median", type=float, default=256, help="median completion length")
    parser.add_argument("--sigma", type=float, default=0.6, help="sigma of the completion lengths")
    parser.add_argument("--longest", type=int, default=2048, help="cap of the completion lengths")
    parser.add_argument("--observations", type=float, default=0.25, help="share of observation tokens")
    parser.add_argument("--repeats", type=int, default=3, help="timed optimizer steps of a process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each layout, in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--autocast", action="store_true", help="mixed precision in bfloat16")
    parser.add_argument("--attention", default="sdpa", help="attention implementation of transformers")
    parser.add_argument("--lora", action="store_true", help="train a LoRA adapter of rank 16")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative gap of losses and gradient norms")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="ratios are against the first")
    parser.add_argument("--only", choices=LAYOUTS, help="measure one trainer in this process")
    given = sys.argv[1:] if given is None else given
    args = parser.parse_args(given)
    args.given = [word for word in given if word != "--json"]
    check_at_least(parser, args, 1, "groups", "micro_batch", "prompt", "longest", "repeats", "rounds", "max_tokens")
    check_at_least(parser, args, 2, "group_size")
    if num_rows(args) % args.micro_batch:
        parser.error(f"--micro-batch must divide the number of rows, {num_rows(args)}")
    if not 0 <= args.observations < 1:
        parser.error("--observations must be at least 0 and below 1")
    if len(args.layouts) < 2:
        parser.error("--layouts must name two at least: the first is what the others are held against")
    if args.trainer == "ppo" and (others := {"trl", "bound"} & set(args.layouts)):
        parser.error(f"--trainer ppo: {', '.join(sorted(others))} has no critic. Leave it out of --layouts")
    if args.layouts[0] == "bound":
        parser.error("--layouts: bound cannot come first, for nothing trains like it; the first is what others match")
    return args


def main() -> None:
    """Run what was asked for and print it."""
    args = parse_arguments()
    if args.only:
        print(json.dumps(measure(args)))
        return
    report(ratios(run_all(args)), args, show)


if __name__ == "__main__":
    main()
