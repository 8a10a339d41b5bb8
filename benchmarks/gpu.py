"""Does everything that a GPU changes work on this one, and what does it gain? One command, at most eight minutes.

    python benchmarks/gpu.py --out outputs/gpu            # on a machine with CUDA
    python benchmarks/gpu.py --toy                        # all parts at toy size on a CPU: a test, no figures

Needs no network, and no vLLM; with vLLM where it is installed. The parts, in this order:

- checks: one optimizer step of a tiny model on this device, against float32 on the CPU: every layout, attention kernel
  and critic, both trainers, bfloat16, gradient checkpointing, LoRA, QLoRA. The error of the gradients is
  |g - g_cpu| / |g_cpu| over all of them; of a pass without gradients it is that of its log-probs, or values.
- kernels: the attention of packed rows, forward and backward, against attention in float64 with the whole mask: on a
  GPU FlashAttention and the memory-efficient kernel, on a CPU the calls for each segment.
- syncs: how often a micro-batch makes the host wait for the device (`torch.cuda.set_sync_debug_mode`), beside TRL's.
  On a CPU the calls are counted that would wait if their tensor were on a GPU.
- quickstart: the recipe, a few steps.
- generator: the transformers generator's tokens per second, and vLLM's.
- 0.5b, 7b: `train_step.py` in each layout and for TRL's step, at the shapes of Qwen2.5, computed in bfloat16: 0.5b
  with weights in float32, as the recipes have them, 7b in bfloat16 with LoRA and gradient checkpointing. The share of
  the matmul rate is 6 x parameters x tokens (LoRA: 4 x) over seconds and the rate of one large matrix product measured
  here. Tokens are those of the rows, without padding, every prompt as often as there are rows: a layout that computes
  less has a larger share. The peak is held against `agent-r1-trl memory`, which expects rows of the longest length:
  where padding is left out, it may be less.
- profile: a step at 0.5b in PyTorch's profiler. In `idle_share` of the step the device waits for the host: above 0.4,
  the host is what to make faster.

Only the first GPU is used. Every part has a process of its own and a time by which it must be done (what one does not
need, the next ones get). A part that fails or runs out of time is named as such, what it had found until then is kept,
and the others go on. `--out` gets gpu.json, and gpu.md, a section for RESULTS.md; both are written anew after every
part, so that nothing is lost if the machine goes away.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import faulthandler
import gc
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import train_step
from _common import be_quiet, check_at_least, make_parser, print_table, run_alone
from _gpu_parts import run_kernels, run_profile
from torch.overrides import TorchFunctionMode

STARTED = time.monotonic()
LIMIT_S = 460.0
"""Of all parts; Python and torch take up to 20 seconds to start."""
LEAST_S, GRACE_S = 10.0, 5.0
"""A part that has less time is left out; one that does not end itself in time is killed after these seconds more."""
DONE_BY = {
    "checks": 0.28,
    "kernels": 0.32,
    "syncs": 0.38,
    "quickstart": 0.47,
    "generator": 0.54,
    "0.5b": 0.72,
    "profile": 0.8,
    "7b": 1.0,
}
"""The share of the limit after which each part is ended."""
LARGE = 0.3
"""Scale of the weights with which one wrong query shows in what is scored."""
TOLERANCE = 0.15
"""Of `memory`'s estimate."""
WORKSPACES = 64 * 2**20
"""Bytes for cuBLAS and cuBLASLt, 32 MiB each on Hopper, which the estimate counts with the CUDA context and torch's
allocator counts with the peak. They are more than all that a toy needs."""
LAYOUTS = {"0.5b": ("trl", "packed", "shared", "tokens", "padded"), "7b": ("packed", "trl", "shared")}
"""In the order of what must not be missed if the time is up."""
TINY = [
    *("--model", "tiny", "--groups", "2", "--group-size", "2", "--micro-batch", "2", "--prompt", "24"),
    *("--median", "20", "--longest", "64", "--max-tokens", "96"),
]
Row = dict[str, Any]


