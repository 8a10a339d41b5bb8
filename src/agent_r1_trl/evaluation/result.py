"""Results of an evaluation: metrics, each with a 95% interval.

A metric is a ratio of two sums over examples (scores and scored attempts; failed calls and calls). The bootstrap draws
whole examples, so several attempts at one question never count as independent evidence. Where every example has one
value, 0 or 1, the interval is Wilson's: the bootstrap of examples that are all alike has no width. A trajectory that
ended in an infrastructure failure counts in `lost_rate` and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from agent_r1_trl.trajectory import USAGE, Trajectory

if TYPE_CHECKING:
    import numpy as np

NAMES = {"em": "exact_match", "valid_answer": "valid_answer_rate"}
"""Metric names of the `info` keys that `SearchQAEnv` sets; other numeric keys keep their own."""
NUM_RESAMPLES = 10_000
"""Resamples of the bootstrap; for more than 1,000 examples fewer, but at least 1,000."""

OF_EVERY_TRAJECTORY = (
    "reward", "turns", "tool_calls", "call_error_rate", "truncated_rate", "completion_tokens", "input_tokens",
    "sampled_tokens", "lost_rate", "solved_always", "solved_never", *NAMES.values(),
)  # fmt: skip
"""Metrics that do not come from the environment's `info`, or that have another name there."""
COUNTS = ("turns", "tool_calls", "completion_tokens", "input_tokens", "sampled_tokens")
"""Metrics that may be 0 or 1 in every example and are no shares of anything."""

Row = dict[str, tuple[float, float]]
"""Metric -> (numerator, denominator) of one trajectory or example."""


