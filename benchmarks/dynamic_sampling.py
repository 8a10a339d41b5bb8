"""How many tokens does a hard task take until it is learned, with and without dynamic sampling and the curriculum?

    python benchmarks/dynamic_sampling.py --seeds 0 1 2 3 4 [--json]
    python benchmarks/dynamic_sampling.py --in-reach 1 --target 0.5        # all prompts are equally hard

A two-layer policy answers keys. Each key has one right word, with which a reply has to begin; seven more tokens follow
that earn nothing, as most tokens of a long answer do. A supervised start, other for every seed, gives the policy a
pass rate of 5%: a share of the keys (`--in-reach`) passes at 5% / share, the others hardly ever. A run ends when the
pass rate over all keys, computed from the policy's probabilities and not from samples, reaches `--target`, or after
`--max-steps` optimizer steps. The unit is generated tokens, replaced trajectories included; every variant trains with
the same settings and from the same starts.

`ratio` is the mean number of tokens over the seeds, over that of the run without; a run that did not reach the target
counts with what it had generated until then, and `reached` says how many did.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
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
    "resampled": {"sampling": {"resample_rounds": 4}},
    "curriculum": {"sampling": {"curriculum": True}},
    "both": {"sampling": {"resample_rounds": 4, "curriculum": True}},
}
WORDS, FIRST_WORD = 40, 300
"""The right words are some of these many tokens of the tokenizer, from this id on."""
MISSED = 1e-3
"""Pass rate at the start of a key that is out of reach."""


class Keys(ToolEnv):
    """Passes if the reply begins with the key's word."""

    def outcome_reward(self, trajectory: Any) -> float:
        """1 or 0."""
        return float(trajectory.completion_ids[:1] == [self.example["answer"]])


