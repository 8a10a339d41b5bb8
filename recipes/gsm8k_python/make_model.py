"""Make the CPU variant's starting point: a tiny model that can call the python tool and copy, but does it carelessly.

Trains a tokenizer and a 3-layer Qwen3 from scratch on demonstrations of made-up arithmetic (the questions of `data/`
are never read). Of three demonstrators, one computes the whole expression, one leaves out its last term, and one
answers without the tool. Training adds the judgement. It takes two to five minutes on two cores.

    python recipes/gsm8k_python/make_model.py
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "quickstart"))
from make_cold_start import train  # noqa: E402
from tokenizer import make_tokenizer  # noqa: E402

SHARES = {"careful": 0.4, "hasty": 0.4, "guessing": 0.2}
QUESTION = "State the final answer to the following arithmetic problem: {} ="
SCHEMA = {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}

Messages = list[dict[str, Any]]


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


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> tuple[list[int], list[int]]:
    """(ids, 1 where the model wrote the token), through the chat template."""
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": SCHEMA}],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def main() -> None:
    """Make and save tokenizer and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/gsm8k_python/start"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--context-weight", type=float, default=0.1, help="loss weight of what others wrote")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    sample = [message for _ in range(200) for message in demonstration(rng)]
    calls = [call["function"]["arguments"]["code"] for message in sample for call in message.get("tool_calls", [])]
    # Only the fixed words become tokens: numbers are read digit by digit.
    texts = [message["content"] for message in sample] + [
        f'{{"name": "python", "arguments": {{"code": "{calls[0]}"}}}}'
    ]
    tokenizer = make_tokenizer(texts, vocab_size=420)
    rows = [encode(tokenizer, demonstration(rng)) for _ in range(args.steps * args.batch_size)]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, rows, args, tokenizer.pad_token_id)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"Saved to {args.out}")


if __name__ == "__main__":
    main()
