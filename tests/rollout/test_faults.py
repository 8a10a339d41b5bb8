"""Nothing that a model, a tool or an environment does stops a rollout or reaches another trajectory in it.

Every rollout here holds a trajectory that misbehaves between two that do not; those must come out exactly as when
they are sampled alone. What an environment's author or a reward function got wrong is no fault: it is raised by name.
"""

import asyncio
import contextlib
import functools
import math
import random
import re
import threading
import time

import pytest
import torch

from agent_r1_trl import testing
from agent_r1_trl.environments.base import ProtocolError
from agent_r1_trl.environments.factory import tool_schemas
from agent_r1_trl.features.doctor.environment import check_env
from agent_r1_trl.generation import Generation, ScriptedGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner, env_session, probe
from agent_r1_trl.testing import AddEchoEnv, call, chat_of, echo, say
from agent_r1_trl.tools import ToolSchemaError, tool
from agent_r1_trl.trajectory import StopReason, Trajectory
from tests.rollout.helpers import PROMPT, roll_out, sampled_ids

GOOD, BAD = "good", "bad"
ERRORS = (SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), ValueError("bad"),
          StopIteration(), TimeoutError("theirs"))  # fmt: skip
plain_and_async = pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
any_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


class GoodEnv(AddEchoEnv):
    """Well-behaved; its prompt tells its trajectories apart from the bad ones."""

    def reset(self, example):
        return [{"role": "user", "content": f"{GOOD}: what is 2 + 3?"}]


@functools.cache
def good_alone(family="qwen3"):
    (trajectory,) = roll_out_each([GoodEnv], [], family=family)
    return trajectory


def roll_out_each(envs, bad_turns, *, family="qwen3", **limits):
    """One trajectory per environment class; the good ones call and answer, the bad ones say `bad_turns`."""
    chat = chat_of(family)
    good_turns = [chat.encode_reply(call()), chat.encode_reply(say("five"))]
    bad_turns = [turn if isinstance(turn, list | Exception) else chat.encode_reply(turn) for turn in bad_turns]
    good_prompt = tuple(chat.encode_prompt(GoodEnv().reset({}), [item.schema for item in GoodEnv.tools]))

    def script(request):
        turns = good_turns if request.prompt_ids[: len(good_prompt)] == good_prompt else bad_turns
        return turns[min(request.turn, len(turns) - 1)]

    order, limits = iter(envs), {"max_turns": 4, "max_concurrency": 1} | limits
    return testing.roll_out(lambda: next(order)(), script, [{"prompt": PROMPT}] * len(envs), chat=chat, **limits)


def bad_among_good(env, bad_turns, *, family="qwen3", **limits):
    """The trajectory of `env`, after checking that its neighbours were not touched."""
    before, trajectory, after = roll_out_each([GoodEnv, env, GoodEnv], bad_turns, family=family, **limits)
    for neighbour in (before, after):
        assert_same(neighbour, good_alone(family))
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    return trajectory


def assert_same(trajectory, alone):
    for name in ("prompt_ids", "completion_ids", "action_mask", "logprobs", "turn_ids", "authors", "stop_reason"):
        assert getattr(trajectory, name) == getattr(alone, name), name
    assert trajectory.messages == alone.messages
    assert trajectory.token_rewards() == alone.token_rewards()


class BadEnv(AddEchoEnv):
    """Its prompt is not the good one's."""

    def reset(self, example):
        return [{"role": "user", "content": f"{BAD}: what is 2 + 3?"}]


def bad_env(*, is_async=False, **methods):
    """`BadEnv` with methods replaced by plain functions or, around the same functions, async ones."""

    def asynchronous(fn):
        async def method(*args, **kwargs):
            return fn(*args, **kwargs)

        return method

    return type("Bad", (BadEnv,), {name: asynchronous(fn) if is_async else fn for name, fn in methods.items()})


def raising(error):
    def method(self, *args, **kwargs):
        raise error

    return method


def returning(value):
    return lambda self, *args: value


# -------------------------------------------------------------------- what a model may write


def in_words(chat, text):
    """The ids of a text as a model would sample it: markers as their tokens, then the end of the turn."""
    text = text.encode("utf-8", "replace").decode()
    return [*chat.tokenizer(text, add_special_tokens=False)["input_ids"], chat.turn_end_ids[0]]


