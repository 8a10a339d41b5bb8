"""The circuit breaker: a tool that is down is waited for, and no update is made from what was sampled meanwhile."""

import asyncio
import logging
import os
import threading
import time
import types

import pytest
import torch

from agent_r1_trl import InfrastructureError, tool
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.features.reliability.tool_watch import ToolOutageError, ToolWatch, count_calls
from agent_r1_trl.generation.base import current_slot
from agent_r1_trl.rollout import RolloutRequest
from agent_r1_trl.rollout.probe import RecordedCall
from agent_r1_trl.testing import AddEnv, calls, say
from agent_r1_trl.trajectory import StopReason, ToolCall, ToolErrorKind, ToolFault, ToolResult, Trajectory, Turn
from tests.trainers.helpers import make_trainer, questions

# Results, as letters: a call that succeeded, that timed out, failed by its infrastructure, by a lost connection, by an
# exception that wrong arguments may cause, by any other, by one that the tool declares as its callers', by a timeout
# that it declares so, by the model's mistake.
KINDS = {
    ".": {},
    "t": {"error": ToolErrorKind.TIMEOUT},
    "i": {"error": ToolErrorKind.INFRASTRUCTURE},
    "c": {"error": ToolErrorKind.EXCEPTION, "judged_fault": ToolFault.TOOL},
    "v": {"error": ToolErrorKind.EXCEPTION, "judged_fault": ToolFault.ARGUMENTS},
    "o": {"error": ToolErrorKind.EXCEPTION},
    "u": {"error": ToolErrorKind.EXCEPTION, "judged_fault": ToolFault.MODEL},
    "d": {"error": ToolErrorKind.TIMEOUT, "judged_fault": ToolFault.MODEL},
    "m": {"error": ToolErrorKind.INVALID_ARGUMENTS},
}


def rollout(letters):
    """A trajectory of one call per letter, and their requests."""
    call = ToolCall(name="look", arguments={})
    results = [ToolResult(call=call, content=f"Error: {letter}", **KINDS[letter]) for letter in letters]
    trajectories = [
        Trajectory(
            prompt_messages=[], prompt_ids=[1], completion_ids=[2], action_mask=[1], logprobs=[0.0], turn_ids=[0],
            authors=["policy"], stop_reason=StopReason.DONE, example_id="q1",
            turns=[Turn(start=0, end=1, message=say(), tool_results=[result])],
        )
        for result in results
    ]  # fmt: skip
    return trajectories, [RolloutRequest(example={})] * len(letters)


class World:
    """A tool that answers or not: the answers in turn, then the last one for ever."""

    def __init__(self, *answers, **settings):
        self.answers, self.waits, self.asked = list(answers), [], 0
        settings = {"max_rise": 0.3, "min_calls": 8, "max_wait_s": 100.0} | settings
        self.watch = ToolWatch(**settings)
        self.watch.ask, self.watch.sleep = self.ask, self.waits.append

    def ask(self, call):
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def judge(self, *rollouts):
        return [self.watch.has_outage(*rollout(letters)) for letters in rollouts]


HEALTHY = "." * 19 + "v"


def test_the_cause_is_shown_without_control_characters():
    trajectories, _ = rollout("c")
    trajectories[0].turns[0].tool_results[0].content = "Error: \x1b[31mrefused"
    assert count_calls(trajectories)["look"].first_cause == "␛[31mrefused (first in example 'q1')"


def test_what_the_model_did_wrong_is_no_call_of_the_tool():
    counted = count_calls(rollout("..tvoudmci")[0])["look"]
    assert (counted.num, counted.num_failed, counted.num_suspect) == (7, 5, 3)
    assert counted.first_cause == "t (first in example 'q1')"
    assert World(False).judge(HEALTHY, "m" * 16, "u" * 16, "d" * 16) == [False] * 4


@pytest.mark.parametrize(("letter", "failed"), [("c", 12), ("i", 16), ("t", 16), ("v", 12), ("o", 12)])
def test_a_share_that_leaves_its_past_is_an_outage_if_calls_fail_that_had_succeeded(letter, failed):
    world = World(False)
    assert world.judge(HEALTHY) == [False] and world.asked == 0
    with pytest.raises(ToolOutageError) as caught:
        world.judge(letter * failed + "." * (16 - failed))
    assert world.waits == [1, 2, 4, 8, 16, 32, 37], "waits grow, up to the longest in all"
    assert world.asked == 3 + 7, "most of five calls, then a single one after each wait"
    for part in (
        f"'look' is down: {failed} of its last 16 calls failed, first with: {letter} (first in", "(1 of 20 before)",
        "outages.max_wait=100", "resume", "user_errors", "outages.max_failure_rise=1.0",
    ):  # fmt: skip
        assert part in str(caught.value)


