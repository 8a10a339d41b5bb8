"""Rollouts of scripted policies with a journal, and environments that come back in both ways."""

import collections
import random
from dataclasses import replace

from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.features.journal import RolloutLog
from agent_r1_trl.features.journal.reader import read_rollout
from agent_r1_trl.generation import Generation, Generator
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest, RolloutRunner
from agent_r1_trl.testing import call, calls, chat_of, say
from agent_r1_trl.tools import tool
from tests.rollout.helpers import PROMPT

NUM_TRAJECTORIES = 3
HEADER = {"size": NUM_TRAJECTORIES, "weights": "w"}
LIMITS = RolloutLimits(max_turns=5, max_completion_length=600)
SUMMARIES = replace(
    LIMITS, context={"policy": "summarise", "turns": 1, "summary_tokens": 30, "summary_prompt": "Sum up."}
)
BY_STEP = replace(LIMITS, context={"policy": "step"})
CALLS = collections.Counter()
"""How often each function ran, by its name and argument."""


@tool
def price(item: str) -> str:
    """Look up a price.

    Args:
        item: What to look up.
    """
    CALLS["price", item] += 1
    return f"{item} costs {len(item)}"


class Shop(ToolEnv):
    """A tool that is a plain function, and state that `ToolEnv` and the user keep."""

    tools = (price,)

    def reset(self, example):
        CALLS["reset"] += 1
        self.seen = []
        return super().reset(example)

    def process_reward(self, call, result):
        self.seen.append(result.content)
        return 0.1 * len(self.seen)

    def outcome_reward(self, trajectory):
        trajectory.info["seen"] = list(self.seen)
        return float(len(self.seen)), {"seen": float(len(self.seen))}


class Counter(ToolEnv):
    """A tool that is a method and changes the state: restarted, unless the class says otherwise."""

    def reset(self, example):
        self.total = 0
        return super().reset(example)

    @tool
    def raise_by(self, number: int) -> str:
        """Raise the counter.

        Args:
            number: How much.
        """
        self.total += number
        return f"now {self.total}"

    def outcome_reward(self, trajectory):
        return float(self.total)


class ReplayedCounter(Counter):
    on_resume = "replay"


class Game:
    """No `ToolEnv`: the protocol by hand."""

    tools = ()
    on_resume = "replay"

    def reset(self, example):
        self.moves = []
        return example["prompt"]

    def step(self, message):
        self.moves.append(message["content"])
        return [{"role": "user", "content": f"move {len(self.moves)}"}], 0.5, len(self.moves) == 4, None

    def outcome_reward(self, trajectory):
        return float(sum(map(len, self.moves)))


class Board(Game):
    """Gives the next context: the board, and of the past the last move alone."""

    def step(self, message):
        observations, reward, done, _ = super().step(message)
        board = {"role": "user", "content": f"the board after {len(self.moves)} moves"}
        return observations, reward, done, {"next_context": [*PROMPT, message, board]}


class RestartedBoard(Board):
    on_resume = "restart"


class Talker(Generator):
    """Says what seed and prompt decide, as a policy with fixed weights would; counts its turns by their seeds."""

    def __init__(self, chat, say):
        self.chat, self.say = chat, say
        self.sampled = collections.Counter()

    async def generate(self, request):
        self.sampled[request.seed] += 1
        rng = random.Random(f"{request.seed} {sum(request.prompt_ids)}")
        ids = self.chat.encode_reply(self.say(rng))[: request.max_tokens]
        stop = "stop" if ids[-1] in self.chat.stop_token_ids else "length"
        return Generation(token_ids=ids, logprobs=[-rng.random() for _ in ids], stop=stop)


def shopper(rng):
    items = [rng.choice(["tea", "bread", "a\ud800b"]) for _ in range(rng.randint(0, 2))]
    return calls(*[("price", {"item": item}) for item in items]) if items else say("done")


def counting(rng):
    return call("raise_by", number=rng.randint(1, 9)) if rng.random() < 0.8 else say("done")


def moving(rng):
    return say("left" if rng.random() < 0.5 else "right, then left")


CASES = {"shop": (Shop, shopper), "counter": (Counter, counting), "replayed": (ReplayedCounter, counting)}
CASES |= {"game": (Game, moving)}
CASES |= {"board": (Board, moving, BY_STEP), "restarted_board": (RestartedBoard, moving, BY_STEP)}
CASES |= {"summaries": (ReplayedCounter, counting, SUMMARIES)}


def requests(count=NUM_TRAJECTORIES):
    rows = [{"prompt": PROMPT, "number": number} for number in range(count)]
    return [RolloutRequest(example=row, example_id=str(row["number"]), seed=100 + row["number"]) for row in rows]


def roll_out(path, env, policy, limits=LIMITS, **options):
    """Sample, and go on with the journal if there is one; returns the trajectories and the generator."""
    recorded = read_rollout(path) if path is not None else None
    log = None if path is None else RolloutLog(path, HEADER, recorded=recorded, **options)
    talker = Talker(chat_of(), policy)
    runner = RolloutRunner(env, talker, chat_of(), limits)
    try:
        return runner.run(requests(), journal=log), talker
    finally:
        runner.close()
        if log is not None:
            log.close()


def without_times(trajectory):
    """Everything but how long it took."""
    record = trajectory.to_dict()
    del record["duration_s"]
    for turn in record["turns"]:
        del turn["generate_s"], turn["env_s"]
        for result in turn["tool_results"]:
            del result["latency_s"], result["queue_s"]
    return record
