"""Make the CPU variant's starting point: a tiny model that can call functions, but does it carelessly.

Trains a tokenizer and a 3-layer Qwen3 from scratch on demonstrations of made-up tasks (those of `data/` are never
read). Of three demonstrators, one does what was asked, one forgets the last call, and one does not look first.
Training adds the judgement. It takes some eight processor minutes.

    python recipes/function_calling/make_model.py
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from env import call
from tasks import SCHEMAS, Call, draw_task
from tiny_model import Messages, cold_start, make_parser

SHARES = {"careful": 0.4, "forgetful": 0.4, "hasty": 0.2}


def demonstration(rng: random.Random) -> Messages:
    """One conversation by a demonstrator drawn from `SHARES`."""
    row, turns = draw_task(rng)
    demonstrator = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if demonstrator == "forgetful":
        turns = [*turns[:-1], turns[-1][:-1]]
    elif demonstrator == "hasty" and row["kind"] == "look first":
        degrees = int(row["question"].split()[2])
        turns = [[("set_heating", {"room": call[1]["room"], "degrees": degrees}) for call in turns[0]]]
    messages = [{"role": "user", "content": row["question"]}]
    for calls in filter(None, turns):
        messages.append({"role": "assistant", "content": "", "tool_calls": [_tool_call(item) for item in calls]})
        messages += [
            {"role": "tool", "name": name, "content": call(row["state"], name, **arguments)}
            for name, arguments in calls
        ]
    return [*messages, {"role": "assistant", "content": "Done."}]


def _tool_call(item: Call) -> dict:
    return {"type": "function", "function": {"name": item[0], "arguments": item[1]}}


def texts(sample: Messages) -> list[str]:
    """What the tokenizer learns its words from."""
    said = [message["content"] for message in sample]
    written = []
    for message in sample:
        for made in message.get("tool_calls", []):
            function = made["function"]
            written.append(json.dumps({"name": function["name"], "arguments": function["arguments"]}))
    return said + written


def main() -> None:
    """Make and save tokenizer and model."""
    args = make_parser(__doc__, out=Path("outputs/function_calling/start"), steps=900).parse_args()
    cold_start(args, demonstration, vocab_size=440, tools=SCHEMAS, texts=texts)


if __name__ == "__main__":
    main()
