"""Whatever an agent or its client does wrong is a state of its trajectory: a reward, a stop reason, a number."""

import asyncio
import functools
import re
import threading
import time

import aiohttp
import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.environments.base import RewardError
from agent_r1_trl.evaluation.agent import Agent
from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.features.doors.agent.held import Held
from agent_r1_trl.features.doors.agent.wire import read_messages
from agent_r1_trl.features.reliability.tool_watch import count_calls
from agent_r1_trl.features.serve import Conversation
from agent_r1_trl.generation.scripted import ScriptedGenerator
from agent_r1_trl.testing import AddEnv, call, chat_of, say
from agent_r1_trl.tools import InfrastructureError
from agent_r1_trl.trajectory import StopReason, ToolErrorKind
from tests.features.doors.agents import TOOLS, ask, checked, loop_agent, post, roll_out, use
from tests.rollout.test_hosted import roll_out_hosted
from tests.toys import limits_of
from tests.trainers.helpers import make_trainer

ANSWER = [say("It is five.")]


# -------------------------------------------------------------------- retries, and clients that leave


def test_a_client_that_times_out_and_retries_gets_what_was_sampled_once():
    async def agent(door, example):
        client = door.async_client.with_options(timeout=0.4, max_retries=5)
        answer = await client.chat.completions.create(model="policy", messages=example["prompt"])
        return float(answer.choices[0].message.content == "It is five.")

    trajectory, recorder = checked(agent, ANSWER, delay_s=1.0)
    assert len(recorder.log) == 1 == len(trajectory.turns) and trajectory.outcome_reward == 1.0


@pytest.mark.parametrize("header", [{}, {"x-stainless-retry-count": "1"}])
def test_an_answer_that_nobody_heard_is_given_to_who_asks_again(header):
    async def agent(door, example):
        with pytest.raises(asyncio.TimeoutError):
            await post(door, {"messages": example["prompt"]}, timeout=aiohttp.ClientTimeout(total=0.2))
        await asyncio.sleep(0.6)
        status, _, _ = await post(door, {"messages": example["prompt"]}, headers=header)
        return float(status == 200)

    trajectory, recorder = checked(agent, ANSWER, delay_s=0.5)
    assert len(recorder.log) == 1 == len(trajectory.turns) and trajectory.outcome_reward == 1.0


def test_a_request_that_says_it_is_a_repetition_gets_the_answer_that_was_heard():
    async def agent(door, example):
        heads = {}, {"x-stainless-retry-count": "2"}
        one, two = [(await post(door, {"messages": example["prompt"]}, headers=head))[1] for head in heads]
        return float(one == two)

    trajectory, _ = checked(agent, ANSWER)
    assert len(trajectory.turns) == 1 == trajectory.outcome_reward


def test_what_a_client_that_left_for_good_has_not_heard_is_not_trained():
    async def agent(door, example):
        with pytest.raises(asyncio.TimeoutError):
            await post(
                door, {"messages": [{"role": "user", "content": "?"}]}, timeout=aiohttp.ClientTimeout(total=0.1)
            )
        await ask(door, example["prompt"])
        return 1.0

    trajectory, recorder = roll_out(agent, ANSWER, delay_s=0.4)
    assert len(recorder.log) == 2 and len(trajectory.turns) == 1
    assert trajectory.prompt_ids == recorder.contexts[1] and trajectory.prompt_messages[0]["content"] != "?"


def test_a_request_of_megabytes_does_not_stop_the_others():
    gaps = []

    async def tick():
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            gaps.append(time.perf_counter() - began)

    async def agent(door, example):
        ticking = asyncio.create_task(tick())
        await ask(door, [{"role": "user", "content": "word and more text 12345. " * 40_000}])
        ticking.cancel()
        return 1.0

    trajectory, _ = checked(agent, ANSWER)
    assert trajectory.outcome_reward == 1.0 and max(gaps) < sum(gaps) / 2


def function(number):
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object"}}}