@pytest.mark.parametrize(
    "text",
    ["[" * 20_000, '{"name": ' * 5000, "9" * 20_000, '{"name": "echo", "arguments": {"text": "' + "x" * 9**5 + '"}}'],
    ids=["nested lists", "nested objects", "a long number", "a long argument"],
)  # fmt: skip
def test_a_huge_call_does_no_harm(text):
    turn = in_words(chat_of(), f"<tool_call>\n{text}\n</tool_call>")
    trajectory = bad_among_good(BadEnv, [turn, say("ok")], max_completion_length=200_000)
    assert trajectory.stop_reason is StopReason.DONE
    assert sampled_ids(trajectory)[: len(turn)] == turn
    assert len(trajectory.turns[0].observations) == 1


# -------------------------------------------------------------------- what a tool or an environment may say


def test_a_megabyte_is_cut_whoever_says_it():
    megabyte = "word " * 200_000

    @tool
    def dump(a: int, b: int) -> str:
        """Say much.

        Args:
            a: Nothing.
            b: Nothing.
        """
        return megabyte

    with_tool = type("Bad", (BadEnv,), {"tools": (dump,)})
    trajectory = bad_among_good(with_tool, [call("dump", a=2, b=3), say("ok")], max_observation_tokens=100)
    assert len(trajectory.turns[0].observations[0]["content"]) < 1000
    assert trajectory.tool_results[0].is_truncated

    def step(self, message):
        return [{"role": "user", "content": megabyte}], 0.0, False, {}

    trajectory = bad_among_good(bad_env(step=step), [say("ok")], max_observation_tokens=100, max_turns=2)
    (observation,) = trajectory.turns[0].observations
    read = chat_of().count(("word " * 2000)[: 64 * 100])
    assert f"[truncated: more than {read} tokens" in observation["content"], "no tokenizer reads the megabyte"
    assert chat_of().count(observation["content"]) <= 100


# -------------------------------------------------------------------- environments


async def never():
    await asyncio.sleep(60)


async def stubborn():
    for _ in range(20):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3)


def blocked():
    time.sleep(20)


any_hang = pytest.mark.parametrize("hang", [never, stubborn, blocked], ids=lambda fn: fn.__name__)


@plain_and_async
@pytest.mark.parametrize("method", ["reset", "step", "seed"])
@any_error
def test_whatever_an_environment_raises_is_its_own_error(method, error, is_async):
    env = bad_env(is_async=is_async, **{method: raising(error)})
    trajectory = bad_among_good(env, [say("ok")])
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert f"Bad.{method} raised" in trajectory.error
    assert type(error).__name__ in trajectory.error
    assert trajectory.outcome_reward == 0
    assert len(trajectory.turns) == (method == "step")


@plain_and_async
@any_error
def test_whatever_close_raises_is_only_written_down(error, is_async, caplog):
    trajectory = bad_among_good(bad_env(is_async=is_async, close=raising(error)), [say("ok")])
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.outcome_reward != 0
    assert "Bad.close raised" in caplog.text


@any_hang
@pytest.mark.parametrize("method", ["reset", "step", "outcome_reward"])
def test_an_environment_that_hangs_is_given_up_after_the_timeout(method, hang):
    def plain(self, *args):
        hang()

    async def asynchronous(self, *args):
        await hang()

    good_alone()  # loads the tokenizer
    began = time.monotonic()
    env = bad_env(**{method: plain if hang is blocked else asynchronous})
    limits = {"step": "rollout_timeout", "reset": "reset_timeout", "outcome_reward": "scoring_timeout"}
    trajectory = bad_among_good(env, [say("ok")], **{limits[method]: 1.0})
    assert time.monotonic() - began < 5
    if method == "step":
        assert trajectory.stop_reason is StopReason.TIMEOUT
        assert trajectory.outcome_reward in (1.0, -1.0)
    else:
        assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
        assert f"Bad.{method} had not returned after {limits[method]}=1 s" in trajectory.error


PICTURE = '<svg xmlns="http://www.w3.org/2000/svg"/>'


@pytest.mark.parametrize("seed", [lambda self, seed=None: 1 / 0, property(lambda self: 7), random.Random().seed])
def test_a_seed_of_another_form_is_the_environments_own_business(seed):
    trajectory, _ = roll_out([say("five")], env=type("Gym", (GoodEnv,), {"seed": seed}))
    assert trajectory.stop_reason is StopReason.DONE


@plain_and_async
def test_what_an_environment_renders_is_recorded_and_read_by_nobody(is_async):
    env = bad_env(is_async=is_async, render_text=returning("a b"), render_svg=returning(PICTURE))
    trajectory = bad_among_good(env, [say("ok")])
    rendered = {"text": "a b", "svg": PICTURE}
    assert trajectory.rendered == rendered and [turn.rendered for turn in trajectory.turns] == [rendered]
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert_same(trajectory, bad_among_good(bad_env(), [say("ok")]))