def test_a_tool_that_comes_back_has_the_rollout_rolled_out_anew_and_is_logged():
    world = World(False, False, False, False, False, True)
    assert world.judge(HEALTHY, "c" * 16, HEALTHY) == [False, True, False]
    assert world.waits == [1, 2, 4]
    metrics = world.watch.metrics
    assert (metrics["time/outage_s"], metrics["tools/replayed_rollouts"]) == (7.0, 1.0)
    assert metrics["tools/look/failure_share"] == 0.05
    assert world.judge(HEALTHY) == [False] and world.watch.metrics["time/outage_s"] == 0.0


def test_failures_that_the_model_causes_are_warned_of_once_and_trained_on(caplog):
    world = World(True)
    with caplog.at_level(logging.WARNING):
        assert world.judge(HEALTHY, "v" * 16, HEALTHY * 3, "v" * 80) == [False] * 4
    assert caplog.text.count("taken for the model's doing") == 1 and not world.waits


def test_a_short_outage_that_is_over_when_the_tool_is_asked_voids_one_rollout():
    world = World(True)
    assert world.judge(HEALTHY, "c" * 16, HEALTHY) == [False, True, False]
    assert world.judge("c" * 16, "c" * 16) == [True, False], "twice in a row: timeouts that the model causes"


def test_few_calls_and_small_rises_are_no_sign():
    world = World(False)
    assert world.judge("." * 4, "ccc", HEALTHY, "ccccc" + "." * 11, "c") == [False] * 5
    assert World(False, max_rise=1.0).judge(HEALTHY, "c" * 99) == [False, False]
    assert World(True, min_calls=40).judge(HEALTHY, "c" * 16) == [False, False]


def test_small_rollouts_are_judged_together():
    world = World(False)
    with pytest.raises(ToolOutageError, match="of its last 8 calls"):
        world.judge(*["...."] * 6, *["cc.."] * 3, *["cccc"] * 3)


def test_a_tool_that_never_worked_ends_the_run_at_once_unless_arguments_may_be_the_cause(caplog):
    for letters in ("i" * 16, "c" * 8 + "t" * 8):
        world = World(False)
        with pytest.raises(
            ToolOutageError, match=r"'look' has never worked: 16 of its last 16 calls failed.*by hand.*timeout_s"
        ):
            world.judge(letters)
        assert world.waits == [], "it did not work before, so waiting is no fix"
    with caplog.at_level(logging.WARNING):
        assert World(False).judge("v" * 32, "v" * 32) == [False, False]
    assert caplog.text.count("first with: v") == caplog.text.count("none has ever succeeded") == 1


def test_what_is_known_of_the_tools_survives_a_checkpoint():
    before, fresh, resumed = (World(False, False, False, True) for _ in range(3))
    before.judge(HEALTHY, HEALTHY)
    resumed.watch.load_state_dict(before.watch.state_dict())
    assert resumed.watch.state_dict() == before.watch.state_dict()
    outage = "v" * 6 + "." * 2  # as a rule of a tool that is new, and far from the past of this one
    assert [world.judge(outage) for world in (before, resumed)] == [[True], [True]]
    assert resumed.waits == before.waits == [1.0] and resumed.asked == before.asked
    assert fresh.watch.state_dict() == '{"past": {}, "succeeded": {}}'


def test_calls_of_rows_that_json_does_not_hold_are_excluded_from_a_checkpoint():
    call = RecordedCall(tool="look", request=RolloutRequest(example={"n": 1}, seed=2**62), messages=[say("é")])
    assert RecordedCall.from_json(call.to_json()) == call
    for value in (object(), (1, 2), {1: 2}):
        request = RolloutRequest(example={"n": value})
        assert RecordedCall(tool="look", request=request, messages=[]).to_json() is None


# -------------------------------------------------------------------- training


class Backend:
    """What the tool below stands on; it is down for its calls `first` to `last`."""

    def __init__(self, error, first, last):
        self.error, self.first, self.last, self.num = error, first, last, 0

    def environment(self):
        @tool(attempts=1)
        def look() -> str:
            """Look."""
            self.num += 1
            if self.first <= self.num <= self.last:
                raise self.error
            return "found"

        return type("Looking", (AddEnv,), {"tools": (look,)})


