"""Several players behind one door: each is trained with its own reward, and nobody with another's unasked."""

import functools

import pytest
import torch

from agent_r1_trl.environments.base import RewardError
from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.features.doors.agent import env as agent_env
from agent_r1_trl.testing import call, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trajectory import Trajectory
from tests.features.doors.agents import TOOLS, ask, checked, roll_out, use
from tests.trainers.helpers import make_trainer

SEATS = ("white", "black")


async def play(door, example, *, named=True, moves=4, answer=None):
    """Both players say words in turn; who has said more letters wins."""
    doors = {name: door.seat(name) if named else door for name in SEATS}
    talks = {name: [{"role": "system", "content": f"You are {name}."}, *example["prompt"]] for name in SEATS}
    letters = dict.fromkeys(SEATS, 0)
    for number in range(moves):
        name = SEATS[number % 2]
        said = await ask(doors[name], talks[name])
        letters[name] += len(said["content"])
        talks[name] += [said, {"role": "user", "content": "Go on."}]
    won = float(letters["white"] > letters["black"]) - float(letters["white"] < letters["black"])
    return {"white": won, "black": -won} if answer is None else answer


MOVES = [say("aaaa"), say("a"), say("aa"), say("a")]


@pytest.fixture(autouse=True)
def _warns_anew():
    agent_env._warn_of_seats.cache_clear()


def test_each_seat_has_its_turns_and_its_reward():
    trajectory, _ = checked(play, MOVES)
    assert [turn.seat for turn in trajectory.turns] == ["white", "black"] * 2
    assert trajectory.seat_rewards == {"white": 1.0, "black": -1.0} and trajectory.outcome_reward == 0.0
    assert (trajectory.numbers["seat/white"], trajectory.numbers["seat/black"]) == (1.0, -1.0)
    assert [sorted({*row.turn_ids} - {-1}) for row in trajectory.rows] == [[0, 2], [1, 3]]
    trajectory.outcome_reward -= 0.5  # a penalty that comes later
    again = Trajectory.from_json(trajectory.to_json())
    assert [again.outcome_of(seat) for seat in (*SEATS, None)] == [0.5, -1.5, -0.5]


@pytest.mark.parametrize(
    "answer, told",
    [(1.0, r"returned 1\.0 for the seats \['black', 'white'\]"), ("done", "for the seats"),
     ({"white": 1.0}, "no reward for 'black'"), ({"white": 1.0, "black": "much"}, "'black'")],
)  # fmt: skip
def test_seats_without_a_reward_of_their_own_are_refused(answer, told):
    with pytest.raises(RewardError, match=told):
        roll_out(functools.partial(play, answer=answer), MOVES)


def test_one_reward_for_all_seats_is_given_where_it_is_meant():
    agent = functools.partial(play, answer=0.5)
    trajectory, _ = checked(None, MOVES, env=functools.partial(AgentEnv, agent, shared_reward=True))
    assert trajectory.outcome_reward == 0.5 and trajectory.seat_rewards == {}


def test_seats_of_an_agent_that_raises_all_earn_the_unfinished_reward():
    async def agent(door, example):
        await play(door, example)
        raise KeyError("no such move")

    trajectory, _ = checked(None, MOVES, env=functools.partial(AgentEnv, agent, unfinished_reward=-0.5))
    assert trajectory.seat_rewards == {"black": -0.5, "white": -0.5}


def test_calls_that_belong_to_no_seat_are_named():
    async def agent(door, example):
        await ask(door, example["prompt"])
        return await play(door, example)

    with pytest.raises(RewardError, match="no reward for calls without a seat"):
        roll_out(agent, MOVES)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a/b", "x" * 65])
def test_a_seat_whose_name_is_no_part_of_an_address_is_refused(name):
    seen = []

    async def agent(door, example):
        with pytest.raises(ValueError, match="must be 1 to 64 letters"):
            door.seat(name)
        seen.append(await ask(door, example["prompt"]))
        return 1.0

    checked(agent, MOVES)
    assert seen


# -------------------------------------------------------------------- players without names


