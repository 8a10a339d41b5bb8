"""What all games share: actions of a turn, formats, penalties, seeds, rows, and how they end."""

import functools
import importlib
import math

import pytest
import reasoning_gym  # noqa: F401 - takes seconds where many tests run, which no time limit below should count

from agent_r1_trl import check_env
from agent_r1_trl.features.games import BanditEnv, CountdownEnv, FrozenLakeEnv, GameEnv, SokobanEnv
from agent_r1_trl.rollout import rollout_requests
from agent_r1_trl.trajectory import StopReason
from tests.environments.helpers import finished, message
from tests.features.games.helpers import ROOM, begun, called, step, text_of, written
from tests.rollout.helpers import roll_out as play

GAMES = [FrozenLakeEnv, SokobanEnv, CountdownEnv]
ALL = {
    "bandit": functools.partial(BanditEnv, max_actions=3),
    "bandit_tool": functools.partial(BanditEnv, action_format="tool"),
    "lake": functools.partial(FrozenLakeEnv),
    "lake_tool": functools.partial(FrozenLakeEnv, action_format="tool"),
    "sokoban": functools.partial(SokobanEnv, max_actions=30),
    "sokoban_tool": functools.partial(SokobanEnv, action_format="tool"),
    "countdown": functools.partial(CountdownEnv),
    "countdown_tool": functools.partial(CountdownEnv, action_format="tool", max_actions=3),
}
ROWS = [{"seed": 3}, {"seed": 4, "prompt": "Play."}]


class Counter(GameEnv):
    """Bring a number to 3; written without anything of the package but the base."""

    actions = ("More", "Less")

    def rules(self):
        return "Bring the number to 3."

    def new_level(self, seed):
        return str(seed % 3)

    def load_level(self, level):
        self.number = int(level)

    def describe(self):
        return f"Number: {self.number}"

    def act(self, action):
        self.number += 1 if action == "More" else -1
        self.is_won = self.is_over = self.number == 3
        return {"step": -0.25, "luck": self.random.random()}


def counter(level="0", **settings):
    return begun(Counter, {"level": level}, **settings)


def test_a_game_keeps_the_tools_of_its_class_beside_play():
    def hint() -> str:
        """Give a hint."""
        return "More."

    own = type("Own", (Counter,), {"tools": [hint], "action_format": "tool"})
    names = [
        [item.name for item in own(**settings).tools] for settings in ({}, {"action_format": None}, {"tools": []})
    ]
    assert names == [["play", "hint"], ["play", "hint"], ["play"]]


# ---------------------------------------------------------------- turns


@pytest.mark.parametrize(("said", "settings"), [(written, {}), (called, {"action_format": "tool"})])
def test_several_actions_are_played_in_their_order_and_what_they_earn_is_named(said, settings):
    env = counter(**settings)
    result = step(env, said("More", "Less", "More"))
    assert env.number == 1 and not result.done
    assert result.info["reward_parts"]["step"] == -0.75
    assert set(result.info["reward_parts"]) == {"step", "luck"}
    assert math.isclose(result.reward, sum(result.info["reward_parts"].values()))
    assert text_of(result) == "Number: 1\nActions left: 7"


@pytest.mark.parametrize(("said", "settings"), [(written, {}), (called, {"action_format": "tool"})])
def test_the_game_ends_with_the_action_that_wins_it_and_the_rest_is_not_played(said, settings):
    env = counter("2", **settings)
    result = step(env, said("More", "Less", "Less"))
    assert result.done and env.is_won and env.number == 3
    trajectory = finished()
    assert env.outcome_reward(trajectory) == (1.0, {"success": 1.0})
    assert trajectory.info == {
        "success": 1.0,
        "num_actions": 1.0,
        "num_effective_actions": 1.0,
        "num_invalid_turns": 0.0,
    }


def test_the_game_is_lost_when_the_actions_are_used_up():
    env = counter(max_actions=2)
    assert step(env, written("Less", "Less", "More")).done
    assert env.number == -2 and env.outcome_reward(finished()) == (0.0, {"success": 0.0})


