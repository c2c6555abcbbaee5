r"""Mathematics with a final answer in \boxed{...}, <answer> or after "Answer:", compared by
math-verify. Unicode signs are read as their LaTeX (2√3, ½, x²).

Equivalence is symbolic (2\sqrt{3} is \sqrt{12}), so sympy evaluates text that a model wrote. Large
powers and long answers are refused first; the limits of the reward process bound everything else.
"""

import logging
import re
import unicodedata
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from math_verify import (
    ExprExtractionConfig,
    LatexExtractionConfig,
    parse,
    verify,
)

from megavlm.rewards import boxed
from megavlm.rewards.base import Score
from megavlm.rewards.options import check_number
from megavlm.rewards.words import ASCII_SIGNS

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

MAX_CHARACTERS = 500  # longest final answer that is read
MAX_DEPTH = 10  # deepest brackets in it: the LaTeX grammar takes seconds from 15 on
_HUGE_POWER = re.compile(r"(?:\^|\*\*)\s*[({]?\s*[+-]?\d{3,}|(?:\^|\*\*)[^+\-*/=,]*(?:\^|\*\*)|\d!")
_LETTER = re.compile(r"\(?([A-Ea-e])\)?[.:]?")
_OPTION = re.compile(r"\(?([A-E])[).:]\s*(\S.*)", re.S)  # "(A) 30", "A. 30"
_ANOTHER = re.compile(r"(?<![A-Za-z\\])[A-E](?:[).:]|\s*$)")
# Unicode signs. Ambiguous ones (√2x, ³√8) stay as they are, and are then refused.
_POWERS, _FRACTIONS = "⁰¹²³⁴⁵⁶⁷⁸⁹", "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
_AS_DIGITS = str.maketrans(_POWERS + "⁺⁻", "0123456789+-")
_POWER = re.compile(rf"(?<=[A-Za-z0-9)}}\]])([⁺⁻]?[{_POWERS}]++)(?!\s*[√∛∜⁄])")  # noqa: RUF001
_FRACTION = re.compile(rf"(?<![\d.^])(?:(\d++)\s?)?([{_FRACTIONS}])(?!\s*[\d.{_FRACTIONS}])")
_ROOT = re.compile(
    r"√\s*(?:(\d++(?:\.\d++)?)(?:(?=[cmk]m\b)|(?![.,]\d|[!A-Za-zπ]))|([A-Za-zπ])(?![\w^]))"
)
_UNREAD = re.compile(rf"[√∛∜⁺⁻ⁿ{_POWERS}{_FRACTIONS}]")
# "5 cm^2": a unit with a power is not a factor.
_UNIT = re.compile(
    r"(?<=[\d)}π\s])(?:[cmk]m|in|ft|yd|mi|units?|inch(?:es)?|feet|meters?|metres?|(?<=\s)m)"
    r"\s*\^\{?[23]\}?\s*$"
)
_QUANTITY = re.compile(r"\\(?:text|math)(?:rm|bf|it)?\{(\s*[+-]?[.\d][^{}]*)\}")
_FORMS = (LatexExtractionConfig(), ExprExtractionConfig())


def check_options(
    right: Any = 0.9, wrong: Any = 0.0, format_reward: Any = 0.1, bare: Any = False
) -> None:
    """Check the options. Raises ValueError for one of the wrong type."""
    for name, value in (("right", right), ("wrong", wrong), ("format_reward", format_reward)):
        check_number(f"geo3k's {name}", value)
    if not isinstance(bare, bool):
        raise ValueError(f"geo3k's bare is {bare!r}: set it to true or false")


