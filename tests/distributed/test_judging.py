"""Two ranks of which each has a part of a prompt group let one of them ask the judge about it."""

import json

import pytest

from agent_r1_trl.testing import judge_server
from agent_r1_trl.testing.judge import parts_of, texts_of
from tests.distributed import judging
from tests.distributed.launch import launch

pytestmark = pytest.mark.release


def test_a_group_on_two_ranks_is_ranked_once_and_both_learn_the_scores(tmp_path):
    with judge_server() as (url, seen):
        (tmp_path / judging.URL_FILE).write_text(url, encoding="utf-8")
        launch("ddp", judging.__name__, tmp_path)
    first, second = json.loads((tmp_path / judging.FOUND_FILE).read_text(encoding="utf-8"))
    assert [first["shared"], second["shared"]] == [[0.1, 0.2, 0.3, 0.1], [0.2, 0.1, 0.1, 0.2]]
    assert [first["alone"], second["alone"]] == [[0.1, 0.2], []]
    asked = sorted((parts_of(body)["The task"], sorted(texts_of(body))) for body in seen.bodies)
    # The last group is asked for again, and known.
    assert asked == [("p", ["a", "aa", "aaa"]), ("q", ["b", "bb"]), ("r", ["c", "cc"])]
