"""Make the tasks of the recipe; no task occurs twice.

python recipes/function_calling/make_data.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tasks import draw_task

HERE = Path(__file__).resolve().parent
SIZES = {"train": 1000, "test": 200}


def main() -> None:
    """Write data/train.jsonl and data/test.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    drawn = {json.dumps(draw_task(rng)[0]): None for _ in range(2 * sum(SIZES.values()))}
    lines = list(drawn)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        chosen, lines = lines[:size], lines[size:]
        rows = [json.dumps({"id": f"{name}-{number}", **json.loads(line)}) for number, line in enumerate(chosen)]
        (args.out / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
