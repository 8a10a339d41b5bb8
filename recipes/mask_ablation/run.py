"""The ablation of Agent-R1 (arXiv 2511.14460, section 4.3): what do the loss mask and the advantage mask contribute?

    python recipes/mask_ablation/run.py --seeds 3 --max_steps 30
    python recipes/mask_ablation/run.py --report          # table and plot of the runs that are there

Each run is `agent-r1-trl train` with the quickstart's recipe and the flags of `VARIANTS`, then a greedy evaluation on
the held-out questions. Runs that are finished are skipped. PPO runs at gamma * lam < 1: at 1 the recursions with and
without advantage mask agree on action tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOTH, NO_ADVANTAGE_MASK, NEITHER = "both masks", "no advantage mask", "neither mask"
PPO = {"algo": "ppo", "gamma": "1.0", "lam": "0.95"}
VARIANTS: dict[tuple[str, str], dict[str, str]] = {
    ("PPO", BOTH): PPO,
    ("PPO", NO_ADVANTAGE_MASK): {**PPO, "advantage_mask": "false"},
    ("PPO", NEITHER): {**PPO, "advantage_mask": "false", "loss_mask": "false"},
    ("GRPO", BOTH): {"algo": "grpo"},
    ("GRPO", NO_ADVANTAGE_MASK): {"algo": "grpo", "advantage_mask": "false"},
    ("GRPO", NEITHER): {"algo": "grpo", "advantage_mask": "false", "loss_mask": "false"},
}
"""(algorithm, masks) -> flags. GRPO gives all tokens of a trajectory the same advantage, so its advantage mask alone
changes nothing; the row is there to check that."""


def folder_of(out: Path, algorithm: str, masks: str, seed: int) -> Path:
    """The folder of a run."""
    return out / f"{algorithm}-{masks}-seed{seed}".lower().replace(" ", "-")


def train_and_evaluate(folder: Path, flags: dict[str, str], seed: int, max_steps: int) -> None:
    """One run, as a user would start it."""
    flags = dict(flags)
    config = f"recipes/quickstart/{flags.pop('algo')}/config_cpu.yaml"
    options = [item for name, value in flags.items() for item in (f"--{name}", value)]
    command = [sys.executable, "-m", "agent_r1_trl.cli.train", "--config", config, "--output_dir", str(folder)]
    command += ["--seed", str(seed), "--max_steps", str(max_steps), "--record_trajectories", "none"]
    command += ["--overwrite", "true", *options]
    print("$", " ".join(command), flush=True)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "agent_r1_trl.cli", "eval", "--config", config, "--model", str(folder)]
    command += ["--output_dir", str(folder / "evaluation")]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def read_run(folder: Path) -> dict[str, list[float] | float] | None:
    """Training curve and held-out score; None for a run that is not finished."""
    state, evaluation = folder / "trainer_state.json", folder / "evaluation" / "evaluation.json"
    if not (state.exists() and evaluation.exists()):
        return None
    history = [row for row in json.loads(state.read_text())["log_history"] if "env/em" in row]
    return {
        "curve": [row["env/em"] for row in history],
        "valid": history[-1]["env/valid_answer"],
        "exact_match": json.loads(evaluation.read_text())["exact_match"],
    }


def report(out: Path, seeds: int) -> str:
    """A Markdown table of held-out exact match by variant; also draws `ablation.png`."""
    lines = [
        "| algorithm | masks | held-out exact match, per seed | mean | training exact match, mean of all steps |",
        "|---|---|---|---|---|",
    ]
    curves = {}
    for (algorithm, masks), _ in VARIANTS.items():
        runs = [read_run(folder_of(out, algorithm, masks, seed)) for seed in range(seeds)]
        done = [run for run in runs if run is not None]
        if not done:
            continue
        scores = [run["exact_match"] for run in done]
        area = [statistics.fmean(run["curve"]) for run in done]  # type: ignore[arg-type]
        cells = ", ".join(f"{score:.3f}" for score in scores)  # type: ignore[str-format]
        mean, mean_area = statistics.fmean(scores), statistics.fmean(area)  # type: ignore[type-var]
        lines.append(f"| {algorithm} | {masks} | {cells} | {mean:.3f} | {mean_area:.3f} |")
        curves[algorithm, masks] = [run["curve"] for run in done]
    draw(out / "ablation.png", curves)
    return "\n".join(lines)


def draw(path: Path, curves: dict[tuple[str, str], list[list[float]]]) -> None:
    """Exact match in training over steps, one panel per algorithm, mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    algorithms = sorted({algorithm for algorithm, _ in curves})
    figure, panels = plt.subplots(1, len(algorithms), figsize=(5 * len(algorithms), 3.6), sharey=True, squeeze=False)
    for panel, algorithm in zip(panels[0], algorithms, strict=True):
        for (name, masks), runs in curves.items():
            if name != algorithm:
                continue
            columns = list(zip(*runs, strict=False))
            steps = range(1, len(columns) + 1)
            panel.plot(steps, [statistics.fmean(column) for column in columns], label=masks)
            panel.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.15)
        panel.set_title(algorithm)
        panel.set_xlabel("optimizer step")
        panel.legend(frameon=False)
    panels[0][0].set_ylabel("exact match in training")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "mask_ablation")
    parser.add_argument("--report", action="store_true", help="only report the runs that are there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(0 if args.report else args.seeds):
        for (algorithm, masks), flags in VARIANTS.items():
            folder = folder_of(args.out, algorithm, masks, seed)
            if read_run(folder) is None:
                train_and_evaluate(folder, flags, seed, args.max_steps)
    table = report(args.out, args.seeds)
    (args.out / "ablation.md").write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
