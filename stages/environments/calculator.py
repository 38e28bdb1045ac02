"""A calculator as a tool: `calc(12+34)` is answered with `46`, and what is said last is the answer.

A turn that ends with a call is answered with its result, or with `error` where it cannot be
computed. Any other turn is the policy's answer and ends the episode: 1 where it equals the row's
`answer`, else 0.

Numbers are whole or decimal, operations + - * / and parentheses; of these a policy's call has none
inside, since the first that closes ends its turn. The result has at most 12 digits,
exact or rounded, and no trailing zeros; one that is longer before its point is an `error`, as on a
pocket calculator, so that no expression makes an observation that is too long.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, ClassVar

from stages.environments.environment import Environment, Observation, right_answer

CALL, END = "calc(", ")"
LONGEST = 200
"""Characters of an expression."""
DIGITS = 12
"""Of a result; where it is below 1, those behind the point."""
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator(Environment):
    """An episode with the tool."""

    stops: ClassVar[tuple[str, ...]] = (END,)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:  # noqa: ARG002
        self._answer = right_answer(row)

    def step(self, action: str) -> Observation:
        _, _, rest = action.rstrip().partition(CALL)
        if not rest.endswith(END):
            return Observation(reward=float(action.strip() == self._answer), done=True)
        try:
            return Observation(text=result(rest.removesuffix(END)))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
            return Observation(text="error")


def result(expression: str) -> str:
    """The value of an expression; an error where it has none."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    return _shown(_value(ast.parse(expression.strip(), mode="eval").body, expression))


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        written = ast.get_source_segment(source.strip(), node) or ""
        if "e" in written.lower():
            raise ValueError("an exponent makes numbers that take for ever")
        return Fraction(written)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, source)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        operation = _OPERATIONS[type(node.op)]
        return operation(_value(node.left, source), _value(node.right, source))
    raise ValueError("numbers, + - * / and parentheses are all that is known")


def _shown(value: Fraction) -> str:
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if before > DIGITS:
        raise ValueError(f"the result has more than {DIGITS} digits")
    places = DIGITS - before
    scaled = round(value * 10**places)
    whole, part = divmod(abs(scaled), 10**places)
    shown = f"{whole}.{part:0{places}}".rstrip("0").rstrip(".") if places else str(whole)
    return f"-{shown}" if scaled < 0 else shown
