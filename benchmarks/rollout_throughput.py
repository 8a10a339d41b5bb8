"""How fast are rollouts with vLLM: TRL's native tool loop, our loop with a barrier after every turn, and ours.

    python benchmarks/rollout_throughput.py [--json]

64 trajectories of 1, 3 and 6 turns. Every turn but the last calls a tool whose latency is drawn from a log-normal
distribution (median 0.2 s, sigma 1; the same seeded latencies for every loop). All loops use one vLLM engine, one
environment class (TRL's `environment_factory` protocol, which ours accepts as well) and one policy: the quickstart's
small model, which first learns, in some seconds, to call the tool until the tool says stop. So every token is sampled
by the model, greedily, and every loop must make the same calls and sample the same number of tokens, or the program
fails.

What differs is the schedule. TRL sends the turns of all trajectories to the engine and waits for the last one, then
runs the calls, a synchronous tool one after the other. The barrier runs calls at the same time and lets nobody go on
before the last has its result. Ours lets every trajectory go on as soon as its own tool has answered.

No schedule can beat the *bound*, the larger of (a) the longest trajectory's own tool time plus its own decoding run
alone and (b) the same rollout with tools that take no time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from typing import Any, ClassVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from _common import (
    MODEL,
    be_quiet,
    check_at_least,
    check_not_negative,
    check_pairs,
    draw_latencies,
    make_parser,
    print_table,
    report,
    rounded,
)
from _trl_loop import MAX_COMPLETION_LENGTH, TimedTrainer, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import TRLEnvAdapter
from agent_r1_trl.generation import GenerationRequest, SamplingParams, VLLMGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner

MAX_TOKENS_PER_TURN = 48
AGAIN, STOP, ANSWER = "again", "stop", "done"
GREEDY = SamplingParams(temperature=0.0)


# ---------------------------------------------------------------- the task


class WaitTask:
    """A tool that takes its time; TRL's environment protocol."""

    latencies: ClassVar[list[list[float]]] = []
    """Seconds of the calls, one list per trajectory."""
    is_waiting: ClassVar[bool] = True
    calls: ClassVar[list[float]] = []
    """Seconds of every call since the list was emptied."""

    def reset(self, task: int, **row: Any) -> None:
        """Begin trajectory `task`."""
        self.waits = list(self.latencies[task])

    def wait(self) -> str:
        """Wait for the tool."""
        seconds = self.waits.pop(0) if self.waits else 0.0
        self.calls.append(seconds)
        if self.is_waiting:
            time.sleep(seconds)
        return AGAIN if self.waits else STOP


def rows_of(num_trajectories: int, num_calls: int) -> list[dict[str, Any]]:
    """The data set: what the policy is asked for, and which latencies are the trajectory's."""
    order = "Wait" if num_calls else "Answer"
    return [{"prompt": _user(f"{order}, number {task}."), "task": task} for task in range(num_trajectories)]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def teach(model: Any, chat: ChatFormat, args: argparse.Namespace) -> None:
    """Supervised learning: call the tool until it says stop, then answer."""
    torch.manual_seed(args.seed)
    schemas = [tool.schema for tool in TRLEnvAdapter(WaitTask).tools]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "wait", "arguments": {}}}],
    }
    answer = {"role": "assistant", "content": ANSWER}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(args.lessons):
        examples = []
        for num_calls in (0, 2, 5, 0, 2, 5, 1, 4):
            prompt = rows_of(args.trajectories, num_calls)[random.randrange(args.trajectories)]["prompt"]
            ids = chat.encode_prompt(prompt, schemas)
            mask = [False] * len(ids)
            for index in range(num_calls + 1):
                reply = chat.encode_reply(answer if index == num_calls else call)
                ids, mask = ids + reply, mask + [True] * len(reply)
                if index < num_calls:
                    said = AGAIN if index < num_calls - 1 else STOP
                    message = {"role": "tool", "name": "wait", "content": said}
                    between = chat.encode_observations(call, [message])[0]
                    ids, mask = ids + between, mask + [False] * len(between)
            examples.append((torch.tensor(ids), torch.tensor(mask)))
        ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in examples], batch_first=True)  # (B, L)
        mask = torch.nn.utils.rnn.pad_sequence([mask for _, mask in examples], batch_first=True)
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---------------------------------------------------------------- the loops


