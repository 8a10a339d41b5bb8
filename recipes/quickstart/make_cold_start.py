"""Make the quickstart's cold start: a tiny model that can search and copy, but often does not bother to.

Trains a tokenizer and a 3-layer Qwen3 model from scratch by supervised learning on demonstrations, and saves both.
Three in four demonstrations are about an invented world, where every name is made up, so that the model learns to copy
names it has never seen; the rest are about the training questions of `data/train.jsonl`. The test questions are never
read. Many demonstrations are hasty or confused on purpose (`MIXTURE` in demonstrations.py): the model gets every skill
but not the judgement of when to use it, and that is left to reinforcement learning.

    python recipes/quickstart/make_cold_start.py
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from demonstrations import Demonstration, Inventor, demonstrate, read_world, render
from tokenizer import make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent

Row = tuple[list[int], list[int]]
"""(ids, 1 where the model wrote the token) of one demonstration."""


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


def train(model: Qwen3ForCausalLM, rows: list[Row], args: argparse.Namespace, pad: int) -> None:
    """One pass with AdamW, warm-up and cosine decay. Text that others wrote has the weight `args.context_weight`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1.0, (s + 1) / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * s / args.steps))),
    )
    # Rows of a batch have similar lengths: less padding.
    order = []
    block = args.batch_size * 16
    for start in range(0, args.steps * args.batch_size, block):
        indices = sorted(range(start, min(start + block, len(rows))), key=lambda i: len(rows[i][0]))
        batches = [indices[i : i + args.batch_size] for i in range(0, len(indices), args.batch_size)]
        random.Random(start).shuffle(batches)
        order += batches
    began = time.time()
    model.train()
    for step, batch in enumerate(order):
        length = max(len(rows[i][0]) for i in batch)
        ids = torch.full((len(batch), length), pad)
        weight = torch.zeros(len(batch), length)
        for row, i in enumerate(batch):
            tokens, mask = rows[i]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            weight[row, : len(tokens)] = torch.tensor([1.0 if m else args.context_weight for m in mask])
        logits = model(input_ids=ids).logits[:, :-1]  # right padding: the causal mask hides it
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        )
        weight = weight[:, 1:].flatten()
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == len(order) - 1:
            own = weight == 1
            print(f"step {step:5d}  own-token loss {losses[own].mean():.4f}  {time.time() - began:.0f} s", flush=True)


def main() -> None:
    """Make and save tokenizer and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--vocab-size", type=int, default=800)
    parser.add_argument(
        "--context-weight", type=float, default=0.1, help="loss weight of text the model did not write"
    )
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
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(model, rows, args, tokenizer.pad_token_id)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    loaded = AutoTokenizer.from_pretrained(args.out)
    if loaded.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise RuntimeError(f"AutoTokenizer does not load the tokenizer that was saved, but a {type(loaded).__name__}.")


if __name__ == "__main__":
    main()
