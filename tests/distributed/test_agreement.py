"""However many processes share a batch, and however, loss, gradient norm and credit are those of one process."""

import pytest

from tests.distributed.agreement import CREDIT_CASES, CRITIC_ESTIMATORS, NUM_STEPS, POLICIES
from tests.distributed.launch import LAUNCHES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("launches")]  # they share the launches of conftest.py


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("launch", ["one", *LAUNCHES])
def test_losses_and_gradient_norms_agree(results, launch, policy):
    expected = results("one")["losses"]["rows" if policy == "tokens" else policy]
    assert len(expected) == NUM_STEPS
    assert min(abs(value) for step in expected for value in step) > 1e-3
    for step, reference in zip(results(launch)["losses"][policy], expected, strict=True):
        assert step == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_signals_of_collapse_agree(results, launch):
    expected = results("one")["signals"]
    assert len(expected) == NUM_STEPS
    assert 0 < expected[0]["echo/repetition"] < 1 and expected[0]["echo/reward_std"] > 0.1
    for step, reference in zip(results(launch)["signals"], expected, strict=True):
        assert step == pytest.approx({name: reference[name] for name in step}, abs=5e-4)


@pytest.mark.parametrize("case", CREDIT_CASES)
def test_two_ranks_with_ragged_rows_give_the_credit_of_one_process(results, case):
    one, two = ({row["key"]: row for row in results(kind)["credit"][case]} for kind in ("one", "ddp"))
    assert len(one) == 12
    assert one.keys() == two.keys()
    assert len({row["width"] for row in two.values()}) == 2, "both ranks are padded alike"
    assert "generation_error" in {row["stop"] for row in two.values()}
    # Values come out of a forward pass, whose rounding depends on the padding, and whitening enlarges it.
    tolerance = 3e-6 if case in CRITIC_ESTIMATORS else 1e-6
    for key, row in two.items():
        assert row["advantages"] == pytest.approx(one[key]["advantages"], abs=tolerance), key
        assert row.get("returns") == pytest.approx(one[key].get("returns"), abs=tolerance), key
    live = [value for row in two.values() for value in row["advantages"] if value]
    assert len(set(live)) > 3