class Ours:
    """Our rollout; `roll_out` returns its seconds and the number of sampled tokens."""

    def __init__(self, generator: VLLMGenerator, chat: ChatFormat) -> None:
        limits = RolloutLimits(
            max_turns=8, max_completion_length=MAX_COMPLETION_LENGTH, max_tokens_per_turn=MAX_TOKENS_PER_TURN
        )
        self.runner = RolloutRunner(self.make_env, generator, chat, limits, GREEDY)

    def make_env(self) -> TRLEnvAdapter:
        """One environment per trajectory."""
        return TRLEnvAdapter(WaitTask)

    def roll_out(self, rows: list[dict[str, Any]]) -> tuple[float, int]:
        """Sample one trajectory per row."""
        requests = [RolloutRequest(example=row, example_id=str(row["task"]), seed=row["task"]) for row in rows]
        start = time.perf_counter()
        trajectories = self.runner.run(requests)
        return time.perf_counter() - start, sum(trajectory.num_action_tokens for trajectory in trajectories)


class WithBarrier(Ours):
    """Ours, but nobody goes on to the next turn before all have their results."""

    def roll_out(self, rows: list[dict[str, Any]]) -> tuple[float, int]:
        """Sample one trajectory per row, all with the same number of turns."""
        self.barrier = asyncio.Barrier(len(rows))
        return super().roll_out(rows)

    def make_env(self) -> TRLEnvAdapter:
        """An environment that meets the others after its tool."""
        barrier = self.barrier

        class Meeting(TRLEnvAdapter):
            async def step(self, message: Any) -> Any:
                result = await super().step(message)
                if not result[2]:  # not done
                    await barrier.wait()
                return result

        return Meeting(WaitTask)


class EngineTrainer(TimedTrainer):
    """TRL's trainer on the given engine."""

    generator: VLLMGenerator

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        async def generate_all() -> list[Any]:
            return await asyncio.gather(
                *(
                    self.generator.generate(
                        GenerationRequest(prompt_ids=ids, max_tokens=MAX_TOKENS_PER_TURN, params=GREEDY)
                    )
                    for ids in prompt_ids
                )
            )

        generations = asyncio.run(generate_all())
        return [generation.token_ids for generation in generations], None


# ---------------------------------------------------------------- the benchmark


def roll_out(
    side: Ours | EngineTrainer, rows: list[dict[str, Any]], *, is_waiting: bool, expected: list[float]
) -> tuple:
    """Seconds and sampled tokens of one rollout.

    Raises:
        RuntimeError: the loop did not make the expected calls.
    """
    WaitTask.is_waiting = is_waiting
    WaitTask.calls.clear()
    seconds, num_tokens = side.roll_out(rows)
    if sorted(WaitTask.calls) != sorted(expected):
        raise RuntimeError(f"{type(side).__name__} made {len(WaitTask.calls)} calls of {len(expected)}.")
    return seconds, num_tokens


