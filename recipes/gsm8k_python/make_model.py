"""Make the CPU variant's starting point: a tiny model that can call the python tool and copy, but does it carelessly.

Trains a tokenizer and a 3-layer Qwen3 from scratch on demonstrations of made-up arithmetic (the questions of `data/`
are never read). Of three demonstrators, one computes the whole expression, one leaves out its last term, and one
answers without the tool. Training adds the judgement. It takes two to five minutes on two cores.

    python recipes/gsm8k_python/make_model.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_model import Messages, cold_start, make_parser

SHARES = {"careful": 0.4, "hasty": 0.4, "guessing": 0.2}
QUESTION = "State the final answer to the following arithmetic problem: {} ="
SCHEMA = {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}


def demonstration(rng: random.Random) -> Messages:
    """One conversation by a demonstrator drawn from `SHARES`."""
    numbers = [rng.randint(*rng.choice([(0, 9), (10, 99)])) for _ in range(rng.randint(3, 4))]
    parts = [str(numbers[0])]
    for number in numbers[1:]:
        parts += [rng.choice("+-"), str(number)]
    question = {"role": "user", "content": QUESTION.format(" ".join(parts))}
    demonstrator = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if demonstrator == "guessing":
        return [question, {"role": "assistant", "content": f"<answer>{rng.randint(1, 150)}</answer>"}]
    expression = " ".join(parts if demonstrator == "careful" else parts[:-2])
    result = str(eval(expression))  # made above: digits, + and -
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": f"print({expression})"}}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "python", "content": result},
        {"role": "assistant", "content": f"<answer>{result}</answer>"},
    ]


def texts(sample: Messages) -> list[str]:
    """What the tokenizer learns: only the fixed words become tokens, numbers are read digit by digit."""
    calls = [call["function"]["arguments"]["code"] for message in sample for call in message.get("tool_calls", [])]
    return [
        *(message["content"] for message in sample),
        f'{{"name": "python", "arguments": {{"code": "{calls[0]}"}}}}',
    ]


def main() -> None:
    """Make and save tokenizer and model."""
    args = make_parser(__doc__, out=Path("outputs/gsm8k_python/start")).parse_args()
    cold_start(args, demonstration, vocab_size=420, tools=[SCHEMA], texts=texts)


if __name__ == "__main__":
    main()
