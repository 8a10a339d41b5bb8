"""ReasoningGymEnv: one question of a reasoning-gym generator, one answer, scored by reasoning-gym."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from typing import Annotated, Any

from agent_r1_trl.environments.tool_env import ToolEnv
from agent_r1_trl.features.games.checks import Tag, check_seed, load_package
from agent_r1_trl.rewards import extract_answer, strip_reasoning
from agent_r1_trl.settings import Flag, Seconds
from agent_r1_trl.trajectory import Message, StopReason, Trajectory

logger = logging.getLogger(__name__)

RUNS_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Generators of reasoning-gym 0.1 whose `score_answer` hands the answer to `eval`, itself or through sympy."""
MAX_ANSWER_CHARS = 10_000


class ReasoningGymEnv(ToolEnv):
    """The model answers one question between `<answer>` and `</answer>`; reasoning-gym scores the answer.

    A row may have the columns `seed` (of the question), `dataset` and `options` (settings of the generator), which
    take the place of the arguments. A row without `seed` gets a question that all members of its group share.

    By default only an answer with the full score earns anything: many generators give a part of it for any answer
    that contains the right one, so a policy would learn to list numbers. A scorer that raises or does not come back
    gives 0, is counted in the info `score_failed` and named in a warning.

    Info: `success`, `score`, `valid_answer`, `score_failed`, `answer` (the generator's), `prediction`.

    Args:
        dataset: name of a generator, such as "chain_sum".
        options: settings of the generator, such as {"max_terms": 3}.
        partial_credit: whether a partial score is paid, between `failure_reward` and `success_reward`.
        answer_tag: tag around the answer; "" if the whole text (without the reasoning) is the answer.
        score_timeout_s: maximum seconds of the scoring.
        **settings: settings of `ToolEnv`.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: there is no such generator, it would run answers as code, or a setting is out of range.
    """

    failure_reward = 0.0
    on_resume = "replay"
    partial_credit: Flag = False
    answer_tag: Annotated[str, Tag()] = "answer"
    score_timeout_s: Seconds = 5.0
    _reset_seed = 0

    def __init__(
        self, dataset: str = "chain_sum", *, options: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        self.dataset = dataset
        self.options = dict(options or {})
        self._generator(self.dataset, self.options, seed=0)
        super().__init__(**settings)

    def seed(self, *, reset_seed: int, dynamics_seed: int) -> None:
        """Take the seeds of the trajectory: the group's own is for the question; nothing else is random."""
        self._reset_seed = reset_seed

    def system_message(self, example: dict[str, Any]) -> str | None:
        """`system_prompt` ("" for none), by default the form of the answer."""
        form = (
            f"Give your answer between <{self.answer_tag}> and </{self.answer_tag}>."
            if self.answer_tag
            else "Reply with the answer only."
        )
        return f"Answer the question. {form}" if self.system_prompt is None else self.system_prompt

    def reset(self, example: dict[str, Any]) -> list[Message]:
        """Start with a question.

        Raises:
            ValueError: a column holds no seed, generator or settings.
        """
        row = example if isinstance(example, Mapping) else {}
        seed = check_seed(type(self).__name__, row.get("seed"))
        given = row.get("options") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"{type(self).__name__}.reset: options={given!r:.200} must be a dict of settings.")
        options = {name: value for name, value in given.items() if value is not None}
        name = row.get("dataset") or self.dataset
        own = self.options if name == self.dataset else {}  # the arguments are those of the environment's generator
        self._made = self._generator(name, {**own, **options}, self._reset_seed if seed is None else seed)
        self._entry = self._made[0]
        return super().reset({**row, "prompt": str(self._entry["question"])})

    def outcome_reward(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """`success_reward` for an answer with the full score, else `failure_reward`, or what lies between them."""
        text = trajectory.final_text if trajectory.stop_reason is StopReason.DONE else ""
        found = extract_answer(text, self.answer_tag) if self.answer_tag else strip_reasoning(text)
        score, failure = self._score(found)
        is_right = score >= 1.0 - 1e-9
        trajectory.info.update(
            success=float(is_right),
            score=score,
            valid_answer=float(bool(found)),
            score_failed=float(failure is not None),
            answer=str(self._entry["answer"]),
            prediction=found or "",
        )
        paid = score if self.partial_credit else float(is_right)
        reward = self.failure_reward + paid * (self.success_reward - self.failure_reward)
        return reward, {"answer": reward}

    def _generator(self, name: Any, options: Mapping[str, Any], seed: int) -> Any:
        owner = type(self).__name__
        gym = load_package("reasoning_gym", owner)
        if isinstance(name, str) and (name in RUNS_ANSWERS or name == "composite"):
            why = "hides which of its generators do" if name == "composite" else "runs the model's answers as code"
            cure = "CountdownEnv" if name in ("countdown", "puzzle24") else "another generator"
            raise ValueError(f"{owner}: dataset={name!r} {why}. Choose {cure}; rows may name one each in `dataset`.")
        if not isinstance(name, str) or name not in gym.factory.DATASETS:
            close = ", ".join(sorted(gym.factory.DATASETS))
            raise ValueError(f"{owner}: dataset={name!r:.100} is no generator of reasoning-gym. It has: {close}.")
        try:
            return gym.create_dataset(name, **{"size": 1, **options, "seed": seed % 2**31})
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"{owner}: options={dict(options)!r:.200} do not suit {name!r}: {error}.") from error

    def _score(self, answer: str | None) -> tuple[float, str | None]:
        """The score in [0, 1], and why it could not be found."""
        if not answer or len(answer) > MAX_ANSWER_CHARS:
            return 0.0, None
        result: list[float] = []
        failure: list[str] = []

        def score() -> None:
            try:
                result.append(float(self._made.score_answer(answer, self._entry)))
            except BaseException as error:  # SystemExit as well: the scorer is not ours
                failure.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=score, daemon=True, name="reasoning-gym-score")
        thread.start()
        thread.join(self.score_timeout_s)
        if result and math.isfinite(result[0]):
            return min(1.0, max(0.0, result[0])), None
        why = failure[0] if failure else f"no number within {self.score_timeout_s:g} s"
        name = self._entry.get("metadata", {}).get("source_dataset", self.dataset)
        logger.warning("reasoning-gym could not score an answer to %r (%s): it scores 0.", name, why)
        return 0.0, why
