"""TRL's generation step, which holds its native tool loop, with a stopwatch: what our rollouts are compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import trl
from datasets import Dataset

MAX_COMPLETION_LENGTH = 512


class TimedTrainer(trl.GRPOTrainer):
    """TRL's trainer; `_generate` is timed and its sampled tokens are counted."""

    seconds = 0.0
    num_tokens = 0

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        output = super()._generate(prompts)
        self.seconds = time.perf_counter() - start
        self.num_tokens = sum(map(sum, output[2]))
        return output

    def roll_out(self, rows: Sequence[dict[str, Any]]) -> tuple[float, int]:
        """Seconds and number of sampled tokens of a rollout with one trajectory per row."""
        self.model.train()
        self._generate_and_score_completions([dict(row) for row in rows])
        return self.seconds, self.num_tokens


def make_trainer(
    trainer_class: type[TimedTrainer],
    model: Any,
    tokenizer: Any,
    *,
    num_trajectories: int,
    output_dir: str,
    **tools: Any,
) -> Any:
    """A trainer that will only ever generate.

    Args:
        trainer_class: says how a turn is generated.
        model: on the CPU.
        tokenizer: of the model.
        num_trajectories: of one rollout.
        output_dir: nothing is left in it.
        tools: `tools=` or `environment_factory=`, as for TRL.
    """
    trainer = trainer_class(
        model=model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=num_trajectories,
            num_generations=2,
            max_completion_length=MAX_COMPLETION_LENGTH,
            bf16=False,
            use_cpu=True,
            report_to=[],
            beta=0.0,
            gradient_checkpointing=False,  # would switch off the cache in `generate`
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}]),
        processing_class=tokenizer,
        **tools,
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer
