"""GymnasiumEnv: actions and observations of every kind in text, ends and limits kept apart, seeds."""

import functools
import io
import json
import math
import sys
from typing import ClassVar

import gymnasium
import pytest

from agent_r1_trl import check_env
from agent_r1_trl.features.doors import GymnasiumEnv
from agent_r1_trl.features.games.base import ActionError
from agent_r1_trl.trajectory import StopReason
from tests.environments.helpers import finished
from tests.features.games.helpers import begun, step, text_of, written
from tests.rollout.helpers import roll_out

WAYS = ("Left", "Down", "Right", "Up")
ROOMS = "tests.features.doors.rooms:Rooms-v0"
lake = functools.partial(
    GymnasiumEnv, "FrozenLake-v1", actions=WAYS, task="Walk to G, not into H.", make_kwargs={"is_slippery": False}
)
pendulum = functools.partial(GymnasiumEnv, "Pendulum-v1", parse_action=float, make_kwargs={"max_episode_steps": 2})
blackjack = functools.partial(GymnasiumEnv, "Blackjack-v1", actions=("stick", "hit"))
ALL = {
    "lake": lake,
    "lake_tool": functools.partial(lake, action_format="tool", max_actions_per_turn=3),
    "taxi": functools.partial(GymnasiumEnv, "Taxi-v4"),
    "blackjack": blackjack,
    "cart_pole": functools.partial(GymnasiumEnv, "CartPole-v1", actions=("left", "right")),
    "pendulum": functools.partial(GymnasiumEnv, "Pendulum-v1", parse_action=lambda text: [float(text)]),
    "rooms": functools.partial(GymnasiumEnv, ROOMS),
}


def scores(env, reason=StopReason.DONE):
    trajectory = finished(stop_reason=reason)
    return env.outcome_reward(trajectory)[0], trajectory.info


# -------------------------------------------------------------------- what is read, and what is said


def test_the_way_over_the_lake_is_the_one_of_gymnasium():
    env = lake(max_actions_per_turn=6)
    system, user = env.reset({"seed": 1})
    assert system["content"].startswith("Walk to G, not into H.\nActions: Left, Down, Right, Up. ")
    assert user["content"] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    result = step(env, written("Down", "down", "Right"))
    assert text_of(result) == "  (Right)\nSFFF\nFHFH\nF[F]FH\nHFFG" and result.reward == 0.0 and not result.done
    result = step(env, written("Right", "Down", "Right"))
    assert result.done and result.reward == 1.0 and result.info["reward_parts"] == {"step": 1.0}
    reward, info = scores(env)
    assert reward == 0.0 and info["success"] == info["episode_return"] == 1.0 and info["num_actions"] == 6.0


@pytest.mark.parametrize(
    ("name", "text", "said", "told"),
    [
        ("lake", "fly", "'fly' is not an action (actions: Left, Down, Right, Up).", "[S]FFF"),
        ("lake", "Down || Down", "'Down || Down' is not an action", "[S]FFF"),
        ("cart_pole", "up", "'up' is not an action (actions: left, right)", ", "),
        ("pendulum", "fast", "could not convert string to float: 'fast'", ", "),
        ("pendulum", "2.5", "'2.5' is not an action (they are those of Box(-2.0, 2.0, (1,), float32))", ", "),
        ("pendulum", "nan", "'nan' is not an action", ", "),
        ("rooms", "12345678901", "'12345678901' is not an action (they are those of Text(1, 10,", "ends with"),
    ],
)
def test_a_reply_that_is_no_action_is_an_invalid_turn_with_a_message(name, text, said, told):
    env = begun(ALL[name])
    before = env.observation
    result = step(env, written(text))
    assert said in text_of(result) and told in before and text_of(result).endswith(before)
    assert result.reward == -0.1 and result.info["is_invalid"] and not result.done and env.num_actions == 0


