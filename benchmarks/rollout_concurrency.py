"""How long do trajectories wait for tools: our rollout against TRL's own tool loop.

    python benchmarks/rollout_concurrency.py [--json]

Part A: 32 trajectories, one call each to a tool that sleeps 0.1 s, then an answer. The *tool phase* is the wall time
minus that of the same rollout with a tool that does not sleep.

Part B: 32 trajectories of 3 turns (two calls, then an answer), latencies drawn from a log-normal distribution (median
0.2 s, sigma 1). No schedule can beat the *critical path*: the trajectory with the longest waits, sampled alone.

Both sides use the quickstart's model in one process, on the same prompts, and sample every token from a forward pass
of it. What is forced, on both sides alike, is which token comes out: just before the draw all logits but the
scripted token's are set to minus infinity (ours: `ForcedGenerator._sample`; TRL: a `LogitsProcessor` that
`_generate_single_turn` hands to `model.generate`). Everything else is each side's own: batching, cache, stopping,
parsing, tool execution, tokens of the next turn. Timed are `RolloutRunner.run` and TRL's `GRPOTrainer._generate`,
which holds its tool loop. Both sides must have sampled the same number of tokens and made the same calls, or the
benchmark fails. No prompt occurs twice, so neither side gains from shared prefixes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any, ClassVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

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
)
from _trl_loop import MAX_COMPLETION_LENGTH, TimedTrainer, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from agent_r1_trl import ToolEnv, tool
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner

ASSISTANT = "<|im_start|>assistant"


class Clock:
    """Whether tools sleep; the replies, and so the tokens, are the same either way."""

    is_running = True
    asked: ClassVar[list[float]] = []
    """Seconds of every call since the list was emptied."""


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    Clock.asked.append(seconds)
    if Clock.is_running:
        time.sleep(seconds)
    return "done"


class WaitEnv(ToolEnv):
    """One tool that sleeps; every trajectory is worth the same."""

    tools = (tool(wait),)

    def outcome_reward(self, trajectory):
        """Nothing to judge."""
        return True


@dataclass(kw_only=True)
class Script:
    """What each trajectory says, found again from the tokens it is asked to continue."""

    chat: ChatFormat
    latencies: list[list[float]]
    """Seconds, one list per trajectory, one call per entry; then comes the answer."""

    @functools.cached_property
    def replies(self) -> list[list[list[int]]]:
        """Token ids by trajectory and turn, the stop token included."""
        answer = {"role": "assistant", "content": "done"}
        return [
            [self.chat.encode_reply(message) for message in [*map(_call, latencies), answer]]
            for latencies in self.latencies
        ]

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """One conversation per trajectory, which names it."""
        return [[{"role": "user", "content": f"Wait, number {index}."}] for index in range(len(self.latencies))]

    def reply_to(self, ids: list[int]) -> list[int]:
        """The scripted turn for a context, padded or not."""
        text = self.chat.tokenizer.decode(ids)
        index = int(text.split("Wait, number ", 1)[1].split(".", 1)[0])
        return self.replies[index][text.count(ASSISTANT) - 1]


def _call(seconds: float) -> dict[str, Any]:
    function = {"name": "wait", "arguments": {"seconds": seconds}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def force(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """Logits (B, V) under which row `i` can only draw `token_ids[i]`."""
    columns = torch.tensor(token_ids, device=logits.device).unsqueeze(1)  # (B, 1)
    return torch.full_like(logits, -torch.inf).scatter(1, columns, logits.gather(1, columns))


# ---------------------------------------------------------------- ours


class ForcedGenerator(TransformersGenerator):
    """Our generator with the script's tokens drawn instead of the model's own choice."""

    script: Script

    def _sample(self, rows: list[Any], logits: torch.Tensor) -> None:
        for row in rows:
            if not row.token_ids:
                row.reply = self.script.reply_to(row.request.asked.prompt_ids)
        super()._sample(rows, force(logits, [row.reply[len(row.token_ids)] for row in rows]))


class Ours:
    """Our rollout; `roll_out` returns its seconds and the number of sampled tokens."""

    def __init__(self, model: Any, tokenizer: Any, max_turns: int) -> None:
        self.chat = ChatFormat(tokenizer)
        self.generator = ForcedGenerator(
            model, pad_token_id=tokenizer.pad_token_id, stop_token_ids=self.chat.stop_token_ids
        )
        limits = RolloutLimits(max_turns=max_turns, max_completion_length=MAX_COMPLETION_LENGTH)
        self.runner = RolloutRunner(WaitEnv, self.generator, self.chat, limits)

    def roll_out(self, script: Script, *, only: int | None = None) -> tuple[float, int]:
        """Sample all trajectories, or one of them alone."""
        self.generator.script = script
        indices = range(len(script.latencies)) if only is None else [only]
        prompts = script.prompts
        requests = [RolloutRequest(example={"prompt": prompts[i]}, example_id=str(i), seed=i) for i in indices]
        start = time.perf_counter()
        trajectories = self.runner.run(requests)
        seconds = time.perf_counter() - start
        return seconds, sum(trajectory.num_action_tokens for trajectory in trajectories)

    def close(self) -> None:
        """End the threads."""
        self.runner.close()
        self.generator.close()


# ---------------------------------------------------------------- TRL's


class ForceReplies(LogitsProcessor):
    """Per row, the script's next token; after its end the stop token, which `generate` ignores."""

    def __init__(self, replies: list[list[int]]) -> None:
        self.replies = replies
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) for the next token of each row."""
        token_ids = [reply[min(self.step, len(reply) - 1)] for reply in self.replies]
        self.step += 1
        return force(scores, token_ids)


class ForcedTrainer(TimedTrainer):
    """TRL's trainer; `_generate_single_turn` forces tokens."""

    script: Script

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        processor = ForceReplies([self.script.reply_to(ids) for ids in prompt_ids])
        self.model.generate = functools.partial(self.model.generate, logits_processor=LogitsProcessorList([processor]))
        try:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        finally:
            del self.model.generate


