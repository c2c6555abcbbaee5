"""Text as it is compared: without case, accents, punctuation, articles; number words as digits."""

import re
import unicodedata

_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty""".split()
NUMBER_WORDS = {word: str(value) for value, word in enumerate(_NUMBERS)} | {"none": "0"}
_ARTICLES = {"a", "an", "the"}
_NOT_WORD = re.compile(r"[^\w.'-]+|(?<!\d)\.|\.(?!\d)|(?<!\w)[-'](?!\d)|['-](?!\w)")
# Letters that no decomposition turns into Latin ones.
_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe", "\u0131": "i"}
)


def plain(text: str) -> str:
    """Lower case without accents: "Côte d'Ivoire" is "cote d'ivoire"."""
    split = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in split if not unicodedata.combining(c)).translate(_LETTERS)


def tokens(text: str) -> list[str]:
    """Words and numbers in order, all of them."""
    return _NOT_WORD.sub(" ", plain(text).replace(",", " ")).split()


def normalized(text: str) -> str:
    """For comparison of short answers."""
    words = (NUMBER_WORDS.get(word, word) for word in tokens(text))
    return " ".join(word for word in words if word not in _ARTICLES)
