"""docs/options.md, written from the dataclasses of the settings; a test compares the two.

`python -m agent_r1_trl.cli.options_page` (`make options`) writes it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.arguments import TrainArguments
from agent_r1_trl.cli.options import default_text, help_of, option_groups
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig
from agent_r1_trl.trainers.config import ModelConfig

PAGE = Path("docs/options.md")
_INTRODUCTION = """\
# Options of training

Every setting of `agent-r1-trl train`, ours first. A recipe writes `name: value` and the command line `--name value`, a
list is `name: [one, two]` and `--name one two`; both write `null` for None, also to take back what a recipe sets.
`echo.patience` is the key `patience` of the mapping `echo`: a recipe writes `echo: {patience: 5}`, the command line
`--echo.patience 5`, a script `echo={"patience": 5}`. Each stands on the command line once. What describes an adapter
(`lora_...`, `use_dora`, `use_rslora`) needs `use_peft: true`. In a script, all but those of task, data and model are
arguments of `MultiTurnGRPOConfig` or `MultiTurnPPOConfig`. Where PPO's default differs, both are given. Made by `make
options`.
"""


def page_text() -> str:
    """The text of docs/options.md."""
    of_grpo: dict[str, Any] = {item.name: item for item in dataclasses.fields(MultiTurnGRPOConfig)}
    of_ppo = {item.name: default_text(item) for item in dataclasses.fields(MultiTurnPPOConfig)}
    parts = [_INTRODUCTION]
    kinds = (TrainArguments, MultiTurnGRPOConfig, MultiTurnPPOConfig, ModelConfig)
    for title, fields in option_groups(*kinds).items():
        rows = [f"## {title}\n", "| option | default | meaning |", "|---|---|---|"]
        for field in fields:
            item: Any = of_grpo.get(field.name, field)
            own = default_text(item)
            ppo = of_ppo.get(item.name, own)
            choices = ", ".join(map(repr, item.metadata.get("choices") or ()))
            meaning = f"{help_of(item)} Choices: {choices}." if choices else help_of(item)
            rows.append(f"| `{item.name}` | {_cell(own if own == ppo else f'{own}; PPO: {ppo}')} | {_cell(meaning)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _cell(text: str) -> str:
    """Text in a table of Markdown; what looks like a tag or a link in it stays text."""
    # Between backticks a backslash would be shown, but for the one before a bar.
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(re.sub(r"(\|)" if part.startswith("`") else r"([|<\[\]*_])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
