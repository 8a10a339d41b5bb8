"""A game that is longer than the context: what is learned with each context policy?

    python benchmarks/long_agents.py --seeds 0 1 2 [--policies keep window] [--json]

The corridor (recipes/corridor) needs 630 tokens, and its model takes 512. Every run has the settings of the recipe's
`config_cpu.yaml`, with the policy in place of the recipe's own. Success before and after is that of the 200 corridors
of `recipes/levels.jsonl`, sampled, with the policy of the training. Its 95% intervals are Wilson's.

Runs are forked from one process that has imported everything; a command of its own takes the imports more. What is
in `--out` already is not made again, so a measurement that was broken off goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import yaml
from _common import be_quiet, check_at_least, make_parser, print_table, report, rounded

import agent_r1_trl.evaluation  # once, before the runs are forked
import agent_r1_trl.trainers
from agent_r1_trl.cli import main as agent_r1_trl
from agent_r1_trl.cli.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = Path("recipes/corridor")
ALGOS = ("grpo", "ppo")
POLICIES: dict[str, Any] = {
    "keep": "keep",
    "window": {"policy": "window", "turns": 1, "tokens": 256},
    "summarise": {"policy": "summarise", "tokens": 256, "summary_tokens": 12, "summary_prompt": "Where are you?"},
}
"""The setting `context` of each."""


# ---------------------------------------------------------------- runs


def forked(call: Callable[[], Any], log: Path) -> float:
    """Call a function in a process of its own, whose output goes to a file; returns its seconds of processor time.

    Raises:
        RuntimeError: it failed, with the end of what it wrote.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    before = os.times()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log.open("w", encoding="utf-8") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                code = call() or 0
                sys.stdout.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"A run failed; its output ends:\n{log.read_text(encoding='utf-8')[-2000:]}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def cold_start(args: argparse.Namespace) -> Path:
    """The model that all runs begin with."""
    start = args.out / "start"
    if not (start / "tokenizer_config.json").exists():  # saved last
        steps = ["--steps", str(args.cold_steps)] if args.cold_steps else []
        script = str(RECIPE / "make_cold_start.py")

        def make() -> None:
            sys.argv = [script, "--out", str(start), *steps]
            runpy.run_path(script, run_name="__main__")

        forked(make, args.out / "start.txt")
    return start


def write_config(args: argparse.Namespace, algo: str, policy: str) -> Path:
    """The recipe with this policy, as a file."""
    recipe = read_recipe(str(RECIPE / algo / "config_cpu.yaml"))
    settings = {name: value for name, value in recipe.items() if not name.startswith(("context_", "summary_"))}
    path = args.out / f"{algo}-{policy}.yaml"
    path.write_text(yaml.safe_dump(settings | {"context": POLICIES[policy]}), encoding="utf-8")
    return path


def evaluate(args: argparse.Namespace, config: Path, model: Path, folder: Path, seed: int) -> dict[str, Any]:
    """What `agent-r1-trl eval` finds; `seed` is that of the sampling.

    Each evaluation needs one of its own. Models that are about equally good and draw the same random numbers lose the
    same games, and then agree far better than their intervals say.
    """
    result = folder / "evaluation.json"
    if not result.exists():
        flags = ["--config", str(config), "--model", str(model), "--output_dir", str(folder), "--journal", "false"]
        flags += ["--num_examples", str(args.num_examples), "--seed", str(seed)]
        forked(lambda: agent_r1_trl(["eval", *flags]), folder / "log.txt")
    return dict(json.loads(result.read_text(encoding="utf-8")))


def train(args: argparse.Namespace, config: Path, start: Path, folder: Path, seed: int) -> float:
    """A training run; returns its seconds of processor time, which other work on the machine does not lengthen."""
    clock = folder / "seconds.txt"  # written at the end
    if not clock.exists():
        flags = ["--config", str(config), "--model_name_or_path", str(start), "--output_dir", str(folder)]
        flags += ["--seed", str(seed), "--record_trajectories", "none"]
        flags += ["--max_steps", str(args.max_steps)] if args.max_steps else []
        seconds = forked(lambda: agent_r1_trl(["train", *flags]), folder / "log.txt")
        clock.write_text(f"{seconds:.1f}\n", encoding="utf-8")
    return float(clock.read_text(encoding="utf-8"))


