"""CIDEr-D, ROUGE-L and keyword coverage of one caption.

Not covered: the Penn Treebank tokenizer of the COCO evaluation server (a Java program). Words are
split at white space and punctuation here, so results differ slightly for contractions.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Words = Sequence[str]
Gram = tuple[str, ...]
_STOP = set(
    """a an and are as at be by for from has have her his in into is it its of off on or over that
    the their them there they this to two up with while near next some one s very image picture
    photo""".split()
) | set("的了在是一个個有和上下着著不这這那")


@dataclass(frozen=True)
class Corpus:
    """Document frequency: for each n-gram, how many of `size` images have it in a reference."""

    frequency: Counter[Gram]
    size: int

    @classmethod
    def of(cls, references: Iterable[Sequence[Words]]) -> "Corpus":
        frequency: Counter[Gram] = Counter()
        size = 0
        for captions in references:
            frequency.update({gram for words in captions for gram in grams(words)})
            size += 1
        return cls(frequency, size)


def grams(words: Words, longest: int = 4) -> Counter[Gram]:
    return Counter(
        tuple(words[i : i + n]) for n in range(1, longest + 1) for i in range(len(words) - n + 1)
    )


def cider_d(caption: Words, references: Sequence[Words], corpus: Corpus) -> float:
    """Return CIDEr-D, 0 to 10. Source: Vedantam et al., "CIDEr: Consensus-based image description
    evaluation", CVPR 2015, section 6: n-grams of 1 to 4 words weighted by tf-idf, counts clipped to
    the reference's, a Gaussian penalty (sigma 6) on the difference of lengths.
    """
    mine = _weights(caption, corpus)
    total = 0.0
    for reference in references:
        theirs = _weights(reference, corpus)
        penalty = math.exp(-((len(caption) - len(reference)) ** 2) / (2 * 6.0**2))
        for left, right in zip(mine, theirs, strict=True):
            norms = _norm(left) * _norm(right)
            if norms:
                dot = sum(min(left.get(gram, 0.0), value) * value for gram, value in right.items())
                total += penalty * dot / norms / len(mine)
    return 10 * total / len(references) if references else 0.0


def _weights(words: Words, corpus: Corpus) -> list[dict[Gram, float]]:
    """Return tf-idf weights, one mapping for each length of n-gram."""
    by_length: list[dict[Gram, float]] = [{} for _ in range(4)]
    for gram, count in grams(words).items():
        seen = max(corpus.frequency[gram], 1)
        by_length[len(gram) - 1][gram] = count * (math.log(max(corpus.size, 1)) - math.log(seen))
    return by_length


def _norm(weights: dict[Gram, float]) -> float:
    return math.sqrt(sum(value**2 for value in weights.values()))


def rouge_l(caption: Words, references: Sequence[Words], beta: float = 1.2) -> float:
    """Return ROUGE-L, 0 to 1: F-measure of the longest common subsequence, best precision and best
    recall over the references, as in the COCO caption evaluation. Source: Lin, "ROUGE: a package
    for automatic evaluation of summaries", 2004.
    """
    if not caption or not any(references):
        return 0.0
    lengths = [(common_subsequence(caption, words), len(words)) for words in references if words]
    precision = max(length for length, _ in lengths) / len(caption)
    recall = max(length / size for length, size in lengths)
    if not precision or not recall:
        return 0.0
    return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)


def common_subsequence(left: Words, right: Words) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for index, other in enumerate(right, 1):
            above = row[index]
            row[index] = diagonal + 1 if word == other else max(above, row[index - 1])
            diagonal = above
    return row[-1]


def keywords_of(references: Sequence[Words]) -> set[Gram]:
    """Return the content words that at least half of the references have."""
    counts = Counter(word for words in references for word in set(words) - _STOP)
    return {(word,) for word, count in counts.items() if 2 * count >= len(references)}


def coverage(caption: Words, keywords: set[Gram]) -> float:
    """Return the share of keywords (of one or more words) in the caption, singular or plural."""
    stems = [_stem(word) for word in caption]
    found = sum(_has(stems, [_stem(word) for word in keyword]) for keyword in keywords)
    return found / len(keywords) if keywords else 0.0


def _has(words: Words, phrase: Words) -> bool:
    size = len(phrase)
    return any(words[i : i + size] == phrase for i in range(len(words) - size + 1))


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
