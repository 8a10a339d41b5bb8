"""The lines of a run, as functions of its numbers."""

from agent_r1_trl.display.lines import headline_of, row_of, seconds_left, shown_metrics, sparks, table

ROWS = [
    row_of({"step": step, "reward": step / 2, "env/em": 0.5, "entropy": 0.04, "step_time": 3.25}) for step in (1, 2)
]


def test_a_table_is_as_wide_as_its_numbers_and_what_is_unknown_is_a_dash():
    rows = [*ROWS, {"step": 1000.0, "reward": -12345.678, "rollout/turns": float("nan")}]
    assert [line.plain for line in table(rows, shown_metrics(rows, 80))] == [
        "step     reward  exact match  entropy  turns  call errors  s/step",
        "   1      +0.50         0.50    0.040      -            -     3.2",
        "   2      +1.00         0.50    0.040      -            -     3.2",
        "1000  -12345.68            -        -      -            -       -",
    ]


def test_numbers_of_the_users_own_stand_behind_the_score():
    """At most three, in the order of their first row; what a feature counts below a name of its own is none."""
    own = {"env/right": 0.25, "env/num_open_orders": 3.0, "env/c": 1.0, "env/d": 1.0, "env/agent/raised": 0.0}
    rows = [row_of({"step": 1, "reward": 0.5, "env/success": 0.5, **own, "entropy": 0.04, "step_time": 3.25})]
    assert [line.plain for line in table(rows, shown_metrics(rows, 80))] == [
        "step  reward  success  right  num_open_or     c  entropy  turns  call errors",
        "   1   +0.50     0.50   0.25         3.00  1.00    0.040      -            -",
    ]
    labels = [metric.label for metric in shown_metrics(rows, 60)]
    assert labels == ["reward", "success", "right", "num_open_or", "c", "entropy"]
    assert headline_of({"reward": 0.5, **own}) == "reward 0.5  right 0.25  num_open_orders 3  c 1"


def test_a_curve_has_its_range_behind_it_and_needs_no_unicode():
    assert [line.plain for line in sparks(ROWS, shown_metrics(ROWS, 80), 80)] == [
        "reward      ▁█ +0.50 to +1.00",
        "exact match ▅▅ 0.50",
        "entropy     ▅▅ 0.040",
    ]
    assert sparks(ROWS, shown_metrics(ROWS, 80), 80, is_ascii=True)[0].plain == "reward      _# +0.50 to +1.00"


def test_groups_taught_what_trl_counts_without_our_rollout_and_nothing_is_said_with_a_critic():
    assert row_of({"frac_reward_zero_std": 0.25}) == {"taught": 0.75}
    assert row_of({"group/zero_variance_share": 0.5, "frac_reward_zero_std": 0.25}) == {"taught": 0.5}
    assert row_of({"group/zero_variance_share": 0.5}, has_critic=True) == {}


def test_the_eta_is_known_from_the_first_step_on_and_an_evaluation_does_not_bring_it_to_zero():
    assert seconds_left(0, 10, 300.0, 300.0) is None
    assert seconds_left(1, 9, 300.0, 0.0) == 9 * 300
    assert seconds_left(1, 9, 350.0, 50.0) == 9 * 300 - 50
    assert seconds_left(1, 9, 9300.0, 9000.0) == 8 * 300
