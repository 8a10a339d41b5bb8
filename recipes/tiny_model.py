"""Tiny models from scratch, for recipes that a CPU trains: tokenizer, model, demonstrations, supervised learning.

The tokenizer is a byte-level BPE with a compact ChatML template and the grammar that reads its turns. The template
renders what Qwen's does, on one line: calls as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, results as
`<tool_response>...</tool_response>`, the tools as their signatures only (`Tools: search(query)`).

A recipe's script puts this folder on its path:

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tiny_model import cold_start
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent_r1_trl.cli.resolve import resolve_env
from agent_r1_trl.features.games import GameEnv

Messages = list[dict[str, Any]]
Row = tuple[list[int], list[int]]
"""(ids, 1 where the model wrote the token) of one demonstration."""

# ---------------------------------------------------------------- tokenizer

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' and messages[0].content %}
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
{%- elif messages[0].role == 'system' and messages[0].content %}
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
WORDS = "|".join(
    (
        r'\{"name": "',
        r'", "arguments": \{"query": "',
        r'"\}\}',
        r"</?answer>",
        r" ?\p{L}[\p{L}\p{M}]*",
        r" ?\p{N}",
        r"\s+(?=\S)",
        r" ?[^\s\p{L}\p{N}]+",
        r"\s+",
    )
)
"""What byte-pair merges stay within; the fixed parts of a call and an answer stand first and become one token each."""


def make_tokenizer(texts: list[str], vocab_size: int, context: int = 1024) -> PreTrainedTokenizerFast:
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
    # Merges must not reach across a marker: in use, markers are cut out before the merges begin.
    marker = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, *MARKERS))))
    tokenizer.train_from_iterator((piece for text in texts for piece in marker.split(text)), trainer)
    tokenizer.add_tokens(added[len(SPECIAL_TOKENS) :])
    tokenizer.add_special_tokens(added[: len(SPECIAL_TOKENS)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


# ---------------------------------------------------------------- model


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 3 layers with random weights, in float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    return model


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save both, and check that they can be loaded.

    Raises:
        RuntimeError: `AutoTokenizer` loads another tokenizer than the one that was saved.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    if loaded.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise RuntimeError(f"AutoTokenizer does not load the tokenizer that was saved, but a {type(loaded).__name__}.")
    print(f"Saved to {folder}")


# ---------------------------------------------------------------- supervised learning


def make_parser(description: str | None, *, out: Path, steps: int = 800) -> argparse.ArgumentParser:
    """A parser with the options that `train` and `cold_start` read."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--context-weight", type=float, default=0.1, help="loss weight of what others wrote")
    return parser


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


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages, tools: Sequence[dict[str, Any]] = ()) -> Row:
    """Token ids and mask of a conversation, through the chat template.

    Args:
        tokenizer: made by `make_tokenizer`.
        messages: the conversation.
        tools: JSON schemas of the tools that the prompt names.
    """
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": schema} for schema in tools] or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def cold_start(
    args: argparse.Namespace,
    demonstration: Callable[[random.Random], Messages],
    *,
    vocab_size: int,
    context: int = 1024,
    tools: Sequence[dict[str, Any]] = (),
    texts: Callable[[Messages], list[str]] = lambda sample: [f"{item['role']}\n{item['content']}" for item in sample],
) -> None:
    """Make a model that imitates demonstrations, and save it with its tokenizer.

    Args:
        args: the options of `make_parser`.
        demonstration: makes one conversation.
        vocab_size: tokens, special ones and single bytes (260 in all) included.
        context: maximum number of tokens that the model takes; longer demonstrations are cut there.
        tools: JSON schemas of the tools that the prompt names.
        texts: what the tokenizer learns its words from, given the messages of 200 demonstrations.
    """
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    sample = [message for _ in range(200) for message in demonstration(rng)]
    tokenizer = make_tokenizer(texts(sample), vocab_size, context)
    whole = (encode(tokenizer, demonstration(rng), tools) for _ in range(args.steps * args.batch_size))
    rows = [(ids[:context], mask[:context]) for ids, mask in whole]
    model = make_model(tokenizer)
    train(model, rows, args, tokenizer.pad_token_id)
    save(model, tokenizer, args.out)


# ---------------------------------------------------------------- demonstrations of games


def read_env(config: Path) -> Callable[[], GameEnv]:
    """What makes the environment of a recipe, with the recipe's settings, so that both see the same prompts."""
    recipe = yaml.safe_load(config.read_text(encoding="utf-8"))
    return resolve_env(recipe["env"], recipe.get("env_kwargs"))


def play(make_env: Callable[[], GameEnv], say: Callable[[Any, random.Random], str], rng: random.Random) -> Messages:
    """One game, from the first message to the last turn of the demonstrator.

    Args:
        make_env: makes the environment.
        say: what the demonstrator writes, given the game as it stands.
        rng: of the level, of random events and of the demonstrator.
    """
    env = make_env()
    env.seed(reset_seed=rng.getrandbits(62), dynamics_seed=rng.getrandbits(62))
    messages = env.reset({})

    async def episode() -> None:
        is_over = False
        while not is_over:
            turn = {"role": "assistant", "content": say(env, rng)}
            observations, _, is_over, _ = await env.step(turn)
            messages.extend([turn, *([] if is_over else observations)])

    asyncio.run(episode())
    return messages


def write_moves(env: GameEnv, moves: Sequence[str]) -> str:
    """A turn with the first of these moves, as many as one turn may hold."""
    return f"<answer>{f' {env.separator} '.join(moves[: env.max_actions_per_turn])}</answer>"


def game_cold_start(
    script: str, description: str | None, say: Callable[[Any, random.Random], str], *, steps: int
) -> None:
    """What the `make_cold_start.py` of a game does: a model that imitates its demonstrator.

    Args:
        script: the `__file__` of the script; its folder is named after the game and holds `grpo/config_cpu.yaml`.
        description: of the command.
        say: the demonstrator; see `play`.
        steps: optimizer steps, unless the command line says otherwise.
    """
    folder = Path(script).resolve().parent
    args = make_parser(description, out=Path("outputs") / folder.name / "start", steps=steps).parse_args()
    make_env = read_env(folder / "grpo" / "config_cpu.yaml")
    cold_start(args, lambda rng: play(make_env, say, rng), vocab_size=400)