# ---------------------------------------------------------------- checks


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer step that must agree with float32 on the CPU."""

    options: tuple[str, ...] = ()
    """Of train_step.py."""
    layout: str = "padded"
    tolerance: float = 2e-3
    kernel: str = "sdpa"
    is_scoring: bool = False
    """The log-probs (PPO: values) of a pass without gradients, for which PyTorch has kernels of its own."""

    @property
    def name(self) -> str:
        """For tables."""
        words = [word.removeprefix("--") for word in self.options] + ["scores"] * self.is_scoring
        return ", ".join([" ".join(words) or "grpo", self.layout, self.kernel])

    @property
    def reference(self) -> tuple[tuple[str, ...], bool]:
        """Options of the step on the CPU: the same trainer and adapters in float32; and whether it is of scores."""
        return tuple(word for word in self.options if word not in ("--autocast", "--checkpointing")), self.is_scoring


def attention_kernels(device: str) -> list[str]:
    """The attention implementations beside PyTorch's that are installed and can train on this device."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    has = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    return [name for name, is_there in has.items() if device == "cuda" and is_there()]


def cases(device: str, *, toy: bool) -> list[Case]:
    """All checks; those of other kernels only where they are installed."""
    ppo = [("--trainer", "ppo", "--critic", kind) for kind in ("head", "model")]
    ppo.append(("--trainer", "ppo", "--critic", "adapter", "--lora"))
    layouts = ("packed", "tokens") if toy else ("padded", "grouped", "packed", "shared", "tokens")
    found = [Case((), layout) for layout in ("trl", *layouts)]
    found += [Case(critic, layout) for critic in ppo for layout in (("shared",) if toy else ("padded", "shared"))]
    found += [
        Case(options, layout, 1e-4, is_scoring=True) for options in ((), ppo[0]) for layout in ("padded", "shared")
    ]
    found += [Case(("--lora",), "packed"), Case(("--checkpointing",), "packed")]
    found += [
        Case(("--autocast",), layout, 0.1) for layout in (("packed",) if toy else ("padded", "packed", "shared"))
    ]
    found += [Case(("--autocast", "--checkpointing", "--lora"), "shared", 0.1)]
    for kernel in attention_kernels(device):
        exact, rounded = Case((), "packed", kernel=kernel), Case(("--autocast",), "packed", 0.1, kernel)
        found += [rounded] if "flash" in kernel else [exact, rounded, dataclasses.replace(exact, layout="shared")]
    return found


def tiny(*options: str, kernel: str = "sdpa") -> argparse.Namespace:
    """Arguments of train_step.py for a step of a few hundred tokens."""
    return train_step.parse_arguments([*TINY, "--attention", kernel, *options, "--layouts", "padded", "packed"])


def first_step(args: argparse.Namespace, layout: str) -> Row:
    """Loss and gradients of the first optimizer step, from weights that are the same on every device."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, batch = train_step.prepare(args, layout, folder)
        same_weights(trainer.model)
        trainer.accelerator.clip_grad_norm_ = lambda *_: torch.zeros(())
        trainer.optimizer.step = lambda: gradients.update(
            {
                name: parameter.grad.detach().float().cpu()
                for name, parameter in trainer.model.named_parameters()
                if parameter.grad is not None
            }
        )
        gradients: dict[str, torch.Tensor] = {}
        torch.manual_seed(args.seed)
        loss, _ = train_step.optimizer_step(trainer, batch)
    return {"loss": loss, "gradients": gradients}


def scores(args: argparse.Namespace, layout: str) -> Row:
    """Log-probs, or the values of `--trainer ppo`: branches of 1 to 4 blocks of queries, and one query more."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, batch = train_step.prepare(args, layout, folder)
        same_weights(trainer.model, LARGE)
        lengths = torch.tensor([34, 66, 98, 130])  # what predicts the last token is the last query
        generator = torch.Generator().manual_seed(5)
        drawn = torch.randint(1, train_step.VOCABULARY[args.model], (4, 130), generator=generator)
        mask = (torch.arange(130) < lengths[:, None]).long()  # (B, T)
        prompt = batch["prompt_ids"][:1].expand(4, -1)
        columns = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt)}
        columns |= {"completion_ids": (drawn * mask).to(prompt.device), "completion_mask": mask.to(prompt.device)}
        whole = [
            torch.cat([columns[f"prompt_{name}"], columns[f"completion_{name}"]], dim=1) for name in ("ids", "mask")
        ]
        with torch.no_grad():
            if args.trainer == "ppo":
                found = trainer._score_values(columns, torch.zeros(4, dtype=torch.bool))[:, :-1]
            else:
                found = trainer._get_per_token_logps_and_entropies(trainer.model, *whole, 130, batch_size=4)[0]
    return {"loss": 0.0, "gradients": {"scores": found.float().cpu() * mask}}


