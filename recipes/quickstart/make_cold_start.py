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

import torch
from demonstrations import SCHEMA, Inventor, Messages, demonstrate, read_world

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tiny_model import encode, make_model, make_parser, make_tokenizer, save, train  # noqa: E402


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

    def real_demonstration() -> Messages:
        row = rng.choice(questions)
        (country, key, _), (_, answer, _) = facts[row["evidence"][0]], facts[row["evidence"][-1]]
        form = 0 if row["question"].startswith("What") else 1
        return demonstrate(world, row["hops"], form, country, key, answer, rng)

    # Few demonstrations and every name once: common phrases become tokens, whole names of training countries do not.
    plain = make_tokenizer([], args.vocab_size)  # for its template
    shown = {"tools": [{"type": "function", "function": SCHEMA}], "tokenize": False}
    texts = [plain.apply_chat_template(real_demonstration(), **shown) for _ in range(300)]
    texts += [f" {text}" for name, facts_of in train_world.items() for text in (name, *facts_of.values())]
    tokenizer = make_tokenizer(texts, args.vocab_size)
    inventor = Inventor(train_world, tokenizer.backend_tokenizer, rng)
    demonstrations = []
    while len(demonstrations) < args.steps * args.batch_size:
        invented = inventor.world(300)
        for _ in range(2000):
            is_real = rng.random() < args.real_share
            demonstrations.append(real_demonstration() if is_real else inventor.demonstration(invented))
    rows = [encode(tokenizer, item, [SCHEMA]) for item in demonstrations[: args.steps * args.batch_size]]
    lengths = [len(ids) for ids, _ in rows]
    print(f"{len(rows)} demonstrations, {sum(lengths) / len(rows):.0f} tokens on average, {max(lengths)} at most")

    model = make_model(tokenizer)
    train(model, rows, args, tokenizer.pad_token_id)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
