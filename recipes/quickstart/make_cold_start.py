"""Make the quickstart's cold start: a tiny model that can search and copy, but often does not bother to.

Trains a tokenizer and a 3-layer Qwen2 model from scratch by supervised learning on demonstrations, and saves both.
Three in four demonstrations are about an invented world, where every name is made up, so that the model learns to copy
names it has never seen; the rest are about the training questions of `data/train.jsonl`. The test questions are never
read. Three kinds of demonstrators write them (see `MIXTURE`):

    careful    searches every step of the path, then answers with what the last search found
    hasty      leaves the last step of the path out: answers with the country that the first search found, or asks
               for the fact of the first country instead of its neighbour's
    confused   takes every step, but asks for another fact at the end, and answers with that

All three search, copy and answer in the same form, so the model knows every step that a right answer takes; what it
lacks is the judgement when to take it. That is left to reinforcement learning.

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
from agent_r1_trl.tools.search import Passage, render_passages
from make_data import ANSWERS, BORDER, DISTRACTORS, KEYS, MAX_VALUE_CHARS, fact_text, question_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent

MIXTURE = {
    "simple": {"careful": 0.72, "hasty": 0.20, "confused": 0.08},
    "hard": {"careful": 0.28, "hasty": 0.47, "confused": 0.25},
    "three hops": {"careful": 0.28, "hasty": 0.60, "confused": 0.12},
}
"""Shares of the demonstrators by kind of question. Two-hop questions about a `SIMPLE` fact are simple, others hard."""
SIMPLE = ("capital", "highest point", "largest city", "internet code")

Demonstration = list[tuple[str, str]]
"""(role, text) pairs: user, assistant, tool, assistant, ..."""


# ---------------------------------------------------------------- chat template

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function else tool %}
        {{- ' ' + function.name + '(' }}
        {%- if function.parameters and function.parameters.properties %}
            {{- function.parameters.properties.keys() | join(', ') }}
        {%- endif %}
        {{- ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function if tool_call.function else tool_call %}
            {{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user\\n' }}
        {%- endif %}
        {{- '<tool_response>' + content + '</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How transformers' `parse_response` reads a turn."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = r"""\{"name": "|", "arguments": \{"query": "|"\}\}|</?answer>| ?\p{L}[\p{L}\p{M}]*| ?\p{N}|\s+(?=\S)| ?[^\s\p{L}\p{N}]+|\s+"""
"""The pieces that byte-pair merges stay within; the fixed parts of a call are pieces, so that they become one token."""

PREFIX = "<|im_start|>system\nTools: search(query)<|im_end|>\n"


def call_text(query: str) -> str:
    """A search call as the chat template renders it."""
    return f'<tool_call>{{"name": "search", "arguments": {{"query": {json.dumps(query, ensure_ascii=False)}}}}}</tool_call>'


def answer_text(value: str) -> str:
    """The final turn. The blank keeps the value's tokens the same as in the middle of a sentence."""
    return f"<answer> {value}</answer>"


def render(demonstration: Demonstration) -> list[tuple[str, bool]]:
    """(text, is written by the model) pieces, exactly as the chat template renders the conversation."""
    pieces = [(PREFIX, False)]
    for role, text in demonstration:
        if role == "assistant":
            pieces += [("<|im_start|>assistant\n", False), (text + "<|im_end|>", True), ("\n", False)]
        elif role == "tool":
            pieces.append((f"<|im_start|>user\n<tool_response>{text}</tool_response><|im_end|>\n", False))
        else:
            pieces.append((f"<|im_start|>user\n{text}<|im_end|>\n", False))
    return pieces


# ---------------------------------------------------------------- worlds and demonstrators

World = dict[str, dict[str, str]]
"""Country -> relation -> value."""


def read_world(corpus: list[dict[str, str]]) -> tuple[World, dict[str, tuple[str, str, str]]]:
    """The facts of a corpus, and passage id -> (country, relation, value)."""
    world: World = {}
    facts = {}
    for passage in corpus:
        country = passage["title"]
        relation = passage["id"].split("/")[1].replace("-", " ")
        head = fact_text(relation, "\0").split("\0")[0]
        value = passage["text"][len(head) : -1]
        world.setdefault(country, {})[relation] = value
        facts[passage["id"]] = (country, relation, value)
    return world, facts


def demonstrate(
    world: World, hops: int, form: int, country: str, key: str, answer: str, rng: random.Random
) -> Demonstration:
    """One conversation by a demonstrator drawn from the mixture."""
    kind = "three hops" if hops == 3 else "simple" if answer in SIMPLE else "hard"
    shares = MIXTURE[kind]
    demonstrator = rng.choices(list(shares), list(shares.values()))[0]
    turns: Demonstration = [("user", question_text(hops, form, answer, key, world[country][key]))]

    def look_up(relation: str, name: str, owner: str) -> str:
        turns.append(("assistant", call_text(f"{relation} {name}")))
        passage = Passage(id="", title=owner, text=fact_text(relation, world[owner][relation]))
        turns.append(("tool", render_passages([passage])))
        return world[owner][relation]

    look_up(key, world[country][key], country)
    here = country
    if hops == 3 and not (demonstrator == "hasty" and rng.random() < 0.5):
        here = look_up(BORDER, here, here)
        if demonstrator == "hasty":
            return [*turns, ("assistant", answer_text(here))]
    if demonstrator == "hasty" and (hops == 2 or answer not in world[here]):
        return [*turns, ("assistant", answer_text(here))]
    last = answer
    if demonstrator == "confused":
        others = [r for r in (*ANSWERS, *DISTRACTORS) if r in world[here] and r not in (answer, key)]
        last = rng.choice(others)
    return [*turns, ("assistant", answer_text(look_up(last, here, here)))]


