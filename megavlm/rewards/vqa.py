"""Short answers to questions about pictures, compared as their kind asks.

    yes_no   one of the two words, first or alone
    number   the only number that is said, within a tolerance; number words too
    choice   the letter of an option, or its text where the row has `choices`
    text     normalised text, alone or after "is"; any of the row's `answers` where it has some

The kind is that of the row's category (counting, attribute, existence, ...), or what its answer is.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megavlm.rewards import boxed
from megavlm.rewards.base import Score
from megavlm.rewards.words import normalized

MAX_CHARACTERS = 2000  # of a final answer
KINDS = ("yes_no", "number", "choice", "text")
CATEGORIES = {
    "counting": "number",
    "count": "number",
    "number": "number",
    "numeric": "number",
    "existence": "yes_no",
    "yes_no": "yes_no",
    "multiple_choice": "choice",
    "choice": "choice",
    "attribute": "text",
    "text": "text",
}
_UNIT = r"(?:[kcm]?m|[km]?g|lbs?|oz|ft|in|inch|inches|miles?|k?w|m?l|sec|min|hrs?|deg|px)[23]?"
_NUMBER = re.compile(rf"(?<![\w.])(-?(?:\d+(?:\.\d+)?|\.\d+))(?:\s?({_UNIT}))?(?!\w)")
_LETTER = re.compile(r"\(?([A-Za-z])(?:[).:]|\Z)")
_IS = re.compile(r"^.*\b(?:is|are|was|were)\b")


def prepare(kinds: Mapping[str, str] | None = None, **_: Any) -> None:
    """Raises ValueError for a kind that is not known."""
    for category, kind in (kinds or {}).items():
        if kind not in KINDS:
            raise ValueError(
                f"the category {category!r} cannot be {kind!r}: kinds are {', '.join(KINDS)}"
            )


def score(
    response: str,
    row: Mapping[str, Any],
    tolerance: float = 0.0,
    relative: float = 0.0,
    right: float = 1.0,
    wrong: float = 0.0,
    kinds: Mapping[str, str] | None = None,
) -> Score:
    """`tolerance`, `relative`: how far a number may be off, as such and as a share of the answer.
    `kinds`: of further categories.
    """
    kind = kind_of(row, kinds or {})
    correct = is_correct(final_answer(response), row, kind, tolerance, relative)
    return Score(right if correct else wrong, correct)


def kind_of(row: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    category = str(row.get("category", "")).lower().replace("-", "_").replace(" ", "_")
    known = {**CATEGORIES, **kinds}
    if category in known:
        kind = known[category]
        # Sets disagree about what such a question is: "what colour is there" is existence, too.
        if kind == "yes_no" and normalized(row["answer"]) not in ("yes", "no"):
            return "text"
        return kind
    answer = str(row["answer"]).strip()
    if normalized(answer) in ("yes", "no"):
        return "yes_no"
    if row.get("choices") or re.fullmatch(r"[A-F]", answer):
        return "choice"
    return "number" if _NUMBER.fullmatch(normalized(answer)) else "text"


def final_answer(response: str) -> str:
    r"""What is in the last \boxed{...}, or after the last "Answer:", or all of it."""
    found = boxed.last_boxed(response)
    if found is None:
        found = boxed.after_answer(response)
    return (response if found is None else found).strip()


def is_correct(
    found: str, row: Mapping[str, Any], kind: str, tolerance: float, relative: float
) -> bool:
    if len(found) > MAX_CHARACTERS:
        return False
    answer = str(row["answer"])
    if kind == "yes_no":
        said = normalized(found).split()
        both = {"yes", "no"} <= set(said)
        return bool(said) and not both and said[0] == normalized(answer)
    if kind == "number":
        truth, said_number = _only_number(answer), _only_number(found)
        if truth is None or said_number is None:
            return False
        if truth.unit and said_number.unit and truth.unit != said_number.unit:
            return False
        far = abs(said_number.value - truth.value)
        return far <= max(tolerance, relative * abs(truth.value)) + 1e-9
    if kind == "choice":
        return _choice(found, row) == _choice(answer, row) is not None
    answers = [answer, *(row.get("answers") or ())]
    said_text = normalized(found)
    after_is = _IS.sub("", said_text).strip()
    return any(text in (said_text, after_is) for text in map(normalized, answers) if text)


class _Number(NamedTuple):
    value: float
    unit: str  # "" where none is said


def _only_number(text: str) -> _Number | None:
    """A second one would be a guess more."""
    digits = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    found = {_Number(float(number), unit) for number, unit in _NUMBER.findall(normalized(digits))}
    return found.pop() if len(found) == 1 else None


def _choice(text: str, row: Mapping[str, Any]) -> str | None:
    """The letter that is meant."""
    choices = [normalized(str(choice)) for choice in row.get("choices") or ()]
    if (said := normalized(text)) and said in choices:
        return chr(ord("A") + choices.index(said))
    match = _LETTER.match(text.strip().strip("*"))
    return match[1].upper() if match else None
