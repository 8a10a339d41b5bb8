"""TextArenaEnv: single-player games, an opponent, rewards, invalid moves, and draws that threads do not share."""

import functools
import importlib
import random
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import textarena
from textarena.envs.registration import ENV_REGISTRY

from agent_r1_trl import check_env
from agent_r1_trl.features.doors import TextArenaEnv
from agent_r1_trl.features.doors.gym import WORD_GAMES
from agent_r1_trl.rollout import RolloutRequest, RolloutRunner
from agent_r1_trl.testing import chat_of, roll_out, say
from agent_r1_trl.trajectory import StopReason
from tests.environments.helpers import finished
from tests.features.games.helpers import begun, message, step, text_of
from tests.toys import limits_of
from tests.trainers.helpers import scripted


def first_free(text):
    """The first move on the board that was shown last."""
    return re.findall(r"'(\[\d\])'", text.rpartition("Available Moves")[2])[0]


guess = functools.partial(TextArenaEnv, "GuessTheNumber-v0")
tic_tac_toe = functools.partial(TextArenaEnv, "TicTacToe-v0", opponent=first_free)
pig = functools.partial(TextArenaEnv, "PigDice-v0", opponent=lambda text: "[hold]")
ALL = {"guess": guess, "tic_tac_toe": tic_tac_toe, "pig": pig, "tagged": functools.partial(guess, answer_tag="move")}


def write(env, text):
    return step(env, message(content=text))


def outcome(env):
    trajectory = finished()
    return env.outcome_reward(trajectory)[0], trajectory.info["success"]


# -------------------------------------------------------------------- one player


def test_a_game_shows_its_prompt_and_then_only_what_is_new():
    env = begun(guess, {"seed": 3})
    random.seed(3)
    secret = random.randint(1, 20)
    messages = env.reset({"seed": 3})
    assert [item["role"] for item in messages] == ["user"] and "Guess The Number" in messages[0]["content"]
    low = next(number for number in range(1, 20) if number != secret)
    result = write(env, f"<think>[{secret}]?</think> I say [{low}].")
    assert text_of(result) == f"The target number is {'higher' if low < secret else 'lower'}."
    result = write(env, f"[{secret}]")
    assert result.done and outcome(env) == (1.0, 1.0)


def test_a_move_that_is_not_allowed_costs_and_a_second_one_ends_the_game():
    env = begun(guess, {"seed": 3})
    result = write(env, "I do not know")
    assert "You attempted an invalid move" in text_of(result) and not result.done
    assert result.info["reward_parts"] == {"invalid_action": -0.1}
    write(env, "[1]")
    assert write(env, "[99]").reward == -0.1 and not env.is_over
    result = write(env, "[99]")
    assert result.done and result.reward == -0.1
    assert env.num_effective_actions == 1 and env.num_invalid_turns == 3 and outcome(env)[1] == 0.0


def test_an_unfinished_game_has_no_reward_of_its_own():
    env = begun(guess)
    write(env, "[1]")
    assert outcome(env) == (0.0, 0.0)


# -------------------------------------------------------------------- two players


@pytest.mark.parametrize(("seat", "moves"), [("first", ("[4]", "[2]", "[6]")), ("second", ("[4]", "[2]", "[6]"))])
def test_a_game_against_a_function_is_won_from_either_seat(seat, moves):
    env = tic_tac_toe(seat=seat)
    prompt = env.reset({})[-1]["content"]
    mine, other = (0, 1) if seat == "first" else (1, 0)
    assert f"You are Player {mine}" in prompt and ("[Player 0] [0]" in prompt) == (seat == "second")
    result = write(env, moves[0])
    assert f"[Player {other}] [{0 if seat == 'first' else 1}]" in text_of(result)
    assert f"[Player {mine}]" not in text_of(result), "what it has said stands in the conversation already"
    result = write(env, moves[1])
    assert not result.done
    assert write(env, moves[2]).done and outcome(env) == (1.0, 1.0)


def test_a_lost_game_costs_what_the_game_says():
    env = begun(tic_tac_toe)
    for move in ("[8]", "[7]", "[5]"):
        result = write(env, move)
    assert result.done and outcome(env) == (-1.0, 0.0)


def test_the_opponent_gets_all_that_its_player_has_read():
    heard = []

    def listens(text):
        heard.append(text)
        return first_free(text)

    env = begun(functools.partial(TextArenaEnv, "TicTacToe-v0", opponent=listens))
    for move in ("[4]", "[8]"):
        write(env, move)
    assert heard[1].startswith(heard[0]) and "You are Player 1" in heard[0]
    assert "[Player 0] [4]" in heard[0] and "[Player 1] [0]" in heard[1] and "[Player 0] [8]" in heard[1]


def test_either_seat_is_drawn_from_the_seed():
    seats = [begun(functools.partial(tic_tac_toe, seat="either"), {"seed": seed}).player for seed in range(12)]
    assert set(seats) == {0, 1}
    assert seats == [begun(functools.partial(tic_tac_toe, seat="either"), {"seed": seed}).player for seed in range(12)]


# -------------------------------------------------------------------- seeds


class SlowDice(textarena.Env):
    """Another thread has its turn between two draws of a move."""

    def reset(self, num_players, seed=None):
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Throw.")

    def step(self, action):
        first = random.randrange(10**6), np.random.randint(10**6)
        time.sleep(0.002)
        told = f"{first} {random.randrange(10**6)} {np.random.randint(10**6)}"
        self.state.add_observation(message=told, observation_type=textarena.ObservationType.GAME_MESSAGE)
        return self.state.step()


