"""Evaluation by the trainer: every row counts once, has its own episode, and leaves the training alone."""

import logging
import math

import pytest
import torch

from agent_r1_trl.evaluation import evaluate
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.rewards import required
from agent_r1_trl.testing import AddEnv, say
from agent_r1_trl.trainers import evaluation as evaluation_module
from agent_r1_trl.trainers.evaluation import EvaluationRows
from agent_r1_trl.trajectory import StopReason
from tests.test_evaluation import rolled_out
from tests.trainers.helpers import make_trainer, questions
from tests.trainers.test_draws import DealtEnv


class SumEnv(AddEnv):
    """Every row earns its number."""

    def reset(self, example):
        self.number = float(example["id"].removeprefix("q"))
        return super().reset(example)

    def outcome_reward(self, trajectory):
        trajectory.info["number"] = self.number
        return self.number


def answer(rng, turn):
    """One turn, which earns nothing by itself."""
    return say("x" * rng.randrange(1, 9))


EVALUATION = {"num_generations_eval": 1, "per_device_eval_batch_size": 4}


# -------------------------------------------------------------------- rows


def test_the_rows_of_a_last_smaller_batch_weigh_as_much_as_the_others(tmp_path):
    trainer = make_trainer(tmp_path, env=SumEnv, script=answer, eval_dataset=questions(5), **EVALUATION)
    metrics = trainer.evaluate()
    numbers = (0 + 1 + 2 + 3 + 4) / 5  # and not the mean of 6 / 4 and 4
    for name in ("reward", "reward/outcome", "rewards/environment_reward/mean", "env/number"):
        assert metrics[f"eval_{name}"] == pytest.approx(numbers), name


def test_every_metric_of_an_evaluation_has_its_prefix(tmp_path):
    """TRL calls those of the rollout eval_ whatever `metric_key_prefix` says."""
    trainer = make_trainer(tmp_path, env=SumEnv, script=answer, eval_dataset=questions(5), **EVALUATION)
    plain = trainer.evaluate()
    metrics = trainer.evaluate(metric_key_prefix="test")
    assert metrics["test_reward"] == plain["eval_reward"] == pytest.approx(2.0)
    assert trainer.state.log_history[-1]["test_reward"] == metrics["test_reward"]
    assert {name.removeprefix("eval_") for name in plain} == {name.removeprefix("test_") for name in metrics}
    sets = {"few": questions(2), "more": questions(5)}
    of_sets = trainer.evaluate(eval_dataset=sets, metric_key_prefix="test")
    assert (of_sets["test_few_reward"], of_sets["test_more_reward"]) == (pytest.approx(0.5), pytest.approx(2.0))
    assert all(name == "epoch" or name.startswith(("test_few_", "test_more_")) for name in of_sets)
    predicted = trainer.predict(questions(5)).metrics
    assert predicted["test_reward"] == pytest.approx(2.0)
    assert all(name.startswith("test_") for name in predicted)
    assert trainer.evaluate()["eval_reward"] == pytest.approx(2.0)


def test_the_trajectories_of_a_whole_evaluation_are_there_afterwards_and_those_of_a_rollout_after_training(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=questions(5), per_device_eval_batch_size=2, num_generations_eval=1)
    trainer.evaluate()
    assert len({item.example_id for item in trainer.last_trajectories}) == len(trainer.last_trajectories) == 5
    trainer.train()
    assert len(trainer.last_trajectories) == 8


def test_every_mean_is_one_over_all_rows_whatever_the_size_of_the_batches(tmp_path):
    results = []
    for size in (2, 4, 8):
        options = {"num_generations_eval": 2, "per_device_eval_batch_size": size}
        results.append(
            make_trainer(tmp_path, env=SumEnv, script=answer, eval_dataset=questions(5), **options).evaluate()
        )
    means = (
        "completions/mean_length", "completions/mean_terminated_length", "completions/max_length", "entropy",
        "rollout/turns", "tokens/policy", "group/reward_std", "stop/done", "reward", "clip_ratio/region_mean",
    )  # fmt: skip
    for name in means:
        values = [result[f"eval_{name}"] for result in results]
        tolerance = 0.02 if name == "entropy" else 1e-6  # TRL's, a mean over the tokens of each batch
        assert values == pytest.approx(values[:1] * 3, rel=tolerance), name


