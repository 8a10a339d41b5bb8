"""Seeds that depend on what is sampled, not on when: a run is reproducible whatever its concurrency."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from the parts, in order (run seed, step, example, generation, turn).

    >>> derive_seed(0, "a") == derive_seed(0, "a"), derive_seed(0, "a") == derive_seed("0", "a")
    (True, False)
    """
    text = json.dumps(list(parts), ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def example_key(example: Mapping[str, Any]) -> str:
    """Name of a data set row: its `id` column, else a digest of its content."""
    if example.get("id") is not None:
        return str(example["id"])
    text = json.dumps(dict(example), sort_keys=True, default=repr, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
