"""One seed of the simulated runs of `traces.py`; `make traces` simulates ten."""

import pytest

from tests.features.echo_trap.families import BEGIN, COLLAPSES, HEALTHY, HELD_OUT, SUDDEN, history_of
from tests.features.echo_trap.traces import HEAVY, guarded, seeds_of, share_lost

FAMILIES = {**HEALTHY, **HELD_OUT}


def test_there_are_forty_families_besides_those_held_out():
    assert len(HEALTHY) >= 40 and not {*HEALTHY} & {*HELD_OUT}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_healthy_run_of_64_groups_is_left_alone(name):
    taken, named = guarded(history_of(seeds_of(name, 0), 64, **FAMILIES[name]))
    assert taken == [] and named is None


@pytest.mark.parametrize("name", [name for name in COLLAPSES if name in SUDDEN])
@pytest.mark.parametrize("groups", [8, 64])
def test_a_sudden_collapse_is_named_within_five_steps(name, groups):
    taken, named = guarded(history_of(seeds_of(name, 0), groups, **COLLAPSES[name]))
    assert 0 <= named - SUDDEN[name] < 5 and {*taken} >= HEAVY
    if "echo" not in name:
        assert "clip" not in taken[:3], "the entropy is high"


@pytest.mark.parametrize("name", [name for name in COLLAPSES if name not in SUDDEN])
@pytest.mark.parametrize("groups", [8, 64])
def test_a_slow_collapse_is_named_before_half_of_the_success_is_gone(name, groups):
    taken, named = guarded(history_of(seeds_of(name, 0), groups, **COLLAPSES[name]))
    assert {*taken} >= HEAVY and named >= BEGIN
    assert share_lost(name, named) < 0.5
