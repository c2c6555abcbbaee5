"""Caption metrics against the formulas written out, and against values worked out by hand."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.rewards.words import tokens
from megavlm.tasks.caption import reward as caption
from megavlm.tasks.caption.metrics import (
    Corpus,
    cider_d,
    common_subsequence,
    coverage,
    keywords_of,
    rouge_l,
)

WORDS = st.lists(st.sampled_from("a b c d".split()), min_size=1, max_size=7)


def literal_cider_d(
    candidate: list[str], references: list[list[str]], images: list[list[list[str]]]
) -> float:
    """Equations 3 and 4 of the paper's section on CIDEr-D, over all n-grams that occur."""

    def count(gram: tuple[str, ...], words: list[str]) -> int:
        n = len(gram)
        return sum(tuple(words[i : i + n]) == gram for i in range(len(words) - n + 1))

    def idf(gram: tuple[str, ...]) -> float:
        seen = sum(any(count(gram, words) for words in image) for image in images)
        return math.log(len(images)) - math.log(max(1, seen))

    total = 0.0
    for n in (1, 2, 3, 4):
        for reference in references:
            vocabulary = {
                tuple(words[i : i + n])
                for words in (candidate, reference)
                for i in range(len(words) - n + 1)
            }
            mine = {g: count(g, candidate) * idf(g) for g in vocabulary}
            theirs = {g: count(g, reference) * idf(g) for g in vocabulary}
            norm = math.sqrt(sum(x * x for x in mine.values())) * math.sqrt(
                sum(x * x for x in theirs.values())
            )
            if norm:
                dot = sum(min(mine[g], theirs[g]) * theirs[g] for g in vocabulary)
                gap = len(candidate) - len(reference)
                total += math.exp(-(gap**2) / (2 * 36)) * dot / norm
    return 10 / 4 * total / len(references)


@given(WORDS, st.lists(st.lists(WORDS, min_size=1, max_size=3), min_size=2, max_size=4))
def test_cider_d_is_the_formula(candidate: list[str], images: list[list[list[str]]]) -> None:
    expected = literal_cider_d(candidate, images[0], images)
    assert cider_d(candidate, images[0], Corpus.of(images)) == pytest.approx(expected)


def test_cider_d_of_the_reference_itself_is_ten() -> None:
    images = [["a red bus drives by".split()], ["two dogs play outside here".split()]]
    assert cider_d(images[0][0], images[0], Corpus.of(images)) == pytest.approx(10)
    assert cider_d(images[1][0], images[0], Corpus.of(images)) == 0


@given(WORDS, WORDS)
def test_the_common_subsequence_is_the_longest(left: list[str], right: list[str]) -> None:
    def subsequences(words: list[str]) -> Counter[tuple[str, ...]]:
        sizes = range(len(words) + 1)
        return Counter(itertools.chain(*(itertools.combinations(words, n) for n in sizes)))

    both = subsequences(left).keys() & subsequences(right).keys()
    assert common_subsequence(left, right) == max(map(len, both))


def test_rouge_l_of_lin_s_example() -> None:
    """Lin (2004), section 3: with beta 1 the two candidates get 0.75 and 0.5."""
    reference = ["police killed the gunman".split()]
    assert rouge_l("police kill the gunman".split(), reference, beta=1) == pytest.approx(0.75)
    assert rouge_l("the gunman kill police".split(), reference, beta=1) == pytest.approx(0.5)
    assert rouge_l([], reference) == 0 and rouge_l(["dog"], reference) == 0


def test_keywords_are_what_half_of_the_references_say() -> None:
    references = [text.split() for text in ("a dog on grass", "two dogs", "a dog runs", "grass")]
    assert keywords_of(references) == {("dog",), ("grass",)}
    assert coverage("dogs everywhere".split(), {("dog",), ("grass",)}) == 0.5
    assert coverage([], {("dog",)}) == 0 and coverage(["dog"], set()) == 0


def test_the_reward_weighs_its_metrics(tmp_path: Path) -> None:
    rows = [{"references": ["a red bus drives by"]}, {"references": ["two dogs play outside"]}]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(row["references"]) + "\n" for row in rows))
    row = rows[0] | {"answer": ""}
    options = {"corpus": str(file), "weights": {"cider": 0.1, "keywords": 1.0}}
    found = caption.score("A red bus drives by.", row, **options)  # type: ignore[arg-type]
    assert found.parts == pytest.approx({"cider": 10.0, "keywords": 1.0})
    assert found.reward == pytest.approx(2.0) and found.correct
    assert caption.score("red " * 10**5, row).reward < 0.3
    assert caption.score("<think>A red bus drives by.</think> Dogs.", row, **options).reward == 0.0  # type: ignore[arg-type]
    alone = caption.score("a bus", {"answer": "a bus"})
    assert alone.parts == pytest.approx({"rouge": 1.0, "keywords": 1.0})


def test_cider_without_a_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="corpus_files"):
        caption.check_options(weights={"cider": 1.0})


def test_a_row_without_references_is_an_error() -> None:
    for row in ({"answer": ""}, {"answer": "", "references": []}, {"references": [None, " ."]}):
        with pytest.raises(ValueError, match=r"no 'references' and no answer.*data\.extra_keys"):
            caption.score("a dog", row)
    row = {"answer": "", "texts": ["a dog"]}
    assert caption.score("a dog", row, reference_key="texts").reward == 1.0
    with pytest.raises(ValueError, match="b'a dog' is bytes, but a text is compared"):
        caption.score("a dog", {"references": [b"a dog"]})


@pytest.mark.parametrize(
    ("said", "reference", "other"),
    [
        ("一只黑色的狗在草地上奔跑。", "一只狗在草地上跑", "两辆红色公交车停在路边"),
        ("草の上を犬が走っている。", "犬が草の上を走る", "赤いバスが止まった"),
        ("สุนัขวิ่งบนหญ้า", "สุนัขกำลังวิ่งบนสนามหญ้า", "รถเมล์สีแดง"),
        ("개가 잔디 위를 달린다.", "개가 잔디 위를 달리고 있다", "빨간 버스가 서 있다"),
        ("एक कुत्ता घास पर दौड़ता है", "कुत्ता घास पर दौड़ रहा है", "लाल बस रुकी"),
    ],
)
def test_captions_of_every_script_overlap(said: str, reference: str, other: str) -> None:
    right, wrong = (
        caption.score(said, {"references": [text]}, correct_from=0.4) for text in (reference, other)
    )
    assert right.correct and min(right.parts.values()) > 0.4
    assert right.reward > 2 * wrong.reward and not wrong.correct
    same = caption.score(f"{reference}。", {"references": [reference]})
    assert same.parts == pytest.approx({"rouge": 1.0, "keywords": 1.0})


def test_words_of_scripts_without_spaces_are_unicode_s() -> None:
    assert tokens("一只iPhone手机\uff0c1.5米") == ["一", "只", "iphone", "手", "机", "1.5", "米"]
    assert tokens("コーヒーが") == ["コーヒー", "が"]
    assert tokens("개가 Côte-d'Ivoire") == ["개가", "cote-d'ivoire"]


def test_a_keyword_of_a_row_is_found_in_any_case_and_of_several_words() -> None:
    row = {"references": ["x"], "keywords": ["Fire truck", "消防车"]}
    for said, share in (
        ("Two fire trucks", 0.5),
        ("a truck on fire", 0.0),
        ("一辆红色的消防车", 0.5),
    ):
        assert caption.score(said, row, weights={"keywords": 1.0}).reward == share