def check_generator(device: str) -> Row:
    """Log-probs of tokens drawn at once for prompts of several lengths, against a pass over each row on the CPU."""
    from agent_r1_trl.generation import GenerationRequest, TransformersGenerator

    args = tiny()
    torch.manual_seed(0)
    model = train_step.make_model(args, "cpu").eval()
    same_weights(model, LARGE)
    drawn = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 512, (length,), generator=drawn).tolist() for length in (5, 31, 33, 64)]
    generator = TransformersGenerator(
        copy.deepcopy(model).to(device), pad_token_id=0, stop_token_ids=[], max_batch_size=4
    )

    async def sample() -> list[Any]:
        calls = [generator.generate(GenerationRequest(prompt_ids=ids, max_tokens=40, seed=1)) for ids in prompts]
        return await asyncio.gather(*calls)

    answers = asyncio.run(sample())
    generator.close()
    ours, exact = [], []
    for ids, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *answer.token_ids]])).logits[0, len(ids) - 1 : -1]
        exact.append(logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0])
        ours.append(torch.tensor(answer.logprobs))
    found, expected = ({"loss": 0.0, "gradients": {"log-probs": torch.cat(rows).float()}} for rows in (ours, exact))
    return compare({"name": "transformers generator, 4 rows at once", "tolerance": 1e-4}, found, expected)


def same_weights(model: Any, scale: float = 0.05) -> None:
    """Draw what is trained anew, the same on every device."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            if parameter.is_floating_point() and parameter.requires_grad:
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).to(parameter))


def run_checks(args: argparse.Namespace) -> Iterator[Row]:
    """Every case on this device, against the CPU in a process that sees no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = cases(device, toy=args.toy)
    keys = sorted({case.reference for case in chosen})
    if device == "cpu":
        expected = references(keys)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/references.pt"
            words, no_gpu = ["--only", "references", "--out", file], {"CUDA_VISIBLE_DEVICES": ""}
            run_alone(__file__, words, environment=no_gpu, timeout=args.limit)
            expected = torch.load(file, weights_only=False)
    # Other kernels come last: one that breaks the device, or is compiled for minutes, takes nothing with it.
    yield from (check(case, expected[case.reference]) for case in chosen if case.kernel == "sdpa")
    yield check_generator(device)
    yield check_qlora(device)
    yield from (check(case, expected[case.reference]) for case in chosen if case.kernel != "sdpa")


def references(keys: list[tuple[tuple[str, ...], bool]]) -> dict[tuple[tuple[str, ...], bool], Row]:
    """Loss and gradients of padded rows in float32, or their scores, by `Case.reference`."""
    return {key: (scores if key[1] else first_step)(tiny(*key[0]), "padded") for key in keys}


def check(case: Case, expected: Row) -> Row:
    """Compare a step with the reference."""
    row: Row = {"name": case.name, "tolerance": case.tolerance}
    try:
        found = (scores if case.is_scoring else first_step)(tiny(*case.options, kernel=case.kernel), case.layout)
    except Exception as error:  # one kernel that does not run must not hide the others
        return row | {"ok": False, "error": first_line(error)}
    return compare(row, found, expected)


def compare(row: Row, found: Row, expected: Row) -> Row:
    """The row of a table, with the errors of a step and whether they are in order."""
    ours, theirs = found["gradients"], expected["gradients"]
    if set(ours) != set(theirs):
        return row | {"ok": False, "error": "other parameters have gradients"}
    size = sum(float(other.square().sum()) for other in theirs.values()) ** 0.5
    error = sum(float((ours[name] - other).square().sum()) for name, other in theirs.items()) ** 0.5
    row |= {"loss_error": abs(found["loss"] - expected["loss"]), "gradient_error": error / size}
    return row | {"ok": max(row["loss_error"], row["gradient_error"]) <= row["tolerance"]}  # NaN is not


