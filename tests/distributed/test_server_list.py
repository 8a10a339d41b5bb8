"""Two ranks have the same servers at every time, whichever join and leave, and every server has the whole weights.

Covered: DDP, and weights that FSDP2 holds in parts. Not covered: a list that changes within a rollout, which no rank
reads then (tests/generation/test_server_list.py).
"""

import json

import pytest

from tests.distributed import server_list
from tests.distributed.critics import save_policy
from tests.distributed.launch import launch
from tests.distributed.server_list import LISTS_FILE
from tests.effort import short
from tests.fake_vllm import FakeServer

pytestmark = pytest.mark.release


class ListedServer(FakeServer):
    """Keeps what it received in each sync, and how many completions it was asked for until then."""

    TOKEN = 9

    def __init__(self):
        super().__init__()
        self.received, self.asked = [], []

    def rpc_end(self, *args):
        self.received.append(dict(self.sums))
        self.asked.append(self.num_sampled())
        result = super().rpc_end(*args)
        self.value = self.TOKEN
        return result

    def num_sampled(self):
        """How many completions it was asked for, apart from scores."""
        return sum("prompt_logprobs" not in body for body in self.bodies)


@pytest.mark.parametrize("kind", short(("ddp", "zero3", "fsdp2"), "ddp", "fsdp2"))
def test_all_ranks_have_the_servers_that_the_first_one_read_and_each_has_whole_weights(kind, tmp_path):
    save_policy(tmp_path)
    with ListedServer() as first, ListedServer() as second:
        lists = [[first.url], [first.url, second.url], [second.url]]
        (tmp_path / LISTS_FILE).write_text(json.dumps(lists), encoding="utf-8")
        launch(kind, server_list.__name__, tmp_path)
        asked = [server.num_sampled() for server in (first, second)]
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    assert [rank["servers"] for rank in ranks] == [lists, lists]

    expected = ranks[0]["weights"]
    assert ranks[1]["weights"] == expected
    assert len({step["model.norm.weight"] for step in expected}) == len(lists), "each step changed the weights"
    for server, steps in ((first, expected[:2]), (second, expected[1:])):
        assert len(server.received) == len(steps)
        for found, wanted in zip(server.received, steps, strict=True):
            assert found == pytest.approx(wanted, abs=1e-3)

    rows = server_list.NUM_ROWS
    assert asked[0] + asked[1] == 3 * rows
    assert first.asked[1] == rows, "in the first step it had all of them"
    assert 0 < second.asked[1] < rows, "in the second step they shared"
