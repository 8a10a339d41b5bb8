"""Which rows come in which order: decided by seed and epoch, not by where a run was started."""

import pytest
from trl.trainer.utils import RepeatSampler

from agent_r1_trl.trainers.saving import EpochOrder
from tests.trainers.helpers import make_trainer, questions


def rows(epoch, seed=3, **options):
    return list(EpochOrder(RepeatSampler(range(12), 2, batch_size=3, seed=seed, **options), lambda: epoch))


def test_an_epoch_has_its_own_order_however_often_it_is_asked_for():
    order = EpochOrder(RepeatSampler(range(12), 2, batch_size=3, seed=3), lambda: 1)
    assert list(order) == list(order) == rows(1)
    assert rows(0) != rows(1) != rows(2)
    assert rows(1) != rows(1, seed=4)


def test_the_first_epoch_is_trls_and_every_epoch_holds_all_rows():
    assert rows(0) == list(RepeatSampler(range(12), 2, batch_size=3, seed=3))
    assert all(sorted(rows(epoch)) == sorted([*range(12), *range(12)]) for epoch in range(3))
    assert len(EpochOrder(RepeatSampler(range(12), 2, batch_size=3, seed=3), lambda: 0)) == 24


def test_unshuffled_rows_stay_in_their_order():
    assert rows(2, shuffle=False)[:4] == [0, 0, 1, 1]


@pytest.mark.parametrize("save_steps", [2, 3])
def test_a_resumed_run_meets_the_rows_that_were_next(tmp_path, save_steps):
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": save_steps, "train_dataset": questions(4)}
    seen = {}
    for name, checkpoint in {"whole": None, "resumed": str(tmp_path / f"checkpoint-{save_steps}")}.items():
        trainer = make_trainer(tmp_path, **options)
        met = seen.setdefault(name, [])

        def roll_out(rows, *args, met=met, roll_out=trainer.rollouts.generate):
            met.append([row["id"] for row in rows])
            return roll_out(rows, *args)

        trainer.rollouts.generate = roll_out
        trainer.train(resume_from_checkpoint=checkpoint)
    assert len(seen["whole"]) == 5
    assert seen["resumed"] == seen["whole"][save_steps:]
