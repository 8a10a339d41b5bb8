"""Which ids a token could be drawn from, where top-k, top-p or min-p cut the others off (sampling masks)."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class KeptIds:
    """The ids that each of N sampled tokens was drawn from; 4 bytes an id, and 4 a token.

    >>> kept = KeptIds.of([[7, 3], [5]])
    >>> len(kept), kept.padded(3).tolist()
    (2, [[3, 7, -1], [5, -1, -1]])
    """

    counts: array[int]
    """(N,) the number of each token's ids."""
    ids: array[int]
    """The ids of all tokens, one token's after another's, each in ascending order."""

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> KeptIds:
        """From the ids of each token, in any order."""
        kept = cls(array("i"), array("i"))
        for ids in lists:
            kept.append(ids)
        return kept

    def append(self, ids: Sequence[int]) -> None:
        """Add those of one more token."""
        self.counts.append(len(ids))
        self.ids.extend(sorted(ids))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[array[int]]:
        """The ids of each token."""
        start = 0
        for count in self.counts:
            yield self.ids[start : start + count]
            start += count

    def first(self, num_tokens: int) -> KeptIds:
        """The kept ids of the first tokens."""
        counts = self.counts[:num_tokens]
        return KeptIds(counts, self.ids[: sum(counts)])

    def padded(self, width: int) -> Any:
        """(N, width) int32 numpy array, each token's ids and -1 behind them."""
        import numpy as np

        out = np.full((len(self), width), -1, dtype=np.int32)
        out[np.arange(width) < np.array(self.counts)[:, None]] = self.ids
        return out

    def to_dict(self) -> dict[str, str]:
        """As text, for JSON."""
        parts = {"counts": self.counts, "ids": self.ids}
        return {name: base64.b64encode(part.tobytes()).decode() for name, part in parts.items()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> KeptIds:
        """The inverse of `to_dict`."""
        return cls(*(array("i", base64.b64decode(record[name])) for name in ("counts", "ids")))