def many_calls(num):
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "add", "arguments": "{}"}} for i in range(num)]
    return [*USER, {"role": "assistant", "tool_calls": calls}]


USER = [{"role": "user", "content": "Hi"}]
TOO_MUCH = {
    "one long text": {"messages": [{"role": "user", "content": "word " * 40_000}]},
    "text in blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 9000}]},
    "messages of one character": {"messages": USER * 3000},
    "tools": {"messages": USER, "tools": [function(number) for number in range(3000)]},
    "one tool": {"messages": USER, "tools": [{"function": {"name": "f", "description": "word " * 40_000}}]},
    "calls": {"messages": many_calls(3000)},
    "arguments of a call": {
        "messages": [
            *USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x" * 200_000}}]},
        ]
    },
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_cannot_fit_is_refused_before_any_work_and_named(name, is_first, monkeypatch):
    encoded, context = [], Held.context
    monkeypatch.setattr(Held, "context", lambda *args: encoded.append(1) or context(*args))

    async def agent(door, example):
        if not is_first:
            await ask(door, example["prompt"])
        answers.append((await post(door, TOO_MUCH[name]))[:2])
        if not is_first:
            await ask(door, [*example["prompt"], *ANSWER, {"role": "user", "content": "Go on."}])
        return 1.0

    answers = []
    trajectory, _ = roll_out(agent, ANSWER, max_model_length=2000, max_completion_length=1000)
    told = trajectory.error  # which ends a trajectory that has not begun
    if not is_first:
        ((status, answer),) = answers
        told = answer["error"]["message"]
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert re.search(r"\d+ characters do not fit into max_model_length=2000", told)
    assert len(encoded) == (0 if is_first else 2)
    assert trajectory.stop_reason is (StopReason.PROMPT_TOO_LONG if is_first else StopReason.DONE)
    assert len(trajectory.turns) == (0 if is_first else 2) and trajectory.outcome_reward == float(not is_first)


def test_a_body_beyond_the_limit_of_all_requests_is_a_length_error_too():
    async def agent(door, example):
        await ask(door, example["prompt"])
        body = {"messages": [{"role": "user", "content": "x" * 9 * 2**20}]}
        status, answer, _ = await post(door, body)
        return float(status == 400 and "8388608 bytes" in answer["error"]["message"])

    trajectory, _ = checked(agent, ANSWER)
    assert trajectory.outcome_reward == 1.0 and trajectory.stop_reason is StopReason.MAX_COMPLETION_LENGTH


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_body_that_would_unfold_to_much_more_is_refused_as_it_comes(algorithm):
    """A gigabyte of zeros is a megabyte of gzip, and would hold the loop up for seconds."""

    async def agent(door, example):
        await ask(door, example["prompt"])
        body = {"messages": [{"role": "user", "content": "x" * 2**20}]}
        status, answer, _ = await post(door, body, compress=algorithm)
        return float(status == 415 and "Send the body uncompressed" in answer["error"]["message"])

    trajectory, _ = checked(agent, ANSWER)
    assert trajectory.outcome_reward == 1.0 and trajectory.stop_reason is StopReason.DONE


def test_long_requests_of_clients_that_have_left_are_not_worked_off_one_by_one(monkeypatch):
    encoded, context = [], Held.context

    def slowly(*args):
        encoded.append(1)
        time.sleep(0.3)
        return context(*args)

    monkeypatch.setattr(Held, "context", slowly)

    async def agent(door, example):
        long = {"messages": [{"role": "user", "content": "word " * 20_000}]}
        asked = [post(door, long, timeout=aiohttp.ClientTimeout(total=0.1)) for _ in range(5)]
        await asyncio.gather(*asked, return_exceptions=True)
        await ask(door, example["prompt"])
        return 1.0

    trajectory, _ = roll_out(agent, ANSWER)
    assert len(encoded) <= 2 + 1 and trajectory.outcome_reward == 1.0


def test_results_of_parallel_calls_are_sorted_in_proportion_to_their_number():
    (asked,) = many_calls(20_000)[1:]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in reversed(range(20_000))]
    began = time.perf_counter()
    read = read_messages([*USER, asked, *results])
    assert [item["content"] for item in read[2:]] == [str(i) for i in range(20_000)]
    assert time.perf_counter() - began < 5


