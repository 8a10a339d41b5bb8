"""Without env and tools the trainer is TRL's, bit for bit; an option that only our rollout honours is honoured."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from tests.effort import nightly
from tests.tokenizers import make_tokenizer
from tests.toys import say
from tests.trainers.helpers import make_args, make_policy, questions, scored_batch, scripted


def ids_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 5) for ids in completion_ids]


def length_reward(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def train(trainer_class, tmp_path, config_class, **options):
    tokenizer = make_tokenizer("qwen3")
    options = {"max_steps": -1, "num_train_epochs": 3, "max_completion_length": 6, "eval_strategy": "epoch"} | options
    names = {name for name in vars(make_args(tmp_path)) if name in GRPOConfig.__dataclass_fields__}
    defaults = {name: getattr(make_args(tmp_path), name) for name in names & set(PLAIN)}
    trainer = trainer_class(
        model=make_policy(tokenizer), reward_funcs=ids_reward, args=config_class(**(defaults | options)),
        train_dataset=questions(5), eval_dataset=questions(2), processing_class=tokenizer,
    )  # fmt: skip
    torch.manual_seed(11)
    trainer.train()
    history = [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k} for row in logs(trainer)]
    return {name: value.clone() for name, value in trainer.model.named_parameters()}, history


PLAIN = (
    "output_dir", "bf16", "use_cpu", "report_to", "logging_steps", "per_device_train_batch_size", "num_generations",
    "save_strategy", "disable_tqdm", "learning_rate", "seed", "beta",
)  # fmt: skip


def logs(trainer):
    return trainer.state.log_history


@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (GRPOConfig, {"max_completion_length": None, "top_p": 0.9}),
        *nightly(
            (MultiTurnGRPOConfig, {}),
            (MultiTurnGRPOConfig, {"steps_per_generation": 2, "num_iterations": 2}),
            (GRPOConfig, {"steps_per_generation": 2, "multi_objective_aggregation": "normalize_then_sum"}),
        ),
    ],
)
def test_the_run_is_trls_bit_for_bit(tmp_path, config_class, options):
    expected, expected_logs = train(GRPOTrainer, tmp_path / "trl", GRPOConfig, **options)
    found, found_logs = train(MultiTurnGRPOTrainer, tmp_path / "ours", config_class, **options)
    assert found_logs == expected_logs
    assert len({row["epoch"] for row in found_logs}) >= 3
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_what_trl_accepts_for_its_own_rollout_is_accepted(tmp_path):
    args = make_args(tmp_path, use_vllm=True, top_p=0.9, max_completion_length=None)
    assert args.asked_features() == []


def make(tmp_path, *, prompts=None, generator=None, turn_reward_funcs=None, reward_funcs=length_reward, **options):
    tokenizer = make_tokenizer("qwen3")
    return MultiTurnGRPOTrainer(
        model=make_policy(tokenizer), reward_funcs=reward_funcs, args=make_args(tmp_path, **options),
        train_dataset=prompts or questions(), processing_class=tokenizer, generator=generator,
        turn_reward_funcs=turn_reward_funcs,
    )  # fmt: skip


def answers():
    return scripted(make_tokenizer("qwen3"), lambda rng, turn: say("x" * rng.randrange(1, 9)))


def test_an_estimator_of_ours_is_honoured_in_one_turn(tmp_path):
    batch = scored_batch(make(tmp_path, advantage_estimator="reinforce_pp", max_completion_length=12))
    mask = batch["tool_mask"].bool()
    advantages = batch["advantages"][mask]
    assert advantages.mean().abs() < 1e-6
    assert (advantages.std() - 1).abs() < 1e-5


def test_a_generator_and_turn_rewards_are_honoured(tmp_path):
    def one_per_turn(trajectory, **kwargs):
        return [[1.0 + item.generation] for item in trajectory]

    trainer = make(tmp_path, generator=answers(), turn_reward_funcs=one_per_turn, reward_funcs=None)
    trainer.train()
    assert [len(item.turns) for item in trainer.last_trajectories] == [1] * 8
    assert trainer.last_trajectories[0].messages[-1]["content"].strip("x") == ""
    assert {item.process_reward for item in trainer.last_trajectories} == {1.0, 2.0, 3.0, 4.0}
    assert trainer.state.log_history[0]["reward/process"] == 2.5


def test_records_and_layouts_are_honoured(tmp_path):
    trainer = make(tmp_path, generator=answers(), record_trajectories="jsonl", update_layout="packed")
    trainer.train()
    assert trainer.layout.name == "packed"
    assert list((tmp_path / "trajectories").rglob("*.jsonl"))


def test_a_recording_format_asks_for_nothing_but_what_it_names(tmp_path):
    assert make_args(tmp_path, record_trajectories="none").asked_features() == []
    assert make_args(tmp_path, kl_placement="reward", beta=0.1, advantage_estimator="reinforce_pp").asked_features()


def test_text_prompts_with_an_option_of_ours_are_refused_and_messages_are_the_fix(tmp_path):
    texts = Dataset.from_list([{"prompt": f"question {index}"} for index in range(8)])
    with pytest.raises(ValueError, match="update_layout"):
        make(tmp_path, prompts=texts, update_layout="packed")
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in texts])
    assert make(tmp_path, prompts=chats, update_layout="packed").env_factory is not None
    assert make(tmp_path, prompts=texts).env_factory is None


def test_a_rollout_function_beside_a_rollout_of_ours_is_refused(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    with pytest.raises(ValueError, match="rollout_func"):
        MultiTurnGRPOTrainer(
            model=make_policy(tokenizer), reward_funcs=ids_reward, args=make_args(tmp_path, update_layout="packed"),
            train_dataset=questions(), processing_class=tokenizer, rollout_func=lambda prompts, trainer: {},
        )  # fmt: skip


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