class Theirs:
    """TRL's generation step with its native tool loop; `roll_out` as for `Ours`."""

    def __init__(self, model: Any, tokenizer: Any, num_trajectories: int, output_dir: str) -> None:
        self.trainer = make_trainer(
            ForcedTrainer, model, tokenizer, num_trajectories=num_trajectories, output_dir=output_dir, tools=[wait]
        )

    def roll_out(self, script: Script) -> tuple[float, int]:
        """Sample all trajectories."""
        self.trainer.script = script
        return self.trainer.roll_out([{"prompt": prompt} for prompt in script.prompts])


# ---------------------------------------------------------------- the benchmark


def measure(ours: Ours, theirs: Theirs, script: Script, *, is_waiting: bool) -> tuple[float, float]:
    """Seconds of our rollout and of TRL's.

    Raises:
        RuntimeError: a side did not make the script's calls, or the two did not sample the same number of tokens.
    """
    Clock.is_running = is_waiting
    expected = sorted(itertools.chain(*script.latencies))
    seconds, tokens = [], []
    for side in (ours, theirs):
        Clock.asked.clear()
        side_s, num_tokens = side.roll_out(script)
        if sorted(Clock.asked) != expected:
            raise RuntimeError(f"{type(side).__name__} made {len(Clock.asked)} calls of {len(expected)}.")
        seconds.append(side_s)
        tokens.append(num_tokens)
    if tokens[0] != tokens[1]:
        raise RuntimeError(f"Our rollout sampled {tokens[0]} tokens, TRL's {tokens[1]}: no fair comparison.")
    return seconds[0], seconds[1]


