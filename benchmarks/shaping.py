"""What the shape of a rollout does to learning: the same trajectories, in other shapes, with one recipe.

    python recipes/frozen_lake/make_cold_start.py
    python benchmarks/shaping.py --config recipes/frozen_lake/grpo/config_cpu.yaml --rollouts 30 --examples 200
    python benchmarks/shaping.py --seeds 0 1 2 --shapes 8x8x1 8x8x4 2x32x1 [--json]     # the quickstart's task

A shape is prompts x responses x updates, all per rollout. Every run generates the same number of trajectories, in the
same number of rollouts, with the same recipe otherwise; what it learned is the recipe's `success` or `exact_match` on
its evaluation data, at its `eval_temperature`. RAGEN (arXiv 2504.20073, section 4) finds that more updates per
rollout hurt (compare 8x8x1 with 8x8x4), and that several initial states help (compare 8x8x1 with 2x32x1). One run of
the quickstart takes some minutes on two cores, one of the games about one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from _common import be_quiet, check_at_least, make_parser, print_table, report
from rich.console import Console

from agent_r1_trl.cli import eval as evaluation
from agent_r1_trl.cli.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "recipes/quickstart/grpo/config_cpu.yaml"
MICRO_BATCH = 16
SCORES = ("success", "exact_match")
"""What a run is judged by: the first of these that its environment reports."""

Shape = tuple[int, int, int]
"""Prompts, responses to each, updates: per rollout."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the options."""
    parser = make_parser(__doc__)
    parser.add_argument("--config", default=RECIPE, help=f"of agent-r1-trl train, from the root (default: {RECIPE})")
    parser.add_argument("--learning-rate", type=float, help="in place of the recipe's")
    parser.add_argument("--shapes", nargs="+", default=["8x8x1", "8x8x4", "2x32x1"], metavar="PxRxU")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--examples", type=int, default=300, help="of the evaluation data (default: 300)")
    parser.add_argument("--keep", help="folder that keeps what the runs wrote (default: none does)")
    args = parser.parse_args(argv)
    check_at_least(parser, args, 1, "rollouts", "examples")
    try:
        args.shapes = [tuple(map(int, text.split("x"))) for text in args.shapes]
        sizes = {prompts * responses for prompts, responses, _ in args.shapes}
    except ValueError:
        parser.error("--shapes: give prompts x responses x updates, such as 8x8x4.")
    if len(sizes) > 1:
        parser.error(f"--shapes: rollouts of {sorted(sizes)} trajectories cannot be compared. Give equal products.")
    if any(min(shape) < 1 or shape[0] * shape[1] % shape[2] for shape in args.shapes):
        parser.error("--shapes: the trajectories of a rollout must divide into its updates. Change the last number.")
    return args


def train(args: argparse.Namespace, shape: Shape, seed: int, folder: str) -> None:
    """Run the recipe in this shape.

    Raises:
        RuntimeError: the run failed, with what it wrote.
    """
    prompts, responses, updates = shape
    recipe = read_recipe(args.config)
    options = {
        "prompts_per_rollout": prompts,
        "num_generations": responses,
        "updates_per_rollout": updates,
        "per_device_train_batch_size": math.gcd(MICRO_BATCH, prompts * responses // updates),
        "max_steps": args.rollouts * updates,
        "warmup_steps": recipe.get("warmup_steps", 0) * updates,
        "seed": seed,
        "output_dir": folder,
        "overwrite": True,
        "record_trajectories": "none",
        "logging_steps": 1,
        "echo": True,  # it watches, and what it saw is in trainer_state.json
        "learning_rate": args.learning_rate or recipe["learning_rate"],
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "agent_r1_trl.cli.train", "--config", args.config, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


def evaluate(args: argparse.Namespace, folder: str) -> float:
    """Success of the model in a folder."""
    flags = ["--config", args.config, "--model", folder, "--num_examples", str(args.examples)]
    metrics = evaluation.run_table(evaluation.read_arguments(flags), Console(quiet=True)).rows[-1].result.metrics
    return next(metrics[name] for name in SCORES if name in metrics)


def run(args: argparse.Namespace, shape: Shape, seed: int) -> float:
    """Train and evaluate; returns the success."""
    with contextlib.ExitStack() as stack:
        if args.keep:
            folder = str(Path(args.keep, f"{'x'.join(map(str, shape))}-seed{seed}"))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        train(args, shape, seed, folder)
        return evaluate(args, folder)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per shape."""
    rows = []
    for shape in args.shapes:
        start = time.perf_counter()
        scores = [run(args, shape, seed) for seed in args.seeds]
        rows.append(
            dict(zip(("prompts", "responses", "updates"), shape, strict=True))
            | {"mean": statistics.fmean(scores), "worst": min(scores), "best": max(scores)}
            | {f"seed_{seed}": score for seed, score in zip(args.seeds, scores, strict=True)}
            | {"seconds_per_run": (time.perf_counter() - start) / len(scores)}
        )
    return rows


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table."""
    trajectories = rows[0]["prompts"] * rows[0]["responses"] * args.rollouts
    seeds = [f"seed {seed}" for seed in args.seeds]
    print_table(
        f"Success on {args.examples} examples after {trajectories} trajectories",
        ["prompts", "responses", "updates", "mean", *seeds, "s per run"],
        [
            [
                *(str(row[name]) for name in ("prompts", "responses", "updates")),
                *(f"{row[name]:.3f}" for name in ("mean", *(f"seed_{seed}" for seed in args.seeds))),
                f"{row['seconds_per_run']:.0f}",
            ]
            for row in rows
        ],
        num_names=0,
    )


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    be_quiet()
    os.chdir(ROOT)  # the recipe's paths start here
    report(measure(args), args, show, figures=lambda rows: {"rows": rows})


if __name__ == "__main__":
    main()