def look_once(rng, turn):
    return calls(("look", {})) if turn == 0 else say("x" * rng.randrange(1, 9))


def trainer_on(backend, folder, **options):
    options = {"max_steps": 3, "train_dataset": questions(8), "save_strategy": "steps", "save_steps": 100} | options
    return make_trainer(folder, script=look_once, env=backend.environment(), learning_rate=1e-3, **options)


@pytest.mark.parametrize("error", [InfrastructureError("gone")])
def test_a_run_waits_for_a_tool_and_trains_on_nothing_that_was_rolled_out_meanwhile(tmp_path, error, caplog):
    waits = []
    healthy = trainer_on(Backend(error, 0, 0), tmp_path / "healthy")
    healthy.train()
    # Step 1 is well (8 calls); in step 2 all 8 calls fail, and 3 + 2 calls with which the tool is asked.
    trainer = trainer_on(Backend(error, 9, 9 + 8 + 4), tmp_path / "outage")
    trainer.features["tools"].sleep = waits.append
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert waits and trainer.state.global_step == 3
    assert "the tool 'look' is down. 8 of its last 8 calls failed, first with" in caplog.text
    for ours, theirs in zip(trainer.model.parameters(), healthy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), "the outage leaves no trace"


@pytest.mark.parametrize("error", [ConnectionRefusedError("refused"), RuntimeError("?")])
def test_a_tool_that_does_not_come_back_ends_the_run_with_a_checkpoint(tmp_path, error):
    backend = Backend(error, 9, 10**9)
    trainer = trainer_on(backend, tmp_path / "outage", outages={"max_wait": 0.0})
    match = rf"'look' is down: 8 of its last 8 calls failed, .*{type(error).__name__}"
    with pytest.raises(ToolOutageError, match=match):
        trainer.train()
    assert trainer.state.global_step == 1
    backend.last = 0
    resumed = trainer_on(backend, tmp_path / "outage")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    healthy = trainer_on(backend, tmp_path / "healthy")
    healthy.train()
    for ours, theirs in zip(resumed.model.parameters(), healthy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), "the journal brings nothing back that was sampled during the outage"


class DownForLater:
    """A tool that is down for the rollouts behind the first one, and for whoever asks it, until it is mended."""

    def __init__(self):
        self.is_down, self.num_failed = True, 0

    def environment(self):
        @tool(attempts=1)
        async def look() -> str:
            """Look."""
            slot = current_slot.get()
            if self.is_down and (slot is None or slot.order > 0):
                self.num_failed += 1
                raise RuntimeError("?")
            return "found"

        return type("Looking", (AddEnv,), {"tools": (look,)})

    def mend(self, seconds):
        self.is_down = False


AHEAD = {"rollouts_ahead": 2, "max_steps": 5, "journal.keep": 99}


@pytest.fixture(scope="module")
def healthy_ahead(tmp_path_factory):
    backend = DownForLater()
    backend.mend(0)
    trainer = trainer_on(backend, tmp_path_factory.mktemp("healthy"), **AHEAD)
    trainer.train()
    return list(trainer.model.parameters())


def begun_rollouts(trainer):
    """The micro-steps of the rollouts in the order in which they begin, each once the one before it has ended."""
    begun, start = [], trainer.rollouts.ahead._start

    def note(rows, micro_step, position):
        begun.append(micro_step)
        rollout = start(rows, micro_step, position)
        rollout.wait()
        return rollout

    trainer.rollouts.ahead._start = note
    return begun


def failed_calls(folder, rank=0):
    recorded = [read_rollout(path) for path in sorted((folder / "journal" / f"rank{rank}").iterdir())]
    steps = [turn.step for rollout in recorded for item in rollout.trajectories for turn in item.turns if turn.step]
    results = [result for step in steps for result in step["info"]["tool_results"]]
    assert len(results) == 5 * 8
    return sum(result["error"] is not None for result in results)


def test_what_ran_ahead_while_a_tool_was_down_is_sampled_anew_in_its_order(tmp_path, healthy_ahead):
    """Though the tool works again when its turn comes, so that its failures would be taken for the model's."""
    backend = DownForLater()
    trainer = trainer_on(backend, tmp_path, **AHEAD)
    trainer.features["tools"].sleep, begun = backend.mend, begun_rollouts(trainer)
    trainer.train()
    assert backend.num_failed >= 2 * 8
    assert begun == [0, 1, 2, 3, 1, 2, 3, 4]
    assert all(map(torch.equal, trainer.model.parameters(), healthy_ahead)), "the outage leaves no trace"
    assert failed_calls(tmp_path) == 0
    replayed = [entry.get("tools/replayed_rollouts") for entry in trainer.state.log_history[:5]]
    assert replayed == [0, 1, 0, 0, 0]