def wilson(share: float, num: int) -> tuple[float, float]:
    """The 95% interval of a share of `num` trials (Wilson, 1927), which has a length at 0 and 1, too."""
    z = 1.96
    centre = share + z * z / (2 * num)
    reach = z * math.sqrt(share * (1 - share) / num + (z / (2 * num)) ** 2)
    return max(0.0, (centre - reach) / (1 + z * z / num)), min(1.0, (centre + reach) / (1 + z * z / num))


def figures(name: str, evaluation: dict[str, Any]) -> dict[str, float]:
    """What the table says of an evaluation; `name` is "before" or "after"."""
    low, high = wilson(evaluation["success"], evaluation["num_examples"])
    return {
        name: evaluation["success"],
        f"{name}_low": low,
        f"{name}_high": high,
        f"rooms_{name}": evaluation["rooms"],
        f"cut_{name}": evaluation["truncated_rate"],
    }


def sampling_seed(policy: str, algo: str, seed: int) -> int:
    """Of the evaluation after a run: another one for each run, and above those of the evaluations before."""
    return len(POLICIES) * (1 + ALGOS.index(algo) + len(ALGOS) * seed) + list(POLICIES).index(policy)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per policy, algorithm and seed."""
    start, rows = cold_start(args), []
    for policy in args.policies:
        for algo in args.algos:
            config, number = write_config(args, algo, policy), list(POLICIES).index(policy)
            before = evaluate(args, config, start, args.out / f"{policy}-before", number)  # no matter which algorithm
            for seed in args.seeds:
                folder = args.out / f"{algo}-{policy}-seed{seed}"
                seconds = train(args, config, start, folder, seed)
                after = evaluate(args, config, folder, folder / "after", sampling_seed(policy, algo, seed))
                rows.append(
                    {
                        "policy": number,
                        "algo": ALGOS.index(algo),
                        "seed": seed,
                        **figures("before", before),
                        **figures("after", after),
                        "seconds": seconds,
                    }
                )
    return rows


# ---------------------------------------------------------------- the command


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the options."""
    parser = make_parser(__doc__)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--algos", nargs="+", choices=ALGOS, default=list(ALGOS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the runs (default: 0)")
    parser.add_argument("--num-examples", type=int, default=200, help="corridors of each evaluation (default: 200)")
    parser.add_argument("--max-steps", type=int, default=0, help="of every run (default: those of the recipe)")
    parser.add_argument("--cold-steps", type=int, default=0, help="of the cold start (default: those of its script)")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: one that is deleted)")
    args = parser.parse_args(argv)
    check_at_least(parser, args, 0, "max_steps", "cold_steps")
    check_at_least(parser, args, 1, "num_examples")
    return args


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table."""

    def interval(row: dict[str, Any], name: str) -> str:
        return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"

    print_table(
        f"Success on {args.num_examples} corridors",
        ["policy", "algorithm", "seed", "before", "after", "rooms before", "after", "cut after", "processor seconds"],
        [
            [
                list(POLICIES)[row["policy"]],
                ALGOS[row["algo"]],
                str(row["seed"]),
                *(interval(row, name) for name in ("before", "after")),
                *(f"{row[name]:.1f}" for name in ("rooms_before", "rooms_after")),
                f"{row['cut_after']:.2f}",
                f"{row['seconds']:.0f}",
            ]
            for row in rows
        ],
        num_names=2,
    )


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    be_quiet()
    logging.getLogger("agent_r1_trl").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as folder:
        args.out = (args.out or Path(folder)).resolve()
        args.out.mkdir(parents=True, exist_ok=True)
        os.chdir(ROOT)  # the recipe's paths start here
        report(measure(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