@pytest.fixture
def slow(monkeypatch):
    """An environment of `SlowDice`."""
    spec = textarena.envs.registration.EnvSpec("SlowDice-v0", SlowDice, None)
    monkeypatch.setitem(ENV_REGISTRY, "SlowDice-v0", spec)
    return begun(functools.partial(TextArenaEnv, "SlowDice-v0"))


def dice(rng, turn):
    return say(rng.choice(["[roll]", "[roll]", "[hold]"]))


def roll_out_dice(env, num_at_once):
    """32 trajectories of a game that throws dice in every move, in groups of four."""
    chat = chat_of()
    runner = RolloutRunner(env, scripted(chat.tokenizer, dice), chat, limits_of(max_turns=4))
    requests = [
        RolloutRequest(example={"prompt": []}, example_id=str(i // 4), seed=i, reset_seed=i // 4) for i in range(32)
    ]
    found = []
    for start in range(0, 32, num_at_once):
        found += runner.run(requests[start : start + num_at_once])
    runner.close()
    return [[turn.observations for turn in item.turns] for item in found]


@pytest.mark.parametrize("name", ["pig", "slow"])
@pytest.mark.usefixtures("slow")
def test_32_games_at_once_are_those_of_one_after_the_other(name):
    env = {"pig": pig, "slow": functools.partial(TextArenaEnv, "SlowDice-v0")}[name]
    random.seed(1), np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    alone = roll_out_dice(env, 1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before, "what others draw does not change"
    random.seed(2), np.random.seed(2)
    assert roll_out_dice(env, 32) == alone
    assert len({str(game) for game in alone}) > (20 if name == "pig" else 7)


def test_what_the_trainers_thread_draws_in_the_middle_of_a_move_is_its_own_and_is_not_drawn_again(slow, monkeypatch):
    """By names that only this thread looks up: the game's modules have generators of their own."""
    others = (importlib.import_module("random"), importlib.import_module("numpy"))
    is_inside, may_go_on = threading.Event(), threading.Event()

    def wait(seconds):
        is_inside.set()
        assert may_go_on.wait(60)

    def drawn():
        python, numpy = others
        return [python.random(), numpy.random.rand()]

    random.seed(1), np.random.seed(1)
    expected = [drawn() for _ in range(3)]
    random.seed(1), np.random.seed(1)
    monkeypatch.setattr(time, "sleep", wait)
    found = [drawn()]
    mover = threading.Thread(target=write, args=(slow, "go"))
    mover.start()
    assert is_inside.wait(60)
    found.append(drawn())
    may_go_on.set()
    mover.join()
    assert [*found, drawn()] == expected


@pytest.mark.parametrize("game", ["GuessTheNumber-v0", "Minesweeper-v0", "Mastermind-v0", "2048-v0"])
def test_an_episode_is_the_seed_of_the_group(game):
    """Minesweeper lays its mines at the first move."""

    def state(reset_seed, dynamics_seed):
        env = begun(functools.partial(TextArenaEnv, game), {}, reset_seed, dynamics_seed)
        write(env, "[1 1] [up] [1 2 3 4]")
        return env.observation, str(env.game.state.game_state)

    assert state(2**62 + 1, 1) == state(2**62 + 1, 2)
    assert len({state(seed, 1)[1] for seed in range(9)}) > 3


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"id": "Wordle-v0"}, ("id='Wordle-v0'", "downloads dictionaries", "SpellingBee")),
        ({"id": "TicTacTo-v0"}, ("no game of TextArena", "Did you mean 'TicTacToe-v0'?")),
        ({"id": "TicTacToe-v0", "num_players": 2}, ("num_players=2", "opponent=None", "Pass an opponent")),
        ({"id": "TicTacToe-v0", "seat": "second"}, ("seat='second'", "Pass an opponent")),
        ({"id": "TicTacToe-v0", "opponent": first_free, "num_players": 1}, ("num_players=1",)),
        ({"id": "TicTacToe-v0", "opponent": first_free, "seat": "third"}, ("seat='third'", "'either'")),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(settings, words):
    with pytest.raises(ValueError) as caught:
        TextArenaEnv(**settings)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_game_for_other_numbers_of_players_says_so():
    with pytest.raises(
        ValueError, match=r"id='TicTacToe-v0': The number of players has to be 2, received 1\. Pass an"
    ):
        begun(functools.partial(TextArenaEnv, "TicTacToe-v0"))


def test_an_opponent_that_says_no_text_is_named():
    with pytest.raises(ValueError, match=r"opponent returned 3: must be text"):
        write(begun(functools.partial(TextArenaEnv, "TicTacToe-v0", opponent=lambda text: 3)), "[4]")


def test_the_games_that_download_dictionaries_are_all_known():
    folder = Path(textarena.__file__).parent / "envs"
    readers = ("nltk.download", "EnglishDictionary", "words_clues_generator")
    found = {
        path.relative_to(folder).parts[0]
        for path in folder.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in readers)
    }
    assert found - {"utils"} == WORD_GAMES
    assert {spec.entry_point.split(".")[2] for spec in ENV_REGISTRY.values()} >= WORD_GAMES


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=r"pip install .agent-r1-trl\[textarena\]"):
        guess()


@pytest.mark.parametrize("name", ALL)
def test_check_env_finds_nothing(name):
    assert check_env(ALL[name], [{"seed": 1}, {"seed": 2}]) == []


def test_only_a_game_without_an_opponent_is_replayed_after_a_kill():
    assert guess().on_resume == "replay" and tic_tac_toe().on_resume == "restart"


def test_a_rollout_ends_with_the_game():
    (item,) = roll_out(tic_tac_toe, lambda request: say(f"[{request.turn}]"), [{"prompt": []}])
    assert item.stop_reason is StopReason.DONE and item.outcome_reward in (-1.0, 0.0, 1.0)