class Task:
    """The keys, their right words, and a policy that starts at the pass rate wanted.

    Args:
        args: of the command line.
        seed: of the right words and of the start.
    """

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        torch.manual_seed(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.answers = FIRST_WORD + torch.randint(WORDS, (args.keys,))  # (K,)
        chats = [[{"role": "user", "content": word}] for word in self._single_tokens(args.keys)]
        rows = [{"prompt": chat, "answer": answer} for chat, answer in zip(chats, self.answers.tolist(), strict=True)]
        self.dataset = Dataset.from_list(rows)
        encoded = [self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
        self.prompts = torch.tensor(encoded)  # (K, L): equally long
        self.policy = self._start(args)

    def pass_rate(self, policy: Any) -> float:
        """Mean over the keys of the probability of the right word."""
        with torch.no_grad():
            chances = policy(self.prompts).logits[:, -1].softmax(-1)  # (K, V)
        return chances.gather(1, self.answers[:, None]).mean().item()

    def _single_tokens(self, num: int) -> list[str]:
        """Words that the tokenizer takes for one token each, and that are no right words."""
        words = [self.tokenizer.decode([index]) for index in range(FIRST_WORD + WORDS, len(self.tokenizer))]
        words = [word for word in words if word.isalpha() and len(self.tokenizer(word)["input_ids"]) == 1]
        if len(words) < num:
            raise ValueError(f"--keys={num}: the tokenizer has {len(words)} words for them. Give fewer.")
        return words[:num]

    def _start(self, args: argparse.Namespace) -> Any:
        policy = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(self.tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
                initializer_range=0.1,
                eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id, bos_token_id=None,
            )
        )  # fmt: skip
        num_in_reach = max(1, round(args.in_reach * args.keys))
        chance = torch.full((args.keys, 1), MISSED)
        chance[torch.randperm(args.keys)[:num_in_reach]] = min(1.0, args.pass_rate * args.keys / num_in_reach)
        target = torch.zeros(args.keys, len(self.tokenizer))  # (K, V)
        target[:, FIRST_WORD : FIRST_WORD + WORDS] = (1 - chance) / (WORDS - 1)
        target.scatter_(1, self.answers[:, None], chance)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
        for _ in range(args.start_steps):
            chances = policy(self.prompts).logits[:, -1].log_softmax(-1)
            optimizer.zero_grad()
            (-(target * chances).sum(-1).mean()).backward()
            optimizer.step()
        return policy


class Count(TrainerCallback):
    """Counts the tokens of everything that was sampled, and ends the run at the target."""

    def __init__(self, task: Task, target: float) -> None:
        self.trainer: Any = None
        self.tokens, self.steps, self.has_reached = 0, 0, False
        self.with_signal: list[float] = []
        self.pass_rates = [task.pass_rate(task.policy)]
        self._task, self._target = task, target

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One rollout per step."""
        trained = self.trainer.last_trajectories
        self.steps += 1
        self.tokens += sum(item.num_action_tokens for item in [*trained, *self.trainer.last_batch.replaced])
        size = args.num_generations
        groups = [{item.total_reward for item in trained[row : row + size]} for row in range(0, len(trained), size)]
        self.with_signal.append(statistics.mean(len(group) > 1 for group in groups))
        self.pass_rates.append(self._task.pass_rate(self.trainer.model))
        if self.pass_rates[-1] >= self._target:
            self.has_reached = control.should_training_stop = True


def train(args: argparse.Namespace, seed: int, options: dict[str, Any], folder: str) -> Count:
    """One run."""
    task = Task(args, seed)
    count = Count(task, args.target)
    trainer = MultiTurnGRPOTrainer(
        model=task.policy,
        args=MultiTurnGRPOConfig(
            output_dir=folder, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            bf16=False, use_cpu=True, record_trajectories="none", journal=False, beta=0.0, seed=seed,
            per_device_train_batch_size=args.prompts * args.group_size, num_generations=args.group_size,
            max_steps=args.max_steps, max_completion_length=args.length, learning_rate=args.learning_rate,
            lr_scheduler_type="constant", gradient_checkpointing=False, **options,
        ),
        env=Keys,
        train_dataset=task.dataset,
        processing_class=task.tokenizer,
        callbacks=[count],
    )  # fmt: skip
    count.trainer = trainer
    with contextlib.redirect_stdout(io.StringIO()):  # the Trainer prints its last log
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
                "start": statistics.mean(count.pass_rates[0] for count in counts),
                "end": statistics.mean(count.pass_rates[-1] for count in counts),
                "reached": sum(count.has_reached for count in counts),
            }
            | {f"tokens_{seed}": count.tokens for seed, count in zip(args.seeds, counts, strict=True)}
        )
        rows[-1]["ratio"] = rows[-1]["tokens"] / rows[0]["tokens"]
    return rows


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the runs (default: 0)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--keys", type=int, default=64, help="prompts of the data set (default: 64)")
    parser.add_argument("--in-reach", type=float, default=0.25, help="share of them that ever passes (default: 0.25)")
    parser.add_argument("--pass-rate", type=float, default=0.05, help="over all of them, at the start (default: 0.05)")
    parser.add_argument("--length", type=int, default=8, help="tokens of a reply (default: 8)")
    parser.add_argument("--prompts", type=int, default=8, help="of a rollout (default: 8)")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories of a prompt (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--target", type=float, default=0.2, help="pass rate at which a run ends (default: 0.2)")
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--start-steps", type=int, default=300, help="of the supervised start (default: 300)")
    args = parser.parse_args(argv)
    check_at_least(parser, args, 2, "group_size", "length")
    check_at_least(parser, args, 1, "prompts", "max_steps", "start_steps")
    check_at_least(parser, args, args.prompts, "keys")
    if args.keys > 900:
        parser.error(f"--keys={args.keys}: keys have three digits. Give 900 at most.")
    if not 0 < args.pass_rate <= args.in_reach <= 1:
        parser.error("--pass-rate and --in-reach are shares, and the former cannot be larger than the latter.")
    return args


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The table."""
    headings = ["variant", "tokens", "steps", "groups with signal", "pass rate at the end"]
    cells = [
        [
            list(VARIANTS)[row["variant"]], f"{row['tokens']:.0f}", f"{row['steps']:.0f}", f"{row['with_signal']:.2f}",
            f"{row['end']:.2f}", str(row["reached"]), f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    title = f"From a pass rate of {rows[0]['start']:.3f} to one of {args.target:g}"
    print_table(title, [*headings, f"reached (of {len(args.seeds)})", "ratio"], cells)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_arguments(argv)
    report(run(args), args, show, figures=lambda rows: {"rows": [rounded(row) for row in rows]})


if __name__ == "__main__":
    main()