@pytest.mark.parametrize(
    "returned",
    [None, 3, "x" * 20_001, "no svg", "<svg/>", "<svg", f"<!DOCTYPE a [<!ENTITY b 'c'>]>{PICTURE}", "\ud800"],
)
def test_a_drawing_of_another_form_is_an_error_in_the_record_once(returned):
    trajectory = bad_among_good(bad_env(render_svg=returning(returned)), [say("ok")])
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.rendered.keys() == {"error"} and "Bad.render_svg: " in trajectory.rendered["error"]
    assert [turn.rendered for turn in trajectory.turns] == [{}]


@any_error
def test_whatever_rendering_raises_is_an_error_in_the_record(error):
    trajectory = bad_among_good(bad_env(render_text=raising(error)), [say("ok")])
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome_reward != 0
    assert "Bad.render_text: " in trajectory.rendered["error"]


@any_hang
def test_rendering_that_hangs_is_given_up_too(hang, monkeypatch):
    monkeypatch.setattr(env_session, "RENDER_TIMEOUT_S", 0.1)
    trajectory = bad_among_good(bad_env(render_svg=lambda self: hang()), [say("ok")], reset_timeout=10.0)
    assert trajectory.stop_reason is StopReason.DONE and "TimeoutError" in trajectory.rendered["error"]


@any_hang
def test_a_close_that_hangs_is_given_up_too(hang, caplog, monkeypatch):
    monkeypatch.setattr(env_session, "CLOSE_TIMEOUT_S", 0.1)
    trajectory = bad_among_good(bad_env(close=lambda self: hang()), [say("ok")])
    assert trajectory.stop_reason is StopReason.DONE
    assert "Bad.close has not returned after 0.1 s" in caplog.text


def test_an_environment_cannot_change_what_was_recorded_or_what_others_see():
    shared = {"role": "user", "content": "first"}
    example = {"prompt": PROMPT, "facts": {"answer": [1]}}

    class Meddler(BadEnv):
        def reset(self, example):
            self.prompt = [{"role": "user", "content": f"{BAD} {example['facts']['answer']}"}]
            example["facts"]["answer"].append(2)
            return self.prompt

        def step(self, message):
            message.clear()
            self.prompt[0]["content"] = "changed"
            shared["content"] += "!"
            return [shared], 0.0, False, {}

    trajectories = testing.roll_out(Meddler, [say("ok")] * 3, [example] * 3, max_turns=2, max_concurrency=1)
    for index, trajectory in enumerate(trajectories):
        assert trajectory.prompt_messages == [{"role": "user", "content": f"{BAD} [1]"}]
        assert [turn.message["content"] for turn in trajectory.turns] == ["ok", "ok"]
        marks = [turn.observations[0]["content"].count("!") for turn in trajectory.turns]
        assert marks == [2 * index + 1, 2 * index + 2]
    assert example["facts"] == {"answer": [1]}


# -------------------------------------------------------------------- mistakes are heard


class Endless(GoodEnv):
    """Never ends by itself."""

    started = closed = 0

    async def step(self, message):
        Endless.started += 1
        await asyncio.Event().wait()

    def close(self):
        Endless.closed += 1


class Waiting(BadEnv):
    """Is made once two of the others are in flight."""

    def __init__(self):
        while Endless.started < 2:
            time.sleep(0.001)
        super().__init__()