@pytest.mark.parametrize(
    "text", ['["fast"]', "[[1], [2, 3]]", "[{}]", f"[{10**400}]", "[1.5]", "[300]", "[-1]"], ids=len
)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_json_that_no_array_of_the_space_holds_is_no_action(text, dtype):
    env = begun(functools.partial(GymnasiumEnv, "Pendulum-v1", parse_action=json.loads))
    env.env.unwrapped.action_space = gymnasium.spaces.Box(0, 1, (1,), dtype)
    assert env.read_action("[1]").tolist() == [1]
    with pytest.raises(ActionError, match="is not an action"):
        env.read_action(text)


def test_numbers_are_written_out():
    env = begun(blackjack, {"seed": 1})
    real = gymnasium.make("Blackjack-v1")
    hand, _ = real.reset(seed=1)
    assert env.observation == ", ".join(map(str, hand))
    cart = begun(ALL["cart_pole"], {"seed": 1})
    values = list(map(float, cart.observation.split(", ")))
    assert values == pytest.approx(gymnasium.make("CartPole-v1").reset(seed=1)[0].tolist(), rel=1e-3)
    step(cart, written("Right"))
    assert float(cart.observation.split(", ")[1]) > values[1]


def test_a_subclass_finds_the_environment_and_its_info():
    class Taxi(GymnasiumEnv):
        def __init__(self, **settings):
            super().__init__("Taxi-v4", **settings)

        def format_observation(self, observation):
            row, column, passenger, goal = self.env.unwrapped.decode(observation)
            return f"taxi {row},{column}; passenger {passenger}; to {goal}; moves {self.info['action_mask'].tolist()}"

        def parse_action(self, text):
            return ["south", "north", "east", "west", "pickup", "dropoff"].index(text)

    env = begun(Taxi, {"seed": 5})
    observation, info = gymnasium.make("Taxi-v4").reset(seed=5)
    assert env.observation.startswith(
        "taxi {},{}; passenger {}; to {}; ".format(*env.env.unwrapped.decode(observation))
    )
    assert env.observation.endswith(f"moves {info['action_mask'].tolist()}")
    assert step(env, written("dropoff")).reward == -10.0
    assert "is not in list" in text_of(step(env, written("up")))


# -------------------------------------------------------------------- ends


def test_the_environments_own_limit_truncates_and_is_no_failure():
    env = functools.partial(GymnasiumEnv, ROOMS, failure_reward=-5.0, success_reward=2.0)
    trajectory, _ = roll_out([written("x")] * 9, env=env)
    assert trajectory.stop_reason is StopReason.MAX_TURNS and len(trajectory.turns) == 3
    assert trajectory.outcome_reward == 0.0 and trajectory.info["success"] == 0.0
    assert "No. Hint" in trajectory.turns[-1].observations[0]["content"], "what a critic goes on from"
    won = begun(env, {"options": {"secret": 77}})
    assert won.observation == "The number ends with 7."
    result = step(won, written("77"))
    assert result.done and not result.info["is_truncated"] and scores(won)[0] == 2.0


def test_an_end_without_success_is_a_failure():
    env = begun(functools.partial(lake, failure_reward=-5.0, success_reward=2.0))
    step(env, written("Down"))
    assert step(env, written("Right")).done, "a hole"
    assert scores(env) == (-5.0, {**scores(env)[1], "success": 0.0})


@pytest.mark.parametrize(("success_return", "success"), [(None, 0.0), (3, 1.0), (4, 0.0)])
def test_success_is_a_return_that_was_reached(success_return, success):
    """CartPole pays 1 a step and registers 475; one that fell is no success though its return is above 0."""
    limited = {"make_kwargs": {"max_episode_steps": 3}}
    env = begun(functools.partial(ALL["cart_pole"], success_return=success_return, **limited))
    results = [step(env, written("left")) for _ in range(3)]
    assert [result.info["is_truncated"] for result in results] == [False, False, True]
    assert scores(env, StopReason.MAX_TURNS)[1]["success"] == success


