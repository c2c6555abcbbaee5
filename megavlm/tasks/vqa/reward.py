r"""Short answers to questions about images, compared by the rules for their kind.

    yes_no   one of the two words, as the first or the only word
    number   the only number in the text, within a tolerance; also number words
    choice   the letter of an option, alone, marked ("(B)", "B.", "option B") or with a reason, or
             the text of the option if the row has `choices`
    text     normalised text, alone or after "is"; any of the row's `answers` if it has some

The row's category (counting, attribute, existence, ...) sets the kind; otherwise its answer does.
The answer is the text in \boxed{}, after "Answer:" or "the answer is", or the whole response.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megavlm.rewards import boxed
from megavlm.rewards.base import Score
from megavlm.rewards.options import check_number
from megavlm.rewards.words import ASCII_SIGNS, CURRENCY, normalized, text_of

MAX_CHARACTERS = 2000  # of a final answer
ANSWER_KINDS = ("yes_no", "number", "choice", "text")
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
_SIGN = rf"%|\u00b0(?:\s?[cf]\b)?|[{CURRENCY}]"
_NUMBER = re.compile(rf"(?<![\w.])(-?(?:\d+(?:\.\d+)?|\.\d+))(?:\s?({_UNIT}|{_SIGN}))?(?!\w)")
_NOT_NUMBER = re.compile(rf"(?:\bnot|n't) {_NUMBER.pattern}")
_PRICE = re.compile(rf"(?:(-)\s?)?([{CURRENCY}])\s?(-?\.?\d(?:[\d.]*\d)?)")  # $5
_BOUND = re.compile(r"[<>\u00b1\u2264\u2265] |\d \+")  # ">5" and "5+" are not 5
_ANSWER_IS = re.compile(r"(?:\b(?:answer|option|choice)\s+(?:is|are)\b|答案[是为為])\s*:?", re.I)
_SENTENCE_END = re.compile(r"\n|。|(?:(?<=[a-z]{3})|(?<=\d))[.!]\s+(?=[A-Z])")
_EXPLANATION = re.compile(
    r"\n\W{0,6}(?:explanation|reason(?:ing)?|justification)\W{0,3}[:\n]", re.I
)
# Markup of LaTeX, HTML and Markdown (a heading, a list), and quotes.
_MARKS = re.compile(
    r"\\[()\[\]]|</?[A-Za-z]\w*\s?/?>|\*\*|__|[`\"“”]|^[ \t]*(?:#{1,6}|[+*-])[ \t]+(?=\S)",
    re.M,
)
_FORMULA = re.compile(r"\${1,2}(?=\S)([^$\n]+)(?<=\S)\${1,2}(?!\d)")  # $5$, not $5-$10
# Text before one of the words, as in "Based on the image, yes".
_PREFACE = re.compile(
    r"^(?:based on|according to|judging by|looking at|in|from) [^,.:;\n]{1,80}, (?=(?:yes|no)\b)"
)
# "no dogs", "no one": not a second answer, unless it directly follows "yes" or "or".
_NO_NOUN = re.compile(
    r"(?<!yes )(?<!yes and )(?<!or )(?<!actually )(?<!wait )\bno[- ](?!(?:yes|not?|i|it|its|it's"
    r"|he|she|we|you|they|this|that|that's|these|those|there|there's|the|an?|and|or|but|nor|so|if"
    r"|as|is|are|isn't|aren't|was|were|do|does|doesn't|don't|can|cannot|can't|because|since|to"
    r"|maybe|perhaps|probably|actually|wait|sorry|in|on|at|not)\b)(?=[a-z])"
)
_NONE = re.compile(r"there (?:are|were) no \w+(?: (?:in|on|at) .*)?")
_IS = re.compile(
    r"^.*\b(?:is|are|was|were|it's|(?:appears?|seems?) to be)\b"
    r"(?: (?:most )?(?:likely|probably)\b)?"
)
_LEAD = (
    r"(?:it'?s\s+|it\s+is\s+|i(?:'d)?\s+(?:choose|pick|select|say)\s+)?"
    r"(?:(?:option|choice|letter)\s+)?"
)
# The letter of an option is alone, has a bracket, point or colon, or is followed by a reason.
_LETTER = re.compile(
    rf"{_LEAD}[(\[]?([A-Z])(?:[)\].:。]+|\s*$|(?=,?\s+(?:because|since|as|due)\b)"
    r"|(?=,\s?[\u4e00-\u9fff])|(?=\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b)|(?=\s+[-\u2013\u2014]\s))",
    re.I,
)
# Text after the letter that rejects it, or that names another letter.
_NOT_THIS = re.compile(
    r"\s*(?:,?\s?不|is\s+(?:not|wrong|incorrect|false|out)\b|(?:isn't|cannot|can't)\b"
    r"|(?:and|or|nor|but|[&/,])\s*(?:not\s+)?(?:option\s+)?(?-i:[(\[][A-Za-z][)\]]|[A-H]\b)"
    r"|(?-i:[(\[]?[A-H](?:[)\].,:]|\s*$)))",
    re.I,
)


def check_options(
    tolerance: Any = 0.0,
    relative: Any = 0.0,
    right: Any = 1.0,
    wrong: Any = 0.0,
    kinds: Any = None,
) -> None:
    """Check the options. Raises ValueError for an unknown kind or a value that is not a number."""
    check_number("vqa's tolerance", tolerance, least=0)
    check_number("vqa's relative tolerance", relative, least=0)
    check_number("vqa's right", right)
    check_number("vqa's wrong", wrong)
    if not isinstance(kinds, Mapping | None):
        raise ValueError(f"vqa's kinds are {kinds!r}: give CATEGORY: KIND for each")
    for category, kind in (kinds or {}).items():
        if kind not in ANSWER_KINDS:
            raise ValueError(
                f"the category {category!r} cannot be {kind!r}: kinds are {', '.join(ANSWER_KINDS)}"
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
    """Score a short answer.

    tolerance, relative: allowed error of a number, absolute and as a share of the answer. kinds:
    kinds of other categories. The kind is reported as a part of the reward, so that metrics have
    the accuracy by kind.
    """
    kind = kind_of(row, kinds or {})
    correct = is_correct(response, row, kind, tolerance, relative)
    return Score(right if correct else wrong, correct, {kind: float(correct)})


def kind_of(row: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    category = str(row.get("category", "")).lower().replace("-", "_").replace(" ", "_")
    known = {**CATEGORIES, **kinds}
    if category in known:
        # Data sets use categories differently: "what colour is there" is existence in some.
        kind = known[category]
        fits = kind == "text" or _read_claim(kind, str(row["answer"]), row) is not None
        return kind if fits else "text"
    answer = str(row["answer"]).strip()
    if normalized(answer) in ("yes", "no"):
        return "yes_no"
    if row.get("choices") or re.fullmatch(r"[A-F]", answer):
        return "choice"
    return "number" if _NUMBER.fullmatch(_plain_numbers(answer)) else "text"


def final_answers(response: str) -> list[str]:
    r"""Return candidates for the final answer: the content of the last \boxed{...} or <answer>, or
    the text after the last "Answer:", or the whole response, each up to "Explanation:". If this
    text has "answer is", the sentence after the last one is a candidate before it. The caller takes
    the first candidate of the right kind. Thoughts are ignored.
    """
    response = boxed.after_thinking(response)
    found = boxed.last_boxed(response)
    if found is None:
        found = boxed.last_tagged(response)
    if found is None:
        found = boxed.after_answer(response)
    whole = _cleaned(response if found is None else found)
    _, *told = _ANSWER_IS.split(whole[-MAX_CHARACTERS:])
    whole = _EXPLANATION.split(whole, maxsplit=1)[0].strip()
    texts = [_SENTENCE_END.split(told[-1].strip())[0]] if told else []
    return [*texts, whole] if len(whole) <= MAX_CHARACTERS else texts


def _cleaned(text: str) -> str:
    r"""Remove LaTeX and Markdown: \(\text{B}\), **B** and "B" are B. A text of only marks stays."""
    plain = _MARKS.sub("", boxed.unwrapped(text.translate(ASCII_SIGNS)))
    return _FORMULA.sub(r"\1", plain).strip().strip("*'").strip() or text.strip()


def is_correct(
    response: str, row: Mapping[str, Any], kind: str, tolerance: float, relative: float
) -> bool:
    answer = str(row["answer"])
    found = final_answers(response)
    if kind == "text":  # any text is an answer of this kind, so the first counts
        claims = {claim for text in found[:1] for claim in _spellings(text)}
        answers = [answer, *(row.get("answers") or ())]
        return any(text in claims for given in answers if (text := normalized(_cleaned(given))))
    claim = next(
        (claim for text in found if (claim := _read_claim(kind, text, row)) is not None), None
    )
    truth = _read_claim(kind, answer, row)
    if isinstance(claim, _Number) and isinstance(truth, _Number):
        return claim.is_near(truth, max(tolerance, relative * abs(truth.value)))
    return claim is not None and claim == truth


def _read_claim(kind: str, text: str, row: Mapping[str, Any]) -> "str | _Number | None":
    """Return the answer of that kind in a text, or None if there is none or several."""
    if kind == "number":
        return _only_number(text)
    if kind == "choice":
        return _choice(text, row)
    return _yes_or_no(text)


def _yes_or_no(text: str) -> str | None:
    """Return the first of the two words, unless the other one is an answer too: "Yes, there are no
    dogs" is a yes.
    """
    claim = _PREFACE.sub("", re.sub(r"[^\S\n]+", " ", text.lower()), count=1)
    lead, *rest = normalized(claim).split() or [""]
    if lead == "yes":
        return None if "no" in normalized(_NO_NOUN.sub(" ", claim)).split() else lead
    return lead if lead == "no" and "yes" not in rest else None


def _spellings(text: str) -> tuple[str, str]:
    """Return the normalised text, and its part after "is"."""
    claim = normalized(text)
    return claim, _IS.sub("", claim).strip()


class _Number(NamedTuple):
    value: float
    unit: str  # "" if none is given

    def is_near(self, other: "_Number", tolerance: float) -> bool:
        units = {self.unit, other.unit} - {""}
        same_unit = len(units) < 2 or units in ({"\u00b0", "\u00b0c"}, {"\u00b0", "\u00b0f"})
        return same_unit and abs(self.value - other.value) <= tolerance + 1e-9


def _only_number(text: str) -> _Number | None:
    """Return the only number of a text, or None if there are several."""
    claim = _NOT_NUMBER.sub("", _plain_numbers(text))
    if _BOUND.search(claim):
        return None
    found = _NUMBER.findall(claim)
    if not found and _NONE.fullmatch(normalized(text)):
        return _Number(0.0, "")
    values = {float(number) for number, _ in found}
    units = {unit.replace(" ", "") for _, unit in found if unit} or {""}
    return _Number(values.pop(), units.pop()) if len(values) == len(units) == 1 else None


def _plain_numbers(text: str) -> str:
    """Return the normalised text, with numbers written as 1200 and prices as 5 $."""
    digits = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.translate(ASCII_SIGNS))
    return normalized(_PRICE.sub(r"\1\3 \2", digits))


def _choice(text: str, row: Mapping[str, Any]) -> str | None:
    """Return the letter of the chosen option, or None."""
    choices = [normalized(text_of(choice)) for choice in row.get("choices") or ()]
    for claim in _spellings(text):
        if claim and claim in choices:
            return chr(ord("A") + choices.index(claim))
    match = _LETTER.match(text.strip())
    if match is None or _NOT_THIS.match(text.strip(), match.end()):
        return None
    return match[1].upper()
