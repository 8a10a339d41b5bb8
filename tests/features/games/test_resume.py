"""A game that was cut short by a kill is played on from the journal as if nothing had happened."""

import functools

import pytest

from agent_r1_trl.features.games import FrozenLakeEnv, SokobanEnv
from tests.features.games.helpers import called, written
from tests.features.journal.helpers import roll_out, without_times

WORDS = ["Left", "Down", "Right", "Up", "Jump"]
CASES = {
    "text": (functools.partial(FrozenLakeEnv, success_rate=0.5), written),
    "tool": (functools.partial(SokobanEnv, num_boxes=2, max_actions=30, action_format="tool"), called),
}


@pytest.mark.parametrize("case", CASES)
def test_a_game_goes_on_where_the_journal_ends(tmp_path, case):
    env, said = CASES[case]

    def policy(rng):
        return said(*rng.choices(WORDS, k=2))

    expected, whole = roll_out(None, env, policy)
    assert len({str(item.turns[0].observations) for item in expected}) > 1
    path = tmp_path / "journal"
    roll_out(path, env, policy)
    data = path.read_bytes()
    for share in (0.3, 0.5, 0.7, 0.9):
        path.write_bytes(data[: int(share * len(data))])
        trajectories, talker = roll_out(path, env, policy)
        assert list(map(without_times, trajectories)) == list(map(without_times, expected))
        assert sum(talker.sampled.values()) < sum(whole.sampled.values())
