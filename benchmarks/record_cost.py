"""What the columns beside the recorded trajectories cost: processor time in the update, and bytes on the disk.

    python benchmarks/record_cost.py [--trainer ppo] [--json]

The quickstart's small model samples with transformers and is trained; the environment answers at once. `share` is the
processor time of the code that collects and writes the columns over that of the training steps around it, `bytes` the
size of the columns over that of the trajectories beside them, both of one run. The first step warms up.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report
from datasets import Dataset
from journal_cost import Answering, Clock
from transformers import AutoTokenizer

from agent_r1_trl.recording import read_records, trajectory_files
from agent_r1_trl.recording.store import sidecar
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig, MultiTurnPPOTrainer

TRAINERS = {"grpo": (MultiTurnGRPOConfig, MultiTurnGRPOTrainer), "ppo": (MultiTurnPPOConfig, MultiTurnPPOTrainer)}


def run(args: argparse.Namespace) -> dict[str, float]:
    """Train `steps` steps after the first one."""
    be_quiet()
    make_config, make = TRAINERS[args.trainer]
    rows = [{"prompt": [{"role": "user", "content": f"Question {number}."}]} for number in range(args.trajectories)]
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            output_dir=folder, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, journal="false",
            per_device_train_batch_size=args.trajectories, num_generations=args.trajectories, beta=args.beta,
            max_steps=1 + args.steps, max_turns=args.turns, max_tokens_per_turn=args.tokens,
            max_completion_length=1024 - 128, **({"critic": "head"} if args.trainer == "ppo" else {}),
        )  # fmt: skip
        trainer = make(
            model=str(MODEL), args=config, env=Answering, train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            reward_funcs=lambda completions, **_: [*range(len(completions))],
        )  # fmt: skip
        clock, spent = Clock(), {"update": 0.0}
        for name in ("on_values", "check_loss", "on_step_end"):
            clock.watch(trainer.recorder, name)
        step = trainer.training_step

        def timed(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            if trainer.state.global_step < 1:
                clock.seconds = 0.0
            result = step(*given, **named)
            spent["update"] += (time.process_time() - start) * (trainer.state.global_step >= 1)
            return result

        trainer.training_step = timed
        trainer.train()
        files = trajectory_files(folder, split="train")
        sizes = [sum(path.stat().st_size for path in paths) for paths in (files, map(sidecar, files))]
        tokens = sum(record.trajectory.num_action_tokens for record in read_records(folder, split="train"))
    return {
        "share": clock.seconds / spent["update"],
        "bytes": sizes[1] / sizes[0],
        "bytes_per_token": sizes[1] / tokens,
        "step_s": spent["update"] / args.steps,
        "columns_s": clock.seconds / args.steps,
    }


def show(result: dict[str, float], args: argparse.Namespace) -> None:
    """Print the result as a table."""
    print_table(
        f"{args.trainer}: {args.trajectories} trajectories of {args.turns} turns, {args.steps} steps",
        ("", "processor seconds of a step"),
        [("rollout and update", f"{result['step_s']:.3f}"), ("columns", f"{result['columns_s']:.4f}")],
    )
    print(
        f"In the columns' code: {result['share']:.2%} of the processor time. On the disk: {result['bytes']:.1%} of "
        f"the trajectories, {result['bytes_per_token']:.1f} bytes per sampled token."
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--trainer", choices=TRAINERS, default="grpo")
    parser.add_argument("--trajectories", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each trajectory (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a turn (default: %(default)s)")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0 there is a reference (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are measured (default: %(default)s)")
    args = parser.parse_args(argv)
    check_at_least(parser, args, 1, "turns", "tokens", "steps")
    check_at_least(parser, args, 2, "trajectories")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    report(run(args), args, show)


if __name__ == "__main__":
    main()
