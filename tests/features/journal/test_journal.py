"""The journal of a rollout: torn files, what is repeated and what is not, and how environments come back."""

import asyncio
import itertools
import json
import logging
import os
import struct
import threading
import time
from dataclasses import replace

import pytest

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.environments.search_qa import SearchQAEnv
from agent_r1_trl.environments.trl_adapters import FunctionToolsEnv, TRLEnvAdapter
from agent_r1_trl.features.journal import JournalReplay, RolloutLog
from agent_r1_trl.features.journal.reader import describe_request, read_rollout, read_trajectory, trajectory_record
from agent_r1_trl.features.journal.recorders import resume_mode
from agent_r1_trl.features.journal.records import VERSION, Appender, dump, pack, pack_floats, read_file, unpack_floats
from agent_r1_trl.features.journal.training import without_later_weights
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRunner
from agent_r1_trl.testing import AddEchoEnv, AddEnv, add, calls, chat_of
from agent_r1_trl.tools import tool
from agent_r1_trl.trajectory import StopReason
from tests.features.journal.helpers import (
    CALLS,
    CASES,
    HEADER,
    Counter,
    Game,
    Shop,
    requests,
    roll_out,
    shopper,
    without_times,
)

RECORDS = [
    {"kind": "a", "text": "é\ud800"},
    {"kind": "b", "numbers": list(range(50))},
    {"kind": "c"},
    {"long": "x" * 9000},
]


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def cut_points(path):
    """Sizes of the file after each of its records."""
    data, ends, start = path.read_bytes(), [], 0
    while start < len(data):
        start += 8 + struct.unpack_from("<I", data, start)[0]
        ends.append(start)
    return ends


# ---------------------------------------------------------------- files


def test_a_file_that_was_cut_anywhere_holds_the_records_before_the_cut(tmp_path):
    path, sizes = tmp_path / "file", [len(pack(record)) for record in RECORDS]
    ends = [0, *itertools.accumulate(sizes)]
    data = b"".join(map(pack, RECORDS))
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        number = max(index for index, end in enumerate(ends) if end <= length)
        assert read_file(path) == (RECORDS[:number], ends[number])


def test_a_record_with_a_wrong_bit_is_dropped_with_all_that_follow(tmp_path):
    path, data = tmp_path / "file", b"".join(map(pack, RECORDS))
    first = len(pack(RECORDS[0]))
    for position in range(first, first + len(pack(RECORDS[1]))):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        assert read_file(path) == (RECORDS[:1], first), position


def test_a_full_disk_is_said_once_and_ends_the_journal_alone(tmp_path, monkeypatch, caplog):
    expected, _ = roll_out(None, Shop, shopper)
    write, count = os.write, 0

    def write_a_little(file, data):
        nonlocal count
        count += 1
        if count > 5:
            raise OSError(28, "No space left on device")
        return write(file, data[:9] if count == 5 else data)

    monkeypatch.setattr(os, "write", write_a_little)
    trajectories, _ = roll_out(tmp_path / "file", Shop, shopper)
    monkeypatch.undo()
    assert list(map(without_times, trajectories)) == list(map(without_times, expected))
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "journal=False" in warning.getMessage() and str(tmp_path / "file") in warning.getMessage()
    assert len(read_file(tmp_path / "file")[0]) == 4
    assert list(map(without_times, roll_out(tmp_path / "file", Shop, shopper)[0])) == list(
        map(without_times, expected)
    )


def test_what_json_cannot_hold_does_not_end_the_run():
    loop = {}
    loop["self"] = loop
    assert dump({(1, 2): {3}, "loop": loop, "number": 1.5}).count("1.5") == 1
    assert int(json.loads(dump({"long": -(1 << 20_000)}))["long"], 16) == -(1 << 20_000)


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        ([0.5, -0.0, float("-inf"), float("nan")], 8),
        ([0.5, -1.25, -0.0, float("-inf")], 4),
        ([0.1], 8),
        ([1e300], 8),
        ([], 4),
    ],
)
def test_numbers_come_back_bit_for_bit_and_take_four_bytes_where_these_hold_them(numbers, size):
    packed = pack_floats(numbers)
    assert struct.pack(f"{len(numbers)}d", *unpack_floats(packed)) == struct.pack(f"{len(numbers)}d", *numbers)
    assert len(packed.strip("~=")) * 6 // 8 == size * len(numbers)


