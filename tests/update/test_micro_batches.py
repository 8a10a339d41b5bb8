"""Micro-batches of an optimizer step by tokens: who computes what when, and that nothing else changes."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent_r1_trl.trainers import MultiTurnPPOTrainer
from agent_r1_trl.trainers.policy_loss import KeptRows
from agent_r1_trl.update.entries import HAS_SIGNAL, MICRO_BATCHES, STANDS_FOR
from agent_r1_trl.update.micro_batches import plan_micro_batches, valid_ids
from tests.trainers.helpers import make_trainer, step_gradients

# -------------------------------------------------------------------- the plan


def test_the_longest_row_goes_first_and_each_one_where_there_is_least():
    # 6 | 5, then 4 to the 5, 3 to the 6, and 2 to either.
    assert plan_micro_batches([5, 3, 2, 4, 6], num_ranks=1, max_tokens=11) == [[[4, 1, 2], [0, 3]]]


def test_a_row_above_the_limit_stands_alone():
    assert plan_micro_batches([20, 3, 4], num_ranks=1, max_tokens=8) == [[[0], [2, 1]]]


def test_every_rank_has_as_many_micro_batches_and_those_of_one_time_are_alike():
    ranks = plan_micro_batches([9, 8, 4, 3, 2], num_ranks=2, max_tokens=9)
    assert ranks == [[[0], [3, 4]], [[1], [2]]]
    assert plan_micro_batches([7], num_ranks=2, max_tokens=9) == [[[0]], [[]]], "the second rank computes an empty one"
    assert plan_micro_batches([0, 0], num_ranks=2, max_tokens=9) == [[[]], [[]]]
    assert plan_micro_batches([7, 7], num_ranks=1, max_tokens=99, least=3) == [[[0], [1], []]]


def ids_of(*texts):
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


def test_rows_that_begin_alike_stay_together_and_are_counted_once():
    rows = ids_of("bbbbb-x", "aaaaa-x", "bbbbb-y", "aaaaa-yz", "aaaaa-yzz", "")
    # Two trees: aaaaa-, x, yz, z are 10 tokens, bbbbb-, x, y are 8.
    assert plan_micro_batches(rows, num_ranks=1, max_tokens=18) == [[[1, 3, 4, 0, 2]]]
    assert plan_micro_batches(rows, num_ranks=1, max_tokens=17) == [[[1, 3, 4], [0, 2]]]
    assert plan_micro_batches(rows, num_ranks=2, max_tokens=99) == [[[1, 3, 4]], [[0, 2]]]


def test_stretches_are_cut_where_little_is_shared():
    rows = ids_of(*["a" * 10 + 2 * letter for letter in "pqrstu"], "b" * 4)
    assert plan_micro_batches(rows, num_ranks=1, max_tokens=22) == [[[0, 1, 2, 3, 4, 5], [6]]], (
        "22 and 4, not 16 and 20"
    )
    assert plan_micro_batches(rows, num_ranks=2, max_tokens=22) == [[[0, 1, 2, 3]], [[4, 5, 6]]], "18 each"


def test_one_process_cuts_no_group_to_save_a_micro_batch_and_several_ranks_do():
    groups = ids_of(*[letter * 8 + 2 * other for letter in "abcd" for other in "pqrs"])  # 16 tokens each
    (alone,) = plan_micro_batches(groups, num_ranks=1, max_tokens=28)
    assert sorted(alone) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], (
        "64 tokens; three micro-batches: 72"
    )
    ranks = plan_micro_batches(groups[:12], num_ranks=2, max_tokens=28)
    assert sorted(ranks) == [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8, 9, 10, 11]]], "28 each, not 32 and 16"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_to_cut_the_rows_is_better(seed):
    generator = np.random.default_rng(seed)
    rows = [bytes(generator.integers(97, 99, generator.integers(1, 9), dtype=np.uint8)).decode() for _ in range(8)]
    rows, limit = sorted(rows), int(generator.integers(8, 25))

    def tokens(chosen):
        return len({row[:end] for row in chosen for end in range(1, len(row) + 1)})

    def cost(sizes):
        return sum(sizes), len(sizes), max(sizes)

    every_way = []
    for cuts in itertools.product([False, True], repeat=len(rows) - 1):
        ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [len(rows)]
        sizes = [tokens(rows[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
        if max(sizes) <= limit:
            every_way.append(cost(sizes))
    (micro_batches,) = plan_micro_batches(ids_of(*rows), num_ranks=1, max_tokens=limit)
    assert cost([tokens(rows[row] for row in chosen) for chosen in micro_batches]) == min(every_way)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_plan_holds_every_valid_row_once_below_the_limit(seed, is_shared):
    generator = np.random.default_rng(seed)
    rows = [generator.integers(0, 2, generator.integers(0, 30)) for _ in range(25)]
    limit, num_ranks = int(generator.integers(30, 120)), int(generator.integers(1, 4))
    ranks = plan_micro_batches(rows if is_shared else [len(row) for row in rows], num_ranks, limit)
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    chosen = [row for micro_batches in ranks for one in micro_batches for row in one]
    assert sorted(chosen) == [index for index, row in enumerate(rows) if len(row)]
    for one in (one for micro_batches in ranks for one in micro_batches):
        prefixes = {tuple(rows[row][:end]) for row in one for end in range(1, len(rows[row]) + 1)}
        assert (len(prefixes) if is_shared else sum(len(rows[row]) for row in one)) <= limit


# -------------------------------------------------------------------- the trainers


SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def trained(trainer):
    trainer.train()
    return trainer


def assert_same_run(first, second):
    for name in ("loss", "grad_norm", "entropy"):
        ours, theirs = ([row[name] for row in t.state.log_history if name in row] for t in (second, first))
        assert ours == pytest.approx(theirs, abs=2e-4), name
    assert len(ours) == 3
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(("layout", "limit"), [("packed", 10_000), ("shared", 150)])
def test_a_ppo_run_does_not_depend_on_the_micro_batches(tmp_path, layout, limit):
    options = {"trainer": MultiTurnPPOTrainer, "max_steps": 3, "critic": "head", "num_iterations": 2, **SMALL}
    first = trained(make_trainer(tmp_path / "a", **options))
    second = trained(make_trainer(tmp_path / "b", update_layout=layout, max_tokens_per_micro_batch=limit, **options))
    assert_same_run(first, second)
    micro_batches = [row["update/micro_batches"] for row in second.state.log_history if "update/micro_batches" in row]
    assert len(micro_batches) == 3
    assert all(number == 0.25 if limit == 10_000 else number > 1 for number in micro_batches)


def test_a_micro_batch_holds_no_more_tokens_than_the_limit_unless_a_row_does(tmp_path, caplog):
    trainer = make_trainer(tmp_path, update_layout="packed", max_tokens_per_micro_batch=400, **SMALL)
    _, steps = step_gradients(trainer)
    sizes = [sum(map(len, valid_ids(inputs))) for step in steps for inputs in step[MICRO_BATCHES]]
    assert max(sizes) <= 400
    assert len(sizes) > 1
    assert not caplog.records
    trainer.layout.max_tokens = 20
    _, steps = step_gradients(trainer)
    assert "max_tokens_per_micro_batch=20" in caplog.text
    alone = [inputs for step in steps for inputs in step[MICRO_BATCHES]]
    assert all(len(inputs["completion_ids"]) == 1 for inputs in alone)
    assert [inputs[STANDS_FOR] for inputs in alone] == [0.5] * 8, "four micro-steps in eight micro-batches"


def test_a_rollout_counts_by_its_micro_steps_however_many_micro_batches_they_became():
    accelerator = SimpleNamespace(distributed_type="NO", sync_gradients=True)
    kept, model = KeptRows(accelerator), torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    # Two micro-steps each: of the first rollout four micro-batches with rows that are kept, of the second one without.
    for has_signal, stands_for in [(True, 0.5)] * 4 + [(False, 2.0)]:
        kept.weigh(torch.ones(()), {HAS_SIGNAL: torch.tensor(has_signal), STANDS_FOR: stands_for})
    kept.rescale(model)
    assert all((parameter.grad == 2).all() for parameter in model.parameters()), "(2 + 2) / 2, not 5 / 4"


def test_a_step_without_any_loss_still_reaches_every_parameter(tmp_path):
    trainer = make_trainer(tmp_path, update_layout="shared", max_tokens_per_micro_batch=400, **SMALL)
    arrange = trainer.layout.arrange

    def silenced(buffer, accelerator):
        for inputs in buffer:
            inputs["tool_mask"] = inputs["tool_mask"] * 0
        return arrange(buffer, accelerator)

    trainer.layout.arrange = silenced
    gradients, steps = step_gradients(trainer)
    assert [len(step[MICRO_BATCHES]) for step in steps] == [0, 0, 0, 1]
    assert len(gradients) == len(list(trainer.model.parameters()))
    assert not any(gradient.any() for gradient in gradients.values())
