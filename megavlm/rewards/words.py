"""Normalisation of text for comparison: without case, accents, punctuation and articles; number
words as digits.
"""

import re
import unicodedata
from collections.abc import Sequence

_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_UNITS = {word: value for value, word in enumerate(_NUMBERS)} | {"none": 0}
_ROUND = {word: value for value, word in zip(range(20, 100, 10), _TENS, strict=True)}
_MINUS_WORDS = {"minus", "negative"}
_ARTICLES = {"a", "an", "the"}
# A point or a sign stays where it belongs to a number, a hyphen or an apostrophe within a word.
_NOT_WORD = re.compile(
    r"[^\w.'-]+|\.(?!\d)|(?<=[^\W\d])\.|(?<=\.)\.|(?<!\w)[-'](?!\.?\d)|['-](?!\w|\.\d)"
)
# Minus signs and dashes that are written for one, apostrophes.
ASCII_SIGNS = str.maketrans(
    dict.fromkeys("\u2212\u2012\u2013\ufe63\uff0d", "-") | dict.fromkeys("\u2019\u02bc", "'")
)
# Letters that no decomposition makes Latin ones.
_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe", "\u0131": "i"}
)


def plain(text: str) -> str:
    """Return the text in lower case without accents: "Côte d'Ivoire" is "cote d'ivoire"."""
    split = unicodedata.normalize("NFKD", text.casefold().translate(ASCII_SIGNS))
    return "".join(c for c in split if not unicodedata.combining(c)).translate(_LETTERS)


def tokens(text: str) -> list[str]:
    """Return all words and numbers in order."""
    return _NOT_WORD.sub(" ", plain(text).replace(",", " ")).split()


def normalized(text: str) -> str:
    """Normalise a short answer; articles are kept if there is nothing else."""
    words = _with_digits([part for word in tokens(text) for part in _parts(word)])
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _parts(word: str) -> list[str]:
    """Split "light-blue" and "twenty-one" in two words, but not "3-4"."""
    parts = word.split("-")
    return parts if all(part.isalpha() for part in parts) else [word]


def _with_digits(words: Sequence[str]) -> list[str]:
    """Replace number words up to 999 by digits: "minus two hundred and five" is "-205"."""
    found: list[str] = []
    index = 0
    while index < len(words):
        sign = words[index] in _MINUS_WORDS and index + 1 < len(words)
        start = index + sign
        value, end = _hundreds(words, start)
        if value is not None:
            found.append(f"{'-' if sign else ''}{value}")
        elif sign and words[start][0] in ".0123456789":
            found.append(f"-{words[start]}")
            end = start + 1
        else:
            found.append(words[index])
            end = index + 1
        index = end
    return found


def _hundreds(words: Sequence[str], start: int) -> tuple[int | None, int]:
    """Return the number that begins at `start`, None without one, and its end."""
    value, end = _below_hundred(words, start)
    hundred = start + 1 if words[start] in _ARTICLES else end
    if words[hundred : hundred + 1] != ["hundred"] or (value or 0) > 9:
        return value, end
    value, end = 100 * (1 if value is None else value), hundred + 1
    more, after = _below_hundred(words, end + (words[end : end + 1] == ["and"]))
    return (value, end) if more is None else (value + more, after)


def _below_hundred(words: Sequence[str], start: int) -> tuple[int | None, int]:
    if start >= len(words):
        return None, start
    if (unit := _UNITS.get(words[start])) is not None:
        return unit, start + 1
    if (tens := _ROUND.get(words[start])) is None:
        return None, start
    unit = _UNITS.get(words[start + 1], 0) if start + 1 < len(words) else 0
    return (tens + unit, start + 2) if 0 < unit < 10 else (tens, start + 1)