# -------------------------------------------------------------------- seeds


def test_an_episode_is_the_seed_of_the_group():
    def episode(reset_seed, dynamics_seed):
        env = begun(functools.partial(GymnasiumEnv, ROOMS), {}, reset_seed, dynamics_seed)
        return env.observation, text_of(step(env, written("x")))

    large = 2**62 + 1
    assert episode(large, 1) == episode(large, 2)
    assert len({episode(seed, 1)[0] for seed in range(9)}) > 1 and len({episode(seed, 1)[1] for seed in range(9)}) == 9


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GymnasiumEnv("Pendulum-v1"), ("id='Pendulum-v1'", "Box(-2.0, 2.0, (1,), float32)", "parse_action")),
        (lambda: GymnasiumEnv("FrozenLack-v1"), ("id='FrozenLack-v1'", "Did you mean", "package:Name-v0")),
        (lambda: GymnasiumEnv("no_package:Any-v0"), ("no_package", "package:Name-v0")),
        (lambda: GymnasiumEnv("FrozenLake-v1", actions=("Up", "Down")), ("actions=('Up', 'Down')", "Discrete(4)")),
        (lambda: GymnasiumEnv("FrozenLake-v1", actions=WAYS, parse_action=int), ("parse_action alone",)),
        (lambda: GymnasiumEnv("Images-v0"), ("Images-v0", "192 numbers", "format_observation")),
        (lambda: GymnasiumEnv("Pendulum-v1", parse_action="no.such"), ("no.such",)),
    ],
)
def test_what_text_cannot_choose_or_show_is_refused_by_name(make, words, monkeypatch):
    class Images(gymnasium.Env):
        observation_space = gymnasium.spaces.Dict({"image": gymnasium.spaces.Box(0, 255, (8, 8, 3))})
        action_space = gymnasium.spaces.Discrete(2)

    monkeypatch.setitem(gymnasium.registry, "Images-v0", gymnasium.envs.registration.EnvSpec("Images-v0", Images))
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


class Drawn(gymnasium.Env):
    """An environment that says it draws text, and one way to keep or break that."""

    metadata: ClassVar[dict] = {"render_modes": ["human", "ansi"]}
    observation_space = gymnasium.spaces.Discrete(4)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, drawing=None):
        self.render_mode, self.drawing = render_mode, drawing

    def reset(self, *, seed=None, options=None):
        return 3, {}

    def render(self):
        return super().render() if self.drawing == "none of its own" else self.drawing


gymnasium.register("Drawn-v0", entry_point=Drawn, disable_env_checker=True, order_enforce=False)


def test_a_drawing_that_is_no_text_is_refused_and_a_stream_of_text_is_read():
    drawn = functools.partial(GymnasiumEnv, "Drawn-v0")
    assert "|x|" in text_of_prompt(drawn(make_kwargs={"drawing": io.StringIO("|x|")}))
    for drawing in (None, "none of its own"):
        with pytest.raises(ValueError, match=r"Drawn-v0.*'ansi'.*returned None.*make_kwargs=\{'render_mode': None\}"):
            drawn(make_kwargs={"drawing": drawing}).reset({"seed": 1})
    assert text_of_prompt(drawn(make_kwargs={"drawing": None, "render_mode": None})) == "3"


def text_of_prompt(env):
    return env.reset({"seed": 1})[-1]["content"]


def test_a_row_with_a_level_is_told_that_there_are_seeds():
    with pytest.raises(ValueError, match=r"level='SFFG' of a row: .* Give the row a `seed`"):
        begun(lake, {"level": "SFFG"})


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install .agent-r1-trl\[gym\]"):
        lake()


@pytest.mark.parametrize("name", ALL)
def test_check_env_finds_nothing(name):
    assert check_env(ALL[name], [{"seed": 1}, {"seed": 2}]) == []
    assert math.isfinite(begun(ALL[name]).max_actions)