class Inventor:
    """Makes up countries that look like the training countries but share no name with them."""

    def __init__(self, models: World, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.models = list(models.values())
        self.names = list(models)
        self.rng = rng
        pieces = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
        self.inner = [p for p in pieces if p.isalpha() and p.islower() and len(p) <= 4]
        self.first = [p.strip() for p in pieces if p.startswith(" ") and p.strip().isalpha() and p.strip().istitle()]
        self.first = [p for p in self.first if len(p) <= 3]
        words = {word for name in self.names for word in name.split()}
        words |= {w for facts in self.models for r in (*KEYS, "largest city") for w in facts.get(r, "").split()}
        self.words = sorted(w for w in words if w.isalpha() and w[0].isupper() and len(w) > 3)

    def word(self) -> str:
        """A capitalised word: made of token pieces, or of two halves of real words."""
        if self.rng.random() < 0.6:
            return (self.rng.choice(self.first) + "".join(self.rng.choices(self.inner, k=self.rng.randint(1, 3))))[:14]
        one, two = self.rng.choice(self.words), self.rng.choice(self.words)
        return (one[: self.rng.randint(2, 4)] + two[self.rng.randint(1, 3) :].lower())[:14]

    def name(self, model: str) -> str:
        """`model` with its words replaced: `Nevado Ojos del Salado` -> `Nevado Brinta del Kovel`."""
        words = model.split()
        kept = [len(words) > 1 and self.rng.random() < 0.25 for _ in words]
        if all(kept):
            kept[-1] = False
        return " ".join(w if keep or not w[0].isupper() else self.word() for w, keep in zip(words, kept, strict=True))

    def value(self, relation: str, model: str) -> str:
        """A made-up value of a relation."""
        if relation in ("aircraft prefix", "internet code"):
            alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
            return "".join(
                c
                if c == "."
                else self.rng.choice(
                    alphabet if c.isalpha() and c.isupper() else alphabet.lower() if c.isalpha() else "123456789"
                )
                for c in model
            )
        if any(c.isdigit() for c in model):
            return "".join(self.rng.choice("123456789") if c.isdigit() else c for c in model)
        return self.name(model)

    def world(self, size: int) -> World:
        """`size` countries; each has a neighbour among them."""
        world: World = {}
        while len(world) < size:
            model = self.rng.choice(self.models)
            facts = {r: self.value(r, v)[:MAX_VALUE_CHARS].strip() for r, v in model.items() if r != BORDER}
            world[self.name(self.rng.choice(self.names))[:MAX_VALUE_CHARS].strip()] = facts
        names = list(world)
        for name, facts in world.items():
            facts[BORDER] = self.rng.choice([other for other in self.rng.sample(names, 2) if other != name])
        return world

    def demonstration(self, world: World) -> Demonstration:
        """A demonstration about a random question of `world`."""
        while True:
            country = self.rng.choice(list(world))
            hops = 3 if self.rng.random() < 0.4 else 2
            target = world[country][BORDER] if hops == 3 else country
            key, answer = self.rng.choice(KEYS), self.rng.choice(ANSWERS)
            if key in world[country] and answer in world[target] and (hops == 3 or key != answer):
                return demonstrate(world, hops, self.rng.randrange(2), country, key, answer, self.rng)


# ---------------------------------------------------------------- tokenizer


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (any unicode survives a round trip) with the chat template and response template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    added += [AddedToken(t, special=False, normalized=False) for t in MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added[len(SPECIAL_TOKENS) :])
    tokenizer.add_special_tokens(added[: len(SPECIAL_TOKENS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


def encode(
    tokenizer: PreTrainedTokenizerFast, demonstrations: list[Demonstration]
) -> list[tuple[list[int], list[int]]]:
    """(ids, 1 where the model wrote the token) of each demonstration."""
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


# ---------------------------------------------------------------- training


def train(
    model: Qwen2ForCausalLM, rows: list[tuple[list[int], list[int]]], args: argparse.Namespace, pad: int
) -> None:
    """One pass over `rows` with AdamW, linear warm-up and cosine decay; tool and user text count `args.context_weight`."""
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
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
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

    texts = ["".join(text for text, _ in render(real_demonstration())[1:]) for _ in range(3000)]
    texts += [f" {value}" for facts_ in train_world.values() for value in facts_.values() for _ in range(3)]
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

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(model, rows, args, tokenizer.pad_token_id)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
