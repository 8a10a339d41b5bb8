"""What the update knew of each sampled token, beside the trajectories: `step_000010.columns.jsonl`.

A line belongs to the trajectory in line `line`, from 0, of the file beside it. Its columns hold a number for each
token that the policy sampled, in the order of time, NaN where there is none:

    entropy      of the policy, at the first pass of the loss over the token
    log_ratio    the trainer's log-prob in that pass minus the sampler's: a number of its own, since the difference of
                 two float16 is off by up to 0.003
    value        the critic's, before the update
    return       the critic's target
    reference    the reference's log-prob
    kl_reward    the KL penalty, where it is part of the rewards

They are base64 of little-endian float16 (`f2:`), or float32 (`f4:`) where a number is too large for that: 2.7 bytes a
token, so that all columns of a critic's run take less than a tenth of what the trajectories take.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1_trl.recording.lines import read_lines

MAX_FLOAT16 = 65504.0


def sidecar(path: Path) -> Path:
    """The file of columns beside one of trajectories."""
    return path.with_suffix(".columns.jsonl")


def encode(values: Any) -> str:
    """A column, (n,) of numpy, as text; float16 unless it needs more range."""
    import numpy as np

    kind = "f4" if (np.isfinite(values) & (np.abs(values) > MAX_FLOAT16)).any() else "f2"
    return f"{kind}:{base64.b64encode(values.astype(f'<{kind}').tobytes()).decode()}"


def decode(text: str) -> Any:
    """(n,) float32 of numpy.

    >>> decode("f2:ADwAwA==").tolist()
    [1.0, -2.0]
    """
    import numpy as np

    kind, _, data = text.partition(":")
    return np.frombuffer(base64.b64decode(data), dtype=f"<{kind}").astype(np.float32)


def read_columns(path: Path) -> dict[int, dict[str, str]]:
    """Line of a trajectory -> its columns as they are written; none where the update did not come that far.

    Raises:
        ValueError: a line is something else; the message names file and line.
    """
    beside = sidecar(path)
    if not beside.is_file():
        return {}
    lines = read_lines(beside, "columns of a trajectory", ("line",))
    return {int(item.pop("line")): item for item in lines}


def decode_all(encoded: Mapping[str, str], num_tokens: int) -> dict[str, Any]:
    """Name -> (num_tokens,) float32; without columns of another length, which are another trajectory's."""
    columns = {name: decode(text) for name, text in encoded.items()}
    return {name: values for name, values in columns.items() if len(values) == num_tokens}
