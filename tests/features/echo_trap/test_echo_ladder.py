"""Which action is due: order, patience, and what each verdict may bring."""

import json

from agent_r1_trl.features.echo_trap.escalation import UNFIT, GuardState, due_actions

ORDER = ["filter", "clip", "learning_rate", "roll_back", "stop"]


def play(verdicts, actions=ORDER, patience=3, max_roll_backs=2, unfit=()):
    """What is taken after each step: a list of (number of the step, names)."""
    state, taken = GuardState(), []
    for verdict in verdicts:
        state.num_steps += 1
        names = due_actions(actions, state, verdict, patience=patience, max_roll_backs=max_roll_backs, unfit=unfit)
        for name in names:
            state.take(name)
        taken += [(state.num_steps, names)] if names else []
    return taken


def test_a_warning_brings_the_milder_actions_one_by_one_with_patience_between_them_and_no_more():
    assert play(["warning"] * 20) == [(1, ["filter"]), (4, ["clip"]), (7, ["learning_rate"])]


def test_the_order_is_the_users():
    actions = ["learning_rate", "filter"]
    assert play(["warning"] * 9, actions) == [(1, ["learning_rate"]), (4, ["filter"])]


def test_a_healthy_run_is_left_alone_and_patience_counts_from_the_last_action():
    verdicts = ["healthy", "warning", "healthy", "converged", "warning", "warning"]
    assert play(verdicts) == [(2, ["filter"]), (5, ["clip"])]


def test_a_run_that_keeps_collapsing_is_rolled_back_when_nothing_milder_is_left_and_is_not_stopped():
    verdicts = ["collapsing"] * 30
    assert play(verdicts, ["filter", "roll_back", "stop"]) == [(1, ["filter"]), (4, ["roll_back"]), (7, ["roll_back"])]


def test_a_run_that_has_collapsed_takes_everything_up_to_the_roll_back_at_once():
    verdicts = ["warning", *["collapsed"] * 12]
    assert play(verdicts) == [
        (1, ["filter"]),
        (2, ["clip", "learning_rate", "roll_back"]),
        (5, ["roll_back"]),
        (8, ["stop"]),
    ]


def test_after_a_roll_back_even_a_collapsed_run_gets_its_patience():
    assert play(["collapsed"] * 4, ["roll_back", "stop"], patience=4) == [(1, ["roll_back"])]
    assert play(["collapsed"] * 5, ["roll_back", "stop"], patience=4, max_roll_backs=1)[1] == (5, ["stop"])


def test_an_action_that_does_not_fit_is_passed_over_even_on_the_way_to_a_roll_back():
    actions, unfit = ["filter", "clip", "entropy", "roll_back"], UNFIT[2]
    assert play(["warning"] * 9, actions, unfit=unfit) == [(1, ["filter"])]
    assert play(["collapsed"], actions, unfit=unfit) == [(1, ["filter", "roll_back"])]
    assert play(["warning"] * 9, ["clip", "entropy"], unfit=UNFIT[0]) == [(1, ["clip"])]


def test_what_is_over_is_undone_after_patience_and_what_feeds_a_high_entropy_at_once():
    state = GuardState(num_taken=dict.fromkeys(("filter", "clip", "entropy", "learning_rate"), 1))
    found = []
    for step in range(3):
        state.note(step, is_healthy=True)
        found.append(state.past_actions(UNFIT[0], 3))
    assert found == [[], [], ["filter", "clip", "entropy"]]
    state.note(4, is_healthy=False)
    assert state.past_actions(UNFIT[0], 3) == state.past_actions(UNFIT[1], 3) == []
    assert state.past_actions(UNFIT[2], 3) == ["clip", "entropy"]


def test_the_state_comes_back_from_json_and_leaves_out_what_it_does_not_know():
    state = GuardState(run="a", num_steps=7, events=[{"action": "filter"}])
    state.take("roll_back")
    values = json.loads(json.dumps(state.to_dict()))
    assert GuardState.from_dict(values | {"of_a_later_version": 1}) == state