def tool_phase(ours: Ours, theirs: Theirs, args: argparse.Namespace) -> dict[str, float]:
    """Part A."""
    script = Script(chat=ours.chat, latencies=[[args.latency]] * args.trajectories)
    measure(ours, theirs, script, is_waiting=False)  # warm-up
    rows = [
        (*measure(ours, theirs, script, is_waiting=True), *measure(ours, theirs, script, is_waiting=False))
        for _ in range(args.repeats)
    ]
    return {
        "tool_phase_s": statistics.median(row[0] - row[2] for row in rows),
        "tool_phase_max_s": max(row[0] - row[2] for row in rows),
        "trl_tool_phase_s": statistics.median(row[1] - row[3] for row in rows),
        "no_latency_s": statistics.median(row[2] for row in rows),
        "trl_no_latency_s": statistics.median(row[3] for row in rows),
    }


def long_tail(ours: Ours, theirs: Theirs, args: argparse.Namespace) -> dict[str, float]:
    """Part B."""
    latencies = draw_latencies(
        count=args.trajectories, num_calls=args.turns - 1, median=args.median, sigma=args.sigma, seed=args.seed
    )
    script = Script(chat=ours.chat, latencies=latencies)
    longest = max(range(len(latencies)), key=lambda index: sum(latencies[index]))
    measure(ours, theirs, script, is_waiting=False)  # warm-up
    rows = [
        (*measure(ours, theirs, script, is_waiting=True), ours.roll_out(script, only=longest)[0])
        for _ in range(args.repeats)
    ]
    our_s, trl_s, alone_s = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "rollout_s": our_s,
        "trl_rollout_s": trl_s,
        "ratio": trl_s / our_s,
        "critical_path_s": alone_s,
        "over_critical_path": our_s / alone_s,
        "longest_tools_s": sum(latencies[longest]),
        "all_tools_s": sum(map(sum, latencies)),
    }


def run(args: argparse.Namespace) -> dict[str, float]:
    """Both parts; seconds are medians over the repeats, except `tool_phase_max_s`."""
    be_quiet()
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        theirs = Theirs(model, AutoTokenizer.from_pretrained(MODEL), args.trajectories, folder)
        ours = Ours(model, AutoTokenizer.from_pretrained(MODEL), args.turns)
        try:
            return {**tool_phase(ours, theirs, args), **long_tail(ours, theirs, args)}
        finally:
            ours.close()


def show(result: dict[str, float], args: argparse.Namespace) -> None:
    """Print the result as a table."""
    value = {name: f"{seconds:.2f}" for name, seconds in result.items()}
    print_table(
        f"{args.trajectories} trajectories, seconds (median of {args.repeats})",
        ("", "ours", "TRL's loop", "bound"),
        [
            (f"A: rollout, tools of {args.latency:g} s, tool phase", value["tool_phase_s"], value["trl_tool_phase_s"],
             f"{args.latency:.2f}"),
            ("A: the same without latency", value["no_latency_s"], value["trl_no_latency_s"], ""),
            (f"B: {args.turns} turns, log-normal tools", value["rollout_s"], value["trl_rollout_s"],
             value["critical_path_s"]),
        ],
    )  # fmt: skip
    print(f"A: our longest tool phase of {args.repeats} was {value['tool_phase_max_s']} s.")
    print(
        f"B: {value['ratio']} times faster than TRL's loop; {value['over_critical_path']} times the critical path "
        f"(the longest trajectory alone, {value['longest_tools_s']} s of it in tools)."
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line.

    Raises:
        SystemExit: for a value out of range.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--trajectories", type=int, default=32, help="an even number (default: %(default)s)")
    parser.add_argument("--latency", type=float, default=0.1, help="A: seconds of each call (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="B: the answer included (default: %(default)s)")
    parser.add_argument("--median", type=float, default=0.2, help="B: median seconds (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=1.0, help="B: of the logarithm (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="medians are taken over these (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="B: of the latencies (default: %(default)s)")
    args = parser.parse_args(argv)
    check_pairs(parser, args)
    if args.turns < 2:
        parser.error(f"--turns={args.turns}: a call and an answer are two turns; give 2 or more.")
    check_not_negative(parser, args, "latency", "median", "sigma")
    check_at_least(parser, args, 1, "repeats")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    report(run(args), args, show)


if __name__ == "__main__":
    main()