MISTAKES = [  # an environment's methods, and what the message names
    ({"step": returning(None)}, r"Bad\.step"),
    ({"step": returning(([], 0.0, True))}, r"Bad\.step"),
    ({"step": returning(([], math.nan, False, {}))}, r"Bad\.step.*reward.*nan"),
    ({"step": returning(([], 10**400, False, {}))}, r"Bad\.step.*reward.*1000"),
    ({"step": returning(([], "much", False, {}))}, r"Bad\.step.*reward.*'much'"),
    ({"step": returning(([5], 0.0, False, {}))}, r"Bad\.step.*observations=\[5\]"),
    ({"step": returning(("text", 0.0, False, {}))}, r"Bad\.step.*observations='text'"),
    ({"step": returning(([], 0.0, torch.tensor([True, False]), {}))}, r"Bad\.step.*done="),
    ({"step": returning(([], 0.0, False, 5))}, r"Bad\.step.*info=5"),
    ({"step": returning(([], 0.0, False, {"tool_results": 5}))}, "info=.*tool_results"),
    ({"step": returning(([], 0.0, False, {"reward_parts": [1]}))}, "info=.*reward_parts"),
    ({"step": returning(([], 0.0, False, {"reward_parts": {"a": math.nan}}))}, r"Bad\.step, part 'a', returned nan"),
    ({"reset": returning("a prompt")}, r"Bad\.reset"),
    ({"reset": returning([{"content": "x"}])}, r"Bad\.reset"),
    ({"reset": None}, "Bad without reset"),
    ({"tools": (5,)}, "5 is no tool"),
    ({"tools": property(lambda self: echo.fn)}, r"Bad\.tools=.*must be a list.*Write \[echo\]"),
    ({"tools": property(lambda self: echo)}, r"Bad\.tools=.*must be a list.*Write \[echo\]"),
    ({"outcome_reward": returning(math.nan)}, r"Bad\.outcome_reward.*nan"),
    ({"outcome_reward": returning("much")}, r"Bad\.outcome_reward.*'much'"),
    ({"outcome_reward": raising(ValueError("typo"))}, "typo"),
    ({"outcome_reward": raising(SystemExit(1))}, "SystemExit"),
    ({"process_reward": raising(ValueError("typo"))}, r"Bad\.process_reward.*ValueError: typo"),
    ({"process_reward": returning(math.nan)}, r"Bad\.process_reward.*nan"),
]


@pytest.mark.parametrize(("methods", "named"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_raised_by_name_and_everything_is_closed(methods, named):
    Endless.started = Endless.closed = 0
    envs = [Endless, type("Bad", (Waiting,), methods), Endless]
    good_alone()  # loads the tokenizer
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match=named) as caught:
        roll_out_each(envs, [call(), say("ok")], max_concurrency=3, rollout_timeout=10)
    if "tools" in methods:
        assert caught.value.__context__ is None, "closing what cannot start is no second error"
    assert Endless.closed == 2
    assert time.monotonic() - began < 15, "the others were stopped"


def test_a_mistake_that_several_make_at_once_leaves_none_of_them_open():
    """The first to be closed ends the rollout, while the others are being closed."""
    numbers, closed, in_step = iter(range(4)), [], []

    class Bad(AddEchoEnv):
        def __init__(self):
            super().__init__()
            self.number = next(numbers)

        async def step(self, message):
            in_step.append(self.number)
            while len(in_step) < 4:  # else the first may end the rollout before the last has begun
                await asyncio.sleep(0.01)
            return "nonsense"

        async def close(self):
            await asyncio.sleep(0.2 * self.number)
            closed.append(self.number)

    with pytest.raises(ProtocolError, match=r"Bad\.step returned 'nonsense'.*It was in example '.*', generation 0"):
        testing.roll_out(Bad, [say()], [{"prompt": PROMPT}] * 4)
    assert sorted(closed) == [0, 1, 2, 3]


def test_a_factory_that_makes_nothing_is_named():
    def make_nothing():
        return None

    with pytest.raises(ValueError, match=r"env=make_nothing .*reset and step"):
        RolloutRunner(make_nothing, ScriptedGenerator([[1]]), chat_of()).run([RolloutRequest(example={})])


# -------------------------------------------------------------------- the sampler


@pytest.mark.parametrize(
    "error", [ValueError("shape"), asyncio.CancelledError("engine shut down")], ids=["error", "cancel"]
)
def test_a_sampler_that_fails_takes_no_other_trajectory_with_it(error):
    class Failing(ScriptedGenerator):
        async def generate(self, request):
            generation = await super().generate(request)
            if len(generation.token_ids) == 1:
                raise error
            return generation

    chat = chat_of()
    generator = Failing(lambda request: chat.encode_reply(say("five"))[: 1 if request.index == 1 else None])
    runner = RolloutRunner(AddEchoEnv, generator, chat, RolloutLimits(max_concurrency=1))
    reasons = [t.stop_reason for t in runner.run([RolloutRequest(example={"prompt": PROMPT})] * 3)]
    runner.close()
    assert reasons == [StopReason.DONE, StopReason.GENERATION_ERROR, StopReason.DONE]


def test_a_sampler_that_is_not_async_is_named():
    class Sampler:
        def generate(self, request):
            return None

    runner = RolloutRunner(AddEchoEnv, Sampler(), chat_of(), RolloutLimits())
    (trajectory,) = runner.run([RolloutRequest(example={"prompt": PROMPT})])
    runner.close()
    assert trajectory.error == "TypeError: Sampler.generate is not async. Write async def generate(self, request)"


@pytest.mark.parametrize(
    ("num_more", "stop", "named"), [(1, "length", "13 ids .* max_tokens=12"), (0, "eos", "stop='eos'")], ids=str
)
def test_a_sampler_that_keeps_no_limit_or_says_nonsense_is_named(num_more, stop, named):
    class Sampler:
        async def generate(self, request):
            ids = [9] * (request.max_tokens + num_more)
            return Generation(token_ids=ids, logprobs=[-1.0] * len(ids), stop=stop)

    runner = RolloutRunner(AddEchoEnv, Sampler(), chat_of(), RolloutLimits(max_completion_length=12))
    (trajectory,) = runner.run([RolloutRequest(example={"prompt": PROMPT})])
    runner.close()
    assert trajectory.stop_reason is StopReason.GENERATION_ERROR and re.search(named, trajectory.error)


@pytest.fixture
def late():
    """(Class, release, closed): its environments are made once `release` is set; `closed` is set as one is closed."""
    release, closed = threading.Event(), threading.Event()

    class Late(AddEchoEnv):
        def __init__(self):
            release.wait(20)

        def close(self):
            closed.set()

    return Late, release, closed


def test_an_environment_that_is_made_after_its_trajectory_was_given_up_is_closed(late):
    env, release, closed = late
    trajectory, _ = roll_out([say()], env=env, limits={"rollout_timeout": 0.1})
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR and not closed.is_set()
    release.set()
    assert closed.wait(10)


def test_an_environment_that_is_made_after_its_probe_was_given_up_is_closed(late, monkeypatch):
    env, release, closed = late
    monkeypatch.setattr(probe, "PROBE_TIMEOUT_S", 0.1)
    asked = probe.RecordedCall(tool="add", request=RolloutRequest(example={}), messages=[])
    assert not asyncio.run(probe.succeeds(asked, env, lambda text, max_tokens: text)) and not closed.is_set()
    release.set()
    assert closed.wait(3)


# -------------------------------------------------------------------- the chat format


IMAGE = [{"type": "image", "image": "a.png"}]


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        ({"reset": returning([{"role": "user", "content": IMAGE}])}, "image"),
        ({"reset": returning([{"role": "wizard", "content": "x"}])}, "wizard"),
        ({"step": returning(([{"role": "user", "content": IMAGE}], 0.0, False, {}))}, "image"),
        ({"step": returning(([{"role": "user", "content": 7}], 0.0, False, {}))}, "7|int"),
    ],
    ids=["image in a prompt", "unknown role", "image in an observation", "number in an observation"],
)
def test_what_the_chat_format_cannot_write_ends_its_trajectory_alone(methods, named):
    trajectory = bad_among_good(bad_env(**methods), [say("ok"), say("ok")])
    if trajectory.error is None:  # a template may take what others refuse
        assert trajectory.stop_reason is not StopReason.ENVIRONMENT_ERROR
        return
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert re.search(named, trajectory.error)