def check_qlora(device: str) -> Row:
    """A step on a base in 4 bits: finite gradients of the same adapters, that point where those in float32 do."""
    row: Row = {"name": "lora on 4 bits, packed", "tolerance": 0.9}
    if importlib.util.find_spec("bitsandbytes") is None or device != "cuda":
        return row | {"skipped": "needs CUDA and bitsandbytes"}
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = train_step.make_model

    def quantised(args: argparse.Namespace, device: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            plain(args, "cpu").save_pretrained(folder)
            config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": 0})

    try:
        expected = first_step(tiny("--lora"), "packed")
        train_step.make_model = quantised
        found = first_step(tiny("--lora", "--autocast"), "packed")
    except Exception as error:
        return row | {"ok": False, "error": first_line(error)}
    finally:
        train_step.make_model = plain
    return compare(row, found, expected)


# ---------------------------------------------------------------- the host waits


class HostReads(TorchFunctionMode):
    """Counts calls that would make the host wait if their tensor were on a GPU."""

    NAMES = (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "nonzero",
        "masked_select",
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            frame = sys._getframe(1)
            while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            self.counts[f"{name} in {Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits(device: str) -> Iterator[Counter[str]]:
    """Counts how often the host waits for the device inside, by place."""
    if device != "cuda":
        with HostReads() as reads:
            yield reads.counts
        return
    counts: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield counts
        for one in caught:
            if "synchroniz" in str(one.message):
                counts[f"{Path(one.filename).name}:{one.lineno}"] += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_syncs(args: argparse.Namespace) -> Iterator[Row]:
    """Waits inside `compute_loss` and its backward pass, per micro-batch: TRL's and each layout's."""
    device, base = "cuda" if torch.cuda.is_available() else "cpu", None
    for options, layouts in (
        ((), ("trl", "padded", "grouped", "packed", "shared")),
        (("--trainer", "ppo"), ("shared",)),
    ):
        for layout in layouts:
            with tempfile.TemporaryDirectory() as folder:
                trainer, batch = train_step.prepare(tiny(*options), layout, folder)
                waits = count_in_micro_batches(trainer, batch, device)
            total = sum(waits.values())
            base = total if base is None else base
            row = {"name": " ".join([*options[1:], layout]), "waits": total, "more_than_trl": total - base}
            yield row | {"places": waits, "ok": True}


def count_in_micro_batches(trainer: Any, batch: dict[str, torch.Tensor], device: str) -> dict[str, float]:
    """Waits per micro-batch of one optimizer step, by place, after a step that warms up."""
    torch.manual_seed(0)
    train_step.optimizer_step(trainer, batch)
    trainer._step = 0
    total: Counter[str] = Counter()
    steps = trainer.args.gradient_accumulation_steps
    for _ in range(steps):
        inputs = trainer._prepare_inputs([])
        trainer._step += 1
        with counted_waits(device) as counts:
            trainer.accelerator.backward(trainer.compute_loss(trainer.model_wrapped, inputs))
        total.update(counts)
    trainer.model.zero_grad()
    return {place: count / steps for place, count in total.items()}


# ---------------------------------------------------------------- the quickstart, the generators


def run_quickstart(args: argparse.Namespace) -> Iterator[Row]:
    """The recipe on this device: seconds, and reward at both ends."""
    from agent_r1_trl.cli import main as command

    device = "cuda" if torch.cuda.is_available() else "cpu"
    flags = (
        "--max_steps 1 --per_device_train_batch_size 4 --max_completion_length 48" if args.toy else "--max_steps 12"
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        flags += f" --output_dir {folder} --use_cpu {device == 'cpu'} --record_trajectories none --disable_tqdm true"
        code = command(["train", "--config", "quickstart/grpo/cpu", *flags.split()])
        seconds = time.perf_counter() - start
        state = json.loads(Path(folder, "trainer_state.json").read_text()) if code == 0 else {"log_history": []}
    rewards = [entry["reward"] for entry in state["log_history"] if "reward" in entry]
    row = {"name": "quickstart", "seconds": seconds, "ok": code == 0 and bool(rewards)}
    yield row | ({"first_reward": rewards[0], "last_reward": rewards[-1]} if rewards else {})


def run_generator(args: argparse.Namespace) -> Iterator[Row]:
    """Tokens per second of the local generator, and of vLLM where it is installed."""
    from agent_r1_trl.generation import GenerationRequest, TransformersGenerator

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = ["--model", "tiny" if args.toy else "0.5b", "--dtype", "float32" if device == "cpu" else "bfloat16"]
    options = train_step.parse_arguments(given)
    rows_at_once, prompt, tokens = (4, 8, 4) if args.toy else (64, 512, 128)
    torch.manual_seed(0)
    model = train_step.make_model(options, device)
    generator = TransformersGenerator(model, pad_token_id=0, stop_token_ids=[], max_batch_size=rows_at_once)
    prompts = torch.randint(1, train_step.VOCABULARY[options.model], (rows_at_once, prompt)).tolist()

    async def sample() -> int:
        calls = [
            generator.generate(GenerationRequest(prompt_ids=ids, max_tokens=tokens, seed=seed))
            for seed, ids in enumerate(prompts)
        ]
        return sum(len(answer.token_ids) for answer in await asyncio.gather(*calls))

    asyncio.run(sample())
    start = time.perf_counter()
    count = asyncio.run(sample())
    rate = count / (time.perf_counter() - start)
    generator.close()
    yield {"name": f"transformers, {rows_at_once} at once", "tokens_per_s": rate, "ok": True}
    has_vllm = not args.toy and importlib.util.find_spec("vllm") is not None
    yield vllm_rate(model, prompts, tokens) if has_vllm else {"name": "vLLM", "skipped": "not installed, or --toy"}


def vllm_rate(model: Any, prompts: list[list[int]], tokens: int) -> Row:
    """Tokens per second of a vLLM engine with the same model and requests."""
    try:
        from vllm import LLM, SamplingParams

        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            engine = LLM(model=folder, skip_tokenizer_init=True, gpu_memory_utilization=0.3, max_model_len=1024)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
            requests: Any = [{"prompt_token_ids": ids} for ids in prompts]
            engine.generate(requests, params, use_tqdm=False)
            start = time.perf_counter()
            engine.generate(requests, params, use_tqdm=False)
            return {
                "name": f"vLLM, {len(prompts)} at once",
                "tokens_per_s": len(prompts) * tokens / (time.perf_counter() - start),
                "ok": True,
            }
    except Exception as error:
        return {"name": "vLLM", "ok": False, "error": first_line(error)}


# ---------------------------------------------------------------- the update


def run_update(args: argparse.Namespace, shape: str) -> Iterator[Row]:
    """`train_step.py` at a shape: TRL's step and each layout, one after the other in this process."""
    rate = matmul_rate(args)
    given = [*TINY, "--repeats", "1"] if args.toy else of_update(shape)
    for layout in ("trl", "tokens") if args.toy else LAYOUTS[shape]:
        row: Row = {"name": layout}
        try:
            options = train_step.parse_arguments([*given, "--only", layout])
            yield row | judge_update(options, measure_alone(options), rate)
        except Exception as error:
            yield row | {"ok": False, "error": first_line(error)}


def of_update(shape: str) -> list[str]:
    """Options of `train_step.py` for a shape."""
    given = ["--model", shape, "--repeats", "3", "--max-tokens", "16384"]  # Triton compiles in the first two
    return given + (["--dtype", "bfloat16", "--lora", "--checkpointing"] if shape == "7b" else ["--autocast"])


def measure_alone(options: argparse.Namespace) -> dict[str, float]:
    """`train_step.measure` on a device that an earlier layout has left, without what it may have left there."""
    gc.collect()
    left = 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated()
    figures = train_step.measure(options)
    return figures | {"peak": figures["peak"] - left}


def judge_update(options: argparse.Namespace, figures: dict[str, float], rate: float) -> Row:
    """Figures of a layout, beside the estimate's."""
    per_parameter, size = (4 if options.lora else 6), shape_of(options)
    weights = size.num_linear_parameters + size.vocab_size * size.hidden_size  # in matrix products
    work = per_parameter * weights * figures["all_tokens"]
    estimate = estimated_bytes(options, size)
    return {
        "tokens_per_s": figures["action_tokens"] / figures["seconds"],
        "peak_gib": figures["peak"] / 2**30,
        "matmul_share": work / figures["seconds"] / rate,
        "estimate_gib": estimate / 2**30,
        "ok": not torch.cuda.is_available()
        or is_as_estimated(figures["peak"], estimate, has_padding=options.only in ("trl", "padded")),
    }


def is_as_estimated(peak: float, estimate: float, *, has_padding: bool = True) -> bool:
    """Whether the bytes at the peak are those of the estimate, but for the tolerance and the workspaces.

    The estimate is for rows of the longest length, which all are with padding; without it, less is in order.
    """
    gap = peak - estimate
    return (abs(gap) if has_padding else gap) <= TOLERANCE * estimate + WORKSPACES


def with_speedups(rows: list[Row]) -> list[Row]:
    """Rows of a part, with what a layout's tokens per second are against TRL's where both are known."""
    base = next((row["tokens_per_s"] for row in rows if row["name"] == "trl" and "tokens_per_s" in row), None)
    if base is None:
        return rows
    return [row | {"speedup": row["tokens_per_s"] / base} if "tokens_per_s" in row else row for row in rows]


def shape_of(options: argparse.Namespace) -> Any:
    """Sizes of a step's model."""
    from peft import LoraConfig

    from agent_r1_trl.trainers.memory import read_shape

    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None
    return read_shape(train_step.model_config(options), lora)


def estimated_bytes(options: argparse.Namespace, size: Any) -> float:
    """What `memory` expects of the update, CUDA context apart."""
    from agent_r1_trl.trainers.memory import CONTEXT_BYTES, MemorySetup, estimate_memory, find_peak

    batch = train_step.make_batch(options)
    lengths = (batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)).tolist()
    layout = {"tokens": "packed", "trl": "padded", "grouped": "padded"}.get(options.only, options.only)
    prompt, longest = int(batch["prompt_mask"].sum(dim=1).max()), max(lengths)
    width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    setup = MemorySetup(
        shape=size,
        dtype=options.dtype,
        mixed_precision=options.autocast,
        per_device_train_batch_size=options.micro_batch,
        prompt_tokens=prompt,
        max_completion_length=(width if layout == "padded" else longest) - prompt,
        update_layout=layout,
        max_tokens_per_micro_batch=options.max_tokens if options.only == "tokens" else None,
        update_rows=len(lengths),
        gradient_checkpointing=options.checkpointing,
        use_vllm=True,
        vllm_mode="server",
    )
    return find_peak(estimate_memory(setup)) - CONTEXT_BYTES


def matmul_rate(args: argparse.Namespace) -> float:
    """Operations per second of one large matrix product."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, dtype = (256, torch.float32) if args.toy else (8192, torch.bfloat16)
    one, other = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        one @ other
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * width**3 / min(seconds)


# ---------------------------------------------------------------- all parts

PARTS: dict[str, Callable[[argparse.Namespace], Iterable[Row]]] = {
    "checks": run_checks,
    "kernels": run_kernels,
    "syncs": run_syncs,
    "quickstart": run_quickstart,
    "generator": run_generator,
    "0.5b": lambda args: run_update(args, "0.5b"),
    "profile": lambda args: run_profile(args, [*TINY] if args.toy else of_update("0.5b")),
    "7b": lambda args: run_update(args, "7b"),
}


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """Every part in a process of its own (`--toy`: in this one), until the time is up."""
    result: dict[str, Any] = {"machine": machine(), "parts": {}}
    for name in args.parts:
        begun = time.monotonic()
        share = 1.0 if name == args.parts[-1] else DONE_BY[name]
        left = args.limit * share - (begun - STARTED)
        rows = run_here(name, args) if args.toy else run_part(name, left)
        seconds = time.monotonic() - begun
        result["parts"][name] = {"rows": [*map(plain, with_speedups(rows))], "seconds": seconds}
        if args.out:
            write(result, Path(args.out))
    return result


def run_here(name: str, args: argparse.Namespace) -> list[Row]:
    """The rows of a part in this process; the last one says so if it failed."""
    rows: list[Row] = []
    try:
        for row in PARTS[name](args):
            rows.append(row)  # those before an error are kept
    except Exception as error:
        rows.append({"name": name, "ok": False, "error": first_line(error)})
    return rows


def run_part(name: str, left: float, program: str = __file__) -> list[Row]:
    """The rows of a part in a process of its own, as far as it came.

    Args:
        name: of the part.
        left: seconds after which it is ended.
        program: this one.
    """
    if left < LEAST_S:
        return [{"name": name, "skipped": "the time was up"}]
    with tempfile.TemporaryDirectory() as folder:
        file, failed = Path(folder, "rows.jsonl"), []
        try:
            words = ["--only", name, "--limit", str(left), "--out", str(file)]
            run_alone(program, words, timeout=left + GRACE_S)  # before that it says itself where it hangs
        except Exception as error:
            log = str(error)[-4000:]
            failed = [{"name": f"{name}, the rest", "ok": False, "error": first_line(error), "log": log}]
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [*(json.loads(line) for line in lines), *failed]


def plain(row: Row) -> Row:
    """A row that is JSON: numbers that are not finite as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def write(result: dict[str, Any], folder: Path) -> None:
    """Write gpu.json and gpu.md."""
    (folder / "gpu.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(markdown(result), encoding="utf-8")


def machine() -> dict[str, str]:
    """What the figures belong to."""
    import importlib.metadata

    names = ("torch", "transformers", "trl", "vllm", "flash-attn", "bitsandbytes")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    device = f"CPU ({platform.machine()})"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"device": device, "date": date, "CUDA": str(torch.version.cuda or "none"), **versions}


def markdown(result: dict[str, Any]) -> str:
    """A section of RESULTS.md."""
    about = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    lines = [
        "## [On a GPU](gpu.py)",
        "",
        "    python benchmarks/gpu.py --out outputs/gpu",
        "",
        f"Machine: {about}.",
        "",
    ]
    if result["machine"]["device"].startswith("CPU"):
        lines += ["CPU: no figures. Every part ran at toy size, which tests the program.", ""]
    for part, found in result["parts"].items():
        rows = found["rows"]
        columns = [
            name for name in dict.fromkeys(key for row in rows for key in row) if name not in ("name", "places", "log")
        ]
        lines += [f"### {part} ({found['seconds']:.0f} s)", "", "| | " + " | ".join(columns) + " |"]
        lines += ["|---" * (len(columns) + 1) + "|"]
        lines += [f"| {row['name']} | " + " | ".join(cell(row.get(name)) for name in columns) + " |" for row in rows]
        lines += [""]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    text = (
        f"{value:.3g}"
        if isinstance(value, float) and value < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else value
    )
    return "" if text is None else str(text).replace("|", "/")


def summary(result: dict[str, Any]) -> list[dict[str, float]]:
    """The JSON line: rows of each part that passed, failed and were skipped."""
    rows = []
    for index, found in enumerate(result["parts"].values()):
        skipped = sum("skipped" in row for row in found["rows"])
        passed = sum(bool(row.get("ok")) for row in found["rows"])
        failed = len(found["rows"]) - passed - skipped
        rows.append(
            {"part": index, "passed": passed, "failed": failed, "skipped": skipped, "seconds": found["seconds"]}
        )
    return rows


def first_line(error: BaseException) -> str:
    """The last line of a message that holds a program's output, else the first."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if "failed:" in lines[0] else lines[0]
    return f"{type(error).__name__}: {text}"[:200]


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Settings."""
    parser = make_parser(__doc__)
    parser.add_argument("--toy", action="store_true", help="all parts at toy size, in this process")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", help="directory for gpu.json and gpu.md; with --only a file")
    parser.add_argument("--only", choices=(*PARTS, "references"), help="one part in this process, rows as JSON lines")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all parts; with --only for this one")
    args = parser.parse_args(given)
    check_at_least(parser, args, 1, "limit")
    if not args.toy and not args.only and not torch.cuda.is_available():
        parser.error("--toy: no CUDA device was found. Pass --toy to run all parts at toy size on the CPU.")
    return args


def run_only(args: argparse.Namespace) -> None:
    """One part, each row written as soon as it is known, or the references of the checks."""
    if args.only == "references":
        keys = sorted({case.reference for case in cases("cuda", toy=args.toy)})
        torch.save(references(keys), args.out)
    else:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        with Path(args.out).open("w", encoding="utf-8") as file:
            for row in PARTS[args.only](args):
                file.write(json.dumps(row) + "\n")
                file.flush()
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps({}))


def use_first_gpu() -> None:
    """Hide the others, for which transformers would use DataParallel; before anything asks for them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


def main() -> None:
    """Run what was asked for and print it."""
    use_first_gpu()
    args = parse_arguments()
    be_quiet()
    if args.only:
        run_only(args)
        return
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)  # whatever is wrong with it must show before the run
        write({"machine": machine(), "parts": {}}, Path(args.out))
    result = run_all(args)
    rows = summary(result)
    print(markdown(result))
    names = list(result["parts"])
    columns = ("passed", "failed", "skipped", "seconds")
    print_table(
        "parts", ("part", *columns), [(names[int(row["part"])], *(f"{row[c]:.0f}" for c in columns)) for row in rows]
    )
    if args.json:
        print(json.dumps({"rows": rows}))
    elif any(row["failed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
