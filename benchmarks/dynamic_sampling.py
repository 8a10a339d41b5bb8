"""How many tokens does a hard task take until it is learned, with and without dynamic sampling and the curriculum?

    python benchmarks/dynamic_sampling.py --seeds 0 1 2 3 4 [--json]

A two-layer policy with random weights learns a table: each prompt names a key, and a reply passes if the id of its
first token leaves the right remainder modulo `classes` (20 of them: the policy starts at a pass rate of 5%). Nothing
else earns anything. A run ends when the mean pass rate of its last rollouts, over everything that was sampled, reaches
`target`, or after `max_steps` optimizer steps. The unit is generated tokens, replaced trajectories included; every
variant trains with the same settings and the same seeds.

`ratio` is the mean number of tokens over the seeds, over that of the run without; a run that did not reach the target
counts with what it had generated until then, and `reached` says how many did.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import deque
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from _common import MODEL, be_quiet, check_at_least, make_parser, print_table, report, rounded
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from agent_r1_trl import ToolEnv
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "resampled": {"resample_rounds": 4},
    "curriculum": {"curriculum": True},
    "both": {"resample_rounds": 4, "curriculum": True},
}
WINDOW = 5
"""Rollouts over which the pass rate is averaged."""


class Table(ToolEnv):
    """Passes if the first token belongs to the key's class."""

    def outcome_reward(self, trajectory: Any) -> float:
        """1 or 0."""
        ids = trajectory.completion_ids
        return float(bool(ids) and ids[0] % self.example["classes"] == self.example["answer"])


class Count(TrainerCallback):
    """Counts tokens and passes of everything that was sampled, and ends the run at the target."""

    def __init__(self, target: float) -> None:
        self.trainer: Any = None
        self.tokens, self.steps, self.has_reached = 0, 0, False
        self.with_signal: list[float] = []
        self._target = target
        self._rates: deque[float] = deque(maxlen=WINDOW)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One rollout per step."""
        trained = self.trainer.last_trajectories
        sampled = [*trained, *self.trainer.resampling.replaced]
        self.steps += 1
        self.tokens += sum(item.num_action_tokens for item in sampled)
        self._rates.append(statistics.mean(item.total_reward for item in sampled))
        size = args.num_generations
        groups = [{item.total_reward for item in trained[row : row + size]} for row in range(0, len(trained), size)]
        self.with_signal.append(statistics.mean(len(group) > 1 for group in groups))
        if len(self._rates) == WINDOW and statistics.mean(self._rates) >= self._target:
            self.has_reached = control.should_training_stop = True


def train(args: argparse.Namespace, seed: int, options: dict[str, Any], folder: str) -> Count:
    """One run."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [
        {"prompt": [{"role": "user", "content": f"Key {key}?"}], "answer": key % args.classes, "classes": args.classes}
        for key in range(args.keys)
    ]
    policy = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    count = Count(args.target)
    trainer = MultiTurnGRPOTrainer(
        model=policy,
        args=MultiTurnGRPOConfig(
            output_dir=folder, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            bf16=False, use_cpu=True, record_trajectories="none", journal=False, beta=0.0, seed=seed,
            per_device_train_batch_size=args.prompts * args.group_size, num_generations=args.group_size,
            max_steps=args.max_steps, max_completion_length=2, learning_rate=args.learning_rate,
            lr_scheduler_type="constant", **options,
        ),
        env=Table,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[count],
    )  # fmt: skip
    count.trainer = trainer
    trainer.train()
    return count


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each variant."""
    be_quiet()
    rows = []
    for name in args.variants:
        counts = []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                counts.append(train(args, seed, VARIANTS[name], folder))
        rows.append(
            {
                "variant": list(VARIANTS).index(name),
                "tokens": statistics.mean(count.tokens for count in counts),
                "steps": statistics.mean(count.steps for count in counts),
                "with_signal": statistics.mean(statistics.mean(count.with_signal) for count in counts),
                "reached": sum(count.has_reached for count in counts),
            }
        )
        rows[-1]["ratio"] = rows[-1]["tokens"] / rows[0]["tokens"]
    return rows


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the runs (default: 0)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--keys", type=int, default=32, help="prompts of the data set (default: 32)")
    parser.add_argument("--classes", type=int, default=20, help="1 / pass rate at the start (default: 20)")
    parser.add_argument("--prompts", type=int, default=8, help="of a rollout (default: 8)")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories of a prompt (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--target", type=float, default=0.5, help="pass rate at which a run ends (default: 0.5)")
    parser.add_argument("--max-steps", type=int, default=400)
    args = parser.parse_args(argv)
    check_at_least(parser, args, 2, "classes", "group_size")
    check_at_least(parser, args, 1, "prompts", "max_steps")
    check_at_least(parser, args, args.prompts, "keys")
    return args


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The table."""
    headings = ["variant", "tokens", "steps", "groups with signal", f"reached (of {len(args.seeds)})", "ratio"]
    cells = [
        [
            list(VARIANTS)[row["variant"]], f"{row['tokens']:.0f}", f"{row['steps']:.0f}", f"{row['with_signal']:.2f}",
            str(row["reached"]), f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    print_table(f"Until a pass rate of {args.target:g}", headings, cells)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(argv)
    report(run(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
