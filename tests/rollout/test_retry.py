"""Lost trajectories are sampled again, with the row and seeds of the first try."""

import pytest

from agent_r1_trl.generation import GenerationError, ScriptedGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner, runner
from agent_r1_trl.testing import AddEchoEnv, call, chat_of, say
from tests.rollout.helpers import PROMPT


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(runner, "RETRY_WAIT_S", 0.0)


class Flaky(AddEchoEnv):
    """Cannot start for the first `failures` tries of the rows that it is told."""

    failures, bad_ids, made = 1, ("b",), []

    def __init__(self):
        super().__init__()
        self.closed = 0
        type(self).made.append(self)

    def seed(self, *, reset_seed, dynamics_seed):
        self.seeds = (reset_seed, dynamics_seed)

    def reset(self, example):
        self.id = example["id"]
        if (
            self.id in self.bad_ids
            and sum(env.id == self.id for env in self.made if hasattr(env, "id")) <= self.failures
        ):
            raise OSError("the server is down")
        return super().reset(example)

    def close(self):
        self.closed += 1


def flaky(**settings):
    return type("Flaky", (Flaky,), {"made": [], **settings})


def roll_out(env, *, retry_failed, script=None, ids="abc", ended=None, **options):
    chat = chat_of()
    turns = script or (lambda request: chat.encode_reply(call() if request.turn == 0 else say("five")))
    generator = ScriptedGenerator(turns, stop_token_ids=chat.stop_token_ids)
    limits = RolloutLimits(max_concurrency=2, **options.pop("limits", {}))
    runner = RolloutRunner(env, generator, chat, limits, retry_failed=retry_failed, on_trajectory=ended)
    rows = [{"id": id, "prompt": PROMPT} for id in ids]
    requests = [RolloutRequest(example=row, example_id=row["id"], seed=ord(row["id"]), reset_seed=7) for row in rows]
    trajectories = runner.run(requests)
    runner.close()
    return trajectories, runner, generator


def reasons(trajectories):
    return [item.stop_reason.value for item in trajectories]


def test_a_failure_that_passes_leaves_the_trajectory_that_there_would_have_been(caplog):
    whole, _, _ = roll_out(flaky(failures=0), retry_failed=0)
    env, ended = flaky(failures=2), []
    trajectories, runner, _ = roll_out(env, retry_failed=2, ended=ended.append)
    for item, expected in zip(trajectories, whole, strict=True):
        assert (item.completion_ids, item.seed, item.example_id) == (
            expected.completion_ids, expected.seed, expected.example_id,
        )  # fmt: skip
    tries = "environment_error: Flaky.reset raised OSError: the server is down"
    assert [item.failed_tries for item in trajectories] == [[], [tries, tries], []]
    assert len(ended) == 3, "tries that are replaced have not ended"
    assert [made.closed for made in env.made] == [1] * 5
    assert {made.seeds for made in env.made if made.id == "b"} == {(7, ord("b"))}
    assert [made.id for made in runner.environments] == ["a", "b", "c"]
    assert caplog.text.count("is tried again (retry_failed=2): 1 x environment_error: Flaky.reset raised") == 1


def test_what_still_fails_is_a_failure_with_all_its_tries():
    trajectories, _, _ = roll_out(flaky(failures=9), retry_failed=2)
    assert reasons(trajectories) == ["done", "environment_error", "done"]
    assert len(trajectories[1].failed_tries) == 2


def test_a_sampler_that_fails_in_the_second_turn_begins_the_trajectory_again():
    chat, failed = chat_of(), []

    def script(request):
        if request.turn == 1 and not failed:
            failed.append(request.seed)
            return GenerationError("the server went away")
        return chat.encode_reply(call() if request.turn == 0 else say("five"))

    trajectories, _, generator = roll_out(AddEchoEnv, retry_failed=1, script=script, ids="a")
    assert reasons(trajectories) == ["done"] and len(trajectories[0].turns) == 2
    assert trajectories[0].failed_tries == ["generation_error: GenerationError: the server went away"]
    seeds = [request.seed for request in generator.requests]
    assert len(seeds) == 4 and seeds[:2] == seeds[2:], "the same draws"


def test_a_prompt_without_room_is_not_tried_again():
    env = flaky()
    trajectories, _, _ = roll_out(env, retry_failed=3, ids="a", limits={"max_model_length": 4})
    assert reasons(trajectories) == ["prompt_too_long"] and len(env.made) == 1
