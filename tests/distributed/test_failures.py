"""Two ranks agree on what failed, whom an evaluation counts, and whether a checkpoint can be resumed."""

import json
import math

import pytest

from tests.distributed import failures
from tests.distributed.launch import launch

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("failures")
    launch("ddp", failures.__name__, folder)
    return json.loads((folder / failures.FOUND_FILE).read_text(encoding="utf-8"))


def test_a_rank_on_which_everything_failed_ends_no_run(found):
    (steps, _) = (rank["bad_row"] for rank in found)
    assert len(steps) == failures.NUM_STEPS
    assert [share for _, _, share in steps].count(0.5) == 2  # one of four rows, two rows a step
    assert all(math.isfinite(loss) and math.isfinite(norm) for loss, norm, _ in steps)


def test_an_outage_ends_the_run_on_both_ranks_with_the_same_reason(found):
    first, second = (rank["outage"] for rank in found)
    assert first == second
    assert first.startswith(
        "NothingRolledOutError: All 8 trajectories were lost: 8 x environment_error: Outage.reset raised"
    )


def test_every_row_of_an_evaluation_counts_once_and_draws_what_one_process_draws(found, tmp_path):
    alone = failures.evaluation(tmp_path)
    assert alone["metrics"][0] == (0 + 1 + 2 + 3 + 4) / 5
    for rank in found:
        assert rank["evaluation"]["metrics"] == pytest.approx(alone["metrics"])
    seeds = [tuple(pair) for rank in found for pair in rank["evaluation"]["seeds"]]
    assert sorted(seeds) == sorted(alone["seeds"]) and len(set(seeds)) == failures.NUM_EVAL_ROWS


def test_a_checkpoint_that_lost_a_file_is_refused_by_both_ranks(found):
    first, second = (rank["torn"] for rank in found)
    assert first == second and first.startswith("CheckpointError: resume_from_checkpoint=")
    assert "rollout_state_rank1.pt is missing. Set resume_from_checkpoint=" in first and "run/checkpoint-4'" in first


def test_what_is_wrong_on_one_rank_ends_both_with_its_words(found):
    first, last = (rank["wrong_values"] for rank in found)
    said = {
        "infinite": "RewardError: reward_funcs: scorer returned inf for Trajectory(example_id='q",
        "raising": "RewardError: reward_funcs: scorer raised KeyError: 'the judge is down' (",
        "turns": "RewardError: turn_reward_funcs: <lambda> returned 5 for 4 trajectories",
        "step": "ProtocolError: BadStep.step returned None",
    }
    for name, message in said.items():
        assert last[name].startswith(message)
        kind = {"step": "RankLostError"}.get(name, "RewardError")
        assert first[name].startswith(f"{kind}: Rank 1 has stopped all others: {message}")


def test_a_group_on_two_ranks_of_which_one_member_is_left_counts_nowhere(found):
    assert [rank["lone_member"] for rank in found] == [[[False, False], [1.0]]] * 2


def test_failures_that_are_sampled_again_on_one_rank_count_on_both(found):
    assert [rank["replaced"] for rank in found] == [[[0.5, 0.0]] * failures.NUM_STEPS] * 2


def test_a_checkpoint_that_one_rank_finds_torn_is_passed_over_by_both(found):
    expected = {"longer": [1, 3], "finished": [1, 1]}
    assert [rank["saving"] for rank in found] == [expected, expected]


def test_both_ranks_are_refused_where_another_run_trains(found):
    first, second = (rank["locked"] for rank in found)
    assert first == second and first.startswith("OutputInUseError: output_dir=") and "is in use by process" in first
