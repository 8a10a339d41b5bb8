"""Provoked collapses: does the monitor notice them in time, and does the guard undo them?

    python benchmarks/echo_trap.py --seeds 0 1 2 3 4 [--json]

Both recipes are the bandit's with mistakes that users make:

    repetition   a learning rate more than ten times too high that does not decay. The task is learned, and then one
                 update too many leaves a policy that says the same in every group; all earn the same, and no gradient
                 leads back.
    inaction     pulls that cost, and groups of four that are divided by their own spread (TRL's default). The better
                 arm pays on one pull in four, so in every third group nobody who pulled it was lucky, and whoever did
                 nothing there is praised as if that were right. In the end nobody pulls.

Every seed is trained twice, with the monitor alone and with the guard; both runs are equal until the guard acts.
Success is that of everything that was sampled, and is averaged over `WINDOW` rollouts.

What is in `--out` already is not trained again, so a measurement that was broken off goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from _common import be_quiet, check_at_least, make_parser, print_table, report, rounded
from transformers import TrainerCallback

from agent_r1_trl.cli.recipe import read_recipe
from agent_r1_trl.cli.resolve import resolve_env
from agent_r1_trl.cli.train import read_arguments, trainer_class
from agent_r1_trl.features.echo_trap.guard import CollapsedError
from agent_r1_trl.features.games.bandit import BanditEnv

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 10
"""Rollouts over which success is averaged: as many as make the monitor's baseline."""
NEVER = -1
"""Stands for a step that never came."""


class PaidPulls(BanditEnv):
    """The bandit with pulls that cost; to pull no arm costs nothing.

    Args:
        fee: what a pull costs.
        **settings: of `BanditEnv`.
    """

    def __init__(self, *, fee: float = 0.1, **settings: Any) -> None:
        self.fee = fee
        super().__init__(**settings)

    def act(self, action: str) -> dict[str, float]:
        """Pull an arm, and pay for it."""
        return {**super().act(action), "fee": -self.fee}


RECIPES: dict[str, dict[str, Any]] = {
    "repetition": {
        "recipe": "bandit",
        "learning_rate": 5e-3,
        "warmup_steps": 20,
        "num_generations": 8,
        "max_steps": 50,
    },
    "inaction": {
        "recipe": "bandit",
        "env": "echo_trap.PaidPulls",
        "env_kwargs": {
            "fee": 0.1,
            "sure_reward": 0.05,
            "invalid_action_reward": 0.0,
            "arms": [["Dragon", "Phoenix"]],  # the cold start prefers the better one of these
        },
        "num_generations": 4,
        "scale_rewards": "group",
        "learning_rate": 1.5e-4,
        "max_steps": 60,
    },
}
"""Name -> folder in `recipes/`, and what differs from its `grpo/config_cpu.yaml`."""
SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "lr_scheduler_type": "constant_with_warmup",
    "record_trajectories": "none",
    "journal": False,
    "logging_strategy": "no",
    "progress": "none",
}
GUARD: dict[str, dict[str, Any]] = {
    "repetition": {"echo": {"rate_factor": 0.2, "rate_steps": 100}},  # a rate of 1e-3, to the end of the run
    "inaction": {},
}
"""Settings of the guard that differ from its defaults."""
ACTIONS: dict[str, Any] = {"echo": {"actions": ["all"]}, "save_strategy": "steps", "save_steps": 5}


# ---------------------------------------------------------------- one run


