"""Compares a description with reference captions: the row's `references`, or its answer."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megavlm.numbers import at_least
from megavlm.rewards import boxed
from megavlm.rewards.base import Score
from megavlm.rewards.options import check_number, check_weights
from megavlm.rewards.words import text_of, tokens
from megavlm.tasks.caption.metrics import (
    Corpus,
    Words,
    cider_d,
    coverage,
    keywords_of,
    rouge_l,
)

MAX_WORDS = 400  # the rest of a longer response is not read, but counts towards its length
METRICS = ("cider", "rouge", "keywords")
DEFAULT_WEIGHTS = {"rouge": 0.5, "keywords": 0.5}


def check_options(
    weights: Any = None,
    corpus: str | None = None,
    reference_key: str = "references",
    correct_from: Any = 0.5,
) -> None:
    """Check the options. Raises ValueError for an unknown metric, or CIDEr without a corpus."""
    check_weights("caption", weights, METRICS)
    check_number("caption's correct_from", correct_from)
    if (weights or {}).get("cider") and corpus is None:
        raise ValueError(
            "cider needs the captions by which words are weighed: set corpus_files to data files, "
            "${data.train_files} for example"
        )
    if corpus is not None:
        read_corpus(corpus)


def check_row(
    row: Mapping[str, Any], reference_key: str = "references", **_: Any
) -> list[list[str]]:
    """Return the words of the row's references. Raises ValueError if it has none, because every
    response would get 0.
    """
    value = row.get(reference_key) or row.get("answer")
    texts = value if isinstance(value, list) else [value]
    references = [words for text in texts if text is not None and (words := tokens(text_of(text)))]
    if not references:
        raise ValueError(
            f"caption has nothing to compare with: the row has no {reference_key!r} and no answer; "
            "name the column of captions in data.extra_keys, and as reference_key in its options"
        )
    return references


def score(
    response: str,
    row: Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
    corpus: str | None = None,
    reference_key: str = "references",
    correct_from: float = 0.5,
) -> Score:
    """Return the weighted sum of metrics (CIDEr-D 0 to 10, the others 0 to 1), correct from
    `correct_from`. corpus: file that the trainer writes from a recipe's `corpus_files`.
    """
    weights = weights or DEFAULT_WEIGHTS
    references = check_row(row, reference_key)
    words = tokens(boxed.after_thinking(response))
    caption: Words = words[:MAX_WORDS]
    parts: dict[str, float] = {}
    if weights.get("rouge"):
        # All words in the unread tail of a long response count as wrong.
        parts["rouge"] = rouge_l(caption, references) * len(caption) / max(len(words), 1)
    if weights.get("keywords"):
        given = {
            word for text in row.get("keywords") or () if (word := tuple(tokens(text_of(text))))
        }
        parts["keywords"] = coverage(caption, given or keywords_of(references))
    if weights.get("cider"):
        assert corpus is not None
        long = len(words) > MAX_WORDS
        parts["cider"] = 0.0 if long else cider_d(caption, references, read_corpus(corpus))
    reward = sum(weights[name] * value for name, value in parts.items())
    return Score(reward, at_least(reward, correct_from), parts)


@lru_cache(maxsize=1)
def read_corpus(file: str) -> Corpus:
    """Read a file with the references of one image in each line, as JSON."""
    with open(file, encoding="utf-8") as lines:
        return Corpus.of([tokens(text) for text in json.loads(line)] for line in lines)