def score(
    response: str,
    row: Mapping[str, Any],
    right: float = 0.9,
    wrong: float = 0.0,
    format_reward: float = 0.1,
    bare: bool = False,
) -> Score:
    r"""Return `right` or `wrong` for the last answer, plus `format_reward` if it is in \boxed{...}.
    bare: a response with neither a box nor "Answer:" is an answer as it is.
    """
    response = boxed.after_thinking(response)
    in_box = boxed.last_boxed(response)
    found = in_box if in_box is not None else boxed.last_tagged(response)
    if found is None:
        found = boxed.after_answer(response)
    if found is None and bare:
        found = response
    correct = found is not None and is_equivalent(found, str(row["answer"]))
    has_form = in_box is not None
    return Score(
        reward=(right if correct else wrong) + format_reward * has_form,
        correct=correct,
        parts={"answer": float(correct), "format": float(has_form)},
    )


def is_equivalent(found: str, answer: str) -> bool:
    """Return True if two final answers are mathematically equal. An answer that is too large to
    evaluate is wrong.
    """
    if len(found) > MAX_CHARACTERS:
        return False
    found, answer = _as_latex(found), _as_latex(answer)
    if boxed.is_equal(found, answer):
        return True
    letter, found = _option(found)
    if choice := _LETTER.fullmatch(answer.strip()):
        return letter == choice[1].upper()
    found = _UNIT.sub("", found)
    if _HUGE_POWER.search(found) or _depth(found) > MAX_DEPTH or _UNREAD.search(found):
        return False
    if letter and boxed.is_equal(found, answer):
        return True
    # math-verify's own time limits use signals, which only a main thread can get. They are off,
    # because the reward process has limits of its own.
    gold, forms = (
        parse(f"${text.strip().strip('$')}$", _FORMS, parsing_timeout=None)
        for text in (answer, found)
    )
    return bool(gold) and verify(gold, forms, timeout_seconds=None)


def _as_latex(text: str) -> str:
    r"""Rewrite 2√3, √(x+1), 2½, x² and ≈ as LaTeX, and \text{5 cm} as 5 cm."""
    text = _QUANTITY.sub(r"\1 ", text.translate(ASCII_SIGNS))
    text = re.sub(r"(?<=\d)⁰(?![⁰¹²³⁴-⁹√])", "°", text)
    text = _POWER.sub(lambda power: _power(power[1].translate(_AS_DIGITS)), text)
    text = _FRACTION.sub(lambda found: _fraction(int(found[1] or 0), found[2]), text)
    for sign, latex in (("⁄", "/"), ("≈", r"\approx "), ("·", r"\cdot ")):  # noqa: RUF001
        text = text.replace(sign, latex)
    text = _ROOT.sub(r"\\sqrt{\1\2}", re.sub(r"√\s*(?=[{(])", r"\\sqrt", text))
    return _braced(text)


def _power(digits: str) -> str:
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _fraction(whole: int, sign: str) -> str:
    """Return 2½ as 5/2 in LaTeX."""
    over, under = map(int, unicodedata.normalize("NFKC", sign).split("\u2044"))
    return rf"\frac{{{whole * under + over}}}{{{under}}}"


def _braced(text: str) -> str:
    r"""Replace \sqrt(...) by \sqrt{...}, because math-verify does not read the former."""
    parts: list[str] = []
    roots: list[bool] = []  # for each open bracket, whether it belongs to a root
    for part in re.findall(r"\\sqrt\(|[^()\\]+|.", text, re.S):
        if part in ("(", r"\sqrt("):
            roots.append(part != "(")
            part = part.replace("t(", "t{")
        elif part == ")" and roots and roots.pop():
            part = "}"
        parts.append(part)
    return "".join(parts)


def _depth(text: str) -> int:
    """Return how deeply brackets are nested, closed or not."""
    steps = ((c in "({[") - (c in ")}]") for c in text)
    return max(accumulate(steps), default=0)


def _option(found: str) -> tuple[str, str]:
    """Return the letter of a multiple-choice option (or "") and the rest of the text. A text with
    two options has no letter.
    """
    text = boxed.unwrapped(found).strip().strip("$").strip()
    if alone := _LETTER.fullmatch(text):
        return alone[1].upper(), found
    labelled = _OPTION.fullmatch(text)
    if labelled is None:
        return "", found
    return ("", "") if _ANOTHER.search(labelled[2]) else (labelled[1], labelled[2])
