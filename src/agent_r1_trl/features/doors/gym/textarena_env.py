"""TextArenaEnv: a game of TextArena, for one player or against a function."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import numpy as np

from agent_r1_trl.features.doors.gym.base import PackagedEnv, function_of
from agent_r1_trl.features.games.base import load_package
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.settings import Count, OneOf

WORD_GAMES = {"Codenames", "Crosswords", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee"}
WORD_GAMES |= {"WordChains", "WordLadder", "WordSearch", "Wordle"}
"""Games that download dictionaries when they are imported or made."""
_DRAWING = threading.Lock()


class TextArenaEnv(PackagedEnv):
    """A game of TextArena: the model reads the game's own prompt and, after each move, what is new.

    The game's reward at its end is the outcome reward; 1 is a success. A move that the game does not allow costs
    `invalid_action_reward`, and the game says why; a second one in a row ends most games. `opponent` moves for all
    other players.

    Args:
        id: of a registered game. What is played is the game without its wrappers.
        opponent: `(text) -> move`, a plain function, or its path. It gets all that its player has read.
        num_players: of the game; by default two with an opponent, else one.
        seat: whether the policy is the "first" or the "second" player, or "either", by the seed.
        make_kwargs: arguments of `textarena.make`.
        **settings: settings of `PackagedEnv`.

    Raises:
        ImportError: textarena is not installed.
        ValueError: there is no such game, or it downloads dictionaries, or settings contradict each other.
    """

    answer_tag = ""
    opponent: Callable[[str], str] | None = None
    num_players: Count | None = None
    seat: Annotated[str, OneOf("first", "second", "either")] = "first"

    def __init__(
        self,
        id: str,
        *,
        opponent: Callable[[str], str] | str | None = None,
        make_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._textarena = load_package("textarena", type(self).__name__, "textarena")
        self.id, self._make_kwargs = id, dict(make_kwargs or {})
        registry = self._textarena.envs.registration.ENV_REGISTRY
        if id not in registry:
            self.refuse(f"no game of TextArena.{did_you_mean(id, registry)}")
        if not WORD_GAMES.isdisjoint(str(registry[id].entry_point).split(".")):
            self.refuse(f"downloads dictionaries whenever it is made. Take none of {', '.join(sorted(WORD_GAMES))}.")
        self.opponent = function_of(opponent, "opponent") or self.opponent
        self.on_resume = "restart" if self.opponent else "replay"  # an opponent may move otherwise than before
        super().__init__(**settings)

    def start(self, seed: int) -> None:
        """Make the game and deal; others may move before the policy."""
        self._draws = random.Random(seed)
        self.player = self._draws.randrange(2) if self.seat == "either" else int(self.seat == "second")
        self._heard: dict[int, str] = {}
        with _drawing_from(self._draws):
            game = self._textarena.make(self.id, **self._make_kwargs)
            while isinstance(game, self._textarena.Wrapper):
                game = game.env  # wrappers repeat the whole game in each observation
            try:
                game.reset(num_players=self._num_players, seed=seed)
            except AssertionError as error:
                fix = "Pass an opponent for a game of several players, and num_players for more than two."
                self.refuse(f"{error}. {fix}", error)
        self.game = game
        self.observation = self._next_observation()

    def read_action(self, text: str) -> str:
        """The text: the game reads it."""
        return text

    def how_to_act(self) -> str:
        """How the model writes its actions: by default as the game says."""
        return super().how_to_act() if self.answer_tag or self.action_format == "tool" else ""

    def act(self, action: str) -> dict[str, float]:
        """Make a move, and let the others make theirs."""
        state, info = self.game.state, self.game.state.game_info[self.player]
        num_errors, was_out = state.error_count, info["invalid_move"]
        self._move(action)
        self.is_effective = state.error_count <= num_errors and info["invalid_move"] == was_out
        self.observation = self._next_observation()
        return {} if self.is_effective else {"invalid_action": self.invalid_action_reward}

    # ---------------------------------------------------------------- internal

    @property
    def _num_players(self) -> int:
        return self.num_players or (2 if self.opponent else 1)

    def _move(self, text: str) -> None:
        with _drawing_from(self._draws):
            self.is_over, _ = self.game.step(text)
        if self.is_over:
            self.own_reward = float((self.game.state.rewards or {}).get(self.player, 0.0))
            self.is_won = self.own_reward >= 1.0

    def _next_observation(self) -> str:
        """What is new to the policy when it is its turn again."""
        while not self.is_over:
            player, news = self.game.get_observation()
            names = {number: f"[Player {number}] " for number in range(self._num_players)}
            said = self._textarena.ObservationType.PLAYER_ACTION
            own = {(player, said)} if player == self.player else {}  # it stands in the conversation already
            told = "\n".join(names.get(who, "") + text for who, text, kind in news if (who, kind) not in own)
            if player == self.player or self.opponent is None:
                return told
            self._heard[player] = f"{self._heard.get(player, '')}\n{told}".strip()
            move = self.opponent(self._heard[player])
            if not isinstance(move, str):
                self.refuse(f"opponent returned {move!r:.200}: must be text. Return a move.")
            self._move(move)
        return str(self.game.state.game_info[self.player].get("reason", ""))

    def _check_settings(self) -> None:
        super()._check_settings()
        if (self._num_players > 1) != bool(self.opponent) or (self.seat != "first" and not self.opponent):
            self.refuse(
                f"num_players={self._num_players}, seat={self.seat!r}, opponent={self.opponent!r:.80}. Pass an "
                "opponent for several players, and for one nothing of it."
            )


@contextlib.contextmanager
def _drawing_from(draws: random.Random) -> Iterator[None]:
    """Let Python's own `random`, and NumPy's, go on from `draws` in here: games draw from what all threads share."""
    with _DRAWING:
        states = random.getstate(), np.random.get_state()
        np.random.seed(draws.getrandbits(32))
        random.setstate(draws.getstate())
        try:
            yield
        finally:
            draws.setstate(random.getstate())
            random.setstate(states[0])
            np.random.set_state(states[1])
