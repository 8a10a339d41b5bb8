"""One seed of the simulated runs of `traces.py`; `make traces` plays ten."""

import pytest

from tests.echo_trap.traces import COLLAPSES, HEALTHY, guarded, history_of

KNOWN_ERRORS = {"sparse takes off"}
"""Families of which docs/echo-trap.md says that they err."""


@pytest.mark.parametrize("name", [name for name in HEALTHY if name not in KNOWN_ERRORS])
def test_a_healthy_run_of_64_groups_is_left_alone(name):
    taken, named = guarded(history_of(0, 64, **HEALTHY[name]))
    assert taken == [] and named is None


@pytest.mark.parametrize("name", ["sudden echo", "explosion", "dead from step 4"])
@pytest.mark.parametrize("groups", [8, 64])
def test_a_sudden_collapse_is_named_within_five_steps(name, groups):
    taken, named = guarded(history_of(0, groups, **COLLAPSES[name]))
    assert named - (3 if name == "dead from step 4" else 60) < 5
    if name != "sudden echo":
        assert not {"clip", "entropy"} & {*taken[:3]}, "the entropy is high"