@pytest.mark.parametrize(("said", "settings"), [(written, {}), (called, {"action_format": "tool"})])
def test_of_ten_thousand_actions_only_those_of_one_turn_are_played_and_the_model_is_told(said, settings):
    env = counter("-9000", max_actions=20_000, **settings)
    result = step(env, said(*["More"] * 10_000))
    assert env.number == -8995 and len(text_of(result)) < 300
    assert "the last 9995 of your 10000 actions were left out" in text_of(result)


@pytest.mark.parametrize(("said", "settings"), [(written, {}), (called, {"action_format": "tool"})])
def test_an_unknown_action_ends_the_turn_costs_the_penalty_and_is_shown_to_the_model(said, settings):
    env = counter(**settings)
    result = step(env, said("More", "Jump", "More"))
    assert env.number == 1 and result.info["reward_parts"]["invalid_action"] == -0.1
    assert "'Jump' is not an action (actions: More, Less). The actions after it were not played." in text_of(result)
    assert not result.info["is_invalid"]
    result = step(env, said("Jump"))
    assert result.reward == -0.1 and result.info["is_invalid"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "More",
        "<answer></answer>",
        "<answer>  </answer>",
        "<answer>||</answer>",
        "<answer>Jump</answer>",
        "<answer>М\u043ere</answer>",
        "<answer>\ud800\u202e\U0001f600</answer>",
        "<answer>More, Less</answer>",
        "<think><answer>More</answer></think>",
        "<answer>More",
    ],
)
def test_a_turn_without_an_action_plays_nothing_costs_the_penalty_and_repeats_the_state(text):
    env = counter()
    result = step(env, message(content=text))
    assert env.number == 0 and env.num_actions == 0
    assert result.reward == -0.1 and result.info["is_invalid"] and not result.done
    assert "Number: 0" in text_of(result)
    text_of(result).encode()


def test_a_turn_that_was_cut_off_is_no_action_even_if_one_stands_in_it():
    env = counter()
    result = step(env, message(content="<answer>More</answer> and then", cut_off="it was too long"))
    assert env.number == 0 and result.info["is_invalid"]
    assert "it was too long" in text_of(result) and "<answer>More || Less</answer>" in text_of(result)


def test_after_some_turns_without_an_action_the_game_is_lost():
    env = counter(max_idle_turns=2)
    assert not step(env, written("Jump")).done
    assert not step(env, written("More")).done
    assert step(env, written("Jump")).done and not env.is_won


@pytest.mark.parametrize("name", ["more", "MORE", " More ", "'More'.", "more!", "`More`", "\u201cMore\u201d\u3002"])
def test_case_and_marks_around_an_action_do_not_matter(name):
    env = counter()
    step(env, written(name))
    assert env.number == 1


def test_actions_may_have_another_separator_and_another_tag():
    env = counter(separator=",", answer_tag="moves")
    result = step(env, message(content="<moves>More, More,Less</moves>"))
    assert env.number == 1 and result.info["reward_parts"]["step"] == -0.75
    assert "<moves>More , Less</moves>" in env.system_message({})
    assert step(env, written("More")).info["is_invalid"]
    plain = counter(separator=",", answer_tag="")
    assert (
        step(plain, message(content="<think>Less, Less</think>More, More,Less")).info["reward_parts"]["step"] == -0.75
    )
    assert plain.number == 1 and "and nothing else" in plain.system_message({})


def test_a_turn_of_text_that_calls_a_tool_is_answered_and_charged():
    result = step(counter(), called("More"))
    assert result.reward == -0.1 and result.info["is_invalid"]
    assert [item["role"] for item in result.observations] == ["tool"]


def test_with_the_tool_an_answer_without_a_call_does_not_end_the_game():
    result = step(counter(action_format="tool"), written("More"))
    assert result.reward == -0.1 and not result.done and result.info["is_invalid"]
    assert "play(" in text_of(result)


