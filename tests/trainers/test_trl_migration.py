"""A TRL agent script runs after changing the class name: tools=, environment_factory=, reward_funcs=."""

import pytest
from transformers import TrainerCallback
from trl import GRPOConfig

from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from tests.trainers.helpers import add, make_args, questions, scripted, two_turns


class Counter:
    """A TRL environment: reset, a tool method, its own reward."""

    def reset(self, **kwargs):
        self.total = 0
        return f" Start at {self.total}."

    def add(self, a: int, b: int) -> int:
        """Add to the total.

        Args:
            a: One number.
            b: The other.
        """
        self.total += a + b
        return self.total

    def get_reward(self):
        return float(self.total)


def build(tmp_path, **arguments):
    tokenizer = make_tokenizer("qwen3")
    defaults = {
        "model": make_policy(tokenizer), "args": make_args(tmp_path, max_completion_length=300),
        "train_dataset": questions(), "processing_class": tokenizer, "generator": scripted(tokenizer, two_turns),
    }  # fmt: skip
    return MultiTurnGRPOTrainer(**(defaults | arguments))


def test_a_plain_grpo_config_will_do(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[], per_device_train_batch_size=4,
        num_generations=2, max_steps=1, max_completion_length=300, max_tool_calling_iterations=1, logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    trainer = build(tmp_path, environment_factory=Counter, args=args)
    assert trainer.rollouts.limits.max_turns == 2
    trainer.train()
    assert trainer.state.log_history[0]["rollout/turns"] == 2.0


def test_what_a_callback_changes_in_the_users_arguments_counts_from_the_next_rollout_on(tmp_path):
    args = make_args(tmp_path, max_completion_length=300, max_steps=3, loss_type="dr_grpo")
    changes = {1: (40, None), 2: (300, 0)}

    class Changes(TrainerCallback):
        def on_step_end(self, given, state, control, **kwargs):
            assert given is args
            args.max_completion_length, args.max_tool_calling_iterations = changes.get(state.global_step, (300, None))

    seen = []

    def note(completions, trajectory, **kwargs):
        seen.append(
            [(len(item.completion_ids), len(item.turns), trainer.max_completion_length) for item in trajectory]
        )
        return [0.0] * len(completions)

    trainer = build(tmp_path, reward_funcs=note, tools=[add], args=args, callbacks=[Changes()])
    assert trainer.args is args
    trainer.train()
    first, shorter, without = seen
    assert min(length for length, _, _ in first) > 40 >= max(length for length, _, _ in shorter)
    assert {turns for _, turns, _ in first} == {2} and {turns for _, turns, _ in without} == {1}
    assert [{limit for _, _, limit in step} for step in seen] == [{300}, {40}, {300}]


def test_a_second_run_into_the_folder_of_another_is_warned_of(tmp_path, caplog):
    trainer = build(tmp_path, environment_factory=Counter)
    for again, is_warned in ((trainer, False), (trainer, False), (build(tmp_path, environment_factory=Counter), True)):
        caplog.clear()
        again.train()
        again.save_state()
        assert ("holds a run already (trainer_state.json)" in caplog.text) is is_warned


def test_a_completion_that_cannot_fit_is_warned_of(tmp_path, caplog):
    positions = make_policy(make_tokenizer("qwen3")).config.max_position_embeddings
    for length, is_warned in ((positions - 1, False), (positions, True)):
        caplog.clear()
        build(tmp_path, environment_factory=Counter, args=make_args(tmp_path, max_completion_length=length))
        text = f"max_completion_length={positions} does not fit into the {positions} positions"
        assert (text in caplog.text) is is_warned


def test_a_penalty_that_only_the_sampler_knows_is_warned_of(tmp_path, caplog):
    for penalty, is_warned in ((1.0, False), (1.2, True)):
        caplog.clear()
        build(tmp_path, environment_factory=Counter, args=make_args(tmp_path, repetition_penalty=penalty))
        assert (f"repetition_penalty={penalty:g}: " in caplog.text) is is_warned


def test_a_temperature_that_the_update_would_not_know_of_is_refused_in_mid_run(tmp_path):
    class Changes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.temperature = 0.7

    trainer = build(
        tmp_path, environment_factory=Counter, args=make_args(tmp_path, max_steps=2), callbacks=[Changes()]
    )
    with pytest.raises(ValueError, match=r"temperature=0\.7 .* began with 1: .*Set it back"):
        trainer.train()


def test_without_a_data_set_the_environment_owns_the_prompts(tmp_path):
    args = make_args(tmp_path, max_completion_length=300, max_steps=2)
    trainer = build(tmp_path, environment_factory=Counter, args=args, train_dataset=None)
    trainer.train()
