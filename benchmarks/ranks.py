"""How a step's time grows with the number of processes that share it: the same trajectories on 1, 2 and 4 ranks.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py [--kind ddp|zero2|zero3] [--json]

Every run trains the same small policy on the same ragged trajectories, which a script writes, so a step is bookkeeping
and an update. The wall time of a step is taken apart with what Linux counts for each thread: seconds on a processor,
seconds in which it could have run and no core was free, and the rest, in which it waited: for other ranks, for
sockets. Runs with other numbers of ranks take turns. Linux only.

With fewer cores than ranks a step cannot get faster with more ranks; then the processor seconds of all ranks together
say what more ranks cost, and the waiting says how much of it they spend on one another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "vllm" not in sys.modules:  # TRL would import it, which takes as long as all else
    sys.modules["vllm"] = None

from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from agent_r1_trl import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, ToolEnv
from agent_r1_trl.generation import ScriptedGenerator

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {"zero2": "cpu_2proc.yaml", "zero3": "cpu_2proc_zero3.yaml"}
WARM_UP = 2
GROUP_SIZE = 4
TIMES = ("step_s", "processor_s", "no_core_s", "waiting_s")


class ByLength(ToolEnv):
    """No tools; what is sampled earns by its length."""

    def outcome_reward(self, trajectory: Any) -> float:
        """Between 0 and 6."""
        return float(len(trajectory.completion_ids) % 7)


class Stopwatch(TrainerCallback):
    """`TIMES` of every step of this process."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        self.start = time.perf_counter(), *scheduled()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop."""
        ended = time.perf_counter(), *scheduled()
        wall, processor, no_core = (b - a for a, b in zip(self.start, ended, strict=True))
        self.steps.append([wall, processor, no_core, max(0.0, wall - processor - no_core)])


def scheduled() -> tuple[float, float]:
    """Seconds that this process's threads have run, and that they could have run without a free core."""
    nanoseconds = [0, 0]
    for path in Path("/proc/self/task").glob("*/schedstat"):
        values = path.read_text().split()
        nanoseconds = [total + int(value) for total, value in zip(nanoseconds, values, strict=False)]
    return nanoseconds[0] / 1e9, nanoseconds[1] / 1e9


def train(args: argparse.Namespace) -> list[float]:
    """Medians of `TIMES` over the steps of this rank."""
    be_quiet()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = AutoConfig.from_pretrained(MODEL)
    for name, value in {"hidden_size": args.width, "intermediate_size": 3 * args.width}.items():
        setattr(config, name, value)

    def answer(request: Any) -> list[int]:
        rng = random.Random(request.seed)
        length = min(args.longest, max(1, int(rng.lognormvariate(0, 0.8) * args.median)))
        return [*(rng.randrange(10, 700) for _ in range(length)), tokenizer.eos_token_id]

    stopwatch = Stopwatch()
    num_rows = args.steps * args.trajectories // GROUP_SIZE
    trainer = MultiTurnGRPOTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=MultiTurnGRPOConfig(
            output_dir=str(args.folder),
            per_device_train_batch_size=args.trajectories // int(os.environ["WORLD_SIZE"]),
            num_generations=GROUP_SIZE,
            max_steps=args.steps,
            max_turns=1,
            max_completion_length=args.longest + 1,
            update_layout="shared",
            learning_rate=1e-6,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            record_trajectories="none",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        env=ByLength,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"Task {row}."}]} for row in range(num_rows)]
        ),
        processing_class=tokenizer,
        generator=ScriptedGenerator(answer, stop_token_ids=[tokenizer.eos_token_id]),
        callbacks=[stopwatch],
    )
    trainer.train()
    return [statistics.median(column) for column in zip(*stopwatch.steps[WARM_UP:], strict=True)]


def launch(args: argparse.Namespace, num_ranks: int, argv: list[str]) -> list[list[float]]:
    """What each rank of a run measured.

    Raises:
        RuntimeError: the run failed, with what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        if args.kind == "ddp":
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            config = str(ROOT / "recipes" / "accelerate_configs" / CONFIGS[args.kind])
            start = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", port]
            start += ["--num_processes", str(num_ranks)]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # DeepSpeed calls ninja
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
        command = [sys.executable, *start, __file__, *argv, "--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{num_ranks} ranks failed:\n{done.stderr[-6000:]}")
        return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank-*.json"))]


def run(args: argparse.Namespace, argv: list[str]) -> list[dict[str, float]]:
    """One line for each number of ranks, medians over the repeats: the step of the slowest rank, else means."""
    found: dict[int, list[list[float]]] = {num_ranks: [] for num_ranks in args.ranks}
    for _, num_ranks in itertools.product(range(args.repeats), args.ranks):
        ranks = launch(args, num_ranks, argv)
        means = [statistics.mean(column) for column in zip(*ranks, strict=True)]
        found[num_ranks].append([max(rank[0] for rank in ranks), *means[1:]])
    lines = []
    for num_ranks, repeats in found.items():
        times = dict(zip(TIMES, (statistics.median(column) for column in zip(*repeats, strict=True)), strict=True))
        lines.append({"ranks": float(num_ranks), **times, "all_processors_s": num_ranks * times["processor_s"]})
    for line in lines:
        line["step_ratio"] = line["step_s"] / lines[0]["step_s"]
        line["processor_ratio"] = line["all_processors_s"] / lines[0]["all_processors_s"]
    return lines


def show(lines: list[dict[str, float]], args: argparse.Namespace) -> None:
    """Print the lines as a table."""
    print_table(
        f"{args.kind}: {args.trajectories} trajectories a step on {os.cpu_count()} cores; seconds of a step",
        ("ranks", "step", "ratio", "on a processor", "no core free", "waiting", "all processors", "ratio"),
        [
            [
                f"{line['ranks']:.0f}", f"{line['step_s']:.2f}", f"{line['step_ratio']:.2f}",
                *(f"{line[name]:.2f}" for name in (*TIMES[1:], "all_processors_s", "processor_ratio")),
            ]
            for line in lines
        ],
    )  # fmt: skip


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--kind", choices=("ddp", *CONFIGS), default="ddp", help="what is split (default: ddp)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="the first is the yardstick")
    parser.add_argument("--trajectories", type=int, default=32, help="of a step, of all ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--median", type=int, default=100, help="tokens of a trajectory (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=600, help="most tokens of one (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="hidden size of the policy (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each number of ranks (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    check_at_least(parser, args, 1, "median", "longest", "width", "repeats")
    for num_ranks in args.ranks:
        if num_ranks < 1 or args.trajectories < 1 or args.trajectories % (GROUP_SIZE * num_ranks):
            parser.error(
                f"--trajectories={args.trajectories}: must be a multiple of {GROUP_SIZE} for each of {num_ranks} "
                f"rank(s), such as {GROUP_SIZE * max(1, num_ranks) * 2}."
            )
    if args.steps <= WARM_UP:
        parser.error(f"--steps={args.steps}: {WARM_UP} steps warm up; give more.")
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure, or be one rank of a run."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    if args.folder is not None:
        file = args.folder / f"rank-{os.environ['RANK']}.json"
        file.write_text(json.dumps(train(args)))
        return
    if not Path("/proc/self/schedstat").exists():
        raise SystemExit("This program reads /proc/self/schedstat, which only Linux has.")
    report(run(args, argv), args, show, figures=lambda lines: {"rows": lines})


if __name__ == "__main__":
    main()