def test_two_calls_in_one_turn_share_the_actions_of_the_turn():
    env = counter("-9", action_format="tool", max_actions_per_turn=3, max_actions=20)
    calls = [("play", {"actions": ["More", "More"]})] * 2
    result = step(env, message(*calls))
    assert env.number == -6 and len(result.observations) == 2
    env = counter("-9", action_format="tool", max_actions=20)
    result = step(env, message(("play", {"actions": ["Jump"]}), ("play", {"actions": ["More"]})))
    assert env.number == -9 and result.reward == -0.1
    assert step(env, message(("play", {"actions": []}))).info["is_invalid"]


# ---------------------------------------------------------------- rows and settings

SETTINGS = {
    Counter: {
        "action_format": ["json"], "max_actions": [0], "max_actions_per_turn": [1.5], "max_idle_turns": [True],
        "separator": [" "], "invalid_action_reward": [math.nan], "answer_tag": ["<answer>", "think"],
        "show_actions_left": ["false"],
    },
    BanditEnv: {
        "arms": [5, [], [["Phoenix"]],
                 *([pair] for pair in (["A", "a"], ["A", "B (risky)"], [" A", "B"], ["A||2", "B"]))],
        "sure_reward": [0.25],  # what the risky arm pays on average
        "risky_probability": [1.5], "risky_reward": [math.nan],
    },
    CountdownEnv: {
        "num_numbers": [(1, 3), 3], "target": [(5, 3)], "operators": [["**"], ["+", "/"]], "max_number": [0],
        "max_actions": [0],
    },
    FrozenLakeEnv: {
        "size": [1, 8],  # a way that is longer than max_actions
        "ice_share": [0], "success_rate": [1.5], "is_slippery": ["false"], "symbols": [{"player": "_"}, {"bear": "B"}],
    },
    SokobanEnv: {
        "room": [6, (3, 6)], "num_boxes": [0], "min_moves": [11], "wall_share": [1.0], "step_reward": [math.inf],
        "symbols": [{"box": 1}],  # as YAML reads a digit
    },
}  # fmt: skip
LEVELS = {
    Counter: [3],
    BanditEnv: ["", "Dragon, Phoenix", "Dragon (risky), Phoenix (risky)", "A (risky), a (sure)"],
    CountdownEnv: [
        "", "[]", "{}", "3", '{"numbers": [], "target": 3}', '{"numbers": [1.5], "target": 3}',
        '{"numbers": 3, "target": 3}', '{"numbers": [true], "target": 3}', '{"numbers": ["3"], "target": 3}',
    ],
    FrozenLakeEnv: ["", "SFX\nFFG", "SF\nFFG", "FF\nFG", "SS\nFG", "SF\nFF", "   "],
    SokobanEnv: ["", "####", "#@.#", "#@$#", "#@@$.#", "#$.#", "#@*#", "#@$.Q#", "#@$..#", "\u2603"],
}  # fmt: skip


@pytest.mark.parametrize("cls", SETTINGS)
def test_what_a_game_cannot_use_is_refused_by_name(cls):
    cases = [(name, value) for name, values in SETTINGS[cls].items() for value in values]
    for name, value in cases:
        with pytest.raises(ValueError, match=name):
            cls(**{name: value})
    rows = [{"level": level} for level in LEVELS[cls]] + [{"seed": seed} for seed in (-1, "x")]
    for row in rows:
        with pytest.raises(ValueError, match=f"{next(iter(row))}="):
            cls().reset(row)


def test_a_row_may_hold_the_level_its_seed_and_what_the_user_says():
    assert begun(Counter, {"level": "-7"}).number == -7
    assert begun(Counter, {"seed": 5, "level": None}).number == 2
    prompt = Counter().reset({"level": "1", "prompt": [{"role": "user", "content": "Go."}]})
    assert prompt[1]["content"] == "Go.\n\nNumber: 1\nActions left: 10"
    prompt = Counter(show_actions_left=False).reset({"level": "1", "prompt": [{"role": "user", "content": ""}]})
    assert [item["content"] for item in prompt[1:]] == ["Number: 1"]


