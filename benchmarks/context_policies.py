"""What vLLM's prefix cache keeps where contexts are rewritten: the share of prompt tokens that need no computing.

    python benchmarks/context_policies.py [--json]

Every turn of a trajectory has a thought. Three of four call a tool, which answers with a text; the fourth is answered
by the user, so that the template drops the thoughts before it (`strip_thinking`). The policy follows a script, so that
all context policies see the same conversation. A real vLLM engine with a tiny model on the CPU gets every request that
the rollout makes, then the turn that the script says, so that its cache holds what it would hold if the model had said
it. `cached` is what the engine's own counters say about the requests alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
import trl
from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report, rounded
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from agent_r1_trl import tool
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import StepResult
from agent_r1_trl.generation import SamplingParams, VLLMGenerator
from agent_r1_trl.generation.base import Generation, Generator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.rollout.requests import derive_seed

WORDS = "There is a town by a river, and the people who live in it are at work. "
MAX_MODEL_LENGTH = 8192
COUNTERS = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")


def policies(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name in the table -> options of the rollout."""
    last, full = {"turns": args.keep}, {"tokens": args.context}
    return {
        "keep": {},
        "window": {"policy": "window", **last},
        "window, tokens": {"policy": "window", **last, **full},
        "drop_observations": {"policy": "drop_observations", **last},
        "drop_observations, tokens": {"policy": "drop_observations", **last, **full},
        "strip_thinking": {"policy": "strip_thinking"},
        "summarise": {"policy": "summarise", "summary_tokens": 128, **full},
    }


@tool
def look(room: int) -> str:
    """Look around.

    Args:
        room: Where.
    """
    return f"Room {room}."


class Engine:
    """A vLLM engine whose cache is filled with what a script says.

    Args:
        folder: where the tiny model is written.
        tokenizer: of the model.
        stop_token_ids: that end a turn.
        block_size: tokens that the cache keeps or loses together.
    """

    def __init__(self, folder: str, tokenizer: Any, stop_token_ids: list[int], block_size: int) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=MAX_MODEL_LENGTH,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(folder)
        self.generator = VLLMGenerator(
            folder, stop_token_ids=stop_token_ids, max_model_len=MAX_MODEL_LENGTH, max_num_seqs=1, dtype="float32",
            disable_log_stats=False, enable_prefix_caching=True, block_size=block_size,
        )  # fmt: skip

    def counts(self) -> list[float]:
        """Prompt tokens looked up in the cache so far, and those of them that it held."""
        found = {metric.name: getattr(metric, "value", 0) for metric in self.generator._engine.get_metrics()}
        return [found[name] for name in COUNTERS]

    async def fill(self, ids: list[int]) -> list[float]:
        """Let the engine compute these ids; returns what the counters have grown by."""
        before = self.counts()
        await self.generator.generate(ids, max_tokens=1, seed=0, params=SamplingParams())
        return [now - then for now, then in zip(self.counts(), before, strict=True)]


class Script(Generator):
    """Says the next turn of a script, or a summary, after the engine has computed the request."""

    def __init__(self, engine: Engine, turns: list[list[int]], summary: list[int], request: RolloutRequest) -> None:
        self.engine, self.turns, self.summary = engine, turns, summary
        self.turn_of = {derive_seed(request.seed, turn): turn for turn in range(len(turns))}
        self.asked, self.cached, self.num_requests = 0.0, 0.0, 0

    async def generate(self, prompt_ids: list[int], *, seed: int, **options: Any) -> Generation:
        """See the class."""
        asked, cached = await self.engine.fill(prompt_ids)
        self.asked, self.cached, self.num_requests = self.asked + asked, self.cached + cached, self.num_requests + 1
        ids = self.turns[self.turn_of[seed]] if seed in self.turn_of else self.summary
        await self.engine.fill([*prompt_ids, *ids])
        return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop="stop")


def roll_out(engine: Engine, tokenizer: Any, options: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Figures of one trajectory under these options."""
    strips = options.get("policy") == "strip_thinking"
    chat = ChatFormat(tokenizer, strips_reasoning=strips)
    thought = chat.truncate(WORDS * args.tokens, args.tokens // 4)
    sight = chat.truncate(WORDS * args.tokens, args.tokens // 2)

    class Env:
        tools = (look,)

        def reset(self, example: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": example["question"]}]

        def step(self, message: dict[str, Any]) -> StepResult:
            asked = message.get("tool_calls", ())
            answers = [
                {"role": "tool", "name": "look", "tool_call_id": call["id"], "content": sight} for call in asked
            ]
            return StepResult(answers or [{"role": "user", "content": sight}], 0.0, False, {})

        def close(self) -> None:
            pass

    def said(room: int) -> list[int]:
        message: dict[str, Any] = {"role": "assistant", "reasoning_content": f"Room {room}? {thought}"}
        if (room + 1) % 4 == 0:
            return chat.encode_reply({**message, "content": "It is not here."})
        function = {"name": "look", "arguments": {"room": room}}
        return chat.encode_reply(
            {**message, "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )

    turns = [said(room) for room in range(args.turns)]
    summary = chat.encode_reply({"role": "assistant", "content": "There was no key so far. " + WORDS * 3})
    request = RolloutRequest(example={"question": "Where is the key? " + WORDS * 8}, example_id="0", seed=0)
    script = Script(engine, turns, summary, request)
    limits = RolloutLimits(max_turns=args.turns, max_completion_length=10**6, context=options)
    runner = RolloutRunner(Env, script, chat, limits.within(MAX_MODEL_LENGTH))
    engine.generator._engine.reset_prefix_cache()
    (trajectory,) = runner.run([request])
    runner.close()
    assert sum(not turn.is_summary for turn in trajectory.turns) == args.turns, trajectory.error
    return {
        "cached": script.cached / script.asked,
        "prompt_tokens": script.asked / script.num_requests,
        "computed_tokens": (script.asked - script.cached) / script.num_requests,
        "rows": float(len(trajectory.rows)),
    }


def run(args: argparse.Namespace) -> list[dict[str, float]]:
    """All policies."""
    be_quiet()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.response_template = None  # the quickstart's own
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(folder, tokenizer, ChatFormat(tokenizer).stop_token_ids, args.block_size)
        try:
            each = policies(args).values()
            return [{"policy": i, **roll_out(engine, tokenizer, options, args)} for i, options in enumerate(each)]
        finally:
            engine.generator.close()


def show(rows: list[dict[str, float]], args: argparse.Namespace) -> None:
    """The table."""
    names = list(policies(args))
    cells = [
        [
            names[int(row["policy"])],
            f"{row['cached']:.0%}",
            *(f"{row[name]:,.0f}" for name in ("prompt_tokens", "computed_tokens", "rows")),
        ]
        for row in rows
    ]
    title = f"{args.turns} turns of {args.tokens} tokens, blocks of {args.block_size}"
    print_table(title, ["context", "cached", "prompt tokens", "computed tokens", "rows"], cells)


def main() -> None:
    """Sample all of them and print what was cached."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=24, help="of the trajectory (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=240, help="of a turn, about (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=4, help="context.turns (default: %(default)s)")
    parser.add_argument("--context", type=int, default=3000, help="context.tokens (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=32, help="of the cache (default: %(default)s)")
    args = parser.parse_args()
    check_at_least(parser, args, 1, "turns", "tokens", "keep", "context", "block_size")
    report(run(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
