"""The callback in a real trl.GRPOTrainer, which knows nothing of our package."""

import logging

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from agent_r1_trl import EchoTrapCallback
from agent_r1_trl.features.echo_trap.callback import read_log
from tests.tokenizers import make_tokenizer
from tests.trainers.helpers import make_policy


def make_plain_trainer(folder, callback, reward, **options):
    tokenizer = make_tokenizer("qwen3")
    args = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_completion_length=2,
        max_steps=options.pop("max_steps", 30), learning_rate=1e-6, logging_steps=1, report_to=[], bf16=False,
        use_cpu=True, disable_tqdm=True, save_strategy=options.pop("save_strategy", "no"), **options,
    )  # fmt: skip
    return GRPOTrainer(
        make_policy(tokenizer, hidden_size=8),
        reward,
        args,
        train_dataset=Dataset.from_list([{"prompt": f"question {i}"} for i in range(8)]),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def falling(steps):
    """A reward function: 1 for half of the completions, from call `steps` on 0 for all."""
    calls = []

    def reward(completions, **kwargs):
        calls.append(1)
        return [0.0 if len(calls) > steps else float(i % 2) for i in range(len(completions))]

    return reward


def test_a_plain_trainer_is_judged_and_ends_when_it_has_collapsed(tmp_path, caplog):
    callback = EchoTrapCallback(stop_on="collapsed")
    trainer = make_plain_trainer(tmp_path, callback, falling(12))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert callback.has_stopped and callback.verdict.state == "collapsed"
    assert {"reward", "zero_std_share"} <= {*callback.verdict.signals}
    assert 13 < trainer.state.global_step < 30
    states = [entry["echo/state"] for entry in trainer.state.log_history if "echo/state" in entry]
    assert states[:12] == [0.0] * 12 and states[-1] == 4.0
    assert len(states) == trainer.state.global_step, "the summary of the run is no step"
    said = [record.getMessage() for record in caplog.records if "echo_trap" in record.getMessage()]
    assert "after healthy. The reward fell from its best by" in said[0] and "twice in a row" in said[0]
    assert "the run ends" in said[-1] and "stop_on='collapsed'" in said[-1]


def test_a_callback_that_only_watches_lets_the_run_end_by_itself_and_goes_on_from_a_checkpoint(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole, resumed = EchoTrapCallback(), EchoTrapCallback()
    trainer = make_plain_trainer(tmp_path, whole, falling(99), **options)
    trainer.train()
    assert trainer.state.global_step == 4 and not whole.has_stopped
    make_plain_trainer(tmp_path, resumed, falling(99), **options).train(str(tmp_path / "checkpoint-2"))
    assert resumed.verdict.step == 4


def test_in_front_of_the_others_the_callback_shows_its_numbers_to_trackers(tmp_path):
    seen = []

    class Tracker(EchoTrapCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append("echo/state" in logs)

    trainer = make_plain_trainer(tmp_path, Tracker(), falling(99), max_steps=1)
    EchoTrapCallback().attach(trainer)
    trainer.train()
    assert seen[0] is True


def test_a_log_line_is_read_by_the_names_of_trl_and_of_ours():
    line = {"reward": 0.5, "reward_std": 0.4, "group/reward_std": 0.3, "frac_reward_zero_std": 0.2, "loss": 1.0}
    assert read_log(line) == {"reward": 0.5, "reward_std": 0.3, "zero_std_share": 0.2}
    assert read_log({"eval_reward": 0.5, "train_runtime": 1.0}) == {}
    assert read_log({"grad_norm": float("nan")}) == {"grad_norm": float("inf")}


def test_another_state_to_stop_on_is_refused_by_name():
    with pytest.raises(ValueError, match="stop_on='warning'"):
        EchoTrapCallback(stop_on="warning")
