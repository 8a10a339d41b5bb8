"""A calculator that evaluates arithmetic without `eval`.

The expression is parsed into a syntax tree, of which only arithmetic nodes are evaluated; attributes, subscripts,
lambdas and comprehensions are refused. Sizes are bounded before anything is computed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from agent_r1_trl.tools.base import tool

Number = int | float

MAX_EXPRESSION_CHARS = 500
MAX_BITS = 4096
MAX_DEPTH = 300

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    function.__name__: function
    for function in (
        abs, round, min, max, math.sqrt, math.floor, math.ceil, math.exp, math.log, math.log2, math.log10, math.sin,
        math.cos, math.tan, math.gcd,
    )
}  # fmt: skip
# Operators as models write them: multiplication sign and dot, division sign, minus sign, dash.
_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"})


def calculate(expression: str) -> Number:
    """Value of an arithmetic expression.

    >>> calculate("2 * (3 + 4) ^ 2")
    98

    Raises:
        ValueError: the expression is not arithmetic, too large, or undefined (division by zero, for example).
    """
    if not isinstance(expression, str) or not expression.strip():
        raise ValueError("the expression is empty")
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, the limit is {MAX_EXPRESSION_CHARS}")
    # Models write `^` for powers; Python would read it as xor, with another precedence.
    source = expression.strip().translate(_SPELLINGS).replace("^", "**")
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("the expression is not valid arithmetic") from error
    try:
        value = _evaluate(tree.body, 0)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error
    return _check_size(value)


@tool(timeout_s=5.0, max_result_chars=2000, user_errors=(ValueError,))
def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, the constants pi and e, and the functions abs, round,
            min, max, sqrt, floor, ceil, exp, log, log2, log10, sin, cos, tan and gcd; for example "(17 + 4) * 2".
    """
    return format_number(calculate(expression))


def format_number(value: Number) -> str:
    """Floats with twelve significant digits, so that 0.1 + 0.2 is shown as 0.3; integers in full."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return format(value, ".12g") if isinstance(value, float) else str(value)


def _evaluate(node: ast.AST, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ValueError("the expression is nested too deep")
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            raise ValueError(f"{node.value!r} is no number")
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _evaluate(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, depth + 1), _evaluate(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _check_size(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Name):
        if node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        raise ValueError(f"unknown name {node.id!r}")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node.func.id, [_evaluate(argument, depth + 1) for argument in node.args])
    raise ValueError("only numbers, + - * / // % **, parentheses and " + ", ".join(_FUNCTIONS) + " are allowed")


def _call(name: str, arguments: list[Number]) -> Number:
    if name not in _FUNCTIONS:
        raise ValueError(f"unknown function {name!r}; there are {', '.join(_FUNCTIONS)}")
    if name == "round" and not all(isinstance(digits, int) and abs(digits) <= 1000 for digits in arguments[1:]):
        raise ValueError("round takes a whole number of digits between -1000 and 1000")
    try:
        return _check_size(_FUNCTIONS[name](*arguments))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}({', '.join(map(format_number, arguments))}) is not defined") from error


def _check_power(base: Number, exponent: Number) -> None:
    is_integral = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if is_integral and abs(exponent) * int(abs(base)).bit_length() > MAX_BITS:
        raise ValueError("the power is too large")


def _check_size(value: Number | complex) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("the result is too large")
    elif not math.isfinite(value):
        raise ValueError("the result is not a finite number")
    return value
