"""What a turn costs in a long rollout: our own processor time per turn, by the number of turns.

    python benchmarks/long_rollout.py [--context.policy window --context.turns 4] [--json]

The policy follows a script and takes no time: every turn is one tool call with a note in its arguments, and the tool
answers at once. What is measured is our own work. Every turn has the same number of tokens, so a cost that does not
grow with the context is the same for 4 turns (1,300 tokens) and for 200 (64,000). As many trajectories are sampled at
once in every rollout. The conversations are those of two model families, whose templates and calls have nothing in
common. Figures are processor milliseconds of all threads per turn, the smallest of `--repeats`:

- `rollout_ms`: the rollout (template, tokens, parsing, tools, environment, masks),
- `journal_ms`: the same with the rollout journal,
- `request_ms`: a request to a vLLM server, on our side; a server in another process answers at once,
- `reward_ms`: rewards on tokens, process and outcome,
- `record_ms`: writing the trajectories to disk,
- `view_ms`: showing one on the terminal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import trl
from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report, rounded
from transformers import AutoTokenizer

from agent_r1_trl import ToolEnv, tool
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.features.journal import RolloutLog
from agent_r1_trl.generation.base import Generation, Generator, SamplingParams, TrajectorySlot, current_slot
from agent_r1_trl.generation.vllm.server import VLLMServerGenerator
from agent_r1_trl.recording.store import TrajectoryStore
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.rollout.requests import derive_seed
from agent_r1_trl.trajectory import Trajectory

FAMILIES = {"qwen2.5": "qwen2_5.jinja", "llama3.1": "llama3_1.jinja"}
THINKING = {"qwen3": "qwen3.jinja", "qwen3, always": "qwen3.jinja"}
"""For `strip_thinking`: Qwen3 drops reasoning with the next user message, others (QwQ) with every message."""
LLAMA_TOKENS = [
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|python_tag|>",
]
WORDS = "There is a town by a river, and the people who live in it are at work. "
COSTS = ("rollout_ms", "journal_ms", "request_ms", "reward_ms", "record_ms", "view_ms")

# A vLLM server as far as a rollout needs one; it prints its port.
SERVER = """
import asyncio, json, sys
from aiohttp import web

async def models(request):
    return web.json_response({"data": [{"id": "policy"}]})

async def complete(request):
    body = await request.read()
    count = int(sys.argv[1])
    logprobs = {"tokens": ["token_id:7"] * count, "token_logprobs": [-1.0] * count}
    choice = {"finish_reason": "stop", "token_ids": [7] * count, "logprobs": logprobs}
    if b'"return_token_ids": true' in body:
        choice["prompt_token_ids"] = json.loads(body)["prompt"]
    return web.json_response({"model": "policy", "choices": [choice]})