# -------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    "limits, reason", [({"max_turns": 3}, "max_turns"), ({"max_completion_length": 100}, "max_completion_length")]
)
def test_a_spent_budget_is_said_twice_then_refused_and_then_the_trajectory_ends(limits, reason):
    seen = []

    async def agent(door, example):
        messages = example["prompt"]
        while True:
            status, answer, headers = await post(door, {"messages": messages, "tools": TOOLS})
            if status != 200:
                ((name, value),) = limits.items()
                assert f"{name}={value}" in answer["error"]["message"]
                seen.append((status, answer["error"]["code"], headers["x-should-retry"]))
                continue
            (choice,) = answer["choices"]
            seen.append(choice["finish_reason"])
            results = [
                {"role": "tool", "tool_call_id": item["id"], "content": "5"}
                for item in choice["message"].get("tool_calls") or ()
            ]
            messages = [*messages, choice["message"], *results]

    trajectory, _ = checked(agent, [call()], **limits)
    num, refusal = len(trajectory.turns), (400, "context_length_exceeded", "false")
    assert trajectory.stop_reason == reason and seen[num - 1 :][1:4] == ["length", "length", refusal]
    assert len(seen) in (num + 3, num + 4) and trajectory.outcome_reward == 0.0
    assert trajectory.info.get("agent/raised", 0) == 0


def test_of_more_calls_at_once_than_turns_are_left_those_that_fit_are_answered():
    async def agent(door, example):
        asked = [ask(door, [{"role": "user", "content": f"Part {part}"}]) for part in range(9)]
        return sum(said["content"] == "It is five." for said in await asyncio.gather(*asked))

    trajectory, _ = checked(agent, ANSWER, max_turns=3, delay_s=0.2)
    assert len(trajectory.turns) == 3 == trajectory.outcome_reward
    assert trajectory.stop_reason is StopReason.MAX_TURNS  # though others were heard after the limit was met


def test_an_agent_that_answers_after_its_budget_keeps_its_reward_and_the_limits_stop_reason():
    async def agent(door, example):
        said = await ask(door, example["prompt"])
        text = await ask(door, [*example["prompt"], said, {"role": "user", "content": "?"}])
        return 0.5 if "budget" in text["content"] else 0.0

    trajectory, _ = checked(agent, ANSWER, max_turns=1)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and trajectory.outcome_reward == 0.5


def test_an_agent_that_rewards_every_answer_may_reward_the_one_that_says_that_its_budget_is_spent():
    async def agent(door, example):
        for number in range(2):
            _, answer, _ = await post(door, {"messages": [{"role": "user", "content": f"Part {number}"}]})
            door.reward(answer["id"], 0.25)
        return 1.0

    trajectory, _ = checked(agent, ANSWER, max_turns=1)
    assert trajectory.total_reward == 1.25 and trajectory.stop_reason is StopReason.MAX_TURNS


def test_a_conversation_that_is_too_long_for_the_model_may_be_shortened():
    async def agent(door, example):
        await ask(door, example["prompt"])
        _, answer, _ = await post(door, {"messages": [{"role": "user", "content": "word " * 400}]})
        await ask(door, [{"role": "user", "content": "A summary."}])
        assert "max_model_length=300" in answer["error"]["message"]
        return float(answer["error"]["code"] == "context_length_exceeded")

    trajectory, _ = checked(agent, ANSWER, max_model_length=300)
    assert trajectory.outcome_reward == 1.0 and trajectory.stop_reason is StopReason.DONE


