"""Without env and tools each prompt is answered in one turn: conversations, and plain text."""

import pytest
from datasets import Dataset

from agent_r1_trl.chat.plain_text import PlainText
from agent_r1_trl.errors import RunError
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.testing import make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from agent_r1_trl.trajectory import StopReason
from tests.trainers.helpers import make_args, questions, scored_batch, scripted


def length_reward(completions, **kwargs):
    texts = [item if isinstance(item, str) else item[0]["content"] for item in completions]
    return [float(len(text)) for text in texts]


def make(tmp_path, *, prompts=None, generator=None, turn_reward_funcs=None, reward_funcs=length_reward, **options):
    tokenizer = make_tokenizer("qwen3")
    return MultiTurnGRPOTrainer(
        model=make_policy(tokenizer), reward_funcs=reward_funcs, args=make_args(tmp_path, **options),
        train_dataset=prompts or questions(), processing_class=tokenizer, generator=generator,
        turn_reward_funcs=turn_reward_funcs,
    )  # fmt: skip


def answers():
    return scripted(make_tokenizer("qwen3"), lambda rng, turn: say("x" * rng.randrange(1, 9)))


TEXTS = [f"The answer to question {index} is" for index in range(8)]


def texts():
    return Dataset.from_list([{"prompt": text, "answer": str(index)} for index, text in enumerate(TEXTS)])


def test_plain_text_is_continued_without_a_chat_template(tmp_path):
    seen = []

    def keep(prompts, completions, answer, **kwargs):
        seen.extend(zip(prompts, completions, answer, strict=True))
        return [float(len(text)) for text in completions]

    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = None
    args = make_args(tmp_path, update_layout="packed", record_trajectories="jsonl", max_completion_length=12)
    trainer = MultiTurnGRPOTrainer(
        model=make_policy(tokenizer), reward_funcs=keep, args=args, train_dataset=texts(), eval_dataset=texts(),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    assert all(prompt == TEXTS[int(answer)] for prompt, _, answer in seen)
    for (prompt, completion, _), item in zip(seen[-8:], trainer.last_trajectories, strict=True):
        assert item.prompt_ids == tokenizer(prompt)["input_ids"]
        assert completion == tokenizer.decode(item.completion_ids, skip_special_tokens=True)
        assert all(item.action_mask) and len(item.turns) == 1
    assert "eval_reward" in trainer.evaluate()
    assert tokenizer.chat_template is None and list((tmp_path / "trajectories").rglob("*.jsonl"))


def test_an_answer_to_plain_text_ends_with_the_sequence(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    said = PlainText(tokenizer).encode_reply(say("four"))
    trainer = make(tmp_path, prompts=texts(), generator=ScriptedGenerator([said], stop_token_ids=[said[-1]]))
    trainer.train()
    assert {item.stop_reason for item in trainer.last_trajectories} == {StopReason.DONE}
    assert {tuple(item.completion_ids) for item in trainer.last_trajectories} == {tuple(said)}
    assert trainer.last_trajectories[0].final_text == "four"


def test_conversations_among_texts_are_named(tmp_path):
    mixed = Dataset.from_list([{"prompt": [{"role": "user", "content": text}] * 2} for text in TEXTS])
    trainer = make(tmp_path, prompts=texts(), generator=answers())
    trainer.eval_dataset = mixed
    with pytest.raises(RunError, match="Make all prompts of a run text"):
        trainer.evaluate()
        raise RunError(trainer.last_trajectories[0].error)


def test_what_only_trls_own_rollout_does_is_refused_with_its_trainer(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    with pytest.raises(ValueError, match=r"rollout_func= replaces generation.*take trl\.GRPOTrainer"):
        MultiTurnGRPOTrainer(
            model=make_policy(tokenizer), reward_funcs=length_reward, args=make_args(tmp_path),
            train_dataset=questions(), processing_class=tokenizer, rollout_func=lambda prompts, trainer: {},
        )  # fmt: skip
    for column in ("image", "images"):
        pictures = Dataset.from_list([{"prompt": row["prompt"], column: "a.png"} for row in questions()])
        trainer = make(tmp_path, prompts=pictures, generator=answers())
        with pytest.raises(ValueError, match=r"'image' or 'images'.*take trl\.GRPOTrainer"):
            trainer.train()


def test_reward_functions_read_the_whole_reply_as_in_trl(tmp_path):
    seen = []

    def keep(completions, **kwargs):
        seen.extend(completion[0] for completion in completions)
        return [0.0] * len(completions)

    reply = {"role": "assistant", "reasoning_content": "two and two", "content": "four"}
    generator = scripted(make_tokenizer("qwen3"), lambda rng, turn: reply)
    scored_batch(make(tmp_path, generator=generator, reward_funcs=keep))
    assert len(seen) == 8
    assert all(set(message) == {"role", "content"} for message in seen)
    assert all("two and two" in message["content"] and "four" in message["content"] for message in seen)
