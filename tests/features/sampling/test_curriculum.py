"""The curriculum: prompts are drawn by how often they passed of late."""

import collections
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.sampling.curriculum import STATE, Curriculum, row_keys
from agent_r1_trl.features.sampling.resampling import check_can_draw
from agent_r1_trl.features.sampling.settings import SamplingSettings
from agent_r1_trl.testing import say
from tests.features.journal.test_training_journal import is_same, train
from tests.trainers.helpers import make_trainer, questions


def curriculum_of(num, **options):
    """Over `num` prompts, without a trainer."""
    return curriculum_over([{"prompt": f"question {i}"} for i in range(num)], **options)


def curriculum_over(rows, **options):
    """Over these rows, without a trainer."""
    fake = SimpleNamespace(
        args=SimpleNamespace(sampling=SamplingSettings(**{"curriculum_rate": 0.3} | options)),
        train_dataset=rows,
        rollouts=SimpleNamespace(),
    )
    return Curriculum(fake)


NAN = math.nan


def test_weights_are_those_of_the_formula():
    curriculum = curriculum_of(5)
    assert curriculum.weights().tolist() == [1] * 5, "new prompts have the largest weight"
    curriculum.pass_rates = torch.tensor([0.5, 0.5, 0.25, 0.02, 1.0], dtype=torch.float64)
    curriculum.num_groups = torch.tensor([0, 3, 1, 1, 1])
    assert curriculum.weights().tolist() == pytest.approx([1, 1, 0.75, 0.1, 0.1])  # 4 * .02 * .98 = .0784 < .1
    curriculum.floor = 0.05
    assert curriculum.weights().tolist() == pytest.approx([1, 1, 0.75, 0.0784, 0.05])
    found = curriculum.metrics()
    total = 1 + 1 + 0.75 + 0.0784 + 0.05
    assert found["curriculum/share_max"] == pytest.approx(1 / total)
    assert found["curriculum/share_min"] == pytest.approx(0.05 / total)
    assert found["curriculum/effective_prompts"] == pytest.approx(total**2 / (2 + 0.75**2 + 0.0784**2 + 0.05**2))
    assert found["curriculum/seen_share"] == 4 / 5
    assert found["curriculum/pass_rate"] == pytest.approx((0.5 + 0.25 + 0.02 + 1) / 4)


def test_a_pass_rate_is_an_average_that_forgets():
    curriculum = curriculum_of(3)
    curriculum.observe([0, 1, 2], [[1.0, 0.0, 1.0, 0.0], [0.0, NAN, NAN, 1.0], [NAN] * 4])
    assert curriculum.pass_rates.tolist() == [0.5, 0.5, 0.5] and curriculum.num_groups.tolist() == [1, 1, 0]
    curriculum.observe([0, 1, 0], [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, NAN, NAN], [0.0, 1.0, 1.0, 1.0]])
    rates = [0.7 * (0.7 * 0.5 + 0.3) + 0.3 * 0.75, 0.7 * 0.5, 0.5]
    assert curriculum.pass_rates.tolist() == pytest.approx(rates)
    assert curriculum.num_groups.tolist() == [3, 2, 0]
    forgetful = curriculum_of(1, curriculum_rate=1.0)
    forgetful.observe([0, 0], [[1.0, 0.0], [0.0, 0.0]])
    assert forgetful.pass_rates.tolist() == [0.0]


def test_prompts_that_pass_half_the_time_are_drawn_most():
    """Weights 1, 0.75, 0.1 and 0.1: shares 0.51, 0.38, 0.05 and 0.05 of the first prompt of a batch."""
    curriculum, num = curriculum_of(4), 4000
    curriculum.pass_rates = torch.tensor([0.5, 0.75, 0.0, 1.0], dtype=torch.float64)
    draws = [curriculum.order(seed) for seed in range(num)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in draws), "nothing is drawn twice in a batch"
    firsts = collections.Counter(order[0] for order in draws)
    for prompt, weight in enumerate((1, 0.75, 0.1, 0.1)):
        share = weight / 1.95
        assert abs(firsts[prompt] / num - share) < 4 * math.sqrt(share * (1 - share) / num)
    # Of the prompts that are left, the second one is drawn in proportion as well.
    seconds = collections.Counter(order[1] for order in draws if order[0] == 0)
    assert abs(seconds[1] / firsts[0] - 0.75 / 0.95) < 4 * math.sqrt(0.75 / 0.95 * 0.2 / 0.95 / firsts[0])


# ---------------------------------------------------------------- in a run


