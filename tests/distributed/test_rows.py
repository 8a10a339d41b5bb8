"""Rows of one trajectory may lie on different ranks; they are trained as the trajectory was in one process."""

import pytest

from tests.distributed.launch import LAUNCHES
from tests.distributed.rows import CASES, MAX_TURNS, REWRITTEN, trajectories_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py

VALUED = ("adapter", "head", "head by tokens", "model", "summarise", "agent with a critic")


def assert_same_steps(found, expected, case):
    """Losses of both optimizer steps, credit, gradients of the second step and weights after it."""
    losses = [rank["losses"] for rank in found["ranks"]]
    for step, expected_loss in enumerate(expected["ranks"][0]["losses"]):
        mean = sum(rank[step] for rank in losses) / len(losses)
        assert mean == pytest.approx(expected_loss, abs=1e-5, rel=1e-5), f"loss of step {step}"
    credit, expected_credit = (
        {key: advantages for key, *_, advantages in trajectories_of(x)} for x in (found, expected)
    )
    assert credit.keys() == expected_credit.keys() and len(credit) == 12
    # Values come out of a forward pass, whose rounding depends on what is computed together.
    tolerance = 1e-5 if case in VALUED else 1e-6
    for key, advantages in credit.items():
        assert advantages == pytest.approx(expected_credit[key], abs=tolerance), key
    for name in ("gradients", "weights"):
        assert found[name].keys() == expected[name].keys()
        largest = max(float(value.abs().max()) for value in expected[name].values())
        assert largest > 1e-3
        for parameter, value in found[name].items():
            gap = float((value - expected[name][parameter]).abs().max())
            assert gap <= 1e-5 * largest, (name, parameter, gap)


def assert_same_micro_batches(ranks):
    assert [len(sizes) for sizes in ranks[0]["sizes"]] == [len(sizes) for sizes in ranks[1]["sizes"]]
    assert ranks[0]["sizes"] == ranks[1]["sizes"], "every rank makes the same micro-batches"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
def test_any_number_of_ranks_trains_on_rows_as_one_process_does_on_whole_trajectories(results, launch, case):
    split, whole = results(launch)["rows"][case], results("one")["whole"][case]
    assert_same_steps(split, whole, case)
    assert {num_rows for _, num_rows, *_ in trajectories_of(whole)} == {1}
    if launch == "one":
        return
    per_rank = [[num_rows for _, num_rows, *_ in rank["trajectories"]] for rank in split["ranks"]]
    most = 7 if "max_turns" in CASES[case] else MAX_TURNS
    assert max(per_rank[0]) == most and min(per_rank[1]) == 1 and sum(per_rank[0]) > 2 * sum(per_rank[1])
    assert any(is_lost for _, _, is_lost, _ in trajectories_of(split))
    assert_same_micro_batches(split["ranks"])


@pytest.mark.parametrize("case", REWRITTEN)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_contexts_that_are_rewritten_are_sampled_and_trained_on_as_in_one_process(results, launch, case):
    two, one = results(launch)["rewritten"][case], results("one")["rewritten"][case]
    rows, expected = ({key: num_rows for key, num_rows, *_ in trajectories_of(x)} for x in (two, one))
    assert rows == expected and max(rows.values()) > 3
    assert_same_steps(two, one, case)
    assert_same_micro_batches(two["ranks"])
