"""Which action is due: order, patience, and what each verdict may bring."""

import pytest

from agent_r1_trl.features.echo_trap.escalation import GuardState, due_actions

ORDER = ["filter", "clip", "learning_rate", "rollback", "stop"]


def actions_after(verdicts, actions=ORDER, patience=3, max_rollbacks=2, is_exploding=False):
    """What is taken after each step: a list of (number of the step, names)."""
    state, taken = GuardState(), []
    rules = {"patience": patience, "max_rollbacks": max_rollbacks, "is_exploding": is_exploding}
    for verdict in verdicts:
        state.num_steps += 1
        names = due_actions(actions, state, verdict, **rules)
        for name in names:
            state.take(name)
        taken += [(state.num_steps, names)] if names else []
    return taken


LATE = ["healthy", "warning", "healthy", "converged", "warning", "warning"]
COLLAPSE = ["warning", *["collapsed"] * 12]
ALL_AT_ONCE = [(1, ["filter"]), (2, ["clip", "learning_rate", "rollback"]), (5, ["rollback"]), (8, ["stop"])]


@pytest.mark.parametrize(
    ("verdicts", "options", "expected"),
    [
        (["warning"] * 20, {}, [(1, ["filter"]), (4, ["clip"]), (7, ["learning_rate"])]),
        (["warning"] * 9, {"actions": ["learning_rate", "filter"]}, [(1, ["learning_rate"]), (4, ["filter"])]),
        (LATE, {}, [(2, ["filter"]), (5, ["clip"])]),
        (
            ["collapsing"] * 30,
            {"actions": ["filter", "rollback", "stop"]},
            [(1, ["filter"]), (4, ["rollback"]), (7, ["rollback"])],
        ),
        (COLLAPSE, {}, ALL_AT_ONCE),
        (["collapsed"] * 4, {"actions": ["rollback", "stop"], "patience": 4}, [(1, ["rollback"])]),
        (
            ["collapsed"] * 5,
            {"actions": ["rollback", "stop"], "patience": 4, "max_rollbacks": 1},
            [(1, ["rollback"]), (5, ["stop"])],
        ),
        (["warning"] * 9, {"is_exploding": True}, [(1, ["filter"]), (4, ["learning_rate"])]),
        (["collapsed"], {"is_exploding": True}, [(1, ["filter", "learning_rate", "rollback"])]),
    ],
    ids=[
        "a warning brings the milder actions one by one",
        "the order is the user's",
        "patience counts from the last action",
        "a run that keeps collapsing is rolled back and not stopped",
        "a run that has collapsed takes everything up to the rollback at once",
        "after a rollback every run gets its patience",
        "and is stopped when no rollback is left",
        "a wider clip does not fit a high entropy",
        "not on the way to a rollback either",
    ],
)
def test_what_a_row_of_verdicts_brings(verdicts, options, expected):
    assert actions_after(verdicts, **options) == expected


def test_what_is_over_is_undone_after_patience_and_a_wider_clip_where_the_entropy_is_high_at_once():
    state = GuardState(num_taken=dict.fromkeys(("filter", "clip", "learning_rate"), 1))
    found = []
    for step in range(3):
        state.note(step, is_healthy=True)
        found.append(state.past_actions(3, is_exploding=False))
    assert found == [[], [], ["filter", "clip"]]
    state.note(4, is_healthy=False)
    assert state.past_actions(3, is_exploding=False) == []
    assert state.past_actions(3, is_exploding=True) == ["clip"]
