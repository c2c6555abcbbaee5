"""Bounded arithmetic from text: no code is executed, and no value exceeds the range of a float."""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from megavlm.rewards.words import ASCII_SIGNS

MAX_EXPRESSION = 200
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    name: getattr(math, name)
    for name in "sqrt sin cos tan asin acos atan atan2 radians degrees exp log hypot".split()
} | {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda x, digits=0.0: float(round(x, int(digits))),
}
_ROOT = re.compile(r"√\s*(?P<number>\d+(?:\.\d+)?)|√\s*(?=\()")
# The multiplication sign may be left out before these.
_LEFT_OUT = re.compile(r"(?<=[\d)])\s*(?=[π√])")
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> float:
    """Return the value of an expression with + - * / // % ** (or ^), parentheses, pi, e and the
    usual functions, or their Unicode signs. The multiplication sign may be left out, as in 2√3.

    Raises ValueError, with a reason of a few words, for anything else.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"longer than {MAX_EXPRESSION} characters")
    text = _LEFT_OUT.sub("*", expression.translate(ASCII_SIGNS).strip())
    text = _ROOT.sub(lambda root: f"sqrt({root['number']})" if root["number"] else "sqrt", text)
    for sign, plain in (("π", "pi"), ("^", "**"), ("×", "*"), ("÷", "/")):  # noqa: RUF001
        text = text.replace(sign, plain)
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("not an expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, TypeError):
        raise ValueError("no such value") from None
    if not math.isfinite(value):
        raise ValueError("too large")
    return value


def shown(value: float) -> str:
    """Format a number with at most ten digits, and whole numbers without a decimal point."""
    return f"{value:.10g}"


def _value(node: ast.AST) -> float:
    """Return the value of a node. Every number is a float, so that powers have a bounded cost."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*_values(arguments))
    raise ValueError("only numbers, + - * / ** ( ), pi, e and " + ", ".join(_FUNCTIONS))


def _values(nodes: list[Any]) -> list[float]:
    return [_value(node) for node in nodes]
