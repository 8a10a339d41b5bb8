"""Demonstrations by a function, which knows the tools and is hasty: of two calls it often makes the first alone.

python recipes/sql_shop/demonstrate.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from env import ShopEnv

from agent_r1_trl.environments.factory import tool_schemas
from agent_r1_trl.recording.dataset import sft_rows
from agent_r1_trl.testing import call, roll_out, say
from agent_r1_trl.trajectory import Message

HERE = Path(__file__).resolve().parent


def demonstrate(row: dict[str, Any], rng: random.Random, hasty: float) -> list[Message]:
    """The turns that answer a question of the data; a hasty demonstrator answers with what the first call found."""
    kind, name = row["kind"], row["name"]
    if kind == "price":
        return [call("product", name=name), say(row["answer"])]
    if kind == "city":
        return [call("customer", name=name), say(row["answer"])]
    first = call("last_order", customer=name)
    if kind == "ordered":
        return [first, say(row["answer"])]
    if rng.random() < hasty:
        return [first, say(row["product"])]
    return [first, call("product", name=row["product"]), say(row["answer"])]


def main() -> None:
    """Roll the demonstrations out, and write those that earned enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=HERE / "data" / "demonstrations.jsonl")
    parser.add_argument("--hasty", type=float, default=0.8, help="share of the two-call questions that get one call")
    parser.add_argument("--min-reward", type=float, default=0.0, help="1 drops the hasty demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/sql_shop/demonstrations.jsonl"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    turns = [demonstrate(row, rng, args.hasty) for row in rows]
    done = roll_out(ShopEnv, lambda request: turns[request.trajectory_seed][request.turn], rows)
    kept = list(sft_rows(done, min_reward=args.min_reward, tools=tool_schemas(ShopEnv)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    print(f"{args.out}: {len(kept)} conversations")


if __name__ == "__main__":
    main()