def test_a_row_that_nobody_scored_has_no_part_in_the_reward(tmp_path):
    def odd(trajectory, **kwargs):
        numbers = [item.info["number"] for item in trajectory]
        return [number if number % 2 else None for number in numbers]

    trainer = make_trainer(
        tmp_path,
        env=SumEnv,
        script=answer,
        eval_dataset=questions(5),
        reward_funcs=[odd],
        reward_weights=[10.0],
        **EVALUATION,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/odd/mean"] == pytest.approx((1 + 3) / 2)
    assert metrics["eval_reward"] == pytest.approx((0 + 11 + 2 + 33 + 4) / 5)


def test_a_row_that_a_required_function_did_not_score_has_no_part_in_the_reward_either(tmp_path):
    @required
    def high(trajectory, **kwargs):
        return [0.0 if item.info["number"] > 2 else None for item in trajectory]

    trainer = make_trainer(
        tmp_path, env=SumEnv, script=answer, eval_dataset=questions(5), reward_funcs=[high], **EVALUATION
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rollout/unscored_share"] == 0.6
    assert metrics["eval_reward"] == metrics["eval_reward/outcome"] == (3 + 4) / 2


def test_rows_that_fill_up_the_last_batch_of_several_processes_do_not_count(monkeypatch):
    """Three rows on two ranks with batches of two: accelerate repeats the first row on the second rank."""
    rows = [rolled_out(reward=1.0), rolled_out(reward=2.0), rolled_out(reward=6.0), rolled_out(reward=100.0)]
    monkeypatch.setattr(
        evaluation_module, "gather_object", lambda own: own if len(own) == 4 else [*recorded(rows[:2]), *own]
    )
    watched = EvaluationRows(3)
    values = torch.tensor([[1.0], [2.0], [6.0], [100.0]])
    watched.take_rewards(values, rows[2:], rank=1)
    assert [item.in_baseline for item in rows] == [True, True, True, False]
    assert values[:3].tolist() == [[1.0], [2.0], [6.0]] and math.isnan(values[3, 0])
    assert watched.take(rows[2:], rank=1) == rows[2:3]
    metrics = watched.metrics({"entropy": [0.5]}, names=["f"], group_size=1)
    assert metrics["reward"] == metrics["rewards/f/mean"] == metrics["reward/outcome"] == [3.0]
    assert metrics["entropy"] == [0.5]
    assert watched.first_row == 4


def recorded(trajectories):
    gather = evaluation_module.gather_object
    evaluation_module.gather_object = lambda rows: rows
    try:
        rows = EvaluationRows()
        rows.take(trajectories, rank=0)
    finally:
        evaluation_module.gather_object = gather
    return list(zip(rows._records, rows._failures, strict=True))


def test_metrics_of_batches_are_weighted_by_rows():
    watched = EvaluationRows(5)
    for size in (4, 1):
        watched.take_rewards(torch.ones(size, 1), [], rank=0)
        watched.take([rolled_out()] * size, rank=0)
    per_batch = {"entropy": [1.0, 6.0], "kl": [math.nan, 3.0], "time/sync_s": [7.0], "nothing": [math.nan] * 2}
    metrics = watched.metrics(per_batch, names=["f"], group_size=1)
    assert (metrics["entropy"], metrics["kl"], metrics["time/sync_s"]) == ([2.0], [3.0], [7.0])
    assert math.isnan(metrics["nothing"][0])


# -------------------------------------------------------------------- episodes


def starts_of(trainer):
    """What the trajectories of an evaluation were asked, and their seeds."""
    seen, roll_out = [], trainer.rollouts.generate

    def watched(*args):
        batch = roll_out(*args)
        seen.extend((item.prompt_messages[0]["content"], item.seed) for item in batch.trajectories)
        return batch

    trainer.rollouts.generate = watched
    trainer.evaluate()
    trainer.rollouts.generate = roll_out
    return seen


def dealt(tmp_path, batch_size, **options):
    return make_trainer(
        tmp_path, env=DealtEnv, script=answer, eval_dataset=equal_rows(7),
        per_device_eval_batch_size=batch_size, **options,
    )  # fmt: skip


def equal_rows(count):
    return questions(1).select([0] * count)


def test_equal_rows_roll_out_episodes_of_their_own_the_same_in_every_evaluation(tmp_path):
    trainer = dealt(tmp_path, 4, num_generations_eval=1)
    first = starts_of(trainer)
    assert len({start for start, _ in first}) == len({seed for _, seed in first}) == 7
    assert starts_of(trainer) == first == starts_of(dealt(tmp_path, 3, num_generations_eval=1))


def test_the_trainer_and_the_evaluator_roll_out_the_same_episodes(tmp_path):
    trainer = dealt(tmp_path, 4, num_generations_eval=2)
    chat = trainer.chat
    generator = ScriptedGenerator([chat.encode_reply(say("5"))], stop_token_ids=chat.stop_token_ids)
    result = evaluate(generator, DealtEnv, chat, equal_rows(7), num_generations=2, seed=trainer.args.seed)
    assert starts_of(trainer) == [(t.prompt_messages[0]["content"], t.seed) for t in result.trajectories]


def test_rows_come_in_the_order_of_the_data_set(tmp_path):
    starts = starts_of(make_trainer(tmp_path, eval_dataset=questions(6), **EVALUATION))
    assert [start for start, _ in starts] == [f"question {index}" for index in range(6)]


# -------------------------------------------------------------------- the training around it


@pytest.mark.parametrize("generator", ["scripted", "transformers"])
def test_evaluation_between_two_steps_does_not_change_the_training(tmp_path, generator):
    options = {"max_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    if generator == "transformers":
        options |= {"script": None, "env": DealtEnv, "max_completion_length": 12}
    histories = []
    for strategy in ("no", "steps"):
        trainer = make_trainer(
            tmp_path, eval_dataset=questions(3), eval_strategy=strategy, eval_steps=1, **EVALUATION, **options
        )
        trainer.train()
        histories.append([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])
    assert histories[0] == histories[1]
    assert len(set(histories[0])) == 4


class DownEnv(SumEnv):
    """The server that the environment needs is down for some evaluations."""

    is_down = staticmethod(lambda example: False)

    def reset(self, example):
        if self.is_down(example):
            raise OSError("the server is down")
        return super().reset(example)


BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}


@pytest.mark.parametrize(
    ("metric", "outage"), [("env/number", range(1)), ("reward", range(1, 3)), ("env/number", range(3))], ids=str
)
def test_an_evaluation_in_which_everything_failed_is_said_and_never_the_best(
    tmp_path, monkeypatch, caplog, metric, outage
):
    trainer = make_trainer(
        tmp_path,
        env=DownEnv,
        script=answer,
        eval_dataset=questions(5),
        max_steps=3,
        metric_for_best_model=metric,
        **BEST,
        **EVALUATION,
    )
    monkeypatch.setattr(
        DownEnv,
        "is_down",
        lambda self, example: not trainer.model.training and trainer.state.global_step - 1 in outage,
    )
    with caplog.at_level(logging.WARNING, logger="agent_r1_trl"):
        trainer.train()
    assert trainer.state.global_step == 3
    evaluations = [entry for entry in trainer.state.log_history if "eval_rollout/turns" in entry]
    assert [entry["eval_reward"] for entry in evaluations] == [None if i in outage else 2.0 for i in range(3)]
    assert [entry["eval_rollout/lost_share"] for entry in evaluations] == [float(i in outage) for i in range(3)]
    said = (
        "5 of the 5 trajectories of this evaluation were lost, so that it has no reward: 5 x environment_error: Down"
    )
    assert caplog.text.count(said) == len(outage)
    assert trainer.state.best_metric == (2.0 if len(outage) < 3 else -math.inf)


def test_a_metric_that_no_evaluation_logs_is_refused_with_those_that_it_logs(tmp_path):
    trainer = make_trainer(
        tmp_path,
        script=answer,
        eval_dataset=questions(2),
        max_steps=1,
        metric_for_best_model="eval_rewardd",
        **BEST,
        **EVALUATION,
    )
    trainer.evaluate()  # outside a training nothing is chosen by it
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_rewardd'.*Did you mean 'reward'\?") as caught:
        trainer.train()
    listed = str(caught.value).partition("one that it logs: ")[2].rstrip(".").split(", ")
    assert {"reward", "rollout/turns"} <= {*listed}


@pytest.mark.parametrize("broken", [None, "hard_new", "hard"])
def test_the_metrics_of_several_evaluation_sets_have_their_names(tmp_path, monkeypatch, broken):
    sets = {"hard_new": questions(5), "hard": questions(3)}  # the one name begins like the other
    options = {"metric_for_best_model": "hard_new_reward", "max_steps": 1}
    trainer = make_trainer(tmp_path, env=DownEnv, script=answer, eval_dataset=sets, **options, **BEST, **EVALUATION)
    monkeypatch.setattr(
        DownEnv, "is_down", lambda *_: not trainer.model.training and trainer._eval_prefix == f"eval_{broken}"
    )
    trainer.train()
    logged = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    expected = {"hard_new": 2.0, "hard": 1.0}
    for name, reward in expected.items():
        assert logged[f"eval_{name}_reward"] == (None if name == broken else reward)
        assert logged[f"eval_{name}_rollout/lost_share"] == float(name == broken)
        assert f"eval_{name}_loss" in logged
    assert not [name for name in logged if name.startswith("eval_") and not name.startswith("eval_hard_")]
    assert trainer.state.best_metric == (-math.inf if broken == "hard_new" else 2.0)


def test_a_best_metric_that_no_evaluation_set_has_is_refused_before_the_run(tmp_path):
    sets = {"hard": questions(5), "easy": questions(3)}
    options = BEST | EVALUATION
    for metric in ("reward", "eval_loss", "hardreward"):
        message = rf"metric_for_best_model='{metric}' .*'hard': .*Set metric_for_best_model='eval_hard_reward'"
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, env=SumEnv, eval_dataset=sets, metric_for_best_model=metric, **options)
    make_trainer(tmp_path, env=SumEnv, eval_dataset=sets, metric_for_best_model="easy_reward", **options)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tools/failure_share", "tools/call_error_share"),
        ("eval_tools/failures/timeout", "eval_tools/call_errors/timeout"),
        ("eval_rollout/infrastructure_failure_share", "eval_rollout/lost_share"),
    ],
)
def test_a_best_metric_that_has_another_name_now_is_refused_with_that_name(tmp_path, old, new):
    options = {**EVALUATION, **BEST, "eval_dataset": questions(5), "env": SumEnv}
    with pytest.raises(ValueError, match=rf"metric_for_best_model='{old}': .*Did you mean '{new}'"):
        make_trainer(tmp_path, metric_for_best_model=old, **options)
    make_trainer(tmp_path, metric_for_best_model=new, **options)