def toss(trajectory):
    number = int(trajectory.example_id[1:])
    return float(number % 3 == 0 or (number % 3 == 1 and len(trajectory.final_text) % 2))


class Coin(ToolEnv):
    """Some prompts are too easy, some too hard."""

    def outcome_reward(self, trajectory):
        return toss(trajectory)


def talk(rng, turn):
    return say("x" * rng.randrange(1, 9))


RUN = {
    "env": Coin,
    "script": talk,
    "sampling.curriculum": True,
    "num_generations": 2,
    "per_device_train_batch_size": 8,
}


def test_prompts_that_teach_come_back_and_the_watch_judges_what_a_uniform_draw_would_earn(tmp_path):
    trainer = train(tmp_path, echo=True, train_dataset=questions(9), max_steps=12, learning_rate=0.0, **RUN)
    curriculum = trainer.features["resampling"].curriculum
    groups, rates = curriculum.num_groups.tolist(), curriculum.pass_rates.tolist()
    assert sum(groups) == 12 * 4
    assert sum(groups[1::3]) > 48 / 3 + 4, "a third of the prompts"
    for row in (*range(0, 9, 3), *range(2, 9, 3)):  # of n groups, all passed or none
        assert abs(rates[row] - 0.5) == pytest.approx(0.5 - 0.5 ** (1 + groups[row]), abs=1e-5)
    shares = curriculum.weights() / curriculum.weights().sum()
    logged = trainer.state.log_history[-2]
    assert logged["curriculum/share_min"] == pytest.approx(shares.min().item(), rel=1e-4)
    weights = [trainer.last_batch.draw_weights[item.example_id] for item in trainer.last_trajectories]
    earned = sum(weight * toss(item) for weight, item in zip(weights, trainer.last_trajectories, strict=True))
    assert logged["echo/reward"] == pytest.approx(earned / sum(weights)) and max(weights) > 1.2 * min(weights)


class Reporting(ToolEnv):
    """The same, but its outcomes say nothing."""

    def outcome_reward(self, trajectory):
        trajectory.info["success"] = bool(toss(trajectory))
        return -1.0


@pytest.mark.parametrize("env", [Coin, Reporting])
def test_what_turns_earn_is_no_pass(tmp_path, monkeypatch, env):
    def process(trajectory, **kwargs):
        return [[0.5] * len(item.turns) for item in trajectory]

    options = RUN | {"env": env, "train_dataset": questions(9), "max_steps": 3, "learning_rate": 0.0}
    trainer = make_trainer(tmp_path, turn_reward_funcs=[process], **options)
    seen, won = [], []
    observe, judge = Curriculum.observe, trainer.features["resampling"]._judge

    def listen(curriculum, prompts, passes):
        seen.append([value for group in passes for value in group])
        observe(curriculum, prompts, passes)

    def judged(rolled_out, size):
        won.append([toss(item) for item in rolled_out.trajectories])
        return judge(rolled_out, size)

    monkeypatch.setattr(Curriculum, "observe", listen)
    trainer.features["resampling"]._judge = judged
    trainer.train()
    assert len(seen) == 3 and seen == won and {*seen[0], *seen[1], *seen[2]} == {0.0, 1.0}
    rates = [line["sampling/pass_rate"] for line in trainer.state.log_history if "sampling/pass_rate" in line]
    assert rates == [pytest.approx(sum(passes) / len(passes)) for passes in seen]


def test_a_weighted_draw_says_what_a_uniform_one_would_earn():
    """Over many draws of 30 of 200 prompts: each counts for 1 / its chance, which an independent count confirms."""
    curriculum = curriculum_of(200)
    curriculum.pass_rates = torch.linspace(0.02, 1.0, 200, dtype=torch.float64) ** 0.3  # most pass nearly always
    counts, plain, weighted = torch.zeros(200), [], []
    for seed in range(600):
        drawn = curriculum.order(seed)[:30]
        counts[drawn] += 1 / 600
        weights, rates = curriculum.draw_weights(drawn, curriculum.pass_rates), curriculum.pass_rates
        plain.append(rates[drawn].mean().item())
        weighted.append(sum(weights[row] * rates[row].item() for row in drawn) / sum(weights.values()))
    everything = {**curriculum.draw_weights(range(30), rates), **curriculum.draw_weights(range(170, 200), rates)}
    for row in (0, 29, 199):
        assert 1 / everything[row] == pytest.approx(counts[max(0, row - 9) : row + 10].mean().item(), rel=0.15)
    truth = curriculum.pass_rates.mean().item()
    assert sum(plain) / 600 < truth - 0.05
    assert sum(weighted) / 600 == pytest.approx(truth, abs=0.01)
    assert {*curriculum.draw_weights(range(200), rates).values()} == {1.0}, "all are drawn"


