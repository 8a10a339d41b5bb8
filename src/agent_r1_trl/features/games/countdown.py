"""CountdownEnv: reach a number with the given numbers and + - * /. Puzzles by reasoning-gym, checked exactly."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from agent_r1_trl.features.games.base import ActionError, GameEnv, load_package, pair_of, shown
from agent_r1_trl.settings import Clash, Count, Finite, Flag, SomeOf

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_CHARS = 200
"""Longest expression that is read. With one multiplication per number, no value has more digits than that."""
_SAME = str.maketrans("\u00d7\u00b7\u00f7\u2212\u2013[]", "**/--()")
"""Signs that people write for these operators."""
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_MAX_DRAWS = 20
_STRIDE = 1_000_003  # so that no seed goes on with the puzzles of its neighbour


class ExpressionError(ValueError):
    """A text is no expression of this game; the message says why."""


class CountdownEnv(GameEnv):
    """Write an expression with the value of the target; every number is used at most once.

    A level is JSON text: `{"numbers": [3, 7, 25], "target": 46}`, and optionally `"solution"`. A row may
    have the columns `numbers` (or `nums`) and `target` instead. The expression is read
    as a syntax tree and computed with fractions: no text is evaluated as code, and nothing is rounded.

    An expression that follows the rules but has another value earns `format_reward`, once; the right one earns
    `success_reward`: 0.1 and 1, as in RAGEN. By default there is one attempt.

    Args:
        num_numbers: (fewest, most) numbers of a puzzle.
        max_number: largest of the numbers.
        target: (smallest, largest) target.
        operators: the operators in the puzzles that are made; an expression may use all four.
        must_use_all: whether every number has to be used.
        format_reward: reward of the first expression that follows the rules but has another value.
        **settings: settings of `GameEnv` and `ToolEnv`; `max_actions` is the number of attempts.

    Raises:
        ValueError: a setting is out of range.
    """

    noun = "expression"
    CLASHES = (
        Clash(
            "operators",
            lambda c: "/" in c.operators and "-" not in c.operators,
            "the generator takes - where a division would leave a rest. Add '-', or remove '/'.",
        ),
    )
    max_actions = 1
    max_actions_per_turn = 1
    num_numbers: Annotated[tuple[int, int], pair_of(2)] = (3, 4)
    max_number: Count = 99
    target: Annotated[tuple[int, int], pair_of(1)] = (10, 999)
    operators: Annotated[Sequence[str], SomeOf(*"+-*/")] = ("+", "-", "*", "/")
    must_use_all: Flag = False
    format_reward: Finite = 0.1

    def rules(self) -> str:
        """The aim."""
        use = "exactly" if self.must_use_all else "at most"
        return (
            f"Write an expression whose value is the target. Use each of the numbers {use} once, the operators "
            "+ - * / and parentheses."
        )

    def example_actions(self) -> list[str]:
        """Two expressions."""
        return ["(5 + 3) * 2", "5 * 3 - 2"]

    def new_level(self, seed: int) -> str:
        """A puzzle of reasoning-gym's generator with a solution that is exactly right."""
        made = load_package("reasoning_gym", type(self).__name__).create_dataset(
            "countdown",
            min_numbers=self.num_numbers[0],
            max_numbers=self.num_numbers[1],
            max_value=self.max_number,
            min_target=self.target[0],
            max_target=self.target[1],
            operators=tuple(self.operators),
            seed=seed,
            size=_MAX_DRAWS * _STRIDE,
        )
        for index in range(_MAX_DRAWS):
            try:
                entry = made[index * _STRIDE]
                numbers = entry["metadata"]["numbers"]
                target = entry["metadata"]["target"]
                if compute(entry["answer"], numbers, must_use_all=True) == target:
                    return json.dumps({"numbers": numbers, "target": target, "solution": entry["answer"]})
            except ValueError:  # the generator gave up, or its solution is not exact
                continue
        raise ValueError(
            f"{type(self).__name__}: no puzzle with num_numbers={tuple(self.num_numbers)}, "
            f"max_number={self.max_number} and target={tuple(self.target)} was found. Widen target or max_number."
        )

    def read_row(self, example: Mapping[str, Any]) -> str:
        """The level of a row: the column `level`, else `numbers` (or `nums`) and `target`, else a new one."""
        numbers = example.get("numbers") if example.get("numbers") is not None else example.get("nums")
        if example.get("level") is None and numbers is not None and example.get("target") is not None:
            return json.dumps(
                {"numbers": numbers, "target": example["target"]},
                default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value),
            )
        return super().read_row(example)

    def load_level(self, level: str) -> None:
        """Begin a puzzle."""
        try:
            self._level = json.loads(level)
            self._numbers, self._target = self._level["numbers"], self._level["target"]
            is_right = bool(self._numbers) and all(type(item) is int for item in [*self._numbers, self._target])
        except (TypeError, KeyError, ValueError):
            is_right = False
        if not is_right:
            raise ValueError(
                f"{type(self).__name__}: level={level!r:.200} must be JSON with whole numbers, such as "
                '{"numbers": [3, 7, 25], "target": 46}.'
            )
        self._is_format_paid = False
        self._tried = ""

    def read_action(self, text: str) -> str:
        """The expression, if it follows the rules."""
        try:
            compute(text, self._numbers, must_use_all=self.must_use_all)
        except ExpressionError as error:
            raise ActionError(f"{shown(text)} does not count: {error}") from error
        return text

    def act(self, action: str) -> dict[str, float]:
        """Try an expression."""
        value = compute(action, self._numbers, must_use_all=self.must_use_all)
        self.is_won = self.is_over = value == self._target
        self._tried = f"{shown(action)} is {value}.\n"
        if self.is_won or self._is_format_paid:
            return {}
        self._is_format_paid = True
        return {"format": self.format_reward}

    def solution(self) -> list[str] | None:
        """The solution of the level, if it has one."""
        known = self._level.get("solution")
        return None if known is None else [known]

    def describe(self) -> str:
        """Numbers and target, after the first attempt also what it came to."""
        return f"{self._tried}Numbers: {', '.join(map(str, self._numbers))}\nTarget: {self._target}"


def compute(text: str, numbers: Sequence[int], *, must_use_all: bool = False) -> Fraction:
    """The value of an expression over the numbers, each of which it uses at most once.

    What follows an equals sign is not read. The text is parsed, never evaluated as code.

    Args:
        text: the expression.
        numbers: the numbers that it may use; one that is listed twice may be used twice.
        must_use_all: whether it has to use all of them.

    Raises:
        ExpressionError: it is none, it uses other numbers, or it divides by zero.

    >>> compute("(3 + 7) / 4", [3, 4, 7])
    Fraction(5, 2)
    """
    written = text.partition("=")[0].translate(_SAME).strip()
    if not written or len(written) > MAX_CHARS or not _EXPRESSION.fullmatch(written):
        raise ExpressionError("an expression has only numbers, + - * / and parentheses, and at most 200 characters")
    try:
        tree = ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("it is no complete expression") from None
    used: Counter[Any] = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if used - Counter(numbers):
        raise ExpressionError("it uses a number that is not given, or one too often")
    if must_use_all and Counter(numbers) - used:
        raise ExpressionError("it does not use all numbers")
    return _value(tree)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            try:
                return _OPERATORS[type(op)](_value(left), _value(right))
            except ZeroDivisionError:
                raise ExpressionError("it divides by zero") from None
    raise ExpressionError("an expression has only numbers, + - * / and parentheses")