@dataclass(kw_only=True)
class EvaluationResult:
    """The results of an evaluation.

    Examples:
        >>> result = EvaluationResult.from_rows([{"f1": (1.0, 1.0)}, {"f1": (0.0, 1.0)}], example_ids=["a", "b"])
        >>> result.metrics, [round(bound, 3) for bound in result.intervals["f1"]]
        ({'f1': 0.5}, [0.095, 0.905])
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    """95% percentile bootstrap over examples; Wilson's score interval where `is_share`."""
    num_examples: int
    num_generations: int = 1
    example_ids: list[str] = field(default_factory=list)
    reset_seeds: list[int] = field(default_factory=list)
    """Per example: the seed of its initial state, from which those of its attempts follow; [] where it is unknown."""
    row_digests: list[str] = field(default_factory=list)
    """Per example: digest of its row of the data set; [] where it is unknown."""
    rows: list[Row] = field(default_factory=list)
    """Per example: what each metric's two sums are made of."""
    trajectories: list[Trajectory] = field(default_factory=list)
    duration_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    failures: str = ""
    """Causes of lost trajectories, none the model's fault: the most frequent causes, each with its count and its
    first example.
    """

    @property
    def panel(self) -> str:
        """Digest of what was asked: the examples' ids and seeds in their order, and the number of attempts; "" where
        the seeds are unknown. Results are compared only on the same panel.
        """
        if not self.reset_seeds:
            return ""
        text = json.dumps([self.num_generations, self.example_ids, self.reset_seeds])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def is_lost(self) -> bool:
        """Whether every trajectory was lost."""
        return self.metrics.get("lost_rate") == 1.0

    @classmethod
    def from_rows(cls, rows: list[Row], *, example_ids: list[str], seed: int = 0, **values: Any) -> EvaluationResult:
        """Metrics and intervals from the sums of each example."""
        sums = _sums(rows)
        totals = {name: pair.sum(axis=0).tolist() for name, pair in sums.items() if is_share(name, pair)}
        shares = {name: wilson_interval(*pair) for name, pair in totals.items()}
        return cls(
            metrics=_ratios(sums),
            intervals=bootstrap_intervals(sums, seed=seed) | shares,
            num_examples=len(rows),
            example_ids=example_ids,
            rows=rows,
            **values,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable, without trajectories and rows: metrics, `intervals`, `panel`, `settings` and others."""
        return {
            **{name: _finite(value) for name, value in self.metrics.items()},
            "num_examples": self.num_examples,
            "num_generations": self.num_generations,
            **({"panel": self.panel} if self.panel else {}),
            "intervals": {name: [_finite(low), _finite(high)] for name, (low, high) in self.intervals.items()},
            "duration_s": round(self.duration_s, 3),
            "settings": self.settings,
            **({"failures": self.failures} if self.failures else {}),
        }


def to_json(content: dict[str, Any]) -> str:
    """Indented JSON; what it does not know as text."""
    return json.dumps(content, indent=2, ensure_ascii=False, default=repr) + "\n"


# ---------------------------------------------------------------- from trajectories to sums


def trajectory_sums(trajectory: Trajectory) -> Row:
    """One trajectory's addition to each metric: (numerator, denominator)."""
    is_failure = trajectory.stop_reason.is_infrastructure_failure
    failures = {"lost_rate": (float(is_failure), 1.0)}
    if is_failure:
        return failures
    results = trajectory.tool_results
    sums: Row = {
        "reward": (trajectory.total_reward if trajectory.is_scored else 0.0, float(trajectory.is_scored)),
        "turns": (float(len(trajectory.env_turns)), 1.0),
        "tool_calls": (float(len(results)), 1.0),
        "call_error_rate": (float(sum(result.is_error for result in results)), float(len(results))),
        "truncated_rate": (float(trajectory.stop_reason.is_truncated), 1.0),
        **{name: (float(count), 1.0) for name, count in token_counts(trajectory).items()},
        **failures,
    }
    scores: Row = {}
    for key, value in trajectory.numbers.items():
        name = NAMES.get(key, key)
        scores[f"info_{name}" if name in sums else name] = (value, 1.0)
    return {**scores, **sums}


def token_counts(trajectory: Trajectory) -> dict[str, int]:
    """Tokens after the prompt, and what a server would charge for: tokens read (the whole context of each turn) and
    tokens sampled.
    """
    if USAGE in trajectory.info:
        return dict(trajectory.info[USAGE])
    num_read = 0
    for row in trajectory.rows:
        for place, (before, turn) in enumerate(zip([-1, *row.turn_ids], row.turn_ids, strict=False)):
            if turn >= 0 and turn != before:
                num_read += len(row.prompt_ids) + place
    return {
        "completion_tokens": len(trajectory.completion_ids),
        "input_tokens": num_read,
        "sampled_tokens": trajectory.num_action_tokens,
    }


def example_sums(trajectories: Sequence[Trajectory]) -> Row:
    """The attempts at one example, added up, with `pass@k`, `pass^k`, `solved_always` and `solved_never` of several.

    A failure that was not the policy's fault is no attempt; with fewer than k of them left, neither `pass@k` nor
    `pass^k` is counted.
    """
    sums: Row = {}
    for name, pairs in _sums([trajectory_sums(item) for item in trajectories]).items():
        numerator, denominator = pairs.sum(axis=0)
        sums[name] = (float(numerator), float(denominator))
    solved = [item.is_solved for item in trajectories if not item.stop_reason.is_infrastructure_failure]
    if len(trajectories) > 1 and solved:
        num_attempts, num_solved = len(solved), sum(solved)
        tried = [k for k in attempts_of(len(trajectories)) if k <= num_attempts]
        sums |= {f"pass@{k}": (pass_at_k(num_attempts, num_solved, k), 1.0) for k in tried}
        sums |= {f"pass^{k}": (pass_all_k(num_attempts, num_solved, k), 1.0) for k in tried}
        sums["solved_always"] = (float(all(solved)), 1.0)
        sums["solved_never"] = (float(not any(solved)), 1.0)
    return sums


def pass_at_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Chance that k of the attempts, drawn without replacement, hold a solved one (Chen et al. 2021).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 4, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(num_attempts - num_solved, k) / math.comb(num_attempts, k)


def pass_all_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Chance that all of k attempts, drawn without replacement, are solved ones: pass^k of tau-bench (Yao et al. 2024,
    arXiv 2406.12045), without bias.

    >>> pass_all_k(4, 3, 1), pass_all_k(4, 3, 2), pass_all_k(4, 3, 4)
    (0.75, 0.5, 0.0)
    """
    return math.comb(num_solved, k) / math.comb(num_attempts, k)


def attempts_of(group_size: int) -> list[int]:
    """The values of k: powers of two, and the number of attempts.

    >>> attempts_of(6)
    [1, 2, 4, 6]
    """
    return sorted({1 << power for power in range(group_size.bit_length())} | {group_size})


# ---------------------------------------------------------------- intervals


def is_share(name: str, sums: np.ndarray) -> bool:
    """Whether a metric says which share of examples has something: each has one value, 0 or 1, and it is no count.

    `sums` are (N, 2) numerators and denominators per example.
    """
    scored = sums[sums[:, 1] > 0]
    return name not in COUNTS and len(scored) > 0 and bool(((scored == 0) | (scored == 1)).all())


def wilson_interval(num: float, total: float) -> tuple[float, float]:
    """Wilson's 95% score interval of a share (Wilson 1927), which has a width also where all are alike.

    >>> [round(bound, 3) for bound in wilson_interval(10, 10)]
    [0.722, 1.0]
    """
    z, share = NormalDist().inv_cdf(0.975), num / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    shrink = 1 + z * z / total
    return max(0.0, (middle - half) / shrink), min(1.0, (middle + half) / shrink)


def bootstrap_intervals(sums: Mapping[str, np.ndarray], *, seed: int = 0) -> dict[str, tuple[float, float]]:
    """95% percentile intervals of ratios of sums: metric -> (N, 2) numerators and denominators per example."""
    return {name: _interval(ratios) for name, ratios in _drawn_ratios(sums, seed).items()}


def difference(
    before: EvaluationResult, after: EvaluationResult, *, seed: int = 0
) -> dict[str, tuple[float, float, float, float]]:
    """Each metric in both with the interval of its change: (before, after, low, high).

    It is that of the examples that have it in both, without those that failed in one. The bootstrap is paired: both
    results see the same draws of examples.

    Raises:
        ValueError: the two results are about different examples.
    """
    if before.example_ids != after.example_ids:
        raise ValueError("The two results are about different examples; a paired difference needs the same ones.")
    shared_before: list[Row] = []
    shared_after: list[Row] = []
    for one, other in zip(before.rows, after.rows, strict=True):
        shared_before.append({name: pair for name, pair in one.items() if name in other})
        shared_after.append({name: pair for name, pair in other.items() if name in one})
    sums_before, sums_after = _sums(shared_before), _sums(shared_after)
    values_before, values_after = _ratios(sums_before), _ratios(sums_after)
    drawn_before = _drawn_ratios(sums_before, seed)
    drawn_after = _drawn_ratios(sums_after, seed)
    changes = {}
    for name, value in values_before.items():
        low, high = _interval(drawn_after[name] - drawn_before[name])
        changes[name] = (value, values_after[name], low, high)
    return changes


def _drawn_ratios(sums: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Metric -> (R,) its value in each draw of examples; NaN where none that was drawn has it."""
    import numpy as np

    if not sums:
        return {}
    stacked = np.concatenate(list(sums.values()), axis=1)  # (N, 2M)
    drawn = np.concatenate([counts @ stacked for counts in _resamples(len(stacked), seed)])  # (R, 2M)
    with np.errstate(invalid="ignore"):
        return dict(zip(sums, (drawn[:, 0::2] / drawn[:, 1::2]).T, strict=True))


def _interval(draws: np.ndarray) -> tuple[float, float]:
    import numpy as np

    draws = draws[np.isfinite(draws)]
    low, high = np.quantile(draws, [0.025, 0.975]) if len(draws) else (math.nan, math.nan)
    return float(low), float(high)


def _resamples(num: int, seed: int) -> Iterator[np.ndarray]:
    """How often each of `num` examples is drawn, (chunk, num), in chunks that bound the memory."""
    import numpy as np

    rng = np.random.default_rng(seed)
    left = min(NUM_RESAMPLES, max(1_000, NUM_RESAMPLES * 1_000 // num))
    while left > 0:
        size = min(left, max(1, 2_000_000 // num))
        yield rng.multinomial(num, np.full(num, 1.0 / num), size=size)
        left -= size


def _ratios(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metric -> its value; NaN where no example has it."""
    totals = {name: pair.sum(axis=0).tolist() for name, pair in sums.items()}
    return {name: one / other if other else math.nan for name, (one, other) in totals.items()}


def _sums(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Metric -> (N, 2); an example without the metric adds nothing."""
    import numpy as np

    names = dict.fromkeys(name for row in rows for name in row)
    sums = {}
    for name in names:
        pairs = [row.get(name, (0.0, 0.0)) for row in rows]
        sums[name] = np.array(pairs, dtype=float)
    return sums


def number_text(value: float, sign: str = "") -> str:
    """A metric's value; "-" if there is none."""
    return f"{value:{sign}.{3 if abs(value) < 100 else 0}f}" if math.isfinite(value) else "-"


def interval_text(bounds: Sequence[float], sign: str = "") -> str:
    """A metric's interval; "" if there is none."""
    texts = [number_text(bound, sign) for bound in bounds]
    return f"[{', '.join(texts)}]" if bounds and "-" not in texts else ""


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
