r"""Reward for mathematics: a final answer after free reasoning, in \boxed{...} or after "Answer:".

Numbers are compared exactly as fractions (0.5, 1/2, \frac{1}{2}, 50\%), and anything else as
normalised text. Nothing is evaluated: no expression, no power, no symbolic equality (2\sqrt{3} is
not \sqrt{12}). The time is linear in the length of the response, whatever it contains.
"""

import re
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from megavlm.rewards.base import Score
from megavlm.rewards.words import ASCII_SIGNS

FORMAT_REWARD = 0.1
# \boxed5, \boxed{, an escaped backslash or brace, a brace
_BRACE = re.compile(
    r"\\boxed(?:\s{0,20}(?P<bare>[+-]?\d[\d.,]{0,30})|(?P<box>\s*\{))|\\[\\{}]|[{}]"
)
_OPEN_THOUGHT = re.compile(r"<think>.*?(?=<answer>|\Z)", re.I | re.S)
# "**Answer**:", a heading "### Answer", a key of JSON
_ANSWER = re.compile(
    r"(?:\banswer(?:[\s*_]{0,4}|(?P<key>\"\s?))|答案[\s*]{0,4})[:\uff1a]"
    r"|^#{1,6} (?:final |correct )?answer\**$",
    re.IGNORECASE | re.MULTILINE,
)
_JSON_VALUE = re.compile(r'"((?:[^"\\\n]|\\.)*)"|-?[\d.]+')
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{([^{}]+)\}\{([^{}]+)\}|([^/]+)/([^/]+))")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname)\{([^{}]*)\}"
)
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])")
_CHOICE = re.compile(r"\(([a-z])\)")
_DROPPED = (
    "\\left",
    "\\right",
    "\\displaystyle",
    "\\!",
    "\\,",
    "\\;",
    "\\ ",
    "\\$",
    "$",
    "^{\\circ}",
    "^\\circ",
    "°",
)


def score(response: str, row: Mapping[str, Any]) -> Score:
    r"""Reward 0.9 for a correct answer after the thoughts and 0.1 for one in \boxed{...}; the last
    one counts.
    """
    response = after_thinking(response)
    boxed = last_boxed(response)
    found = boxed if boxed is not None else after_answer(response)
    correct = found is not None and is_equal(found, row["answer"])
    reward = (1.0 - FORMAT_REWARD) * correct + FORMAT_REWARD * (boxed is not None)
    return Score(reward=reward, correct=correct)


def is_equal(left: str, right: str) -> bool:
    """Return True if two answers are the same number or, normalised, the same text."""
    left, right = _normalize(left), _normalize(right)
    if left == right:
        return bool(left)
    left_number, right_number = _number(left), _number(right)
    return left_number is not None and left_number == right_number


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} that is closed and not empty, or None. Of nested
    boxes the inner one counts, as in math-verify.
    """
    last, content = -1, None
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace["bare"]:
            last, content = brace.start(), brace["bare"].rstrip(".,")
        elif brace["box"] or brace[0] == "{":
            opened.append(brace)
        elif brace[0] == "}" and opened:
            box = opened.pop()
            if box["box"] and box.start() > last and text[box.end() : brace.start()].strip():
                last, content = box.start(), text[box.end() : brace.start()]
    return content


def after_answer(text: str) -> str | None:
    """Return the rest of the line after the last "Answer:", the value after a key "answer", or
    None.
    """
    matches = deque(_ANSWER.finditer(text), maxlen=1)
    if not matches:
        return None
    rest = text[matches[0].end() :].strip()
    if matches[0]["key"] and (value := _JSON_VALUE.match(rest)):
        return value[0] if value[1] is None else value[1].replace("\\\\", "\\")
    return rest.partition("\n")[0].strip().strip("*").strip() or None


def last_tagged(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>, or None."""
    content, start = None, None
    for tag in re.finditer("<(/?)answer>", text, re.IGNORECASE):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            content, start = text[start : tag.start()].strip(), None
    return content


def after_thinking(text: str) -> str:
    """Return the text after the first </think>, which ends a thought for SGLang's parsers too, or
    the whole text if there is none. A </think> in the arguments of a tool call is text, unless a
    <think> comes before it. A thought that is not closed ends at <answer>.
    """
    thought, closed, rest = text.partition("</think>")
    in_call = thought.rfind("<tool_call>") > thought.rfind("</tool_call>")
    if closed and ("<think>" in thought or not in_call):
        return rest
    return text if closed else _OPEN_THOUGHT.sub("", text)


def unwrapped(text: str) -> str:
    r"""Remove \text{...}, \textbf{...} and similar commands, up to two nested ones."""
    return _WRAPPER.sub(r"\1", _WRAPPER.sub(r"\1", text))


def _normalize(text: str) -> str:
    text = text.translate(ASCII_SIGNS).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = unwrapped(text)
    for symbol in _DROPPED:
        text = text.replace(symbol, "")
    text = "".join(text.split()).rstrip(".").casefold()
    if choice := _CHOICE.fullmatch(text):
        text = choice[1]
    return _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)


def _number(text: str) -> Fraction | None:
    """Return the exact value of a number, a fraction of two numbers or a percentage, or None."""
    for percent in ("\\%", "%"):
        if text.endswith(percent):
            value = _decimal(text.removesuffix(percent))
            return None if value is None else value / 100
    match = _FRACTION.fullmatch(text)
    if match is None:
        return _decimal(text)
    sign, *parts = match.groups()
    numerator, denominator = (_decimal(part) for part in parts if part is not None)
    if numerator is None or not denominator:
        return None
    return (-1 if sign == "-" else 1) * numerator / denominator


def _decimal(text: str) -> Fraction | None:
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return Fraction(text.rstrip(".")) if _NUMBER.fullmatch(text) else None
