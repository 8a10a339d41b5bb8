"""What the benchmarks share: quiet libraries, checked arguments, runs in a process of their own, tables and JSON."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table

MODEL = Path(__file__).resolve().parents[1] / "recipes" / "quickstart" / "model"
"""The quickstart's small model and its tokenizer."""


def be_quiet() -> None:
    """No warnings and progress bars between the figures."""
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def draw_latencies(*, count: int, num_calls: int, median: float, sigma: float, seed: int) -> list[list[float]]:
    """Log-normal seconds, to the millisecond: `num_calls` of them for each of `count` trajectories."""
    rng = random.Random(seed)
    return [[round(median * rng.lognormvariate(0.0, sigma), 3) for _ in range(num_calls)] for _ in range(count)]


def run_alone(
    program: str,
    arguments: Iterable[str],
    *,
    timeout: float | None = None,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON line that a run of `program` in a new process ends with.

    Args:
        program: a file.
        arguments: of the run.
        timeout: seconds after which it is killed, with all that it started; None: never.
        environment: variables besides those of this process.

    Raises:
        RuntimeError: the run failed, with what it wrote, or took too long.
    """
    command = [sys.executable, program, *arguments]
    variables = {**os.environ, **(environment or {})}
    name = " ".join([Path(program).name, *command[2:]])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=variables, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{name} took more than {timeout:.0f} s") from error
            raise
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{errors}")
    return json.loads(output.strip().splitlines()[-1])


# ---------------------------------------------------------------- arguments


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`, introduced by the first line of a program's docstring."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="after the table, print one line of JSON")
    return parser


def check_at_least(parser: argparse.ArgumentParser, args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse smaller values."""
    for name in names:
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)}: must be {least} or more.")


def check_not_negative(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """Refuse negative values, infinity and NaN."""
    for name in names:
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name}={getattr(args, name)}: must be a finite number >= 0.")


def check_pairs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse numbers of trajectories that TRL cannot put into groups of two."""
    if args.trajectories < 2 or args.trajectories % 2:
        parser.error(f"--trajectories={args.trajectories}: TRL needs groups of two; give an even number >= 2.")


# ---------------------------------------------------------------- results


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """Four decimals will do."""
    return {name: round(value, 4) for name, value in figures.items()}


def report(
    result: Any,
    args: argparse.Namespace,
    show: Callable[[Any, argparse.Namespace], None],
    *,
    figures: Callable[[Any], dict[str, Any]] = rounded,
) -> None:
    """Print what `show` makes of a result, and its `figures` as one line of JSON if they were asked for."""
    show(result, args)
    if args.json:
        print(json.dumps(figures(result)))


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]], *, num_names: int = 1) -> None:
    """Numbers to the right, the first `num_names` columns to the left."""
    table = Table(title=title)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column < num_names else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
