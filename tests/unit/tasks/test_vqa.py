"""Short answers of every kind: what is right, what is a guess too many."""

import itertools
from typing import Any

import pytest

from megavlm.tasks.vqa import reward as vqa


@pytest.mark.parametrize(
    ("response", "row", "correct"),
    [
        ("3", {"answer": "3", "category": "counting"}, True),
        ("There are three dogs.", {"answer": "3", "category": "counting"}, True),
        ("none", {"answer": "0", "category": "counting"}, True),
        ("3 or 4", {"answer": "3", "category": "counting"}, False),
        ("13", {"answer": "3", "category": "counting"}, False),
        (r"first 4, then \boxed{3}", {"answer": "3", "category": "counting"}, True),
        ("1,200", {"answer": "1200", "category": "number"}, True),
        ("-2.50", {"answer": "-2.5", "category": "number"}, True),
        ("Yes.", {"answer": "yes", "category": "existence"}, True),
        ("No, there is none", {"answer": "no", "category": "existence"}, True),
        ("yes and no", {"answer": "yes", "category": "existence"}, False),
        ("I say yes", {"answer": "yes", "category": "existence"}, False),
        ("Answer: yes", {"answer": "yes", "category": ""}, True),
        ("A red one", {"answer": "red one", "category": "existence"}, True),
        ("(B)", {"answer": "B", "category": "multiple_choice"}, True),
        ("B: a circle", {"answer": "B", "category": "choice"}, True),
        ("circle", {"answer": "B", "choices": ["square", "circle"]}, True),
        ("B", {"answer": "circle", "choices": ["square", "circle"]}, True),
        ("Because", {"answer": "B", "category": "choice"}, False),
        ("", {"answer": "B", "category": "choice"}, False),
        ("The colour is Red.", {"answer": "red", "category": "attribute"}, True),
        ("red blue green", {"answer": "red", "category": "attribute"}, False),
        ("the Café", {"answer": "cafe", "category": "text"}, True),
        ("sofa", {"answer": "couch", "answers": ["sofa", "couch"], "category": "text"}, True),
        ("", {"answer": "a", "category": "text"}, False),
        ("1 2 " * 10**5, {"answer": "1", "category": "counting"}, False),
    ],
)
def test_kinds(response: str, row: dict[str, Any], correct: bool) -> None:
    assert vqa.score(response, row).correct is correct


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        (".5", "0.5", True),
        (".5", "5", False),
        ("-.5", "-0.5", True),
        ("-.5", "5", False),
        ("$.50", "0.5", True),
        ("$.50", "50", False),
        ("about ...5", "5", True),
        ("Fig.5 shows 3", "3", False),
        ("\u22125", "-5", True),
        ("\u22125", "5", False),
        ("\u20135", "-5", True),
        ("3\u20134", "3", False),
        ("5cm", "5", True),
        ("5 cm", "5cm", True),
        ("5 km", "5 cm", False),
        ("5cm and 5 m", "5 cm", False),
        ("5", "5 cm", True),
        ("there are 5 in the image", "5", True),
        ("3D", "3", False),
        ("minus 3", "-3", True),
        ("minus three", "-3", True),
        ("negative 3", "3", False),
        ("5 minus 3", "-3", False),
        ("twenty-one", "21", True),
        ("There are Twenty One birds.", "21", True),
        ("thirty", "30", True),
        ("thirty-two", "30", False),
        ("ninety nine", "99", True),
        ("one hundred", "100", True),
        ("a hundred", "100", True),
        ("two hundred and five people", "205", True),
        ("twenty or one", "21", False),
        ("12", "twelve", True),
        ("The answer is not 5.", "5", False),
        ("There aren't 5 dogs but six.", "6", True),
        ("It is not clear, 5?", "5", True),
        ("There are no dogs in the image.", "0", True),
        ("There are no dogs but 3 cats", "0", False),
        ("no idea", "0", False),
        ("The answer is 3. There are 3 dogs and 2 cats.", "3", True),
        ("The answer is 3.5", "3", False),
        ("<think>maybe 3</think> 4", "4", True),
        ("<think>4 or 3</think><answer> 4 </answer>", "4", True),
        (r"<think>\boxed{4}</think> 3", "4", False),
        ("<think><answer>4</answer></think> 3", "4", False),
        ("<think>4", "4", False),
        ("3-4", "3", False),
        ("There aren\u2019t 5", "5", False),
        ("It isn\u02bct 5", "5", False),
        ("There are 5 dogs: 5 in all.", "5", True),
        ("5 cm or 5 m", "5 cm", False),
        ("5\n\nExplanation: 2 left, 3 right.", "5", True),
        ("5\n\nExplanation: the answer is 6", "5", False),
        ('```json\n{"answer": 5}\n```', "5", True),
        ('{"answer": "4 or 5"}', "5", False),
        ("2 dogs, 1 cat", "3", False),
    ],
)
def test_numbers(response: str, answer: str, correct: bool) -> None:
    assert vqa.score(response, {"answer": answer, "category": "number"}).correct is correct
    assert vqa.kind_of({"answer": answer}, {}) == "number"


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (B).", "B"),
        ("The answer is B.", "B"),
        ("The correct option is: **B**", "B"),
        ("**Answer**: B", "B"),
        ("Answer: (B) a circle", "B"),
        ("Option B", "B"),
        ("Option B is correct.", "B"),
        ("B because it is round", "B"),
        ("B, since it is round", "B"),
        ("B is the correct answer", "B"),
        ("B) a circle", "B"),
        ("B - a circle", "B"),
        ("[B]", "B"),
        ("I choose B.", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\[ \boxed{\mathrm{\text{B}}} \]", "B"),
        (r"so \(B\)", None),
        ("B. A circle", "B"),
        ("b", "B"),
        ("The answer is not A but B", None),
        ("Option A is wrong, B", None),
        ("(A) is wrong, (B) is right", None),
        ("(A) or (B)", None),
        ("A or B", None),
        ("A, B", None),
        ("A. B. C", None),
        ("A) and B)", None),
        ("A dog", None),
        ("A", "A"),
        ("a dog", None),
        ("Because", None),
        ("I think so", None),
        ("The answer is A. No, the answer is B.", "B"),
        ("<think>A</think><answer>(B)</answer>", "B"),
        ("(B) because (A) is wrong", "B"),
        ("It\u2019s B", "B"),
        ("I\u02bcd choose B.", "B"),
        ("It isn\u2019t B", None),
        ("B isn\u2019t right", None),
        ('The answer is "B".', "B"),
        ("\u201cB\u201d", "B"),
        ("'B'", "B"),
        ('"A" or "B"', None),
        ('"A" "B"', None),
        ("B\n\n**Explanation:** A is wrong.", "B"),
        ("B\nA", None),
        ('```json\n{"answer": "B", "reason": "not A"}\n```', "B"),
        ('{"answer": "A or B"}', None),
        ("### Answer\n**B**", "B"),
        ("Answer: A and B", None),
        ("A dog is seen. " * 200 + "The answer is B.", "B"),
    ],
)
def test_letters(response: str, letter: str | None) -> None:
    for gold in "ABCD":
        row = {"answer": gold, "category": "multiple_choice"}
        assert vqa.score(response, row).correct is (gold == letter)


