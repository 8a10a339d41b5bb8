"""Names of models and data sets: which of them can be ids of the Hub."""

from __future__ import annotations

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def is_hub_id(name: str) -> bool:
    """Whether a name can be the id of a model or data set; no path, and nothing that exists here under that name.

    >>> is_hub_id("Qwen/Qwen3-0.6B"), is_hub_id("data/train.jsonl"), is_hub_id("./model"), is_hub_id("None")
    (True, False, False, False)
    """
    endings = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".yaml")
    return (
        bool(_ID.fullmatch(name))
        and name != "None"
        and not name.lower().endswith(endings)
        and "--" not in name
        and ".." not in name
        and not Path(name).exists()
    )


def data_name(name: str) -> str:
    """An id of the Hub as it is; the last two parts of a path.

    >>> data_name("hotpotqa/hotpot_qa"), data_name("/home/ada/data/test.jsonl")
    ('hotpotqa/hotpot_qa', 'data/test.jsonl')
    """
    return name if is_hub_id(name) else "/".join(Path(name).parts[-2:])
