"""Make the arithmetic of the CPU variant with reasoning-gym (`pip install reasoning-gym`); no question occurs twice.

python recipes/gsm8k_python/make_data.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = {"train": 1000, "test": 200}


def main() -> None:
    """Write data/train.jsonl and data/test.jsonl."""
    import reasoning_gym

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2, "seed": args.seed}
    drawn = reasoning_gym.create_dataset("chain_sum", size=4 * sum(SIZES.values()), **settings)
    rows = list({row["question"]: row["answer"] for row in drawn}.items())
    args.out.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        chosen, rows = rows[:size], rows[size:]
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in chosen]
        (args.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