@pytest.mark.parametrize(
    ("response", "gold", "correct"),
    [
        ("The answer is yes.", "yes", True),
        ("The answer is no, there is none", "no", True),
        (r"\boxed{\text{yes}}", "yes", True),
        (r"$\boxed{\text{No}}$", "no", True),
        ("**Yes**", "yes", True),
        ("Yes, the answer is obvious.", "yes", True),
        ("Yes, but the answer is no", "no", True),
        ("The answer is not yes", "yes", False),
        ("yes or no", "yes", False),
        ("Yes, there are no people in the street.", "yes", True),
        ("Yes, the shelf is empty; no books are on it.", "yes", True),
        ("Yes, no one is there.", "yes", True),
        ("**Yes.**\n\nNo dogs are seen.", "yes", True),
        ("Yes, it is a no-parking zone.", "yes", True),
        ("Yes, there\u2019s no dog.", "yes", True),
        ("Based on the image, yes, there is a dog.", "yes", True),
        ("From the image, yes or no", "yes", False),
        ("yes, no", "yes", False),
        ("yes... no.", "yes", False),
        ("Yes. Actually no", "yes", False),
        ("Yes, actually no dogs", "yes", False),
        ("Yes. Wait, no there is one", "yes", False),
        ("Yes, no it isn't", "yes", False),
        ("Yes, no, maybe", "yes", False),
        ("Yes/No", "yes", False),
        ("Yes\nNo", "yes", False),
        ("yes or no people", "yes", False),
        ("yes and no dogs", "yes", False),
        ("yes no dogs", "yes", False),
        ("no, yes", "no", False),
        ("no, yes", "yes", False),
        ("It\u2019s red.", "red", True),
        ("It\u02bcs red or blue.", "red", False),
        ("It appears to be red.", "red", True),
        ("The colour is most likely red.", "red", True),
        (r"\boxed{\text{red}}", "red", True),
        ("The answer is **red**.", "red", True),
        ("It's red.", "red", True),
        ("The answer is red or blue.", "red", False),
        ("The answer is red. It is nice.", "red", True),
        ("The answer is red\nIt is blue", "red", True),
        ("The answer is red\nIt is blue", "blue", False),
        ("The answer is St. Louis.", "St. Louis", True),
        ("<answer>red</answer>", "red", True),
        ("<answer> yes </answer>", "yes", True),
        ("light-blue", "light blue", True),
        ("dark red", "red", False),
        ("a", "A", True),
        ("A", "a", True),
        ("the", "a", False),
        ("", "the", False),
        ("A dog", "a", False),
        ("A dog", "dog", True),
    ],
)
def test_words(response: str, gold: str, correct: bool) -> None:
    row = {"answer": gold, "category": "yes_no"}  # text where the answer is neither
    assert vqa.score(response, row).correct is correct


def test_an_answer_that_is_not_of_its_category_s_kind_is_text() -> None:
    for category in ("multiple_choice", "counting", "existence"):
        row = {"answer": "many", "category": category}
        assert vqa.score("Many.", row).correct and not vqa.score("A few", row).correct