def test_a_prompt_that_leaves_no_room_ends_the_trajectory():
    async def agent(door, example):
        await post(door, {"messages": [{"role": "user", "content": "word " * 400}]})
        await asyncio.sleep(60)

    trajectory, _ = roll_out(agent, ANSWER, max_model_length=200)
    assert trajectory.stop_reason is StopReason.PROMPT_TOO_LONG and not trajectory.turns
    assert "max_model_length=200" in trajectory.error


# -------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    "returned, expected", [(0.75, (0.75, {})), (True, (1.0, {})), (False, (0.0, {})), (None, (0.0, {})),
                           ("five", (0.0, {})), ((1.5, {"a": 1.0, "b": 0.5}), (1.5, {"a": 1.0, "b": 0.5}))],
)  # fmt: skip
def test_what_run_returns_is_the_reward(returned, expected):
    async def agent(door, example):
        await ask(door, example["prompt"])
        return returned

    trajectory, _ = checked(agent, ANSWER)
    assert (trajectory.outcome_reward, trajectory.reward_parts) == expected


@pytest.mark.parametrize("returned", [{"reward": 1}, float("nan"), (1.0, {"a": 0.5})])
def test_what_is_no_reward_ends_the_run_with_the_place(returned):
    async def agent(door, example):
        await ask(door, example["prompt"])
        return returned

    with pytest.raises(RewardError, match=r"AgentEnv\.run(, part|) ?returned"):
        roll_out(agent, ANSWER)


def test_a_subclass_scores_the_answer_and_calls_have_rewards_of_their_own():
    class Mine(AgentEnv):
        def run(self, door, example):  # on a thread
            assert threading.current_thread() is not threading.main_thread()
            first = door.client.chat.completions.create(model="policy", messages=example["prompt"])
            door.reward(first, 0.25, "brief")
            door.reward(first.id, 0.5)
            return first.choices[0].message.content

        async def outcome_reward(self, trajectory):
            trajectory.info["length"] = len(self.answer)
            return float(self.answer == trajectory.final_text and self.example["prompt"] is not None)

    trajectory, _ = checked(None, ANSWER, env=Mine)
    assert trajectory.outcome_reward == 1.0 and trajectory.total_reward == 1.75
    assert trajectory.turns[0].reward_parts == {"brief": 0.25, "reward": 0.5} and trajectory.info["length"] == 11


# -------------------------------------------------------------------- agents that fail


def test_an_agent_that_raises_after_a_call_is_scored_and_before_one_is_an_environment_error():
    async def late(door, example):
        await ask(door, example["prompt"])
        raise KeyError("no such tool")

    async def early(door, example):
        raise KeyError("no such file")

    async def never(door, example):
        return 1.0

    trajectory, _ = checked(late, ANSWER)
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome_reward == 0.0
    assert trajectory.info["agent/raised"] == 1 and "KeyError" in trajectory.info["agent_error"]
    for agent, told in ((early, "made no call: KeyError"), (never, "returned and made no call")):
        trajectory, _ = roll_out(agent, ANSWER)
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and told in trajectory.error


@pytest.mark.parametrize(
    "turns", [(), ANSWER, [call()]], ids=["before a call", "after an answer", "after a tool's call"]
)
def test_infrastructure_that_fails_is_neither_the_policys_fault_nor_an_outage_of_a_tool(turns):
    async def agent(door, example):
        if turns:
            await ask(door, example["prompt"], tools=TOOLS)
        raise InfrastructureError("the index is down")

    trajectory, _ = roll_out(agent, turns)
    assert trajectory.stop_reason is StopReason.TOOL_FAILURE and "the index is down" in trajectory.error
    assert count_calls([trajectory]) == {} and len(trajectory.turns) == bool(turns)
    assert not turns or "the index is down" in trajectory.info["agent_error"]


