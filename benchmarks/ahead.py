"""Steps per hour with rollouts that run ahead of the update, and with TRL's own trainer.

    python benchmarks/ahead.py [--json]                     # a tool with a long tail
    python benchmarks/ahead.py --median 0 --no-trl [--json]   # no tool to wait for: what running ahead costs

A training for each `rollouts_ahead` of `--ahead`, one after the other in one process, with the transformers generator:
update and sampling take turns, and what goes on during the update are the tools. A trajectory calls an async tool
three times and answers; the tool sleeps for log-normal seconds (`--median`, `--sigma`), which follow from the row, the
member of its group and the turn. So all runs wait for the same calls. TRL's loop trains on the same rows with the same
environment class, `--trl-steps` steps of it.

`read` are the tokens of contexts that the sampler has read in a step (again after each weight sync), `scored` those
of the forward pass that importance ratios need before the update.

Tokens are sampled from forward passes of the quickstart's model. Which token comes out is forced, on all sides alike
(`rollout_concurrency.py` says how), so that all trajectories are equal. All runs must make the same calls for a step,
or the program fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from typing import Any, ClassVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trl
from _common import (
    MODEL,
    be_quiet,
    check_at_least,
    check_not_negative,
    make_parser,
    print_table,
    report,
    rounded,
)
from datasets import Dataset
from rollout_concurrency import ASSISTANT, ForcedGenerator, ForcedTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

NUM_CALLS = 3
"""Tool calls of a trajectory; then it answers."""


class WaitTask:
    """A tool that takes its time; TRL's environment protocol."""

    median: ClassVar[float] = 0.0
    sigma: ClassVar[float] = 0.0
    seed: ClassVar[int] = 0
    num_calls: ClassVar[Counter[int]] = Counter()
    """Row -> calls of its trajectories since the counter was emptied."""
    _num_begun: ClassVar[Counter[int]] = Counter()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def begin_run(cls, args: argparse.Namespace) -> None:
        """Forget an earlier run."""
        cls.median, cls.sigma, cls.seed = args.median, args.sigma, args.seed
        cls.num_calls, cls._num_begun = Counter(), Counter()

    def reset(self, task: int, **row: Any) -> None:
        """Begin a trajectory of row `task`."""
        with self._lock:
            self._member = self._num_begun[task]
            self._num_begun[task] += 1
        self._task, self._turn = task, 0

    async def wait(self) -> str:
        """Wait for the tool."""
        seconds = latency(self.seed, self._task, self._member, self._turn, median=self.median, sigma=self.sigma)
        self._turn += 1
        with self._lock:
            self.num_calls[self._task] += 1
        await asyncio.sleep(seconds)
        return "done"

    def get_reward(self) -> float:
        """Every other member of a group has done it well, so all groups are trained on."""
        return float(self._member % 2)


def latency(seed: int, task: int, member: int, turn: int, *, median: float, sigma: float) -> float:
    """Log-normal seconds of a call, the same in all runs."""
    return median * random.Random(f"{seed}/{task}/{member}/{turn}").lognormvariate(0.0, sigma)


