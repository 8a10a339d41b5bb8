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

Every setting of `agent-r1-trl train`, ours first. Of TRL's and transformers' own, the first sentence;
`agent-r1-trl train --help` prints the rest.

- A recipe writes `name: value`, the command line `--name value`; a list is `name: [one, two]` and `--name one two`;
  None is `null`, also to take back what a recipe sets.
- `echo.patience` is the key `patience` of the mapping `echo`: `echo: {patience: 5}` in a recipe, `--echo.patience 5`
  on the command line, `echo={"patience": 5}` in a script.
- In a script, all but those of task, data and model are arguments of `MultiTurnGRPOConfig` or `MultiTurnPPOConfig`.
- Adapters (`lora_...`, `use_dora`, `use_rslora`) need `use_peft: true`.

Made by `make options`.
"""
_OF_LIBRARIES = ("(TRL)", "(transformers)")
"""What titles of groups end with whose settings are not ours."""
_SENTENCE = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z`'\"])")
"""The gap between two sentences."""


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
            meaning = help_of(item)
            if title.endswith(_OF_LIBRARIES):
                meaning = _SENTENCE.split(meaning, maxsplit=1)[0]
            choices = [repr(choice) for choice in item.metadata.get("choices") or ()]
            if any(choice not in meaning for choice in choices):
                meaning = f"{meaning} Choices: {', '.join(choices)}."
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
