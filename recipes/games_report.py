"""Do the recipes of the games learn? Success before and after, over seeds, by the commands that a user would type.

    python recipes/games_report.py --seeds 0 1 2                        # everything, on one core
    python recipes/games_report.py --games bandit --algos grpo ppo

For each game the cold start is made once, by its own script. Each algorithm then trains from it with
`config_cpu.yaml`, once for every seed. Success before and after is measured on the levels of `recipes/levels.jsonl`,
sampled at the recipe's `eval_temperature`. What is in `--out` already is not made again, so a report that was broken
off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GAMES = ("bandit", "frozen_lake", "countdown", "sokoban")
ALGOS = ("grpo", "ppo")


def run(*command: str) -> float:
    """Run a Python command from the root of the repository, and show it; returns its seconds of processor time."""
    print("$ python", *command, flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    before = os.times()
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def evaluate(config: str, model: Path, folder: Path, num_examples: int) -> float:
    """Success of a model on the levels of the evaluation."""
    result = folder / "evaluation.json"
    if not result.exists():
        flags = ["--config", config, "--model", str(model), "--output_dir", str(folder), "--journal", "false"]
        run("-m", "agent_r1_trl.cli", "eval", *flags, "--num_examples", str(num_examples))
    return float(json.loads(result.read_text(encoding="utf-8"))["success"])


def train(config: str, start: Path, folder: Path, seed: int, max_steps: int | None) -> float:
    """A training run; returns its seconds of processor time, which other work on the machine does not lengthen."""
    clock = folder / "seconds.txt"  # written at the end
    if not clock.exists():
        flags = ["--config", config, "--model_name_or_path", str(start), "--output_dir", str(folder)]
        flags += ["--seed", str(seed), "--record_trajectories", "none", "--overwrite", "true"]
        flags += ["--max_steps", str(max_steps)] if max_steps else []
        seconds = run("-m", "agent_r1_trl.cli.train", *flags)
        clock.write_text(f"{seconds:.1f}\n", encoding="utf-8")
    return float(clock.read_text(encoding="utf-8"))


def measure(args: argparse.Namespace, game: str, algo: str) -> dict[str, Any]:
    """Success of one algorithm on one game: `before`, `after` and `seconds` of every seed."""
    folder, config = args.out / game, f"recipes/{game}/{algo}/config_cpu.yaml"
    start = folder / "start"
    if not (start / "tokenizer_config.json").exists():  # saved last
        steps = ["--steps", str(args.cold_steps)] if args.cold_steps else []
        run(f"recipes/{game}/make_cold_start.py", "--out", str(start), *steps)
    figures: dict[str, Any] = {"game": game, "algo": algo, "after": [], "seconds": []}
    figures["before"] = evaluate(config, start, folder / f"{algo}-before", args.num_examples)
    for seed in args.seeds:
        trained = folder / f"{algo}-seed{seed}"
        figures["seconds"].append(train(config, start, trained, seed, args.max_steps))
        figures["after"].append(evaluate(config, trained, trained / "after", args.num_examples))
    return figures


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| game | algorithm | success before | after, per seed | mean | processor seconds of a run |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        after = ", ".join(f"{value:.2f}" for value in row["after"])
        mean, seconds = statistics.fmean(row["after"]), statistics.fmean(row["seconds"])
        lines.append(f"| {row['game']} | {row['algo']} | {row['before']:.2f} | {after} | {mean:.2f} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Make what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=GAMES)
    parser.add_argument("--algos", nargs="+", choices=ALGOS, default=ALGOS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "games_report")
    parser.add_argument("--num_examples", type=int, default=200, help="levels of each evaluation")
    parser.add_argument("--cold_steps", type=int, help="steps of the cold starts (default: those of the scripts)")
    parser.add_argument("--max_steps", type=int, help="steps of the training (default: those of the recipes)")
    args = parser.parse_args()
    args.out = args.out.resolve()
    report = table([measure(args, game, algo) for game in args.games for algo in args.algos])
    (args.out / "report.md").write_text(f"{report}\n", encoding="utf-8")
    print(f"\n{report}")


if __name__ == "__main__":
    main()
