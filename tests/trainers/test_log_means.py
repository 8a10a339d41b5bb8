"""What is logged of several rollouts and micro-batches: means over all rollouts, and over all tokens."""

import math

import pytest
import torch

from agent_r1_trl.features.distillation import SelfDistillation
from agent_r1_trl.rewards.function import RunningTotal
from agent_r1_trl.testing import AddEnv, call, make_policy, make_tokenizer, say
from agent_r1_trl.trainers.log_means import SeenMetrics, TokenMean, complete, fill_absent, logged_mean
from agent_r1_trl.update.batches import MIN_COLUMNS, trim_padding
from tests.trainers.helpers import LOST, LikelihoodTrainer, answering, make_trainer, questions

# -------------------------------------------------------------------- metrics that some rollouts do not log


def test_a_count_is_0_for_the_rollouts_without_it_before_and_after_it_was_first_seen():
    metrics = {
        "rollout/turns": [2.0, 1.0, 1.0, 2.0],
        "reward/process": [0.5, math.nan, 0.5, 0.5],
        "tools/call_errors/timeout": [3.0],
        "tools/add/calls": [1.0, 2.0],
        "tools/add/latency_s": [0.25],
        "rollout/rows": [3.0],
        "reward_parts/format": [0.75],
        "env/em": [1.0],
    }
    complete(metrics, seen=["tools/call_errors/timeout", "tools/call_errors/exception"])
    means = {name: logged_mean(values) for name, values in metrics.items()}
    assert means["tools/call_errors/timeout"] == 3 / 4
    assert means["tools/call_errors/exception"] == 0
    assert means["tools/add/calls"] == 3 / 4
    assert means["rollout/rows"] == 6 / 4, "one row per trajectory where nothing was rewritten"
    assert means["reward_parts/format"] == 0.75 / 3, "one rollout has no trajectory in the baseline"
    assert means["tools/add/latency_s"] == 0.25 and means["env/em"] == 1, "unknown for the others"


def test_a_log_without_a_new_rollout_says_nothing_of_rollouts():
    metrics = {"loss": [1.0]}
    fill_absent(metrics, ["tools/call_errors/timeout", "reward_parts/format"])
    assert metrics == {"loss": [1.0]}


def test_what_a_run_has_logged_is_read_once_and_anew_after_a_rollback():
    seen, history = SeenMetrics(), [{"tools/a/calls": 1.0, "loss": 1.0}, {"eval_tools/b/calls": 1.0}]
    assert seen.read(history, "") == ["tools/a/calls"] and seen.read(history, "eval_") == ["tools/b/calls"]
    history.append({"reward_parts/format": 0.5})
    assert seen.read(history, "") == ["reward_parts/format", "tools/a/calls"]
    del history[:2]
    assert seen.read(history, "") == ["reward_parts/format"]


def speak(rng, turn):
    return say("x" * rng.randrange(1, 9))


def trainer_that_calls_in(tmp_path, steps, **options):
    """A training whose policy makes a wrong call per trajectory, in these steps alone."""
    box = []

    def script(rng, turn):
        is_calling = bool(box) and box[0].model.training and box[0].state.global_step in steps
        return call(a="x", b=1) if is_calling and turn == 0 else speak(rng, turn)

    trainer = make_trainer(tmp_path, script=script, **options)
    box.append(trainer)
    return trainer


COUNTS = {"tools/call_errors/invalid_arguments": 1.0, "tools/add/calls": 1.0, "reward_parts/tool_error": -0.1}


def test_metrics_of_one_rollout_in_four_are_means_over_the_four_and_0_afterwards(tmp_path):
    trainer = trainer_that_calls_in(tmp_path, {2}, max_steps=8, logging_steps=4)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    for name, value in COUNTS.items():
        assert first[name] == pytest.approx(value / 4), name
        assert second[name] == 0, name
    assert first["reward_parts/tool_error"] == pytest.approx(first["reward/process"])
    assert second["tools/call_error_share"] == 0 and "tools/add/latency_s" not in second


