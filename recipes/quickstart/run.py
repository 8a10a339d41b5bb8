"""The quickstart: evaluate a small cold-started agent, train it, evaluate it again, and show what changed.

    python recipes/quickstart/run.py                      # or: make quickstart
    python recipes/quickstart/run.py --learning_rate 0    # the control: nothing is learned

Each part is the command that is printed, as a user would type it. Both evaluations take the same held-out questions,
greedily and within the same limits.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from agent_r1_trl.trainers.checkpoints import set_aside

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHOWN = ("exact_match", "f1", "valid_answer_rate", "turns", "tool_calls", "call_error_rate")


def read_options() -> argparse.Namespace:
    """Read the options; the default of `--config` follows from `--algo`."""
    algos = sorted(path.parent.name for path in HERE.glob("*/config_cpu.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=algos, default="grpo")
    parser.add_argument("--config", help="recipe (default: recipes/quickstart/ALGO/config_cpu.yaml)")
    parser.add_argument("--output_dir", default="outputs/quickstart")
    parser.add_argument("--seed", type=int, default=0, help="of the training run")
    parser.add_argument("--learning_rate", type=float, help="default: the recipe's")
    parser.add_argument("--max_steps", type=int, help="default: the recipe's")
    parser.add_argument("--num_examples", type=int, help="held-out questions (default: all)")
    options = parser.parse_args()
    options.config = options.config or f"recipes/quickstart/{options.algo}/config_cpu.yaml"
    return options


def step(title: str, *command: str) -> None:
    """Run a command of agent-r1-trl; the program ends with its exit code if it fails."""
    print(f"\n--- {title}\n$ agent-r1-trl {shlex.join(command)}\n", flush=True)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if code := subprocess.run([sys.executable, "-m", "agent_r1_trl.cli", *command], env=environment).returncode:
        sys.exit(code)


def main() -> None:
    """Evaluate, train, evaluate, show."""
    options, start = read_options(), time.perf_counter()
    os.chdir(ROOT)  # the recipe's paths start here
    out, config = options.output_dir, ["--config", options.config]
    if (old := set_aside(Path(out))) is not None:
        print(f"The run of an earlier start is now in {old}.")
    if not (HERE / "model" / "config.json").exists():
        subprocess.run([sys.executable, str(HERE / "make_cold_start.py")], check=True)
    asked = {name: getattr(options, name) for name in ("seed", "learning_rate", "max_steps")}
    changes = [part for name, value in asked.items() if value is not None for part in (f"--{name}", str(value))]
    num = [] if options.num_examples is None else ["--num_examples", str(options.num_examples)]
    step("1 of 3: held-out questions, before", "eval", *config, *num, "--output_dir", f"{out}/before")
    step("2 of 3: training", "train", *config, *changes, "--output_dir", out)
    step("3 of 3: the same questions, after", "eval", *config, *num, "--model", out, "--output_dir", f"{out}/after")
    step("what changed", "eval", "compare", f"{out}/before", f"{out}/after", "--metric", *SHOWN)
    print(f"""\
time          {(time.perf_counter() - start) / 60:.1f} minutes
model         {out}
trajectories  {out}/trajectories (training), {out}/before and {out}/after (evaluation)

Next:
  agent-r1-trl view {out}                                     # every token of it, in a browser
  agent-r1-trl view {out}/after --terminal --filter unsolved    # what it still gets wrong
  agent-r1-trl doctor --config {options.config}""")


if __name__ == "__main__":
    main()
