"""How far the judge of a recipe agrees with people, and with itself.

Reads texts that people have graded, several for each prompt, and has the judge score each group twice. Prints, over
the pairs of texts in a group, Kendall's tau between the judge's scores and the grades (1: the same order, 0: none,
-1: the reverse order; ties as in tau-b), and the share of pairs that the judge orders otherwise if it is asked again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from agent_r1_trl.rewards import JudgeReward

HERE = Path(__file__).parent


def orders(scores: Sequence[float]) -> list[int]:
    """For each pair of scores whether the first (1), the second (-1) or none (0) is larger."""
    return [(first > second) - (first < second) for first, second in itertools.combinations(scores, 2)]


def kendall_tau(scores: Sequence[float], grades: Sequence[float]) -> float:
    """Kendall's tau-b of one group; NaN where all scores, or all grades, are equal."""
    judged, graded = orders(scores), orders(grades)
    scale = math.sqrt(sum(map(abs, judged)) * sum(map(abs, graded)))
    if not scale:
        return math.nan
    return sum(a * b for a, b in zip(judged, graded, strict=True)) / scale


def measure(groups: Sequence[Sequence[dict[str, Any]]], judges: Sequence[JudgeReward], gold: str) -> dict[str, float]:
    """Agreement of the first judge's scores with the column `gold`, and with those of the second."""
    taus, flips, num_failed = [], [], 0
    for rows in groups:
        texts = [[{"role": "assistant", "content": row["text"]}] for row in rows]
        first, second = (judge(prompts=[row["prompt"] for row in rows], completions=texts) for judge in judges)
        if None in first or None in second:
            num_failed += 1
            continue
        taus.append(kendall_tau(first, [row[gold] for row in rows]))
        flips += [a != b for a, b in zip(orders(first), orders(second), strict=True)]
    known = [tau for tau in taus if not math.isnan(tau)]
    return {
        "tau": sum(known) / len(known) if known else math.nan,
        "flips": sum(flips) / len(flips) if flips else math.nan,
        "groups": len(groups),
        "without_order": len(taus) - len(known),
        "failed": num_failed,
    }


def main() -> None:
    """Print the agreement of a recipe's judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=HERE / "grpo" / "config.yaml", help="recipe with the judge")
    parser.add_argument(
        "--data", default=HERE / "data" / "graded.jsonl", help="rows with id, prompt, text and a grade"
    )
    parser.add_argument("--gold", default="grade", help="column with the grades; larger is better")
    arguments = parser.parse_args()
    settings = yaml.safe_load(Path(arguments.config).read_text(encoding="utf-8"))["reward_options"]["JudgeReward"]
    options = settings.pop("options", {})
    Path(settings.get("cache", ".")).parent.mkdir(parents=True, exist_ok=True)
    # Another seed is another request, which the cache does not answer with the first one's scores.
    judges = [JudgeReward(**settings, required=False, options=options | {"seed": seed}) for seed in (1, 2)]
    rows = [json.loads(line) for line in Path(arguments.data).read_text(encoding="utf-8").splitlines()]
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["id"])]
    for name, value in measure(groups, judges, arguments.gold).items():
        print(f"{name:14} {value:.3f}" if isinstance(value, float) else f"{name:14} {value}")


if __name__ == "__main__":
    main()
