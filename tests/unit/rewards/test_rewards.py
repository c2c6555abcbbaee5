"""Rule-based rewards: what counts as correct, and that hostile text costs nothing."""

import re
from typing import Any

import pytest

from megavlm.rewards import boxed, exact_match, registry
from tests.unit.rewards.hostile import assert_cheap


@pytest.mark.parametrize(
    ("response", "correct"), [("red", True), (" red\n", True), ("Red", False), ("red red", False)]
)
def test_exact_match(response: str, correct: bool) -> None:
    score = exact_match.score(response, {"answer": "red"})
    assert (score.correct, score.reward) == (correct, float(correct))


CALL = '<tool_call>\n{"name": "a", "arguments": {"text": "a </think> b"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so \boxed{80}", "80", 1.0),
        (r"so \boxed{81}", "80", 0.1),
        (r"first \boxed{1}, no: \boxed{80}", "80", 1.0),
        (r"\boxed{\frac{2\sqrt{2}}{5}}", r"\frac { 2 \sqrt { 2 } } { 5 }", 1.0),
        ("Answer: 80", "80", 0.9),
        ("**Answer:** 80\nthanks", "80", 0.9),
        ("80", "80", 0.0),
        (r"\boxed{80", "80", 0.0),
        (r"\boxed", "80", 0.0),
        ("", "80", 0.0),
        ("Answer:", "80", 0.0),
        ("### Answer\n80", "80", 0.9),
        ('{"answer": "80", "unit": "cm"}', "80", 0.9),
        ('{"answer": 80}', "80", 0.9),
        ('{"answer": "8", "other": 80}', "80", 0.0),
        (r"\boxed{}", "80", 0.0),
        (r"\boxed{80}, no: \boxed{81", "80", 1.0),
        (r"<think>\boxed{80}</think>", "80", 0.0),
        (r"<think>\boxed{81}</think>Answer: 80", "80", 0.9),
        (r"<think>81</think>\boxed{80}, as </think> has said.", "80", 1.0),
        (rf"<think>So.</think>\boxed{{80}}. {CALL}", "80", 1.0),
        (rf"\boxed{{80}}. {CALL}", "80", 1.0),
        ("\\boxed{\uff18\uff10}", "80", 1.0),
    ],
)
def test_boxed_takes_the_last_answer_and_rewards_the_form(
    response: str, answer: str, reward: float
) -> None:
    score = boxed.score(response, {"answer": answer})
    assert score.reward == pytest.approx(reward)
    assert score.correct == (reward >= 0.9)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("0.5", r"\frac{1}{2}"),
        ("1/2", r"\dfrac12"),
        ("-1/2", r"-\frac{1}{2}"),
        ("50%", r"\frac{1}{2}"),
        (r"50\%", "0.50"),
        ("1,234", "1234.0"),
        (".5", "0.5"),
        ("+3", "3."),
        (r"$120^\circ$", "120"),
        (r"\text{blue}", "Blue"),
        (r"5 \sqrt { 3 }", r"5\sqrt{3}"),
        ("(C)", "c"),
    ],
)
def test_equal_answers(left: str, right: str) -> None:
    assert boxed.is_equal(left, right) and boxed.is_equal(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1", "10"),
        ("1,2", "12"),
        ("1/0", "0"),
        ("x/2", "0.5"),
        ("1/2/3", "6"),
        ("", ""),
        ("(c)", "(d)"),
        ("-1", "1"),
    ],
)
def test_different_answers(left: str, right: str) -> None:
    assert not boxed.is_equal(left, right) and not boxed.is_equal(right, left)


HOSTILE = {
    "megabyte": "'1' * 1_000_000",
    "power": "r'\\boxed{9**9**9}'",
    "exponent": "r'\\boxed{1e999999999}'",
    "open boxes": "r'\\boxed{' * 200_000",
    "closed boxes": r"'\\boxed{' * 100_000 + '}' * 100_000",
    "pairs of boxes": r"'\\boxed{}' * 100_000",
    "thoughts": "'<think>' * 150_000",
    "open answers": "'Answer:' * 200_000",
    "wide box": "r'\\boxed{' + '{' * 500_000 + '}' * 500_001",
    "spaces": "r'\\boxed' + ' ' * 1_000_000",
    "open quotes": "'\"answer\": \"' + 'a' * 500_000",
    "keys": '\'"answer": "\' * 100_000',
    "headings": "'\\n# answer' * 100_000",
    "long number": "r'\\boxed{' + '9' * 1_000_000 + '}'",
    "long text": "r'\\boxed{' + r'\\text' * 200_000 + '}'",
    "slashes": "r'\\boxed{' + '/' * 400_000 + '}'",
    "fractions": "r'\\boxed{' + r'\\frac{' * 80 + '}' * 81",
}


def test_hostile_text_is_wrong_and_cheap() -> None:
    imports = "from megavlm.rewards import boxed"
    assert_cheap(HOSTILE, 5, imports, "not boxed.score(response, {'answer': '80'}).correct")


def test_registry_knows_its_rewards_and_lists_them_for_an_unknown_name() -> None:
    assert registry.load_reward("exact_match", {})("3", {"answer": "3"}).reward == 1.0
    assert registry.load_reward("boxed", {}) is boxed.score
    for name in (*registry.BUILT_IN_REWARDS, "reward_model", "a.b:c", "http://127.0.0.1:1/x"):
        registry.check_reward_name(name)
    for name in ("exact", "a.b", "a:b:c", "", "../a:b"):
        with pytest.raises(ValueError, match=rf"reward.name='{re.escape(name)}'.*boxed, caption"):
            registry.check_reward_name(name)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("caption", {"weights": {"rouge": "x"}}, "caption's weight of rouge is 'x'"),
        ("caption", {"weights": {"rouge": -1}}, "at least 0"),
        ("caption", {"weights": {"rouge": float("nan")}}, "weight of rouge is nan"),
        ("caption", {"weights": {"rouge": 0, "keywords": 0}}, "weights are all 0"),
        ("caption", {"weights": {}}, "weights are all 0"),
        ("caption", {"weights": {1: 1.0}}, "no component '1'"),
        ("caption", {"correct_from": None}, "correct_from is None"),
        ("geospot", {"weights": {"country": -1}}, "weight of country is -1"),
        ("geospot", {"weights": ["country"]}, "give NAME: NUMBER"),
        ("geospot", {"weights": {"country": True}}, "is True"),
        ("geospot", {"tolerance": "25"}, "tolerance in km is '25': set it to a number above 0"),
        ("geospot", {"tolerance": float("inf")}, "is inf"),
        ("geo3k", {"right": "x"}, "geo3k's right is 'x'"),
        ("geo3k", {"format_reward": float("nan")}, "format_reward is nan"),
        ("geo3k", {"bare": "no"}, "set it to true or false"),
        ("vqa", {"tolerance": "x"}, "vqa's tolerance is 'x'"),
        ("vqa", {"relative": -0.1}, "vqa's relative tolerance is -0.1"),
        ("vqa", {"wrong": float("-inf")}, "vqa's wrong is -inf"),
        ("vqa", {"kinds": ["a"]}, "give CATEGORY: KIND"),
        ("vqa", {"kinds": {"a": ["text"]}}, "cannot be"),
    ],
)
def test_options_of_built_in_rewards_are_checked(
    name: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        registry.load_reward(name, options)
