"""The doctor's check of the weights: is the model scored in an update as it was sampled?

The only check that loads the weights, so it waits to be asked. It makes one training step at learning rate 0 on four
short prompts; the trainer looks at its own log-probs before that step (`trainers/score_check.py`).
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from agent_r1_trl.features.doctor.report import Report, describe_error

_PROMPTS = (
    "Name a river.",
    "Which river flows through Paris, and how long is it? Say where it rises and where it reaches the sea.",
    "Count from one to five.",
    "Repeat this sentence without changing a word of it: the quick brown fox jumps over the lazy dog, and then again.",
)
"""Their lengths differ, so that there is padding."""


def examine_scores(
    report: Report,
    model: str,
    *,
    update_layout: str = "auto",
    model_init_kwargs: dict[str, Any] | None = None,
    **chat_options: Any,
) -> None:
    """Load the weights, sample short answers and compare log-probs; adds one line to the report.

    Args:
        report: where the finding goes.
        model: directory or Hub name.
        update_layout: the recipe's.
        model_init_kwargs: the recipe's, such as {dtype: float32}.
        **chat_options: the recipe's `chat_template` and `response_template`.
    """
    from datasets import Dataset

    from agent_r1_trl.environments.trl_adapters import SingleTurnEnv
    from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

    has_gpu = torch.cuda.is_available()
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in _PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        args = MultiTurnGRPOConfig(
            output_dir=folder,
            max_steps=1,
            learning_rate=0.0,
            per_device_train_batch_size=8,
            num_generations=2,
            max_completion_length=16,
            update_layout=update_layout,
            model_init_kwargs=model_init_kwargs,
            use_cpu=not has_gpu,
            bf16=has_gpu,
            report_to=[],
            save_strategy="no",
            record_trajectories="none",
            disable_tqdm=True,
            beta=0.0,
            **chat_options,
        )
        try:
            trainer = MultiTurnGRPOTrainer(
                model=model,
                args=args,
                reward_funcs=_no_reward,
                train_dataset=Dataset.from_list(rows),
                env=SingleTurnEnv,
            )
            trainer.train()
        except Exception as error:  # loading, sampling and scoring run other people's code
            report.error("scores", describe_error(error, limit=1000), "Follow the message, or take another model.")
            return
    report.ok("scores", f"Sampled and scored log-probs agree (update_layout={update_layout!r}).")


def _no_reward(completions: list[Any], **columns: object) -> list[float]:
    """Nothing is to be learned."""
    return [0.0] * len(completions)
