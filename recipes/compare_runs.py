"""Do recipes learn, and what does a setting change? Success before and after training, over seeds, in one table.

    python recipes/compare_runs.py games --seeds 0 1 2
    python recipes/compare_runs.py masks --seeds 0 1 2 --max_steps 24 --num_examples 300
    python recipes/compare_runs.py games --only bandit

Every part is a command that a user would type: a cold start by the script of its recipe, evaluation, training,
evaluation. What is in `--out` already is not made again, so a report that was broken off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Variant(NamedTuple):
    """A recipe, and flags of its training."""

    name: str
    recipe: str
    """Folder and algorithm, such as `bandit/ppo`."""
    flags: str = ""
    metric: str = "success"
    """Of the evaluation."""
    logged: str = "env/success"
    """The same in the log of the training."""

    @property
    def config(self) -> str:
        """The file of the recipe."""
        return f"recipes/{self.recipe}/config_cpu.yaml"


GAMES = [Variant(f"{game} {algo}", f"{game}/{algo}") for game in ("bandit", "frozen_lake", "countdown", "sokoban")
         for algo in ("grpo", "ppo")]  # fmt: skip
MASKS = {"both masks": "", "no advantage mask": "--advantage_mask false",
         "neither mask": "--advantage_mask false --loss_mask false"}  # fmt: skip
# At gamma * lam = 1 the recursions of PPO with and without advantage mask agree on action tokens. GRPO gives all
# tokens of a trajectory one advantage, so that its advantage mask alone changes nothing: its row checks that.
STUDIES = {
    "games": GAMES,
    "masks": [
        Variant(f"{algo} {masks}", f"quickstart/{algo}", f"{flags} {more}", "exact_match", "env/em")
        for algo, more in {"ppo": "--gamma 1.0 --lam 0.95", "grpo": ""}.items()
        for masks, flags in MASKS.items()
    ],
}


def run(*command: str) -> float:
    """Run a Python command from the root of the repository, and show it; returns its seconds of processor time."""
    print("$ python", *command, flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    before = os.times()
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def read(path: Path) -> dict[str, Any]:
    """The content of a file of JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def evaluate(variant: Variant, model: Path | None, folder: Path, num: list[str]) -> float:
    """A model on the held-out rows; None: the one that the recipe names."""
    if not (folder / "evaluation.json").exists():
        flags = ["--config", variant.config, "--output_dir", str(folder), "--journal", "false", *num]
        if model is not None:
            flags += ["--model", str(model)]
        run("-m", "agent_r1_trl.cli", "eval", *flags)
    return float(read(folder / "evaluation.json")[variant.metric])


def make_start(variant: Variant, out: Path) -> Path | None:
    """The model to start from, made where it is missing; None: it comes with the package."""
    if variant.recipe.startswith("quickstart"):
        return None
    script = ROOT / "recipes" / variant.recipe.partition("/")[0] / "make_cold_start.py"
    start = out / script.parent.name
    if not (start / "tokenizer_config.json").exists():  # saved last
        run(str(script), "--out", str(start))
    return start


def measure(variant: Variant, args: argparse.Namespace) -> str:
    """The line of the table of one variant."""
    start = make_start(variant, args.out)
    folder = args.out / variant.name.replace(" ", "-")
    num = ["--num_examples", str(args.num_examples)]
    before = evaluate(variant, start, folder / "before", num)
    after, curves, seconds = [], [], []
    for seed in args.seeds:
        trained = folder / f"seed{seed}"
        clock = folder / f"seed{seed}.txt"  # written at the end
        if not clock.exists():
            flags = ["--config", variant.config, "--output_dir", str(trained), "--seed", str(seed)]
            flags += ["--record_trajectories", "none", "--overwrite", "true", *variant.flags.split()]
            if start is not None:
                flags += ["--model_name_or_path", str(start)]
            if args.max_steps:
                flags += ["--max_steps", str(args.max_steps)]
            clock.write_text(f"{run('-m', 'agent_r1_trl.cli.train', *flags):.1f}", encoding="utf-8")
        seconds.append(float(clock.read_text(encoding="utf-8")))
        after.append(evaluate(variant, trained, trained / "after", num))
        history = read(trained / "trainer_state.json")["log_history"]
        curves.append(statistics.fmean(entry[variant.logged] for entry in history if variant.logged in entry))
    means = " | ".join(f"{statistics.fmean(values):.3f}" for values in (after, curves))
    each = ", ".join(f"{value:.3f}" for value in after)
    return f"| {variant.name} | {before:.3f} | {each} | {means} | {statistics.fmean(seconds):.0f} |"


def main() -> None:
    """Make what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--only", default="", help="variants whose names hold this text")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "compare_runs")
    parser.add_argument("--num_examples", type=int, default=200, help="rows of each evaluation")
    parser.add_argument("--max_steps", type=int, help="steps of the training (default: those of the recipes)")
    args = parser.parse_args()
    args.out = args.out.resolve()
    heads = [
        "run",
        "before",
        "after, per seed",
        "mean",
        "in training, mean of all steps",
        "processor seconds of a run",
    ]
    lines = [measure(variant, args) for variant in STUDIES[args.study] if args.only in variant.name]
    report = "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])
    (args.out / f"{args.study}.md").write_text(f"{report}\n", encoding="utf-8")
    print(f"\n{report}")


if __name__ == "__main__":
    main()