@pytest.mark.parametrize(("metric", "better"), [(None, "eval_reward"), ("hard_loss", "eval_hard_reward")])
def test_the_loss_as_the_best_metric_is_warned_of(tmp_path, caplog, metric, better):
    sets = questions(5) if metric is None else {"hard": questions(5)}
    options = EVALUATION | {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "eval_dataset": sets, "env": SumEnv}
    make_trainer(tmp_path, metric_for_best_model=metric, **options)
    assert f"Set metric_for_best_model='{better}'." in caplog.text
    caplog.clear()
    make_trainer(tmp_path, metric_for_best_model=better, **options)
    assert "metric_for_best_model" not in caplog.text


def test_failed_rows_are_excluded_from_the_reward_of_an_evaluation(tmp_path, monkeypatch, caplog):
    trainer = make_trainer(tmp_path, env=DownEnv, script=answer, eval_dataset=questions(5), **EVALUATION)
    monkeypatch.setattr(DownEnv, "is_down", lambda self, example: example["id"] in ("q3", "q4"))
    with caplog.at_level(logging.WARNING, logger="agent_r1_trl"):
        metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_reward/outcome"] == 1.0  # of 0, 1 and 2
    assert metrics["eval_rollout/lost_share"] == 0.4
    assert metrics[f"eval_stop/{StopReason.ENVIRONMENT_ERROR.value}"] == 0.4
    assert "2 of the 5 trajectories of this evaluation were lost" in caplog.text and "example 'q3'" in caplog.text