def test_a_turn_is_written_once_and_its_answer_once_for_the_eyes_of_the_user_alone(tmp_path):
    trajectories, _ = roll_out(tmp_path / "file", Shop, shopper)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    kinds = [record["kind"] for record in read_file(tmp_path / "file")[0]]
    num_turns = sum(len(trajectory.turns) for trajectory in trajectories)
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "rollout": 1, "start": len(trajectories), "turn": num_turns, "step": num_turns, "end": len(trajectories),
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_finished_trajectory_comes_back_bit_for_bit(tmp_path, case):
    for trajectory in roll_out(None, *CASES[case])[0]:
        for logprobs in (
            trajectory.logprobs,
            [value and -0.5 for value in trajectory.logprobs],
            [-0.25] * len(trajectory.logprobs),
        ):
            trajectory.logprobs = logprobs
            back = read_trajectory(json.loads(dump(trajectory_record(trajectory))))
            assert back.to_json() == trajectory.to_json()


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("case", CASES)
def test_a_rollout_that_was_cut_at_any_record_goes_on_as_if_it_had_not_been(tmp_path, case):
    rolled_out = CASES[case]
    expected, whole = roll_out(None, *rolled_out)
    path = tmp_path / "file"
    roll_out(path, *rolled_out)
    data, ends = path.read_bytes(), cut_points(path)
    assert len(ends) > 15
    assert any(turn.is_summary for item in expected for turn in item.turns) is (case == "summaries")
    for number, end in [*enumerate([0, *ends])][len(case) % 3 :: 3]:
        path.write_bytes(data[:end] + data[end : end + 5])  # and a torn record behind it
        records = read_file(path)[0]
        recorded = sum(record["kind"] == "turn" for record in records)
        trajectories, talker = roll_out(path, *rolled_out)
        assert list(map(without_times, trajectories)) == list(map(without_times, expected)), number
        assert sum(talker.sampled.values()) == sum(whole.sampled.values()) - recorded, "no recorded turn is sampled"
        assert read_rollout(path).is_complete
        again, talker = roll_out(path, *rolled_out)
        assert [item.to_json() for item in again] == [item.to_json() for item in trajectories], "times included"
        assert not talker.sampled


def test_functions_of_recorded_turns_are_not_called_again_and_the_state_is_what_it_was(tmp_path):
    path = tmp_path / "file"
    expected, _ = roll_out(path, Shop, shopper)
    assert CALLS["price", "tea"] + CALLS["price", "bread"] > 1
    drop_ends(path)
    CALLS.clear()
    trajectories, _ = roll_out(path, Shop, shopper)
    assert [item.info["seen"] for item in trajectories] == [item.info["seen"] for item in expected]
    assert CALLS == {"reset": 3}


class Moody(Game):
    word = "move"

    def step(self, message):
        (observation,), reward, done, info = super().step(message)
        text = observation["content"].replace("move 2", f"{self.word} 2")
        return [{"role": "user", "content": text}], reward, done, info


def test_a_replayed_environment_that_answers_otherwise_is_named_and_the_record_counts(tmp_path, caplog):
    class Replayed(Moody):
        on_resume = "replay"

    path, policy = tmp_path / "file", CASES["game"][1]
    expected, _ = roll_out(path, Replayed, policy)
    drop_ends(path)
    Replayed.word = "turn"
    trajectories, talker = roll_out(path, Replayed, policy)
    assert list(map(without_times, trajectories)) == list(map(without_times, expected)) and not talker.sampled
    assert "Replayed" in caplog.text and "on_resume='restart'" in caplog.text


def test_a_restarted_environment_that_answers_otherwise_goes_on_from_there(tmp_path):
    class Restarted(Moody):
        on_resume = "restart"

    path, policy = tmp_path / "file", CASES["game"][1]
    roll_out(path, Restarted, policy)
    drop_ends(path)
    Restarted.word = "turn"
    expected, _ = roll_out(None, Restarted, policy)
    trajectories, talker = roll_out(path, Restarted, policy)
    assert list(map(without_times, trajectories)) == list(map(without_times, expected))
    assert sum(talker.sampled.values()) == 2 * len(trajectories), "the third and the fourth turn of each"
    again, _ = roll_out(path, Restarted, policy)
    assert list(map(without_times, again)) == list(map(without_times, expected)), "the later records count"


