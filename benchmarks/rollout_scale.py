"""What a rollout of very many trajectories costs in one process, apart from sampling.

    python benchmarks/rollout_scale.py [--json]

The policy follows a script (two calls, then an answer) and takes no time, and the tool sleeps 1 s, so what is left is
our own work: chat template, tokens, parsing, tools, environments, bookkeeping. Four rollouts: 1,000 trajectories at
once, and 5,000 of which 1,000 are sampled at once; each with an async tool and with a plain one, which needs a thread.
Measured are wall time, processor time per turn (all threads), and the largest number of threads, open files and
resident memory, read from /proc every 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import threading
import time
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from _common import MODEL, be_quiet, check_not_negative, make_parser, print_table, report, rounded
from transformers import AutoTokenizer

from agent_r1_trl import ToolEnv, tool
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation.base import Generation, Generator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner

SLEEP = {"seconds": 1.0}


@tool
async def async_wait(query: str) -> str:
    """Wait without a thread.

    Args:
        query: Anything.
    """
    await asyncio.sleep(SLEEP["seconds"])
    return "nothing found"


@tool(name="async_wait")
def plain_wait(query: str) -> str:
    """Wait on a thread.

    Args:
        query: Anything.
    """
    time.sleep(SLEEP["seconds"])
    return "nothing found"


class Instant(Generator):
    """Says the turn that is next, at once."""

    def __init__(self, chat: ChatFormat, turns: list[list[int]]) -> None:
        self.turns = turns
        self.end = turns[0][-1]
        self.first = chat.encode_prompt([{"role": "user", "content": "?"}]).count(self.end)

    async def generate(self, prompt_ids: list[int], **options: Any) -> Generation:
        """A turn and the observation after it end with one such token each."""
        ids = self.turns[(prompt_ids.count(self.end) - self.first) // 2]
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop="stop")


class Peaks(threading.Thread):
    """The largest number of threads, open files and megabytes while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.has_ended = threading.Event()
        self.threads = self.files = 0
        self.megabytes = 0.0

    def run(self) -> None:
        """Look every 50 ms."""
        page = resource.getpagesize()
        while not self.has_ended.wait(0.05):
            self.threads = max(self.threads, threading.active_count())
            self.files = max(self.files, len(os.listdir("/proc/self/fd")))
            with open("/proc/self/statm", encoding="ascii") as file:
                self.megabytes = max(self.megabytes, int(file.read().split()[1]) * page / 2**20)


def roll_out(chat: ChatFormat, item: Any, trajectories: int, at_once: int, workers: int) -> dict[str, float]:
    """One rollout."""

    class Env(ToolEnv):
        tools = (item,)
        max_tool_workers = workers

        def outcome_reward(self, trajectory: Any) -> float:
            return 1.0

    function = {"name": "async_wait", "arguments": {"query": "the capital of Norway"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    turns = [chat.encode_reply(message) for message in (call, call, {"role": "assistant", "content": "Oslo"})]
    generator = Instant(chat, turns)
    runner = RolloutRunner(Env, generator, chat, RolloutLimits(max_concurrency=at_once))
    requests = [
        RolloutRequest(example={"prompt": f"Question {i // 8}?"}, example_id=str(i // 8), generation=i % 8, seed=i)
        for i in range(trajectories)
    ]
    peaks = Peaks()
    peaks.start()
    began, spent = time.perf_counter(), time.process_time()
    rolled_out = runner.run(requests)
    seconds, processor = time.perf_counter() - began, time.process_time() - spent
    peaks.has_ended.set()
    runner.close()
    num_turns = sum(len(trajectory.turns) for trajectory in rolled_out)
    assert num_turns == 3 * trajectories, "the script was not followed"
    return {
        "seconds": seconds,
        "processor_ms_per_turn": 1000 * processor / num_turns,
        "threads": peaks.threads,
        "files": peaks.files,
        "mb": peaks.megabytes,
    }


def show(rows: list[dict[str, float]], args: argparse.Namespace) -> None:
    """The table."""
    headings = ["tool is", "trajectories", "seconds", "processor ms per turn", "threads", "files", "MB"]
    names = ["is_async", "trajectories", "seconds", "processor_ms_per_turn", "threads", "files", "mb"]
    cells = [
        [
            "async" if row["is_async"] else "plain",
            *(f"{row[name]:.3g}" if name[0] == "p" else f"{row[name]:.0f}" for name in names[1:]),
        ]
        for row in rows
    ]
    print_table(f"{args.at_once} trajectories at once, a tool that takes {args.latency:g} s", headings, cells)


def main() -> None:
    """Sample all four and print them."""
    parser = make_parser(__doc__)
    parser.add_argument("--at-once", type=int, default=1000, help="trajectories that are sampled at once")
    parser.add_argument("--queue", type=int, default=5000, help="trajectories of the longer rollouts")
    parser.add_argument("--latency", type=float, default=1.0, help="seconds that the tool sleeps")
    parser.add_argument("--workers", type=int, default=1000, help="max_tool_workers of the plain tool")
    args = parser.parse_args()
    for name in ("at_once", "queue", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)}: must be 1 or more.")
    check_not_negative(parser, args, "latency")
    be_quiet()
    SLEEP["seconds"] = args.latency
    chat = ChatFormat(AutoTokenizer.from_pretrained(MODEL))
    rows = []
    for item in (async_wait, plain_wait):
        for trajectories in (args.at_once, args.queue):
            figures = roll_out(chat, item, trajectories, args.at_once, args.workers)
            rows.append({"is_async": item is async_wait, "trajectories": trajectories, **figures})
    report(rows, args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