async def with_sub_agent(door, example):
    """A tool of the agent asks the policy itself."""
    messages = list(example["prompt"])
    for _ in range(2):
        said = await ask(door, messages, tools=TOOLS)
        found = await ask(door, [{"role": "system", "content": "You add."}, *example["prompt"]])
        messages += [said, *({**use(item), "content": found["content"]} for item in said["tool_calls"])]
    await ask(door, messages, tools=TOOLS)
    return 1.0


async def with_summaries(door, example):
    for number in range(3):
        first = {"role": "system", "content": f"It is {number}."}
        await ask(door, [first, *example["prompt"]])
    return 1.0


async def players_with_tools(door, example):
    talks = {name: [{"role": "system", "content": f"You are {name}."}, *example["prompt"]] for name in SEATS}
    for number in range(4):
        messages = talks[SEATS[number % 2]]
        said = await ask(door, messages, tools=TOOLS)
        messages += [said, *map(use, said["tool_calls"])]
    return 1.0


@pytest.mark.parametrize(
    "agent, turns, is_told",
    [(functools.partial(play, named=False, answer=1.0), MOVES, True), (players_with_tools, [call()], True),
     (with_sub_agent, [call(), say("5"), call(), say("5"), say("5")], False), (with_summaries, MOVES, False)],
)  # fmt: skip
def test_unnamed_conversations_that_take_turns_are_warned_of_and_sub_agents_are_not(agent, turns, is_told, caplog):
    trajectory, _ = checked(agent, turns, max_completion_length=4000)
    assert ("take turns" in caplog.text) is is_told is ("agent/taking_turns" in trajectory.info)
    caplog.clear()
    checked(None, turns, env=functools.partial(AgentEnv, agent, shared_reward=True), max_completion_length=4000)
    assert "take turns" not in caplog.text


# -------------------------------------------------------------------- training


def train(folder, agent, trainer, **options):
    """The trainer after one step, and what it has estimated."""
    torch.manual_seed(0)
    run = make_trainer(
        folder,
        env=functools.partial(AgentEnv, agent),
        script=lambda rng, turn: say("x" * rng.randrange(1, 9)),
        trainer=trainer,
        max_steps=1,
        context="agent",
        max_completion_length=400,
        **options,
    )
    estimate, credits = run.credit.estimate, []
    run.credit.estimate = lambda *args, **given: credits.append(estimate(*args, **given)) or credits[-1]
    run.train()
    return run, credits[0][0]


def test_each_row_is_trained_with_the_advantage_of_its_seat(tmp_path, caplog):
    run, credit = train(tmp_path, play, MultiTurnGRPOTrainer)
    size, signs = run.num_generations, set()
    for start in range(0, len(run.last_trajectories), size):
        group = run.last_trajectories[start : start + size]
        for seat in SEATS:
            rewards = torch.tensor([item.seat_rewards[seat] for item in group])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for number, (item, advantage) in enumerate(zip(group, expected.tolist(), strict=True), start):
                own = [credit.advantages[number, turn.start].item() for turn in item.turns if turn.seat == seat]
                assert own == pytest.approx([advantage] * 2, abs=1e-5)
                signs.add((seat, advantage > 0))
    assert len(signs) == 4
    log = run.state.log_history[0]
    assert log["env/seat/white"] == -log["env/seat/black"] and log["group/zero_variance_share"] < 1
    assert "nothing can be learned" not in caplog.text


def test_the_critic_learns_the_return_of_each_seat(tmp_path):
    run, credit = train(tmp_path, play, MultiTurnPPOTrainer, lam=1.0)
    for number, item in enumerate(run.last_trajectories):
        for turn in item.turns:
            reward = item.seat_rewards[turn.seat]
            assert credit.returns[number, turn.start : turn.end].tolist() == pytest.approx(
                [reward] * (turn.end - turn.start)
            )


def test_groups_without_a_winner_are_filtered_by_the_rewards_of_their_seats(tmp_path):
    run, _ = train(tmp_path, play, MultiTurnGRPOTrainer, sampling={"filter_groups": "min_p", "filter_value": 0.01})
    assert run.state.log_history[0]["filter/kept_share"] > 0