def drop_ends(path):
    """As a run that was killed before its first trajectory had ended."""
    records = [record for record in read_file(path)[0] if record["kind"] != "end"]
    path.write_bytes(b"".join(map(pack, records)))


def test_finished_trajectories_are_sampled_again_for_reward_functions_that_look_at_environments(tmp_path):
    path = tmp_path / "file"
    expected, _ = roll_out(path, Shop, shopper)
    CALLS.clear()
    trajectories, talker = roll_out(path, Shop, shopper, repeats_finished=True)
    assert list(map(without_times, trajectories)) == list(map(without_times, expected))
    assert not talker.sampled and CALLS["reset"] == 3 and set(CALLS) == {"reset"}


def test_another_row_under_the_same_name_is_not_taken_from_the_journal(tmp_path):
    path = tmp_path / "file"
    roll_out(path, Shop, shopper)
    log = RolloutLog(path, HEADER, recorded=read_rollout(path))
    (request, *_) = requests()
    assert log.finished(request) is not None
    assert log.finished(replace(request, example={**request.example, "number": "changed"})) is None


def test_trajectories_of_a_loop_that_was_given_up_have_ended_and_nothing_follows(tmp_path):
    started, release, back = (threading.Event() for _ in range(3))

    @tool
    async def stuck() -> str:
        """Never return."""
        started.set()
        release.wait(30)
        back.set()
        return "at last"

    class Stuck(AddEchoEnv):
        tools = (*AddEchoEnv.tools, stuck)

    chat, path = chat_of(), tmp_path / "file"
    generator = ScriptedGenerator(
        lambda request: chat.encode_reply(calls(("stuck", {}))), stop_token_ids=chat.stop_token_ids
    )
    runner = RolloutRunner(Stuck, generator, chat, RolloutLimits(stall_timeout=0.3, watchdog_interval=None))
    rolled_out = runner.run(requests()[:2], journal=RolloutLog(path, HEADER | {"size": 2}))
    assert {trajectory.stop_reason for trajectory in rolled_out} == {StopReason.ENVIRONMENT_ERROR}
    release.set()
    assert back.wait(10) or not started.is_set()  # a busy machine may hold the loop before
    time.sleep(0.2)  # the loop that was given up writes what it would have written
    runner.close()
    again = JournalReplay(path).replay(requests()[:2])
    assert [item.to_json() for item in again] == [item.to_json() for item in rolled_out]
    assert "held the event loop" in again[0].error


def test_a_loop_that_wakes_up_adds_nothing_to_a_trajectory_that_was_given_up():
    chat, release, added = chat_of(), threading.Event(), threading.Event()
    arrived: list[asyncio.Future[None]] = []

    class Holding(ScriptedGenerator):
        async def generate(self, request):
            arrived.append(asyncio.get_running_loop().create_future())
            if len(arrived) == 2:
                arrived[0].set_result(None)  # the other one goes on as soon as the loop does
                release.wait(30)
            await arrived[0]
            generation = await super().generate(request)
            asyncio.get_running_loop().call_soon(added.set)
            return generation

    generator = Holding(lambda request: chat.encode_reply(calls(("add", {"a": 1, "b": 2}))))
    runner = RolloutRunner(AddEchoEnv, generator, chat, RolloutLimits(stall_timeout=0.3, watchdog_interval=None))
    rolled_out = runner.run(requests()[:2])
    before = [item.to_json() for item in rolled_out]
    release.set()
    assert added.wait(10)
    time.sleep(0.1)
    runner.close()
    assert [item.to_json() for item in rolled_out] == before
    assert all(not item.completion_ids for item in rolled_out)


