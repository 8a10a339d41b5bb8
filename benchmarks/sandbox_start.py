"""What isolation costs: sandboxes of both local backends, started one by one, then all at once.

    python benchmarks/sandbox_start.py [--json]

`sandlock` and `limits` take turns. A start is the first call of a trajectory's sandbox, which runs `1`; the calls
after it run on the same interpreter. `together_s` is the time until the last of `--sandboxes` that start at once has
answered.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _common import check_at_least, make_parser, print_table, report

from agent_r1_trl.features.sandbox.local import LocalSandbox
from agent_r1_trl.features.sandbox.tools import find_problems

BACKENDS = ("sandlock", "limits")
NAMES = {"alone_s": "first call", "call_s": "further calls", "together_s": "all at once, until the last one is ready"}


def main() -> None:
    """Start both, in turns."""
    parser = make_parser(__doc__)
    parser.add_argument("--sandboxes", type=int, default=64, help="that start at the same time")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    check_at_least(parser, args, 1, "sandboxes", "repeats")
    for problem in find_problems("sandlock", "python"):
        parser.error(problem)
    for backend in BACKENDS:
        start_alone(backend)  # the fork server starts with the first one
    rounds = [{backend: measure(backend, args.sandboxes) for backend in BACKENDS} for _ in range(args.repeats)]
    figures = {
        f"{backend}_{name}": statistics.median(of_round[backend][name] for of_round in rounds)
        for backend in BACKENDS
        for name in NAMES
    }
    figures |= {f"{name[:-2]}_ratio": figures[f"sandlock_{name}"] / figures[f"limits_{name}"] for name in NAMES}
    report(figures, args, show)


def measure(backend: str, num: int) -> dict[str, float]:
    """Seconds of one start, of a later call, and of `num` starts at once."""
    alone_s, call_s = start_alone(backend)
    sandboxes = [LocalSandbox(backend) for _ in range(num)]
    with ThreadPoolExecutor(num) as pool:
        together_s = timed(lambda: list(pool.map(answers, sandboxes)))
        list(pool.map(LocalSandbox.close, sandboxes))
    return {"alone_s": alone_s, "call_s": call_s, "together_s": together_s}


def start_alone(backend: Any) -> tuple[float, float]:
    """Seconds of the first call of a sandbox, and of the median of ten further ones."""
    sandbox = LocalSandbox(backend)
    seconds = [timed(lambda: answers(sandbox)) for _ in range(11)]
    sandbox.close()
    return seconds[0], statistics.median(seconds[1:])


def answers(sandbox: LocalSandbox) -> None:
    """Run a call, which must succeed."""
    result = sandbox.run("1")
    assert result.error is None, result.error


def timed(work: Callable[[], Any]) -> float:
    """Wall time, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def show(figures: dict[str, float], args: argparse.Namespace) -> None:
    """The table."""
    cells = [
        [
            text,
            *[f"{1e3 * figures[f'{backend}_{name}']:.1f}" for backend in BACKENDS],
            f"{figures[name[:-2] + '_ratio']:.1f}",
        ]
        for name, text in NAMES.items()
    ]
    print_table(f"Starting sandboxes, in ms; together: {args.sandboxes}", ["", *BACKENDS, "ratio"], cells)


if __name__ == "__main__":
    main()