class Watch(TrainerCallback):
    """Keeps what every optimizer step says, those included that a rollback undoes."""

    def __init__(self, trainer: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the monitor and the guard, which were added before."""
        trainer = self._trainer
        sampled = [*trainer.last_trajectories, *trainer.last_batch.replaced]
        self.steps.append(
            {
                "step": state.global_step,
                "success": statistics.fmean(item.info["success"] for item in sampled),
                "acted": statistics.fmean(item.info["num_actions"] > 0 for item in sampled),
                "state": trainer.features["echo_signals"].judge.verdict.state,
                "signals": sorted(trainer.features["echo_signals"].judge.verdict.signals),
            }
        )


def make_start(name: str, args: argparse.Namespace) -> Path:
    """The cold start of a recipe, made by its own script."""
    folder = args.out / f"start-{name}"
    if not (folder / "config.json").exists():
        script = ROOT / "recipes" / name / "make_cold_start.py"
        steps = ["--steps", str(args.cold_steps)] if args.cold_steps else []
        command = [sys.executable, str(script), "--out", str(folder), *steps]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder


def write_recipe(name: str, args: argparse.Namespace, seed: int, *, is_guarded: bool, folder: Path) -> Path:
    """The recipe of one run as a file, in JSON, which is YAML."""
    changes = dict(RECIPES[name])
    base = changes.pop("recipe")
    recipe = read_recipe(str(ROOT / "recipes" / base / "grpo" / "config_cpu.yaml"))
    env_kwargs = {**recipe["env_kwargs"], "max_idle_turns": 1, **changes.pop("env_kwargs", {})}
    start = make_start(base, args)
    values = {**recipe, **SHARED, **changes, "env_kwargs": env_kwargs, "model_name_or_path": str(start)}
    values |= {
        "seed": seed,
        "output_dir": str(folder),
        "echo": True,
        **({**ACTIONS, **GUARD[name]} if is_guarded else {}),
    }
    if args.max_steps:
        values["max_steps"] = args.max_steps
    path = folder / "recipe.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def train(name: str, args: argparse.Namespace, seed: int, *, is_guarded: bool) -> dict[str, Any]:
    """One run in this process: `steps` and `events` (what the guard did); read back if it was made before."""
    folder = args.out / f"{name}-{'guard' if is_guarded else 'plain'}-{seed}"
    result = folder / "steps.json"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path = write_recipe(name, args, seed, is_guarded=is_guarded, folder=folder)
        script, config, model = read_arguments(["--config", str(path)])
        config.model_init_kwargs = {"dtype": model.dtype}
        env = resolve_env(script.env, script.env_kwargs)
        trainer = trainer_class(script.trainer)(model=model.model_name_or_path, args=config, env=env)
        watch = Watch(trainer)
        trainer.add_callback(watch)
        try:
            trainer.train()
        except CollapsedError as error:  # the action `stop`
            print(error, file=sys.stderr)
        guard = trainer.features.get("echo_guard")
        events = [] if guard is None else guard.state.events
        result.write_text(json.dumps({"steps": watch.steps, "events": events}), encoding="utf-8")
    return json.loads(result.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- what it says


def smoothed(steps: Sequence[dict[str, Any]]) -> list[float]:
    """Success after each step, averaged over the last `WINDOW` rollouts (at the start over fewer)."""
    values = [step["success"] for step in steps]
    return [statistics.fmean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]


def first_step(flags: Sequence[bool]) -> int:
    """Number of the first step for which something holds; `NEVER` if there is none."""
    return next((number for number, flag in enumerate(flags, start=1) if flag), NEVER)


def summary(name: str, seed: int, plain: dict[str, Any], guarded: dict[str, Any]) -> dict[str, Any]:
    """One seed in numbers. Steps are counted as they were made, those that were undone included."""
    curve, with_guard = smoothed(plain["steps"]), smoothed(guarded["steps"])
    top = max(range(len(curve)), key=curve.__getitem__)
    is_halved = [place > top and value <= curve[top] / 2 for place, value in enumerate(curve)]
    states = [step["state"] for step in plain["steps"]]
    taken = [event["action"] for event in guarded["events"] if event["outcome"] == "taken"]
    return {
        "recipe": list(RECIPES).index(name),
        "seed": seed,
        "start": curve[min(WINDOW, len(curve)) - 1],
        "best": curve[top],
        "halved": first_step(is_halved),
        "warned": first_step([state not in ("healthy", "converged") for state in states]),
        "collapsing": first_step([state in ("collapsing", "collapsed") for state in states]),
        "end": curve[-1],
        "guard_best": max(with_guard),
        "guard_end": with_guard[-1],
        "guard_steps": len(with_guard),
        "rollbacks": taken.count("rollback"),
        "actions": len(taken),
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per recipe and seed; draws the plots."""
    rows, curves = [], {}
    for name in args.recipes:
        for seed in args.seeds:
            plain = train(name, args, seed, is_guarded=False)
            guarded = train(name, args, seed, is_guarded=True)
            rows.append(summary(name, seed, plain, guarded))
            curves[name, seed] = (plain, guarded)
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            draw(args.plots / f"echo_trap_{name}.png", name, {seed: curves[name, seed] for seed in args.seeds})
    return rows


def draw(path: Path, name: str, curves: dict[int, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Success over the steps made, one panel per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(3.0 * len(curves), 2.9), sharey=True, squeeze=False)
    for panel, (seed, (plain, guarded)) in zip(panels[0], curves.items(), strict=True):
        for run, color, label in ((plain, "tab:red", "without the guard"), (guarded, "tab:blue", "with it")):
            values = [step["success"] for step in run["steps"]]
            panel.plot(range(1, len(values) + 1), values, color=color, alpha=0.25, linewidth=1)
            panel.plot(range(1, len(values) + 1), smoothed(run["steps"]), color=color, label=label)
        for event in guarded["events"]:
            if event["outcome"] == "taken":
                is_back = event["action"] == "rollback"
                panel.axvline(event["total_steps"], color="black", linestyle="-" if is_back else ":", linewidth=0.8)
        panel.set(title=f"{name}, seed {seed}", xlabel="optimizer steps made", ylim=(-0.03, 1.03))
    panels[0][0].set_ylabel("success")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


# ---------------------------------------------------------------- the command


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the options."""
    parser = make_parser(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the runs (default: 0)")
    parser.add_argument("--max-steps", type=int, default=0, help="of every run (default: those of the recipes)")
    parser.add_argument(
        "--cold-steps", type=int, default=0, help="of the cold starts (default: those of their scripts)"
    )
    parser.add_argument("--out", type=Path, help="folder of the runs (default: one that is deleted)")
    parser.add_argument("--plots", type=Path, help="folder for a plot of each recipe (default: none is drawn)")
    args = parser.parse_args(argv)
    check_at_least(parser, args, 0, "max_steps", "cold_steps")
    return args


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table."""

    def step(value: int) -> str:
        return "never" if value == NEVER else str(value)

    print_table(
        f"Success over {WINDOW} rollouts, and the steps of the verdicts",
        ["recipe", "seed", "best", "warning", "collapsing", "halved", "end", "guarded", "rollbacks"],
        [
            [
                list(RECIPES)[row["recipe"]], str(row["seed"]), f"{row['best']:.2f}",
                *(step(row[key]) for key in ("warned", "collapsing", "halved")),
                f"{row['end']:.2f}", f"{row['guard_end']:.2f}", str(row["rollbacks"]),
            ]
            for row in rows
        ],
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    be_quiet()
    logging.getLogger("agent_r1_trl").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        args.out = (args.out or Path(folder)).resolve()
        args.plots = args.plots.resolve() if args.plots else None
        os.chdir(ROOT)  # the recipes' paths start here
        report(measure(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
