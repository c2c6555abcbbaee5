"""A description against reference captions: the row's `references`, or its answer."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow.parquet as pq

from megavlm.rewards.base import Score
from megavlm.rewards.caption_metrics import (
    Corpus,
    Words,
    cider_d,
    coverage,
    keywords_of,
    rouge_l,
)
from megavlm.rewards.options import check_number, check_weights
from megavlm.rewards.words import tokens

MAX_WORDS = 400  # the rest of a longer response is not read, but counts as length
METRICS = ("cider", "rouge", "keywords")
DEFAULT_WEIGHTS = {"rouge": 0.5, "keywords": 0.5}


def prepare(
    weights: Any = None,
    corpus_files: Sequence[str] = (),
    reference_key: str = "references",
    correct_from: Any = 0.5,
) -> None:
    """Raises ValueError for a metric that is not known, or has not what it needs."""
    check_weights("caption", weights, METRICS)
    check_number("caption's correct_from", correct_from)
    if (weights or {}).get("cider") and not corpus_files:
        raise ValueError(
            "cider needs the captions by which words are weighed: set corpus_files to Parquet "
            "files, ${data.train_files} for example"
        )
    if corpus_files:
        read_corpus(tuple(corpus_files), reference_key)


def check_row(
    row: Mapping[str, Any], reference_key: str = "references", **_: Any
) -> list[list[str]]:
    """The words of its references. Raises ValueError without any: every response would get 0."""
    told = row.get(reference_key) or row.get("answer")
    texts = told if isinstance(told, list) else [told]
    references = [words for text in texts if text is not None and (words := tokens(str(text)))]
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
    corpus_files: Sequence[str] = (),
    reference_key: str = "references",
    correct_from: float = 0.5,
) -> Score:
    """The weighted metrics (CIDEr-D 0 to 10, the others 0 to 1), correct from `correct_from`."""
    weights = weights or DEFAULT_WEIGHTS
    references = check_row(row, reference_key)
    words = tokens(response)
    caption: Words = words[:MAX_WORDS]
    parts: dict[str, float] = {}
    if weights.get("rouge"):
        # A long response's tail is wrong words all.
        parts["rouge"] = rouge_l(caption, references) * len(caption) / max(len(words), 1)
    if weights.get("keywords"):
        keywords = set(map(str, row.get("keywords") or ())) or keywords_of(references)
        parts["keywords"] = coverage(caption, keywords)
    if weights.get("cider"):
        corpus = read_corpus(tuple(corpus_files), reference_key)
        parts["cider"] = cider_d(caption, references, corpus) if len(words) <= MAX_WORDS else 0.0
    reward = sum(weights[name] * value for name, value in parts.items())
    return Score(reward, reward >= correct_from, parts)


@lru_cache(maxsize=1)
def read_corpus(files: tuple[str, ...], reference_key: str) -> Corpus:
    """Raises ValueError for a file or column that is missing."""
    references: list[list[Words]] = []
    for file in files:
        try:
            column = pq.read_table(file, columns=[reference_key])[reference_key].to_pylist()
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"{file} has no captions in {reference_key!r} ({error})") from error
        for captions in column:
            texts = captions if isinstance(captions, list) else [captions]
            references.append([tokens(str(text)) for text in texts])
    return Corpus.of(references)
