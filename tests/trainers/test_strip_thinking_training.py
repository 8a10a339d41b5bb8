"""Both trainers with `context='strip_thinking'`: contexts of the published template in all they do."""

import pytest

from agent_r1_trl.recording import read_trajectories
from agent_r1_trl.testing import say
from agent_r1_trl.testing.tokenizers import read_template
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.effort import short
from tests.trainers.helpers import PlainEnv, make_trainer, questions


def two_reasoning(rng, turn):
    """Answers, most of them with reasoning."""
    reasoning = {
        "role": "assistant",
        "content": f"{rng.randint(0, 99)}",
        "reasoning_content": f"so {rng.randint(0, 99)}",
    }
    return reasoning if rng.random() < 0.8 else say("none")


class AskingEnv(PlainEnv):
    """Asks once more."""

    def next_user_message(self, message):
        return "Sure?"


@pytest.mark.parametrize("trainer_class", short((MultiTurnGRPOTrainer, MultiTurnPPOTrainer), MultiTurnPPOTrainer))
def test_reasoning_is_stripped_in_training_evaluation_and_after_a_resume(tmp_path, trainer_class):
    options = {
        "trainer": trainer_class, "context": "strip_thinking", "max_turns": 2,
        "script": two_reasoning, "env": AskingEnv,
        "eval_dataset": questions(4), "per_device_eval_batch_size": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "record_trajectories": "jsonl", "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    trainer = make_trainer(tmp_path, **options, max_steps=2)
    trainer.train()
    trainer.evaluate()
    assert trainer.args.context.policy == "strip_thinking"
    assert trainer.rollouts.chat.chat_template == read_template("qwen3"), "not TRL's, which keeps reasoning"
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2 and all(entry["rollout/rows"] > 1 and entry["grad_norm"] > 0 for entry in logged)
    resumed = make_trainer(tmp_path, **options, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    tokenizer = trainer.processing_class
    for item in [*read_trajectories(tmp_path), *resumed.last_trajectories]:
        last = tokenizer.decode(item.rows[-1].prompt_ids)
        reasoning = [turn.message.get("reasoning_content") for turn in item.turns]
        if reasoning[0]:
            assert len(item.rows) == 2 and reasoning[0] not in last and item.turns[0].message["content"] in last


def test_a_model_without_reasoning_is_refused_by_the_trainer(tmp_path):
    with pytest.raises(ValueError, match=r"context='strip_thinking' has no effect.*context='keep'"):
        make_trainer(tmp_path, family="qwen2_5", context="strip_thinking")
