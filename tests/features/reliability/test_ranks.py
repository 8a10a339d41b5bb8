"""What one rank makes of the silence of another."""

import json
import threading
import time
from dataclasses import asdict

from agent_r1_trl.features.reliability import ranks


class Store:
    """Rank 1, on another machine, gives no new heartbeat."""

    def set(self, key, value):
        pass

    def multi_get(self, keys):
        return ["", json.dumps(asdict(ranks.Sign(host="far", pid=1, machine="another")))]


def test_a_run_whose_processes_all_stood_still_together_goes_on(monkeypatch):
    monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(ranks, "PAUSE_S", 0.2)
    lost = []
    watch = ranks.RankWatch(0.4, on_signal=None, on_error=None, on_lost=lost.append)
    watch._store = Store()
    watch._look_around()
    time.sleep(0.5)  # as in a process that was stopped (Ctrl-Z)
    watch._look_around()
    assert not lost, "silence counts from the pause on"
    for _ in range(12):
        time.sleep(0.05)
        watch._look_around()
    assert "no heartbeat" in lost[0] and "failures.rank_timeout=0.4" in lost[0]


def test_a_store_that_does_not_answer_is_a_machine_that_is_gone(monkeypatch):
    """A machine without power closes no connection, so the call that asks it does not return."""
    back = threading.Event()

    class Silent(Store):
        asked = 0

        def multi_get(self, keys):
            self.asked += 1
            if self.asked > 2:
                back.wait(20)
            return [json.dumps(asdict(ranks.Sign(host=f"machine-{key}", pid=1, machine="another"))) for key in keys]

    monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(ranks, "BEAT_S", 0.05)
    lost = []
    watch = ranks.RankWatch(0.5, on_signal=None, on_error=None, on_lost=lost.append)
    watch._store = Silent()
    watch._thread = threading.Thread(target=watch._watch, daemon=True)
    watch._thread.start()
    watch._watch_store()
    assert "on machine-0, has not answered for" in lost[0] and "failures.rank_timeout=0.5" in lost[0]
    start = time.monotonic()
    watch.stop(ranks.FAILED)
    assert time.monotonic() - start < 5, "it does not wait for the store either"
    back.set()