def test_a_failure_that_came_with_the_kill_is_sampled_again_and_one_of_a_whole_rollout_is_not(tmp_path):
    class Failing(Shop):
        is_down = True

        def step(self, message):
            if type(self).is_down and self.example["number"] == 1:
                raise ConnectionError("gone")
            return super().step(message)

    path = tmp_path / "file"
    roll_out(path, Failing, shopper)
    whole = path.read_bytes()
    trajectories, _ = roll_out(path, Failing, shopper)
    assert [item.stop_reason for item in trajectories].count("environment_error") == 1
    ends = [index for index, record in enumerate(read_file(path)[0]) if record["kind"] == "end"]
    others = [record for index, record in enumerate(read_file(path)[0]) if index != ends[-1]]
    (failed,) = [item for item in requests() if item.example["number"] == 1]
    again = {"kind": "start", "t": len(requests()), "request": describe_request(replace(failed, attempt=1))}
    for records, counts in ((others, False), ([*others, again], True)):
        path.write_bytes(b"".join(map(pack, records)))
        log = RolloutLog(path, HEADER, recorded=read_rollout(path))
        assert (log.finished(failed) is not None) == counts, (
            "one that was followed by another try did not come with it"
        )
    Failing.is_down = False
    path.write_bytes(b"".join(map(pack, others)))
    trajectories, _ = roll_out(path, Failing, shopper)
    assert [item.stop_reason for item in trajectories].count("environment_error") == 0
    path.write_bytes(whole)
    trajectories, _ = roll_out(path, Failing, shopper)
    assert [item.stop_reason for item in trajectories].count("environment_error") == 1


# ---------------------------------------------------------------- how an environment comes back


class TRLCounter:
    def reset(self, **row):
        self.total = 0

    def increase(self, number: int) -> int:
        """Increase.

        Args:
            number: How much.
        """
        self.total += number
        return self.total


class DeclaredTRLCounter(TRLCounter):
    on_resume = "replay"


class OwnStep(AddEnv):
    def step(self, message):
        return super().step(message)


class Client:
    """Somebody else's object, whose method is a tool."""

    def find(self, text: str) -> str:
        """Find.

        Args:
            text: What.
        """
        return text


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (AddEnv, "replay"),
        (lambda: FunctionToolsEnv([add]), "replay"),
        (lambda: ToolEnv(tools=[Client().find]), "replay"),
        (lambda: SearchQAEnv.__new__(SearchQAEnv), "replay"),
        (Counter, "restart"),
        (OwnStep, "restart"),
        (lambda: TRLEnvAdapter(TRLCounter), "restart"),
        (lambda: TRLEnvAdapter(DeclaredTRLCounter), "replay"),
        (Game, "replay"),
        (object, "restart"),
    ],
)
def test_an_environment_declares_how_it_comes_back_and_has_a_careful_default(make, expected):
    assert resume_mode(make()) == expected


@pytest.mark.parametrize("declared", ["rewind", True])
def test_a_declaration_that_cannot_be_kept_is_refused_by_name(tmp_path, declared):
    class Odd(Shop):
        on_resume = declared

    with pytest.raises(ValueError, match="on_resume"):
        roll_out(tmp_path / "file", Odd, shopper)


def test_turns_of_weights_that_a_resumed_run_makes_anew_are_gone_for_good(tmp_path):
    """Also if that run is killed before it has sampled others, and the third one knows weights of their number."""
    path, header = tmp_path / "rollout.journal", {"kind": "rollout", "version": VERSION, "size": 2}
    appender = Appender(path)
    turns = [{"kind": "turn", "turn": index, "versions": [[index, 5]]} for index in range(3)]
    for record in (header, {"kind": "start", "request": {"seed": 0}}, {"kind": "start", "request": {"seed": 1}}):
        appender.append(record)
    for record in (*({"t": 0, **turn} for turn in turns), {"t": 0, "kind": "end", "trajectory": {"a": 1}}):
        appender.append(record)
    appender.append({"t": 1, **turns[0]})
    appender.close()
    RolloutLog(path, header, recorded=without_later_weights(read_rollout(path), 1)).close()
    first, second = without_later_weights(read_rollout(path), 9).trajectories
    assert [turn.versions for turn in first.turns] == [[(0, 5)], [(1, 5)]] and first.end is None
    assert [turn.versions for turn in second.turns] == [[(0, 5)]]