@pytest.mark.parametrize("error", [SystemExit("bye"), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
def test_an_agent_that_raises_what_ends_programs_ends_its_trajectory_alone(error):
    async def agent(door, example):
        await ask(door, example["prompt"])
        raise error

    def plain(door, example):
        answer = door.client.chat.completions.create(model="policy", messages=example["prompt"])
        assert answer.choices
        raise error

    for run in (agent, plain):
        trajectory, _ = roll_out(run, ANSWER)
        assert trajectory.stop_reason is StopReason.DONE and trajectory.info["agent/raised"] == 1


def test_a_sampler_that_fails_is_told_the_agent_and_ends_the_trajectory():
    async def agent(door, example):
        status, answer, headers = await post(door, {"messages": example["prompt"]})
        seen.append((status, headers["x-should-retry"], "the machine is gone" in answer["error"]["message"]))
        await asyncio.sleep(60)

    seen = []
    generator = ScriptedGenerator(lambda request: RuntimeError("the machine is gone"))
    trajectory, _ = roll_out(agent, None, generator=generator)
    assert trajectory.stop_reason is StopReason.GENERATION_ERROR and "the machine is gone" in trajectory.error
    assert not seen or seen == [(500, "false", True)]


def test_an_agent_that_hangs_is_timed_out_and_scored_and_its_next_call_is_gone():
    asked = []

    def agent(door, example):
        client = door.client.with_options(max_retries=0)
        client.chat.completions.create(model="policy", messages=example["prompt"])
        time.sleep(0.9)
        try:
            client.chat.completions.create(model="policy", messages=example["prompt"])
        except openai.APIStatusError as error:
            asked.append(error.status_code)

    async def slow(door, example):
        await ask(door, example["prompt"])
        await asyncio.sleep(1.5)
        return 1.0

    import openai

    both = iter([agent, slow])
    limits = {"rollout_timeout": 0.6}
    trajectories, _ = roll_out(None, ANSWER, env=lambda: AgentEnv(next(both)), examples=2, **limits)
    assert [item.stop_reason for item in trajectories] == [StopReason.TIMEOUT] * 2
    assert all(len(item.turns) == 1 and item.outcome_reward == 0.0 for item in trajectories)


def test_an_agent_that_makes_no_call_in_time_is_an_environment_error():
    async def agent(door, example):
        await asyncio.sleep(60)

    trajectory, _ = roll_out(agent, ANSWER, reset_timeout=0.3)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and "reset_timeout" in trajectory.error


@pytest.mark.parametrize("is_agent", [True, False])
def test_agents_that_start_are_not_reported_as_stuck(is_agent, caplog):
    async def agent(door, example):
        await asyncio.sleep(0.7)
        await ask(door, example["prompt"])
        return 1.0

    class Slow(AddEnv):
        async def reset(self, example):
            await asyncio.sleep(0.7)
            return super().reset(example)

    options = {} if is_agent else {"env": Slow, "context": "keep"}
    roll_out(agent, ANSWER, watchdog_interval=0.2, **options)
    assert ("No trajectory has moved" in caplog.text) is not is_agent


def test_calls_after_the_end_and_between_rollouts_leave_no_trace(caplog):
    doors = []

    async def agent(door, example):
        doors.append(door)
        if len(doors) > 1:
            seen.append(
                (
                    await post(
                        door, {"messages": example["prompt"]}, headers={"Authorization": f"Bearer {doors[0].api_key}"}
                    )
                )[0]
            )
        await ask(door, example["prompt"])
        return 1.0

    seen = []
    trajectories, _ = roll_out(agent, ANSWER, examples=2, max_concurrency=1)
    assert seen == [410] and [len(item.turns) for item in trajectories] == [1, 1]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_another_context_policy_is_refused_with_the_one_to_set():
    with pytest.raises(ValueError, match=r"context\.policy='keep': .* decides itself .* Set context='agent'"):
        roll_out(loop_agent, ANSWER, context="keep")


def test_an_environment_that_is_no_agent_is_refused_with_an_agents_policy(tmp_path):
    with pytest.raises(ValueError, match=r"context\.policy='agent': AddEnv is no agent.* Set context='keep'"):
        make_trainer(tmp_path, env=AddEnv, context="agent").train()


def test_an_environment_needs_an_agent():
    with pytest.raises(ValueError, match=r"AgentEnv\.run=None: must be a function"):
        AgentEnv()


# -------------------------------------------------------------------- where no agent can be


def test_a_hosted_model_is_not_evaluated_with_an_agent():
    with pytest.raises(ValueError, match=r"AgentEnv: an agent asks for its turns itself.*base_url"):
        roll_out_hosted(["five"], env=functools.partial(AgentEnv, loop_agent))


def test_nobody_talks_in_an_agents_place(capsys):
    kwargs = '{"run": "tests.features.doors.agents.loop_agent"}'
    arguments = ["no/such/model", "--env", "agent_r1_trl.features.doors.AgentEnv", "--env_kwargs", kwargs]
    for command in ("chat", "serve"):
        assert main([command, *arguments]) == 2
        assert "nobody can talk in its place. Serve the model" in capsys.readouterr().err
    agent = Agent(name="tiny", generator=ScriptedGenerator([]), chat=chat_of("qwen2_5"), limits=limits_of())
    conversation = Conversation(agent, functools.partial(AgentEnv, loop_agent))
    with pytest.raises(ValueError, match="nobody can talk in its place"):
        asyncio.run(conversation.say([{"role": "user", "content": "Hello."}]))


# -------------------------------------------------------------------- what the metrics of tools know


async def with_clock(door, example):
    """Opens a row with every call; runs what it can of three calls."""
    messages = list(example["prompt"])
    for minute in range(4):
        clock = {"role": "system", "content": f"10:0{minute}"}
        said = await ask(door, [clock, *messages], tools=TOOLS[:1])
        calls = said.get("tool_calls", [])
        known = [item for item in calls if item["function"]["name"] == "add"]
        rest = [{"role": "tool", "tool_call_id": item["id"], "content": "?"} for item in calls if item not in known]
        messages += [said, *map(use, known), *rest]
    return 1.0


@pytest.mark.parametrize("agent", [with_clock, functools.partial(loop_agent, tools=TOOLS[:1])])
def test_calls_and_unknown_tools_are_counted_in_whatever_row_their_results_are_read(agent):
    turns = [call(), call(a=4, b=5), call("echo", text="hi"), say("five")]
    trajectory, _ = checked(agent, turns, max_completion_length=4000)
    assert [(item.call.arguments, item.content) for item in trajectory.tool_results] == [
        ({"a": 2, "b": 3}, "5"), ({"a": 4, "b": 5}, "9"), ({"text": "hi"}, "?" if agent is with_clock else "hi"),
    ]  # fmt: skip
    assert [item.error for item in trajectory.tool_results] == [None, None, ToolErrorKind.UNKNOWN_TOOL]
    assert set(count_calls([trajectory])) == {"add"}


def test_an_agent_that_drops_its_last_turn_has_drifted_though_it_goes_on_from_an_earlier_one():
    async def agent(door, example):
        messages = list(example["prompt"])
        messages += [await ask(door, messages), {"role": "user", "content": "Go on."}]
        await ask(door, messages)
        await ask(door, [*messages, {"role": "user", "content": "Say something."}])
        return 1.0

    trajectory, _ = checked(agent, [say("five"), say(""), say("six")])
    assert len(trajectory.rows) == 2 and trajectory.info["drift/assistant"] == 1
    assert trajectory.info["agent_drift"] == "assistant message 3: 'assistant: ' became 'user: Say something.'"


def test_an_agents_own_error_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr("agent_r1_trl.features.doors.agent.env._warned", set())

    async def agent(door, example):
        await ask(door, example["prompt"])
        return example["no such column"]

    for _ in range(2):
        checked(agent, [say("five")])
    (told,) = [item.getMessage() for item in caplog.records if "An agent raised" in item.getMessage()]
    assert "KeyError: 'no such column'" in told and "unfinished_reward=0" in told