def test_a_second_run_of_a_trainer_knows_nothing_of_the_first(tmp_path):
    trainer = train(tmp_path, train_dataset=questions(9), journal=False, learning_rate=0.0, **RUN)
    trainer.train()
    assert trainer.features["resampling"].curriculum.num_groups.sum() == 4 * 4
    assert len(trainer.batches) == 8 and all(map(is_same, trainer.batches[:4], trainer.batches[4:]))


def test_pass_rates_follow_the_content_of_rows_through_a_checkpoint(tmp_path, caplog):
    one, two, three, four = ({"id": i, "prompt": f"question {i}"} for i in range(4))
    curriculum = curriculum_over([one, two, three])
    curriculum.observe([0, 1], [[1.0], [0.0]])
    curriculum.observe([0], [[1.0]])
    curriculum.save(tmp_path)  # .5, .65, .755 and .35
    same = curriculum_over([three, {"prompt": "question 1", "id": 1}, one])  # another order, of columns as well
    same.load(tmp_path)
    assert same.pass_rates.tolist() == pytest.approx([0.5, 0.35, 0.755]) and same.num_groups.tolist() == [0, 1, 2]
    assert not caplog.text
    changed = curriculum_over([one, two | {"prompt": "another question"}, three, four])
    changed.load(tmp_path)
    assert changed.pass_rates.tolist() == pytest.approx([0.755, 0.5, 0.5, 0.5])
    assert "has pass rates of 2 prompts, of which the data has 1. The others of the data begin anew" in caplog.text
    changed.save(tmp_path)  # the row that is gone is forgotten
    curriculum.load(tmp_path)
    assert curriculum.num_groups.tolist() == [2, 0, 0]


def test_equal_rows_share_a_pass_rate():
    curriculum = curriculum_over([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    curriculum.observe([0, 2], [[1.0], [0.0]])
    assert curriculum.pass_rates.tolist() == pytest.approx([0.7 * 0.65, 0.5, 0.7 * 0.65])
    assert curriculum.num_groups.tolist() == [2, 0, 2]


def test_keys_of_rows_read_stored_columns_and_know_no_addresses():
    rows = [{"prompt": "a", "image": b"\x00"}, {"prompt": "a", "image": b"\x01"}, {"prompt": "a", "image": b"\x00"}]
    stored = Dataset.from_list(rows)
    keys = row_keys(stored)
    assert keys == row_keys(rows) and keys[0] == keys[2] != keys[1]
    stored.set_transform(lambda batch: {"prompt": [object() for _ in batch["prompt"]]})
    assert row_keys(stored) == keys and row_keys(stored.select([2, 1])) == [keys[0], keys[1]]
    assert row_keys([{"x": object()}]) == row_keys([{"x": object()}])


def test_a_checkpoint_without_pass_rates_of_its_rows_begins_anew_and_says_so(tmp_path, caplog):
    curriculum = curriculum_of(2)
    curriculum.observe([0], [[1.0]])
    curriculum.save(tmp_path)
    same, other = curriculum_of(2), curriculum_over([{"prompt": f"other question {i}"} for i in range(2)])
    same.load(tmp_path)
    assert same.pass_rates.tolist() == [0.65, 0.5] and not caplog.text
    for folder in (tmp_path, tmp_path / "none"):
        other.load(folder)
        assert other.pass_rates.tolist() == [0.5] * 2 and "The curriculum begins anew" in caplog.text
        caplog.clear()
    by_number = {"pass_rates": torch.tensor([0.94, 0.5]), "num_groups": torch.tensor([3, 0])}
    torch.save(by_number, tmp_path / STATE)  # as before rows had keys
    same.load(tmp_path)
    assert same.pass_rates.tolist() == [0.5, 0.5] and same.num_groups.tolist() == [0, 0]
    assert "by row number" in caplog.text and "The curriculum begins anew" in caplog.text


def test_an_environment_that_makes_its_own_prompts_is_refused():
    for curriculum in (True, False):
        config = SimpleNamespace(sampling=SamplingSettings(resample_rounds=2, curriculum=curriculum))
        if not curriculum:
            check_can_draw(None, config)  # the fix
            continue
        with pytest.raises(ValueError, match=r"curriculum=True with train_dataset=None"):
            check_can_draw(None, config)
