"""The quickstart: evaluate a small cold-started agent, train it, evaluate it again, and show what changed.

    python recipes/quickstart/run.py                      # or: make quickstart
    python recipes/quickstart/run.py --learning_rate 0    # the control: nothing is learned

Both evaluations play the same held-out questions, greedily and within the same limits. Training is the command that
is printed: the same entry point and recipe that a run of your own would use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_r1_trl.cli import eval as evaluation
from agent_r1_trl.cli.errors import UsageError, run_command
from agent_r1_trl.cli.tables import changes_table
from agent_r1_trl.evaluation import EvaluationResult, difference
from agent_r1_trl.evaluation.comparison import compare
from agent_r1_trl.evaluation.table import write_result
from agent_r1_trl.trainers.checkpoints import set_aside

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = Path("recipes/quickstart/model")
SHOWN = ("exact_match", "f1", "valid_answer_rate", "turns", "tool_calls", "tool_error_rate")


def read_options(argv: list[str]) -> argparse.Namespace:
    """Read the options; the default of `--config` follows from `--algo`."""
    algos = sorted(path.parent.name for path in HERE.glob("*/config_cpu.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=algos, default="grpo")
    parser.add_argument("--config", help="recipe (default: recipes/quickstart/ALGO/config_cpu.yaml)")
    parser.add_argument("--output_dir", "--output-dir", default="outputs/quickstart")
    parser.add_argument("--seed", type=int, default=0, help="of the training run")
    parser.add_argument("--learning_rate", "--learning-rate", type=float, help="default: the recipe's")
    parser.add_argument("--max_steps", "--max-steps", type=int, help="default: the recipe's")
    parser.add_argument("--num_examples", "--num-examples", type=int, help="held-out questions (default: all)")
    options = parser.parse_args(argv)
    options.config = options.config or f"recipes/quickstart/{options.algo}/config_cpu.yaml"
    return options


def evaluate(options: argparse.Namespace, model: str | None, name: str, console: Console) -> EvaluationResult:
    """Play the held-out questions and keep the trajectories. Without `model`, the recipe's model plays."""
    folder = Path(options.output_dir) / name
    flags = ["--config", options.config, "--output_dir", str(folder), *(["--model", model] if model else [])]
    if options.num_examples is not None:
        flags += ["--num_examples", str(options.num_examples)]
    result = evaluation.run_table(evaluation.read_arguments(flags), console, description=name).rows[-1].result
    write_result(result, folder)
    return result


def train(options: argparse.Namespace, console: Console) -> None:
    """Run the training command."""
    flags = ["--config", options.config, "--output_dir", options.output_dir, "--seed", str(options.seed)]
    for name in ("learning_rate", "max_steps"):
        if getattr(options, name) is not None:
            flags += [f"--{name}", str(getattr(options, name))]
    console.print(f"$ python -m agent_r1_trl.cli.train {' '.join(flags)}\n", style="bold", highlight=False)
    command = [sys.executable, "-m", "agent_r1_trl.cli.train", *flags]
    code = subprocess.run(command, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}).returncode
    if code:
        raise UsageError(f"training ended with exit code {code}; its output is above.")


def make_cold_start(console: Console) -> None:
    """Make the model if it is missing."""
    if not (MODEL / "config.json").exists():
        console.rule("making the cold start", align="left")
        subprocess.run([sys.executable, str(HERE / "make_cold_start.py")], check=True)


def report(
    options: argparse.Namespace, before: EvaluationResult, after: EvaluationResult, seconds: dict[str, float]
) -> dict[str, Any]:
    """The content of `results.json`."""
    return {
        "before": before.to_dict(),
        "after": after.to_dict(),
        "change": {name: list(values) for name, values in difference(before, after).items() if name in SHOWN},
        "algo": options.algo,
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "config": options.config,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "model": options.output_dir,
        "trajectories": f"{options.output_dir}/trajectories",
    }


def run(argv: list[str]) -> int:
    """Evaluate, train, evaluate, show."""
    options = read_options(argv)
    os.chdir(ROOT)  # the recipe's paths start here
    console = Console(soft_wrap=True)
    if (old := set_aside(Path(options.output_dir))) is not None:
        console.print(f"The run of an earlier start is now in {old}.")
    make_cold_start(console)
    seconds: dict[str, float] = {}

    def step(name: str, title: str, action: Any) -> Any:
        console.print()
        console.rule(title, align="left")
        start = time.perf_counter()
        value = action()
        seconds[name] = time.perf_counter() - start
        return value

    before = step("before", "1 of 3: held-out questions, before", lambda: evaluate(options, None, "before", console))
    step("train", "2 of 3: training", lambda: train(options, console))
    after = step(
        "after",
        "3 of 3: the same questions, after",
        lambda: evaluate(options, options.output_dir, "after", console),
    )
    results = Path(options.output_dir) / "results.json"
    text = json.dumps(report(options, before, after, seconds), indent=2, ensure_ascii=False)
    results.write_text(text + "\n", encoding="utf-8")
    console.print()
    wide = Console(width=max(console.width, 110)) if not console.is_terminal else Console()
    title = f"{before.num_examples} held-out questions, greedy; A: before, B: after training"
    changes = compare(before, after)
    wide.print(changes_table({name: changes[name] for name in SHOWN if name in changes}, title))
    minutes = sum(seconds.values()) / 60
    parts = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    out = options.output_dir
    console.print(
        f"time          {minutes:.1f} minutes ({parts})\n"
        f"model         {out}\n"
        f"trajectories  {out}/trajectories (training), {out}/before and {out}/after (evaluation)\n"
        f"figures       {results}\n\n"
        "Next:\n"
        f"  agent-r1-trl view {out} --terminal                          # what it did in the last step\n"
        f"  agent-r1-trl view {out}/after --terminal --filter failed    # what it still gets wrong\n"
        f"  agent-r1-trl doctor --config {options.config}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run))  # type: ignore[arg-type]
