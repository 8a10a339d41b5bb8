"""What the rollout journal costs: the same rollout with and without it, one after the other, several times.

    python benchmarks/journal_cost.py [--json]

The quickstart's small model samples with transformers, trajectories have several turns, and the environment answers at
once: nothing hides the journal's work. `share` is the processor time of the journal's own code (encoding, checksums,
writing) over that of the rollout with it; `ratio` compares the wall time of both rollouts, in which other work on the
machine shows as well. `resume_s` is what it takes to read the rollout back instead of sampling it; what comes back
must be what was sampled, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.features.journal import RolloutLog, log, recorders
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.generation import SamplingParams, TransformersGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner

OBSERVATION = "Here is what was found: " + "a fact about a place, its river and its people. " * 6


class Answering:
    """Answers every message at once with some hundred tokens."""

    tools = ()

    def reset(self, example: dict[str, Any]) -> list[dict[str, str]]:
        """The question."""
        return example["prompt"]

    def step(self, message: dict[str, Any]) -> tuple:
        """Never done: the limit of turns ends the trajectory."""
        return [{"role": "user", "content": OBSERVATION}], 0.1, False, {}


class Clock:
    """Processor seconds of the functions that it watches; they do not call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        """Time each call of `owner.name` from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        setattr(owner, name, timed)


def watched() -> Clock:
    """A clock over everything that the journal does while a rollout runs."""
    clock = Clock()
    for name in ("checksum_ids", "pack_ids", "pack_floats", "step_record"):
        clock.watch(recorders, name)
    for name in ("describe_request", "trajectory_record"):
        clock.watch(log, name)
    clock.watch(log.Appender, "append")
    return clock


def run(args: argparse.Namespace) -> dict[str, float]:
    """Sample `repeats` pairs of rollouts."""
    be_quiet()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    chat = ChatFormat(tokenizer)
    generator = TransformersGenerator(
        model,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=chat.stop_token_ids,
        max_batch_size=args.trajectories,
    )
    limits = RolloutLimits(max_turns=args.turns, max_tokens_per_turn=args.tokens, max_completion_length=1024 - 128)
    runner = RolloutRunner(Answering, generator, chat, limits, SamplingParams())
    prompts = [[{"role": "user", "content": f"Question {number}."}] for number in range(args.trajectories)]
    requests = [RolloutRequest(example={"prompt": prompt}, seed=seed) for seed, prompt in enumerate(prompts)]
    clock, plain, kept, shares, resumed = watched(), [], [], [], []

    def roll_out(journal: RolloutLog | None) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        trajectories = runner.run(requests, journal=journal)
        return time.perf_counter() - start, [trajectory.completion_ids for trajectory in trajectories]

    roll_out(None)  # warms up
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            path = Path(folder) / f"{repeat}.journal"
            seconds, _ = roll_out(None)
            plain.append(seconds)
            clock.seconds, start = 0.0, time.process_time()
            seconds, ids_with = roll_out(RolloutLog(path, {"size": len(requests)}))
            kept.append(seconds)
            shares.append(clock.seconds / (time.process_time() - start))
            start = time.perf_counter()
            seconds, ids_again = roll_out(RolloutLog(path, {}, recorded=read_rollout(path)))
            resumed.append(time.perf_counter() - start)
            if ids_with != ids_again:
                raise RuntimeError("The journal gave back other tokens than were sampled.")
        num_bytes = path.stat().st_size
    runner.close()
    generator.close()
    return {
        "share": statistics.median(shares),
        "ratio": statistics.median(with_ / without for with_, without in zip(kept, plain, strict=True)),
        "rollout_s": statistics.median(plain),
        "with_journal_s": statistics.median(kept),
        "resume_s": statistics.median(resumed),
        "bytes_per_token": num_bytes / sum(map(len, ids_with)),
        "megabytes": num_bytes / 1e6,
    }


def show(result: dict[str, float], args: argparse.Namespace) -> None:
    """Print the result as a table."""
    print_table(
        f"{args.trajectories} trajectories of {args.turns} turns (median of {args.repeats})",
        ("", "seconds"),
        [
            ("rollout", f"{result['rollout_s']:.3f}"),
            ("with the journal", f"{result['with_journal_s']:.3f}"),
            ("out of the journal", f"{result['resume_s']:.3f}"),
        ],
    )
    print(
        f"In the journal's code: {result['share']:.2%} of the processor time; wall time with over without: "
        f"{result['ratio']:.3f}. {result['megabytes']:.2f} MB, {result['bytes_per_token']:.0f} bytes per token."
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--trajectories", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each trajectory (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of rollouts (default: %(default)s)")
    args = parser.parse_args(argv)
    check_at_least(parser, args, 1, "trajectories", "turns", "tokens", "repeats")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    report(run(args), args, show)


if __name__ == "__main__":
    main()