def test_a_resumed_run_logs_0_of_what_it_has_logged_before(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer_that_calls_in(tmp_path, {0}, **options).train()
    resumed = trainer_that_calls_in(tmp_path, {0}, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    logged = [entry for entry in resumed.state.log_history if "reward" in entry]
    for name, value in COUNTS.items():
        assert [entry[name] for entry in logged] == pytest.approx([value, 0, 0, 0]), name


def test_a_second_evaluation_logs_0_of_what_the_first_one_has_logged(tmp_path):
    calls_in = [0]

    def script(rng, turn):
        return call(a="x", b=1) if turn == 0 and calls_in and calls_in[0] == 0 else speak(rng, turn)

    trainer = make_trainer(tmp_path, script=script, eval_dataset=questions(4), per_device_eval_batch_size=4)
    first = trainer.evaluate()
    calls_in.clear()
    second = trainer.evaluate()
    name = "eval_tools/call_errors/invalid_arguments"
    assert first[name] == 1 and second[name] == 0
    assert second["eval_reward_parts/tool_error"] == 0


class Meter:
    """A reward function that says how often it was called, and what it has paid per call."""

    __name__ = "meter"

    def __init__(self):
        self.num_calls = 0

    def __call__(self, completions, log_metric, **columns):
        self.num_calls += 1
        log_metric("meter/calls", RunningTotal(self.num_calls))
        log_metric("meter/length", float(self.num_calls))
        return [0.0] * len(completions)


def test_a_total_since_the_run_began_is_not_averaged_over_the_rollouts_of_a_log(tmp_path):
    meter = Meter()
    trainer = make_trainer(tmp_path, script=speak, max_steps=8, logging_steps=4, reward_funcs=[meter])
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert (first["meter/calls"], second["meter/calls"]) == (4.0, 8.0)
    assert (first["meter/length"], second["meter/length"]) == (2.5, 6.5)


def test_an_evaluation_logs_a_total_as_it_is_at_its_end(tmp_path):
    options = {"eval_dataset": questions(8), "per_device_eval_batch_size": 4}
    trainer = make_trainer(tmp_path, script=speak, reward_funcs=[meter := Meter()], **options)
    assert trainer.evaluate()["eval_meter/calls"] == meter.num_calls > 1


# -------------------------------------------------------------------- means over tokens


def test_a_mean_over_micro_batches_is_one_over_their_tokens():
    assert logged_mean([TokenMean(1.0, 30), TokenMean(4.0, 10), TokenMean(9.0, 0)]) == 1.75
    assert math.isnan(logged_mean([TokenMean(1.0, 0)]))
    assert logged_mean([1.0, math.nan, 2.0]) == 1.5


UNEVEN = ["x", "xx", "xxx" * 9, "x" * 40, "xxx", "xx", LOST, LOST]
"""The lost rows are a micro-batch of their own, without a token."""


@pytest.mark.parametrize(
    "options",
    [{}, {"update_layout": "grouped"}, {"update_layout": "packed", "max_tokens_per_micro_batch": 150}],
    ids=str,
)
def test_token_means_do_not_depend_on_how_the_rows_are_split(tmp_path, options, policy_path):
    def logged(name, **given):
        run = answering(tmp_path / name, UNEVEN, trainer=LikelihoodTrainer, model=policy_path, beta=0.1, **given)
        run.add_callback(SelfDistillation(lambda item, row: f"say {item.generation}" if item.generation else None))
        run.features["distillation"].attach(run)
        run.train()
        return run.state.log_history[0]

    together = logged("together")
    apart = logged("apart", per_device_train_batch_size=2, gradient_accumulation_steps=4, **options)
    for name in ("entropy", "kl", "extra_loss", "distillation", "distillation/gap", "clip_ratio/region_mean"):
        assert apart[name] == pytest.approx(together[name], rel=1e-4, abs=1e-7), name
    assert together["distillation/gap"] != 0 and together["kl"] == pytest.approx(0, abs=1e-6)


def test_a_row_without_tokens_in_the_loss_is_no_token_where_completions_have_one_token(tmp_path):
    """TRL takes an (R, 1) tensor for one number per row."""
    tokenizer = make_tokenizer("qwen3")
    rows = ["x", "x", "x", LOST]
    trainer = answering(tmp_path, rows, env=OneToken, model=make_policy(tokenizer), max_completion_length=1)
    trainer.train()
    item = trainer.last_trajectories[0]
    assert sum(item.action_mask) == 1 == len(item.completion_ids)
    logits = trainer.state.log_history[0]["entropy"]
    policy = make_policy(tokenizer)
    with torch.no_grad():
        last = policy(input_ids=torch.tensor([item.prompt_ids])).logits[0, -1]
    expected = torch.distributions.Categorical(logits=last).entropy().item()
    assert logits == pytest.approx(expected, rel=1e-2), "not three quarters of it"


class OneToken(AddEnv):
    """Every answer earns something else."""

    count = 0

    def outcome_reward(self, trajectory):
        OneToken.count += 1
        return float(OneToken.count)


def test_a_dummy_row_keeps_two_columns():
    rows = {
        "prompt_ids": torch.ones(1, 3, dtype=torch.long), "prompt_mask": torch.tensor([[0, 0, 1]]),
        "completion_ids": torch.ones(1, 5, dtype=torch.long), "completion_mask": torch.tensor([[1, 0, 0, 0, 0]]),
    }  # fmt: skip
    assert trim_padding(rows)["completion_ids"].shape == (1, MIN_COLUMNS) == (1, 2)
