"""`watch_by`: the parts of the data have metrics of their own, and one that falls while the mean rises is named."""

import itertools
import logging

import pytest
from datasets import Dataset

from agent_r1_trl.features.reliability.parts import Fall, RowResult, find_falls, part_metrics
from agent_r1_trl.testing import AddEnv
from tests.trainers.helpers import make_trainer, questions

KINDS = questions(16).map(lambda row, index: {"kind": "hard" if index % 4 == 0 else "easy"}, with_indices=True)


def results(**rewards):
    """Rows in the order of time: the first of each part, the second of each, ..."""
    together = itertools.zip_longest(*rewards.values())
    named = ((tag, reward) for step in together for tag, reward in zip(rewards, step, strict=True))
    return [RowResult(tag, reward, float(reward > 0.5)) for tag, reward in named if reward is not None]


def test_a_part_that_falls_while_the_mean_rises_is_found_with_its_numbers():
    rows = results(hard=[1, 1, 0, 1] * 3 + [0] * 12, easy=[0] * 12 + [1] * 12)
    assert find_falls(rows) == [Fall("hard", 0.75, 0.0)]
    assert find_falls(results(hard=[1, 1, 0, 1] * 3 + [0] * 12, easy=[0] * 24)) == [], "the mean falls as well"
    assert find_falls(results(hard=[0, 1] * 12, easy=[0] * 12 + [1] * 12)) == [], "noise"
    assert find_falls(results(hard=[1] * 7 + [0] * 14, easy=[0] * 12 + [1] * 12)) == [], "too few rows"


def test_the_metrics_of_a_part_are_means_over_its_rows():
    rows = [RowResult("a", 1.0, 1.0), RowResult("a", 0.5, 0.0), RowResult("b", -1.0, 0.0)]
    assert part_metrics(rows) == {"by/a/reward": 0.75, "by/a/solved": 0.5, "by/b/reward": -1.0, "by/b/solved": 0.0}


class Turning(AddEnv):
    """Beside its call, a hard question earns 1 for three steps and then nothing; an easy one the other way round."""

    episodes = itertools.count()

    def reset(self, example):
        self.is_late = next(self.episodes) >= 3 * 32
        return super().reset(example)

    def outcome_reward(self, trajectory):
        return float((self.example["kind"] == "easy") == self.is_late)


def test_a_run_warns_once_and_logs_both_parts(tmp_path, caplog):
    Turning.episodes = itertools.count()
    trainer = make_trainer(
        tmp_path, env=Turning, train_dataset=KINDS, watch_by="kind", max_steps=8, max_turns=1,
        per_device_train_batch_size=32, num_generations=2,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count("kind=hard falls while the mean rises: its reward was 1.50") == 1
    assert "kind=easy falls" not in caplog.text
    first, *_, last = [entry for entry in trainer.state.log_history if "by/easy/reward" in entry]
    assert [first[f"by/{tag}/solved"] for tag in ("hard", "easy")] == [1.0, 0.0]
    assert [last[f"by/{tag}/solved"] for tag in ("hard", "easy")] == [0.0, 1.0]


def test_a_column_that_is_not_there_or_has_a_value_for_each_row_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"watch_by='knd': no row has such a column \(the first one has id, prompt"):
        make_trainer(tmp_path, train_dataset=KINDS, watch_by="knd")
    many = Dataset.from_list([{**KINDS[0], "kind": str(number)} for number in range(51)])
    with pytest.raises(ValueError, match=r"watch_by='kind': the column has 51 values, .* Name a column with fewer"):
        make_trainer(tmp_path, train_dataset=many, watch_by="kind")
