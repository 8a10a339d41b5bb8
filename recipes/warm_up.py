"""Show a model conversations before GRPO: supervised learning with TRL's trainer, in our tokens and with our mask.

    python recipes/warm_up.py --model MODEL --demonstrations sft.jsonl --output_dir outputs/start \
        --num_train_epochs 1 --learning_rate 1e-5

Each line of the file has `messages`, and `tools` if the agent has some; `agent-r1-trl export --sft` writes such files.
Every setting of TRL's `SFTConfig` is an option. docs/warm-up.md has the way around it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer, TrlParser

from agent_r1_trl.chat import ChatFormat


@dataclass
class Arguments:
    """What is trained on what."""

    model: str
    demonstrations: str


def main() -> None:
    """Read, encode, train, save."""
    parser = TrlParser((Arguments, SFTConfig))
    has_gpu = torch.cuda.is_available()
    on_gpu = dict.fromkeys(("bf16", "dataloader_pin_memory", "gradient_checkpointing"), has_gpu)
    parser.set_defaults(save_strategy="no", report_to="none", **on_gpu)
    given, args = parser.parse_args_and_config()
    lines = Path(given.demonstrations).read_text(encoding="utf-8").splitlines()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    chat = ChatFormat(tokenizer)
    rows = [chat.encode_demonstration(row["messages"], row.get("tools")) for row in map(json.loads, lines)]
    chat.write_to(tokenizer)  # its template is saved with the model
    trainer = SFTTrainer(given.model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