def test_ids_that_cannot_be_read_end_their_trajectory_alone(monkeypatch):
    chat = chat_of()

    def unreadable(*args):
        raise OverflowError("no such id")

    monkeypatch.setattr(chat.encoder, "decode", unreadable)
    trajectory, _ = roll_out([say()], chat=chat)
    assert trajectory.stop_reason is StopReason.GENERATION_ERROR
    assert "OverflowError: no such id" in trajectory.error


@pytest.mark.parametrize("is_bare", [False, True])
def test_an_environment_with_a_step_of_its_own_may_give_its_tools_as_schemas(is_bare):
    class Schemas:
        def __init__(self):
            self.env = AddEchoEnv()
            self.tools = [item.schema["function"] if is_bare else item.schema for item in self.env.tools]

        def __getattr__(self, name):
            if name in ("reset", "step", "outcome_reward", "close"):
                return getattr(self.env, name)
            raise AttributeError(name)

    turns = [call(), say("five")]
    given, expected = (roll_out(turns, env=env)[0] for env in (lambda: Schemas(), AddEchoEnv))
    assert given.prompt_ids == expected.prompt_ids and given.completion_ids == expected.completion_ids
    assert tool_schemas(Schemas) == tool_schemas(AddEchoEnv) != []
    assert not [finding for finding in check_env(Schemas, [{"prompt": PROMPT}]) if finding.level == "error"]
    Schemas.__init__ = lambda self: setattr(self, "tools", [{"name": "add"}]) or setattr(self, "env", AddEchoEnv())
    with pytest.raises(ToolSchemaError, match=r"Tool schema.*must be"):
        roll_out(turns, env=lambda: Schemas())
