"""Make the quickstart's cold start: a tiny model that can search and copy, but often does not bother to.

Trains a tokenizer and a 3-layer Qwen3 model from scratch by supervised learning on demonstrations, and saves both.
Three in four demonstrations are about an invented world, where every name is made up, so that the model learns to copy
names it has never seen; the rest are about the training questions of `data/train.jsonl`. The test questions are never
read. Many demonstrations are hasty or confused on purpose (`MIXTURE` in demonstrations.py): the model gets every skill
but not the judgement of when to use it, and that is left to reinforcement learning.

    python recipes/quickstart/make_cold_start.py
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from demonstrations import Demonstration, Inventor, demonstrate, read_world, render
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiny_model import Row, make_model, make_parser, make_tokenizer, save, train  # noqa: E402


def encode(tokenizer: PreTrainedTokenizerFast, demonstrations: list[Demonstration]) -> list[Row]:
    """Token ids and masks."""
    pieces = [render(demonstration) for demonstration in demonstrations]
    flat = [text for piece in pieces for text, _ in piece]
    encoded = iter(tokenizer.backend_tokenizer.encode_batch(flat, add_special_tokens=False))
    rows = []
    for piece in pieces:
        ids: list[int] = []
        mask: list[int] = []
        for _, is_assistant in piece:
            new = next(encoded).ids
            ids += new
            mask += [int(is_assistant)] * len(new)
        rows.append((ids, mask))
    return rows


def check_rendering(tokenizer: PreTrainedTokenizerFast, demonstration: Demonstration) -> None:
    """Training text and rollout text must agree token by token."""
    messages: list[dict[str, Any]] = []
    for role, text in demonstration:
        if text.startswith("<tool_call>"):
            call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            messages.append({"role": role, "content": "", "tool_calls": [{"type": "function", "function": call}]})
        else:
            messages.append({"role": role, "content": text})
    schema = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
    ids = tokenizer.apply_chat_template(
        messages, tools=[{"type": "function", "function": schema}], return_dict=False, tokenize=True
    )
    if ids != encode(tokenizer, [demonstration])[0][0]:
        raise RuntimeError(f"The chat template renders a demonstration differently: {tokenizer.decode(ids)!r}")


def main() -> None:
    """Make and save tokenizer and model."""
    parser = make_parser(__doc__, out=HERE / "model")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--vocab-size", type=int, default=800)
    parser.add_argument("--real-share", type=float, default=0.25, help="share of demonstrations on real questions")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)

    corpus = [json.loads(line) for line in (args.data / "corpus.jsonl").open(encoding="utf-8")]
    questions = [json.loads(line) for line in (args.data / "train.jsonl").open(encoding="utf-8")]
    world, facts = read_world(corpus)
    train_names = {facts[passage_id][0] for row in questions for passage_id in row["evidence"]}
    train_world = {name: world[name] for name in sorted(train_names)}

    def real_demonstration() -> Demonstration:
        row = rng.choice(questions)
        (country, key, _), (_, answer, _) = facts[row["evidence"][0]], facts[row["evidence"][-1]]
        form = 0 if row["question"].startswith("What") else 1
        return demonstrate(world, row["hops"], form, country, key, answer, rng)

    # Few demonstrations and every name once: common phrases become tokens, whole names of training countries do not.
    texts = [text for _ in range(300) for text, _ in render(real_demonstration())]
    texts += [f" {text}" for name, facts_of in train_world.items() for text in (name, *facts_of.values())]
    tokenizer = make_tokenizer(texts, args.vocab_size)
    inventor = Inventor(train_world, tokenizer.backend_tokenizer, rng)
    demonstrations = []
    while len(demonstrations) < args.steps * args.batch_size:
        invented = inventor.world(300)
        for _ in range(2000):
            is_real = rng.random() < args.real_share
            demonstrations.append(real_demonstration() if is_real else inventor.demonstration(invented))
    demonstrations = demonstrations[: args.steps * args.batch_size]
    for demonstration in demonstrations[:50]:
        check_rendering(tokenizer, demonstration)
    rows = encode(tokenizer, demonstrations)
    lengths = [len(ids) for ids, _ in rows]
    print(f"{len(rows)} demonstrations, {sum(lengths) / len(rows):.0f} tokens on average, {max(lengths)} at most")

    model = make_model(tokenizer)
    train(model, rows, args, tokenizer.pad_token_id)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