def measure(sides: dict[str, Ours | EngineTrainer], num_turns: int, args: argparse.Namespace) -> dict[str, float]:
    """One row: seconds are medians over the repeats, TRL's loop runs once.

    Raises:
        RuntimeError: the loops did not make the same calls and sample the same number of tokens.
    """
    latencies = WaitTask.latencies = draw_latencies(
        count=args.trajectories, num_calls=num_turns - 1, median=args.median, sigma=args.sigma, seed=args.seed
    )
    rows = rows_of(args.trajectories, num_turns - 1)
    every_call = list(itertools.chain(*latencies))
    longest = max(range(len(rows)), key=lambda task: sum(latencies[task]))
    columns: dict[str, list[float]] = {}
    tokens = set()

    def time_it(name: str, side: str, *, is_waiting: bool = True, alone: bool = False) -> None:
        chosen, expected = ([rows[longest]], latencies[longest]) if alone else (rows, every_call)
        seconds, num_tokens = roll_out(sides[side], chosen, is_waiting=is_waiting, expected=expected)
        columns.setdefault(name, []).append(seconds)
        if not alone:
            tokens.add(num_tokens)

    roll_out(sides["ours"], rows, is_waiting=False, expected=every_call)  # warm-up
    for _ in range(args.repeats):
        time_it("ours", "ours")
        time_it("barrier", "barrier")
        time_it("no_latency", "ours", is_waiting=False)
        time_it("decoding", "ours", is_waiting=False, alone=True)
    time_it("trl", "trl")
    if len(tokens) != 1:
        raise RuntimeError(f"The loops sampled {sorted(tokens)} tokens: no fair comparison.")
    median = {name: statistics.median(values) for name, values in columns.items()}
    bound = max(sum(latencies[longest]) + median["decoding"], median["no_latency"])
    return {
        "turns": num_turns,
        "speedup": median["trl"] / median["ours"],
        "over_barrier": median["barrier"] / median["ours"],
        "over_bound": median["ours"] / bound,
        "ours_s": median["ours"],
        "barrier_s": median["barrier"],
        "trl_s": median["trl"],
        "bound_s": bound,
        "no_latency_s": median["no_latency"],
        "longest_tools_s": sum(latencies[longest]),
        "tokens": tokens.pop(),
    }


def run(args: argparse.Namespace) -> list[dict[str, float]]:
    """One row per number of turns."""
    be_quiet()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    chat = ChatFormat(tokenizer)
    teach(model, chat, args)
    generator = VLLMGenerator(
        model, stop_token_ids=chat.stop_token_ids, max_model_len=1024, max_num_seqs=args.trajectories
    )
    with tempfile.TemporaryDirectory() as folder:
        trl_loop = make_trainer(
            EngineTrainer,
            model,
            tokenizer,
            num_trajectories=args.trajectories,
            output_dir=folder,
            environment_factory=WaitTask,
        )
        trl_loop.generator = generator
        sides = {"ours": Ours(generator, chat), "barrier": WithBarrier(generator, chat), "trl": trl_loop}
        try:
            return [measure(sides, num_turns, args) for num_turns in args.turns]
        finally:
            sides["ours"].runner.close()
            sides["barrier"].runner.close()
            generator.close()


def show(rows: list[dict[str, float]], args: argparse.Namespace) -> None:
    """Print the rows as a table."""
    names = ("ours_s", "barrier_s", "trl_s", "bound_s", "speedup", "over_barrier", "over_bound")
    print_table(
        f"{args.trajectories} trajectories, seconds (median of {args.repeats}; TRL's loop once)",
        ("turns", "ours", "barrier", "TRL's loop", "bound", "TRL / ours", "barrier / ours", "ours / bound"),
        [(str(row["turns"]), *(f"{row[name]:.2f}" for name in names)) for row in rows],
        num_names=0,
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--trajectories", type=int, default=64, help="an even number (default: %(default)s)")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3, 6], help="rows (default: %(default)s)")
    parser.add_argument("--median", type=float, default=0.2, help="seconds of a call (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm (default: %(default)s)")
    parser.add_argument("--lessons", type=int, default=60, help="steps in which the policy learns the task")
    parser.add_argument("--repeats", type=int, default=3, help="medians are taken over these (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the latencies (default: %(default)s)")
    args = parser.parse_args(argv)
    check_pairs(parser, args)
    if not all(1 <= num_turns <= 6 for num_turns in args.turns):
        parser.error(f"--turns={args.turns}: the policy learns 1 to 6 turns; give numbers from 1 to 6.")
    check_not_negative(parser, args, "median", "sigma")
    check_at_least(parser, args, 1, "repeats", "lessons")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    report(run(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
