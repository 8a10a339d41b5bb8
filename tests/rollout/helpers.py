"""Scripted conversations: what the policy says, and environments that answer in a known way."""

import asyncio
import random
import threading

import pytest

from agent_r1_trl import testing
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.generation import Generator
from agent_r1_trl.testing import AddEchoEnv, ScriptedPolicy, add, call, chat_of, echo, say
from agent_r1_trl.tools import InfrastructureError
from tests.toys import unfold

PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]


def roll_out(turns, *, env=AddEchoEnv, family="qwen3", chat=None, examples=1, limits=None, **options):
    """Roll out; returns the trajectories (or the only one) and the policy that said the turns."""
    chat = chat or chat_of(family)
    policy = turns if isinstance(turns, ScriptedPolicy) else ScriptedPolicy(turns, chat)
    rows = [{"prompt": PROMPT}] * examples
    trajectories = testing.roll_out(env, policy, rows, chat=chat, **unfold(limits or {}), **options)
    return (trajectories[0] if examples == 1 else trajectories), policy


class Gate:
    """Holds the trajectories of its environment `env` in their steps until it is opened."""

    def __init__(self):
        self.closed = []
        """The ids of the rows whose environments were closed."""
        self.env = self._make_env()
        self._is_open = threading.Event()
        self._entered = threading.Semaphore(0)

    def _make_env(self):
        gate = self

        class Held(AddEchoEnv):
            async def step(self, message):
                gate._entered.release()
                while not gate._is_open.is_set():
                    await asyncio.sleep(0.005)
                return await super().step(message)

            def close(self):
                gate.closed.append(self.example.get("id"))

        return Held

    def wait_for(self, num):
        """Return once so many trajectories are in a step."""
        for _ in range(num):
            assert self._entered.acquire(timeout=30)

    def open(self):
        self._is_open.set()


def mostly_nightly(families, *kept):
    """Parameters of which CI runs the families that are named; the others run with the matrix."""
    return [pytest.param(name, marks=[] if name in kept else [pytest.mark.matrix]) for name in families]


def sampled_ids(trajectory):
    return [token for token, mask in zip(trajectory.completion_ids, trajectory.action_mask, strict=True) if mask]


def random_script(seed, turn):
    rng = random.Random(f"{seed} {turn}")
    return rng.choice([call(), call("echo", text="hé <|im_end|> ok"), say("five"), call("nope", x=1)])


class Recorder(Generator):
    """A generator around another that keeps what it was asked and what it handed out."""

    def __init__(self, generator):
        self.generator = generator
        self.contexts = []
        self.max_tokens = []
        self.handed = []

    async def generate(self, request):
        generation = await self.generator.generate(request)
        self.contexts.append(list(request.prompt_ids))
        self.max_tokens.append(request.max_tokens)
        self.handed.append(generation)
        return generation

    @property
    def log(self):
        """(context, sampled ids) of each request."""
        return [(context, list(given.token_ids)) for context, given in zip(self.contexts, self.handed, strict=True)]

    @property
    def ids(self):
        return [token for generation in self.handed for token in generation.token_ids]

    @property
    def logprobs(self):
        return [logprob for generation in self.handed for logprob in generation.logprobs]


def roll_out_recorded(turns, *, chat, env=AddEchoEnv, prompt=PROMPT, **limits):
    """One trajectory of these turns, messages or ids, over and over, and the recorder of its requests."""
    recorder = Recorder(ScriptedPolicy(lambda request: turns[request.turn % len(turns)], chat))
    limits = {"max_turns": len(turns)} | unfold(limits)
    (trajectory,) = testing.roll_out(env, recorder, [{"prompt": prompt}], chat=chat, **limits)
    return trajectory, recorder


def check_rows(trajectory, log):
    """Every sampled id has mask 1 in exactly one row, after exactly what the sampler was given."""
    assert len(trajectory.turns) == len(log)
    found = [[] for _ in log]
    for row in trajectory.rows:
        ids = [*row.prompt_ids, *row.completion_ids]
        for position, (mask, turn) in enumerate(zip(row.action_mask, row.turn_ids, strict=True), len(row.prompt_ids)):
            assert mask == (turn >= 0)
            if mask:
                found[turn].append((ids[:position], ids[position]))
    for tokens, (context, sampled, *_) in zip(found, log, strict=True):
        assert tokens == [(context + sampled[:count], token) for count, token in enumerate(sampled)]


def scene(*, rewards=(), outcome=0.0, ends_at=None, fails_at=None, down_at=None, hangs_at=None):
    """An environment class with the tools above that does what it is told at a turn (-1: in `reset`)."""

    class Scene(ToolEnv):
        tools = (add, echo)

        def reset(self, example):
            self.turn = -1
            self.act()
            return super().reset(example)

        async def step(self, message):
            self.turn += 1
            self.act()
            if self.turn == hangs_at:
                await asyncio.sleep(60)
            observations, _, done, info = await super().step(message)
            reward = rewards[self.turn] if self.turn < len(rewards) else 0.0
            return observations, reward, done, info | {"reward_parts": {"told": reward}}

        def act(self):
            if self.turn == fails_at:
                raise RuntimeError(f"turn {self.turn} broke")
            if self.turn == down_at:
                raise InfrastructureError("the back end is down")

        def is_done(self, message):
            return self.turn == ends_at

        def outcome_reward(self, trajectory):
            return outcome

    return Scene