class Script:
    """What every trajectory says, found again from the tokens that it is asked to continue."""

    def __init__(self, chat: ChatFormat) -> None:
        call = {"type": "function", "function": {"name": "wait", "arguments": {}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        self._chat = chat
        self._call = chat.encode_reply(said)
        self._answer = chat.encode_reply({"role": "assistant", "content": "done"})

    def reply_to(self, ids: list[int]) -> list[int]:
        """Token ids of the turn for a context, padded or not; the stop token is the last."""
        turn = self._chat.tokenizer.decode(ids).count(ASSISTANT) - 1
        return self._call if turn < NUM_CALLS else self._answer


class TokenCounter:
    """Counts the tokens that pass through a model, by what for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.num: Counter[str] = Counter()
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options.get("input_ids", args[0] if args else None)
        if ids is None:
            return
        if torch.is_grad_enabled():
            kind = "trained"
        elif options.get("use_cache") or options.get("past_key_values") is not None:
            kind = "sampled" if ids.shape[1] == 1 else "read"
        else:
            kind = "scored"
        self.num[kind] += ids.numel()


# ---------------------------------------------------------------- the runs


def settings(args: argparse.Namespace, folder: str, num_steps: int) -> dict[str, Any]:
    """Settings of both trainers."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": args.prompts * args.group_size,
        "num_generations": args.group_size,
        "max_steps": num_steps,
        "learning_rate": 1e-6,
        "max_completion_length": 512,
        "beta": 0.0,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,  # would switch off the cache in TRL's `generate`
    }


def dataset(args: argparse.Namespace, num_steps: int) -> Dataset:
    """Rows for the whole run: none is used twice."""
    prompt = "Wait, number {}."
    tasks = range(args.prompts * num_steps)
    return Dataset.from_list([{"prompt": [{"role": "user", "content": prompt.format(i)}], "task": i} for i in tasks])


def timed(trainer: trl.GRPOTrainer, args: argparse.Namespace, num_steps: int) -> dict[str, float]:
    """Seconds of a training, by the wall and of the processor, per step.

    Raises:
        RuntimeError: not every trajectory has made its calls.
    """
    WaitTask.begin_run(args)
    start, start_cpu = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    expected = dict.fromkeys(range(args.prompts * num_steps), NUM_CALLS * args.group_size)
    if dict(WaitTask.num_calls) != expected:
        made = sum(WaitTask.num_calls.values())
        raise RuntimeError(f"{type(trainer).__name__} made {made} calls, {sum(expected.values())} were expected.")
    return {
        "steps_per_hour": 3600 * num_steps / seconds,
        "step_s": seconds / num_steps,
        "processor_s": cpu_s / num_steps,
    }


def run_ours(args: argparse.Namespace, ahead: int, num_steps: int) -> dict[str, float]:
    """A training of ours."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    chat = ChatFormat(tokenizer)
    generator = ForcedGenerator(
        model,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=chat.stop_token_ids,
        max_batch_size=args.prompts * args.group_size,
    )
    generator.script = Script(chat)
    counter = TokenCounter(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = MultiTurnGRPOTrainer(
            model=model,
            args=MultiTurnGRPOConfig(
                **settings(args, folder, num_steps),
                rollouts_ahead=ahead,
                # Forced tokens are no policy's: their ratios say nothing.
                score_check="off",
                **({"failures": {"min_effective_share": 0.0}} if ahead else {}),
                record_trajectories="none",
                progress="none",
            ),
            train_dataset=dataset(args, num_steps),
            processing_class=tokenizer,
            environment_factory=WaitTask,
            generator=generator,
        )
        try:
            figures = timed(trainer, args, num_steps)
            figures |= {f"{kind}_tokens": counter.num[kind] / num_steps for kind in ("read", "scored")}
        finally:
            generator.close()
    return {"ahead": ahead, **figures, **logged(trainer.state.log_history, ahead)}


def logged(history: list[dict[str, float]], ahead: int) -> dict[str, float]:
    """What a run has logged: means over the steps and the largest age."""

    def values(name: str) -> list[float]:
        return [entry[name] for entry in history if name in entry] or [0.0]

    return {
        "rollout_s": statistics.fmean(values("time/rollout_s")),
        "update_s": statistics.fmean(values("time/update_s")),
        "wait_s": statistics.fmean(values("time/wait_s" if ahead else "time/rollout_s")),
        "staleness": statistics.fmean(values("sampling/staleness")),
        "staleness_max": max(values("sampling/staleness_max")),
    }


def run_trl(args: argparse.Namespace) -> dict[str, float]:
    """A training of TRL's."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ForcedTrainer(
            model=model,
            reward_funcs=None,
            args=trl.GRPOConfig(**settings(args, folder, args.trl_steps)),
            train_dataset=dataset(args, args.trl_steps),
            processing_class=tokenizer,
            environment_factory=WaitTask,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.script = Script(ChatFormat(tokenizer))
        return {"ahead": -1, **timed(trainer, args, args.trl_steps)}


def run(args: argparse.Namespace) -> list[dict[str, float]]:
    """One row per run."""
    be_quiet()
    quick = argparse.Namespace(**{**vars(args), "median": 0.0})
    alone = run_ours(quick, 0, args.warm_up)  # also what is computed for the first time
    rows = []
    for ahead in args.ahead:
        rows.append(run_ours(args, ahead, args.steps))
        rows[-1]["ratio"] = rows[-1]["steps_per_hour"] / rows[0]["steps_per_hour"]
        rows[-1]["update_to_sampling"] = alone["update_s"] / alone["rollout_s"]
    if args.trl:
        rows.append(run_trl(args))
        rows[-1]["ratio"] = rows[-1]["steps_per_hour"] / rows[0]["steps_per_hour"]
    return rows


def show(rows: list[dict[str, float]], args: argparse.Namespace) -> None:
    """Print the rows as a table."""
    names = ("steps_per_hour", "ratio", "step_s", "processor_s", "wait_s", "update_s", "staleness", "staleness_max")
    whole = ("steps_per_hour", "staleness_max", "read_tokens", "scored_tokens")
    names += whole[2:]
    print_table(
        f"{args.prompts} x {args.group_size} trajectories a step, {args.steps} steps; a tool of {args.median:g} s "
        f"(sigma {args.sigma:g}), {NUM_CALLS} calls each",
        ("ahead", "steps/h", "ratio", "s/step", "CPU s", "wait", "update", "age", "most", "read", "scored"),
        [
            (
                "TRL" if row["ahead"] < 0 else str(row["ahead"]),
                *(f"{row[name]:.{0 if name in whole else 2}f}" if name in row else "" for name in names),
            )
            for row in rows
        ],
    )
    print(f"Without a tool the update takes {rows[0]['update_to_sampling']:.2f} times as long as the rollout.")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2, 4], help="rollouts (default: 0 1 2 4)")
    parser.add_argument("--steps", type=int, default=10, help="rollouts of each run (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="of a rollout (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=4, help="trajectories a prompt (default: %(default)s)")
    parser.add_argument("--median", type=float, default=0.5, help="median seconds of a call (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first run (default: %(default)s)")
    parser.add_argument("--trl-steps", type=int, default=1, help="of TRL's loop (default: %(default)s)")
    parser.add_argument("--no-trl", dest="trl", action="store_false", help="leave TRL's loop out")
    parser.add_argument("--seed", type=int, default=0, help="of the latencies (default: %(default)s)")
    args = parser.parse_args(argv)
    check_at_least(parser, args, 1, "steps", "prompts", "warm_up", "trl_steps")
    check_at_least(parser, args, 2, "group_size")
    check_not_negative(parser, args, "median", "sigma")
    if min(args.ahead) < 0:
        parser.error(f"--ahead={args.ahead}: must be 0 or more each.")
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(argv)
    report(run(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