def test_tolerance() -> None:
    row = {"answer": "200", "category": "number"}
    assert not vqa.score("205", row).correct
    assert (
        vqa.score("205", row, tolerance=5).correct and vqa.score("196", row, relative=0.02).correct
    )
    assert not vqa.score("195", row, relative=0.02).correct


def test_values_and_kinds_are_configurable() -> None:
    row = {"answer": "3", "category": "diagram"}
    assert vqa.score("about 3", row).correct
    assert not vqa.score("about 3", row, kinds={"diagram": "text"}).correct
    assert vqa.score("x", row, wrong=-1.0).reward == -1.0


def test_accuracy_is_told_by_kind_without_a_category() -> None:
    for answer, said, parts in (
        ("yes", "no", {"yes_no": 0.0}),
        ("3", "three", {"number": 1.0}),
        ("B", "(B)", {"choice": 1.0}),
        ("red", "blue", {"text": 0.0}),
    ):
        assert vqa.score(said, {"answer": answer}, right=2.0).parts == parts


@pytest.mark.parametrize(
    ("said", "other"),
    [
        ("A+", "A-"),
        ("A+", "A"),
        ("A-", "A"),
        ("A\u2212", "A+"),
        ("O+", "O-"),
        ("C#", "C"),
        ("C++", "C"),
        ("C#", "C++"),
        ("B\u266d", "B"),
        ("<", ">"),
        ("+", "-"),
        ("+", "#"),
        ("?", "!"),
        ("&", "%"),
        ("$", "\u20ac"),
        ("\u00a3", "\u00a5"),
        ("<5", ">5"),
        ("<5", "5"),
        ("\u2264 5", "\u2265 5"),
        ("\u00b15", "5"),
        ("5+", "5"),
        ("5%", "5\u00b0"),
        ("5%", "$5"),
        ("$5", "\u20ac5"),
        ("-$5", "$5"),
        ("5 \u00b0C", "5 \u00b0F"),
        ("-5", "5"),
        ("$5-$10", "$5-$100"),
        ("10\u00b2", "102"),
        ("2\u00bd", "21/2"),
        ("\u0e02\u0e32\u0e27", "\u0e02\u0e48\u0e32\u0e27"),  # Thai: white and news
        ("\u304b\u304d", "\u304b\u304e"),  # Japanese: persimmon and key
        ("\u0915\u093f", "\u0915\u0940"),  # vowel signs of Hindi
    ],
)
def test_a_sign_that_tells_two_answers_apart_counts(said: str, other: str) -> None:
    for text, gold in itertools.product((said, other), repeat=2):
        for response in (text, f"The answer is {text}.", f"Answer: **{text}**"):
            assert vqa.score(response, {"answer": gold}).correct is (text == gold), response


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("The grade is A+.", "A+"),
        ("(A-)", "A-"),
        ("$5", "5"),
        ("It costs $5.", "$5"),
        ("$5$", "5"),
        ("$C\\#$", "C#"),
        ("5 %", "5%"),
        ("5 percent", "5%"),
        ("25 \u00b0C", "25\u00b0"),
        ("25\u00bac", "25 \u00b0C"),
        ("\u2103 25", "25"),
        ("+5", "5"),
        ("#5", "5"),
        ("5", "#5"),
        ("1200", "1,200"),
        ("-$5", "-5"),
        ("# Red", "red"),
        ("### Yes", "yes"),
        ("- red", "red"),
        ("+ Yes", "yes"),
        ("red - a nice one", "red a nice one"),
        ("yes--it is", "yes"),
        ("\u2705 Yes", "yes"),
        ("-> 5", "5"),
        ("dont walk", "don't walk"),
        ("Don\u2019t walk", "dont walk"),
        ("\uff15", "5"),
        ("3\u53ea\u72d7", "3"),
    ],
)
def test_signs_that_change_nothing_do_not_count(response: str, gold: str) -> None:
    assert vqa.score(response, {"answer": gold}).correct


@pytest.mark.parametrize(
    "response",
    [
        "B\u3002",
        "B\u3001\u5706",
        "B\uff1a\u5706",
        "B\uff0e\u5706\u5f62",
        "\uff08B\uff09",
        "\u3010B\u3011",
        "\u300cB\u300d",
        "\uff22",
        "\uff22\u3002",
        "B\uff0c\u56e0\u4e3a\u5b83\u662f\u5706\u7684",
        "\u7b54\u6848\uff1aB\u3002",
        "\u7b54\u6848\u662fB\u3002\u5b83\u662f\u5706\u7684",
        "Answer\uff1aB\u3002",
        "<answer>\uff22</answer>",
    ],
)
def test_a_letter_before_chinese_punctuation_or_of_full_width_is_read(response: str) -> None:
    for gold in "ABCD":
        row = {"answer": gold, "category": "multiple_choice"}
        assert vqa.score(response, row).correct is (gold == "B")
    for two in ("A\uff0cB", "A\u3001B\u3001C", "A\u548cB"):
        assert not vqa.score(two, {"answer": "A"}).correct
