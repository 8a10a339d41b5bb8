"""What `overlap_rollout` saves: a step should take the longer of rollout and update instead of their sum.

    python benchmarks/overlap.py [--json]

The same training run twice, one after the other: synchronous, and with the next rollout generated while the update
trains. The policy is the quickstart's small model, sampled by vLLM in the same process; trajectories have three turns,
whose observations take a log-normal time (median 0.2 s, sigma 1) to come. Rollout and update of the synchronous run
are the yardstick: `over_max` is the overlapped step over the larger of the two, `speedup` the synchronous step over
the overlapped one. Left out are the first steps, in which engine and caches warm up, and the last, behind which no
rollout follows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report, run_alone
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from agent_r1_trl import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, ToolEnv

WARM_UP = 2


class SlowEnv(ToolEnv):
    """Answers every message after a while, whatever it says; three turns."""

    median, sigma = 0.2, 1.0

    def reset(self, example: dict[str, Any]) -> list[dict[str, str]]:
        """The seed of the waits comes with the row."""
        self.rng = random.Random(example["task"])
        self.num_turns = 0
        return super().reset(example)

    async def step(self, message: dict[str, Any]) -> tuple:
        """Wait; done after the third turn."""
        self.num_turns += 1
        if self.num_turns == 3:
            return [], 0.0, True, {}
        await asyncio.sleep(self.median * self.rng.lognormvariate(0.0, self.sigma))
        return [{"role": "user", "content": "go on"}], 0.0, False, {}

    def outcome_reward(self, trajectory: Any) -> float:
        """Anything that differs."""
        return float(sum(trajectory.completion_ids) % 7)


class Stopwatch(TrainerCallback):
    """Wall time of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self.start)


def train(args: argparse.Namespace, *, overlap: bool) -> dict[str, float]:
    """Medians over the steps of one run."""
    be_quiet()
    rows = [{"prompt": [{"role": "user", "content": f"Task {task}."}], "task": task} for task in range(args.steps * 8)]
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = MultiTurnGRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL),
            args=MultiTurnGRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=args.trajectories,
                num_generations=args.trajectories // 8,
                max_steps=args.steps,
                num_iterations=1,
                max_turns=3,
                max_tokens_per_turn=args.tokens,
                max_completion_length=1024 - 128,
                learning_rate=1e-6,
                beta=0.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=True,
                use_vllm=True,
                overlap_rollout=overlap,
                record_trajectories="none",
                report_to=[],
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                seed=args.seed,
            ),
            env=SlowEnv,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            callbacks=[stopwatch],
        )
        try:
            trainer.train()
        finally:
            trainer.rollouts.close()
    history = [entry for entry in trainer.state.log_history if "time/rollout_s" in entry]
    columns = {
        "step_s": stopwatch.seconds,
        "rollout_s": [entry["time/rollout_s"] for entry in history],
        "wait_s": [entry.get("time/wait_s", entry["time/rollout_s"]) for entry in history],
        "staleness": [entry.get("sampling/staleness", 0.0) for entry in history],
    }
    return {name: statistics.median(values[WARM_UP:-1]) for name, values in columns.items()}


def run(argv: list[str]) -> dict[str, float]:
    """Both runs, each in a process of its own."""
    off, on = (run_alone(__file__, [*argv, "--only", mode]) for mode in ("off", "on"))
    update_s = off["step_s"] - off["rollout_s"]
    return {
        "over_max": on["step_s"] / max(off["rollout_s"], update_s),
        "speedup": off["step_s"] / on["step_s"],
        "update_s": update_s,
        "rollout_s": off["rollout_s"],
        "step_s": off["step_s"],
        "overlapped_step_s": on["step_s"],
        "overlapped_wait_s": on["wait_s"],
        "overlapped_staleness": on["staleness"],
    }


def show(result: dict[str, float], args: argparse.Namespace) -> None:
    """Print the result as a table."""
    value = {name: f"{number:.2f}" for name, number in result.items()}
    print_table(
        f"{args.trajectories} trajectories a step, seconds (median of {args.steps - WARM_UP - 1} steps)",
        ("", "rollout", "update", "step"),
        [
            ("synchronous", value["rollout_s"], value["update_s"], value["step_s"]),
            ("overlapped", "", "", value["overlapped_step_s"]),
        ],
    )
    print(
        f"{value['speedup']} times as fast; {value['over_max']} times the longer of rollout and update. The update "
        f"still waited {value['overlapped_wait_s']} s for its rollout."
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--trajectories", type=int, default=64, help="a multiple of 16 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of a turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("off", "on"), help="one run in this process: the medians as JSON")
    args = parser.parse_args(argv)
    if args.trajectories < 16 or args.trajectories % 16:
        parser.error(f"--trajectories={args.trajectories}: 8 groups of two at least; give a multiple of 16.")
    if args.steps < WARM_UP + 2:
        parser.error(f"--steps={args.steps}: {WARM_UP} steps warm up and the last does not count; give 4 or more.")
    check_at_least(parser, args, 1, "tokens")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.only:
        print(json.dumps(train(args, overlap=args.only == "on")))
        return
    report(run(sys.argv[1:] if argv is None else argv), args, show)


if __name__ == "__main__":
    main()
