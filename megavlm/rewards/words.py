"""Normalisation of text for comparison: case, accents, punctuation and articles are removed, and
number words become digits. Signs that distinguish answers stay: A+ and A-, C#, <5, 5%, $5.
"""

import unicodedata
from collections.abc import Sequence

import regex as re  # its \w includes the vowel signs and tone marks of every script

_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_UNITS = {word: value for value, word in enumerate(_NUMBERS)} | {"none": 0}
_ROUND = {word: value for value, word in zip(range(20, 100, 10), _TENS, strict=True)}
_MINUS_WORDS = {"minus", "negative"}
_ARTICLES = {"a", "an", "the"}
# A point or a sign stays if it belongs to a number; a hyphen or an apostrophe, within a word.
_NOT_WORD = re.compile(
    r"[^\w.'-]+|\.(?!\d)|(?<=[^\W\d])\.|(?<=\.)\.|(?<!\w)[-'](?!\.?\d)|['-](?!\w|\.\d)"
)
CURRENCY = "$\u00a2-\u00a5\u0e3f\u20a0-\u20c0"  # for use in a character class
# "+5" and "#5" are 5; the hyphen of "A-" is a minus, that of "red - blue" and "red--blue" a dash.
_SIGN = re.compile(
    rf"([<\u00b0\u00b1\u2264\u2265\u266d\u266f%{CURRENCY}]|(?<![-=])>"
    r"|(?<!\w)(?:\+(?!\.?\d)|#(?! ?\d))|(?<=\w)(?:[+#]|-(?![\w-]|\.\d)))"
)
# Scripts written without spaces. For most of them, Unicode's words (UAX 29) are single characters.
_NO_SPACES = re.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_BOUNDARY = re.compile(r"(?V1w)\b")
_CONTRACTION = re.compile(
    r"\b(is|are|was|were|do|does|did|has|have|had|ca|wo|could|should|would|must)nt\b"
)
# Full-width forms, and Chinese and Japanese punctuation except the full stop.
_WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    "\u3000\u3001\u3010\u3011\u300c\u300d\u300e\u300f\u300a\u300b", ' ,[]""""""'
)
# Also minus signs, dashes that are used as minus signs, and apostrophes.
ASCII_SIGNS = (
    _WIDE
    | str.maketrans(dict.fromkeys("\u2212\u2012\u2013\ufe63", "-"))
    | str.maketrans(dict.fromkeys("\u2019\u02bc", "'"))
)
# Letters that Unicode does not decompose into Latin ones; the degree sign of some keyboards.
_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe", "\u0131": "i"}
)
_DEGREE = str.maketrans("\u00ba\u02da", "\u00b0\u00b0")
# 10² must not become 102, nor 2½ 21/2.
_RAISED = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2079\u2150-\u215e])")


def text_of(value: object) -> str:
    """Return a column's value as text. Raises ValueError for bytes, whose text would be b'...'."""
    if isinstance(value, bytes):
        raise ValueError(
            f"{value!r:.40} is bytes, but a text is compared: store the column as text"
        )
    return str(value)


def plain(text: str) -> str:
    """Return the text in lower case without accents: "Côte d'Ivoire" is "cote d'ivoire"."""
    text = _RAISED.sub(" ", text.casefold().translate(ASCII_SIGNS).translate(_DEGREE))
    split = unicodedata.normalize("NFKD", text)
    kept = "".join(c for c in split if not _is_accent(c)).translate(_LETTERS)
    return unicodedata.normalize("NFC", kept)


def _is_accent(character: str) -> bool:
    """Return True for a mark that can be left out. False for the voicing marks of kana, the tone
    marks of Thai and the viramas of Indian scripts (combining classes 7 to 9 and 84 to 132).
    """
    kind = unicodedata.combining(character)
    return 10 <= kind < 84 or kind > 132


def tokens(text: str) -> list[str]:
    """Return all words and numbers in order."""
    found: list[str] = []
    for word in _NOT_WORD.sub(" ", plain(text).replace(",", " ")).split():
        if _NO_SPACES.search(word):
            found += [part for part in _BOUNDARY.split(word) if part.strip("-'.")]
        else:
            found.append(word)
    return found


def normalized(text: str) -> str:
    """Normalise a short answer. Articles and signs are kept if there is nothing else."""
    words: list[str] = []
    for index, part in enumerate(_SIGN.split(_CONTRACTION.sub(r"\1n't", plain(text)))):
        words += [part] if index % 2 else tokens(part)
    words = _with_digits([part for word in words for part in _parts(word)])
    kept = [word for word in words if word not in _ARTICLES] or words
    whole = "".join(text.split())
    return " ".join(kept) or whole.removesuffix(".") or whole


def _parts(word: str) -> list[str]:
    """Split "light-blue" and "twenty-one" into two words, but not "3-4"."""
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
    """Return the number that begins at `start` (None if there is none) and its end."""
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