async def main():
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/health", models), web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def chat_format(family: str) -> ChatFormat:
    """The quickstart's small tokenizer with the template and the special tokens of a family."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = Path(trl.__file__).parent / "chat_templates" / (FAMILIES | THINKING)[family]
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    if family.endswith("always"):
        rule = "loop.index0 > ns.last_query_index"
        assert rule in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(rule, "loop.last")
    tokenizer.response_template = None  # the quickstart's own
    if family.startswith("llama"):
        tokenizer.add_special_tokens({"additional_special_tokens": LLAMA_TOKENS})
        tokenizer.bos_token, tokenizer.eos_token = LLAMA_TOKENS[:2]
    return ChatFormat(tokenizer, strips_reasoning=family in THINKING)


class Script(Generator):
    """Says the turn that is next, at once; the seed of a request tells which one that is."""

    def __init__(self, turns: list[list[int]], requests: list[RolloutRequest]) -> None:
        self.turns = turns
        self.turn_of = {derive_seed(item.seed, turn): turn for item in requests for turn in range(len(turns))}

    async def generate(self, prompt_ids: list[int], *, seed: int, **options: Any) -> Generation:
        """The turn of the script."""
        ids = self.turns[self.turn_of[seed]]
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop="stop")


class Conversation:
    """What is said and done in all rollouts of a family.

    Args:
        family: of the model.
        num_tokens: of a turn, about.
    """

    def __init__(self, family: str, num_tokens: int) -> None:
        self.chat = chat_format(family)
        self.note = self.chat.truncate(WORDS * num_tokens, num_tokens // 4)
        self.sight = self.chat.truncate(WORDS * num_tokens, num_tokens // 2)

    def turns(self, count: int) -> list[list[int]]:
        """Ids of `count` turns."""
        functions = [{"name": "look", "arguments": {"room": turn, "note": self.note}} for turn in range(count)]
        calls = [[{"type": "function", "function": function}] for function in functions]
        reasoning = {"reasoning_content": self.note} if self.chat.reasoning_rule else {}
        return [
            self.chat.encode_reply({"role": "assistant", "content": "", "tool_calls": call, **reasoning})
            for call in calls
        ]

    def environment(self) -> type[ToolEnv]:
        """One tool that answers at once."""

        @tool
        async def look(room: int, note: str) -> str:
            """Look around.

            Args:
                room: Where.
                note: What to remember.
            """
            return f"Room {room}. {self.sight}"

        class Env(ToolEnv):
            tools = (look,)

            def outcome_reward(self, trajectory: Trajectory) -> float:
                return 1.0

        return Env


def timed(work: Callable[[], Any], args: argparse.Namespace, num_turns: int) -> tuple[float, Any]:
    """Milliseconds per turn, the smallest of `--repeats`, and what the last piece of work returned.

    Work on few turns is done several times, so that all figures are of about as many turns.
    """
    found, times = [], max(1, args.all_turns // num_turns)
    for _ in range(args.repeats):
        began = time.process_time()
        for _ in range(times):
            result = work()
        found.append(1000 * (time.process_time() - began) / num_turns / times)
    return min(found), result


def measure(said: Conversation, num_turns: int, args: argparse.Namespace, url: str) -> dict[str, float]:
    """All costs of rollouts with this number of turns."""
    count = args.trajectories
    requests = [RolloutRequest(example={"question": f"Start {i}."}, example_id=str(i), seed=i) for i in range(count)]
    generator = Script(said.turns(num_turns), requests)
    context = {"policy": args.context_policy, "turns": args.context_turns, "tokens": args.context_tokens}
    limits = RolloutLimits(max_turns=num_turns, max_completion_length=2**30, context=context)
    runner = RolloutRunner(said.environment(), generator, said.chat, limits)
    runner.run(requests)  # warms up
    costs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:

        def roll_out_with_journal() -> None:
            log = RolloutLog(Path(folder) / "rollout.journal", {"size": count})
            runner.run(requests, journal=log)
            log.close()

        num_sampled = count * num_turns
        costs["rollout_ms"], rolled_out = timed(lambda: runner.run(requests), args, num_sampled)
        costs["journal_ms"], _ = timed(roll_out_with_journal, args, num_sampled)
        costs["request_ms"], _ = timed(lambda: ask(url, rolled_out[0]), args, num_turns)
        costs["reward_ms"], _ = timed(lambda: [item.token_rewards() for item in rolled_out], args, num_sampled)
        store = TrajectoryStore(folder)
        costs["record_ms"], _ = timed(lambda: store.write(0, rolled_out), args, num_sampled)
        costs["view_ms"], _ = timed(lambda: rolled_out[0].show(said.chat.tokenizer), args, num_turns)
    runner.close()
    assert all(len(item.turns) == num_turns and len(item.tool_results) == num_turns for item in rolled_out)
    tokens = sum(len(item.completion_ids) for item in rolled_out) / count
    return {"turns": num_turns, "tokens": tokens, **costs}


def ask(url: str, trajectory: Trajectory) -> None:
    """Send the requests of a trajectory to a server, one after the other, as its rollout would."""
    generator = VLLMServerGenerator([url], stop_token_ids=[0])

    begins = {  # turn -> its row, and where in it
        row.turn_ids[place]: (row, place)
        for row in trajectory.rows
        for place in range(len(row.turn_ids))
        if row.turn_ids[place] >= 0 and (place == 0 or row.turn_ids[place - 1] != row.turn_ids[place])
    }

    async def requests() -> None:
        current_slot.set(TrajectorySlot())
        for _, (row, place) in sorted(begins.items(), key=lambda item: item[0]):
            context = row.prompt_ids + row.completion_ids[:place]
            await generator.generate(context, max_tokens=512, seed=0, params=SamplingParams())

    try:
        asyncio.run(requests())
    finally:
        generator.close()


def run(args: argparse.Namespace) -> list[dict[str, float]]:
    """All rollouts of all families."""
    be_quiet()
    rows = []
    server = subprocess.Popen([sys.executable, "-c", SERVER, "80"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        for index, family in enumerate(families(args)):
            said = Conversation(family, args.tokens)
            rows += [{"family": index, **measure(said, turns, args, url)} for turns in args.turns]
    finally:
        server.terminate()
        server.wait()
    return rows


def families(args: argparse.Namespace) -> list[str]:
    """Those whose templates the policy needs."""
    return list(THINKING if args.context_policy == "strip_thinking" else FAMILIES)


def show(rows: list[dict[str, float]], args: argparse.Namespace) -> None:
    """The table."""
    headings = ["family", "turns", "tokens", *(name.removesuffix("_ms") for name in COSTS)]
    cells = [
        [
            families(args)[int(row["family"])],
            *(f"{row[name]:,.0f}" for name in ("turns", "tokens")),
            *(f"{row[name]:.3f}" for name in COSTS),
        ]
        for row in rows
    ]
    print_table("Processor milliseconds per turn", headings, cells)


def main() -> None:
    """Sample all of them and print what a turn cost."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16, 64, 200], help="of a trajectory")
    parser.add_argument("--tokens", type=int, default=320, help="of a turn, about (default: %(default)s)")
    parser.add_argument("--trajectories", type=int, default=2, help="sampled at once (default: %(default)s)")
    parser.add_argument("--all-turns", type=int, default=400, help="over which a figure is taken, at least")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest one counts (default: %(default)s)")
    parser.add_argument(
        "--context.policy", dest="context_policy", default="keep", help="as in a recipe (default: %(default)s)"
    )
    parser.add_argument("--context.turns", dest="context_turns", type=int)
    parser.add_argument("--context.tokens", dest="context_tokens", type=int)
    args = parser.parse_args()
    for turns in args.turns:
        if turns < 1:
            parser.error(f"--turns={turns}: must be 1 or more.")
    check_at_least(parser, args, 1, "tokens", "trajectories", "all_turns", "repeats")
    report(run(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