def test_a_run_that_an_outage_has_ended_takes_nothing_from_the_journal_that_ran_ahead(tmp_path, healthy_ahead):
    backend = DownForLater()
    trainer = trainer_on(backend, tmp_path, outages={"max_wait": 0.0}, **AHEAD)
    begun_rollouts(trainer)
    with pytest.raises(ToolOutageError, match="'look' is down: 8 of its last 8 calls failed"):
        trainer.train()
    assert trainer.state.global_step == 1
    backend.mend(0)
    resumed = trainer_on(backend, tmp_path, **AHEAD)
    resumed.train(resume_from_checkpoint=True)
    assert all(map(torch.equal, resumed.model.parameters(), healthy_ahead))
    assert failed_calls(tmp_path) == 0


def test_a_resumed_run_knows_what_the_interrupted_one_knew_of_its_tools(tmp_path):
    backend = Backend(RuntimeError("?"), 0, 0)
    trainer_on(backend, tmp_path, max_steps=2, save_steps=2).train()
    backend.first, backend.last = backend.num + 1, 10**9
    resumed = trainer_on(backend, tmp_path, outages={"max_wait": 0.0})
    with pytest.raises(ToolOutageError, match=r"8 of its last 8 calls failed, .*\(0 of 16 before\)"):
        resumed.train(resume_from_checkpoint=True)  # without the past, wrong arguments might be the cause


def hanging(backend, *, on_loop):
    """An environment whose tool does not return while `is_hanging`."""

    @tool
    async def look() -> str:
        """Look."""
        while backend.is_hanging:
            time.sleep(0.05) if on_loop else await asyncio.sleep(0.05)
        return "found"

    return type("Hanging", (AddEnv,), {"tools": (look,)})


@pytest.mark.parametrize("how", ["awaits", "held for long", "held"])
def test_a_tool_that_hangs_when_it_is_asked_holds_up_neither_signal_nor_run(tmp_path, how, monkeypatch):
    on_loop = how != "awaits"
    backend = types.SimpleNamespace(is_hanging=False)
    trainer = make_trainer(tmp_path, script=look_once, env=hanging(backend, on_loop=on_loop))
    trainer.train()
    rollouts, asked = trainer.rollouts, RolloutRequest(example=trainer.train_dataset[0])
    ask = trainer.features["tools"].ask
    call = RecordedCall(tool="look", request=asked, messages=[look_once(None, 0)])
    assert ask(call)
    backend.is_hanging = True
    monkeypatch.setattr("agent_r1_trl.rollout.runner.CLOSE_TIMEOUT_S", 1.0)  # 15: launchers wait 30 s
    if how == "held for long":
        monkeypatch.setattr("agent_r1_trl.features.reliability.tool_watch.ASK_TIMEOUT_S", 0.3)
    elif how == "held":
        threading.Timer(0.3, rollouts.cancel).start()  # a signal
    else:
        threading.Timer(0.3, lambda: (rollouts.is_cancelled.set(), rollouts.runner.stop())).start()
    start = time.monotonic()
    assert not ask(call)
    assert how == "held for long" or not ask(call), "once the run is told to end, nothing is asked"
    assert time.monotonic() - start < 10
    backend.is_hanging = False
    rollouts.end_run()
    assert ask(call), "the next one is asked as before"
    rollouts.close()


def test_a_relative_output_dir_does_not_follow_a_tool_that_changes_the_directory(tmp_path, monkeypatch):
    (tmp_path / "start").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "start")

    class Wandering(AddEnv):
        def step(self, message):
            os.chdir(tmp_path / "elsewhere")
            return super().step(message)

    trainer = make_trainer(
        "out", env=Wandering, max_steps=1, save_strategy="steps", save_steps=1, record_trajectories="jsonl"
    )
    trainer.train()
    trainer.save_model()
    assert not list((tmp_path / "elsewhere").iterdir())
    saved = tmp_path / "start" / "out"
    assert (saved / "checkpoint-1").is_dir() and (saved / "trajectories").is_dir()
    assert list(saved.glob("*.safetensors"))