@pytest.mark.parametrize(
    ("cls", "package", "shown"),
    [
        (FrozenLakeEnv, "gymnasium", "gymnasium"),
        (CountdownEnv, "reasoning_gym", "reasoning-gym"),
    ],
)
def test_without_its_package_a_game_names_the_extra(cls, package, shown, monkeypatch):
    real = importlib.import_module

    def missing(name, *rest):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=rf'{cls.__name__} needs .* {shown}: pip install "agent-r1-trl\[games\]"'):
        cls().reset({"seed": 1})


def test_a_puzzle_of_the_row_s_own_needs_no_package(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", None)
    assert CountdownEnv().reset({"nums": [1, 2], "target": 3})


@pytest.mark.parametrize("cls", GAMES)
def test_a_system_prompt_of_one_s_own_takes_the_place_of_the_rules_and_an_empty_one_is_none(cls):
    assert cls(system_prompt="Mine.").reset({"seed": 1})[0] == {"role": "system", "content": "Mine."}
    assert [item["role"] for item in cls(system_prompt="").reset({"seed": 1})] == ["user"]


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("cls", GAMES)
def test_the_same_seed_makes_the_same_level_and_another_seed_another(cls):
    levels = [begun(cls, reset_seed=seed).level for seed in (1, 1, 2, 3, 2**62)]
    assert levels[0] == levels[1] and len(set(levels)) >= 4


def test_members_of_a_group_share_the_level_and_draw_their_own_events():
    requests = rollout_requests([{"x": 1}] * 8, first_row=0, group_size=4, seed=0, step=0)

    events = []
    for request in requests:
        env = begun(Counter, {}, request.reset_seed, request.seed)
        events.append((env.level, step(env, written("Less")).info["reward_parts"]["luck"]))
    assert len({level for level, _ in events[:4]}) == 1 and len({luck for _, luck in events[:4]}) == 4


@pytest.mark.parametrize("name", ALL)
def test_played_again_from_its_seeds_an_episode_says_the_same(name):
    """What a run that goes on after a kill stands on (`on_resume`)."""
    said = [written("Down", "Right"), called("Right"), written("1 + 1"), written("Jump"), called("Down")]

    def episode():
        env = ALL[name]()
        env.seed(reset_seed=11, dynamics_seed=12)
        texts = [env.reset({})]
        for item in said:
            result = step(env, item)
            texts.append((result.observations, result.reward, result.done))
            if result.done:
                break
        return texts

    assert episode() == episode() and ALL[name]().on_resume == "replay"


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize("name", ALL)
def test_check_env_finds_nothing(name):
    assert check_env(ALL[name], ROWS) == []


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_a_rollout_plays_a_game_to_its_end(family):
    turns = [written("Down"), written("Jump"), written("Down")]
    env = functools.partial(SokobanLevel, max_actions_per_turn=1)
    trajectory, _ = play(turns, env=env, family=family)
    assert trajectory.stop_reason is StopReason.DONE and trajectory.outcome_reward == 10.0
    assert [turn.reward for turn in trajectory.turns] == [-0.1, -0.1, pytest.approx(0.9)]
    assert trajectory.turns[2].reward_parts == {"step": -0.1, "box_on_target": 1.0}
    assert trajectory.info["success"] == 1.0 and trajectory.info["num_invalid_turns"] == 1.0
    first, *drawn = [part.rendered["svg"] for part in (trajectory, *trajectory.turns)]
    assert len({first, *drawn}) == 3 and first != drawn[0] == drawn[1], "an unknown action changes nothing"
    assert drawn[2].count("<path") == first.count("<path") == 6, "ground, edges, wall, target, box, player"


class SokobanLevel(SokobanEnv):
    def read_row(self, example):
        return ROOM
