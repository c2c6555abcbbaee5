"""Equivalent mathematics is right; what a model writes to exhaust the verifier costs nothing."""

import asyncio
from collections.abc import Iterator

import pytest

from megavlm.config.reward import Reward
from megavlm.rewards.base import Example, Score
from megavlm.rewards.manager import Part, RewardManager
from megavlm.tasks.geo3k import reward as geo3k
from tests.support.timeouts import scaled


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"5\sqrt 2", r"\sqrt{50}"),
        (r"\frac{2\sqrt{2}}{5}", r"\frac { 2 \sqrt { 2 } } { 5 }"),
        ("x = 5", "5"),
        ("5 cm", "5"),
        (r"30^\circ", "30"),
        ("(B)", "B"),
        ("b", "B"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"(x+1)^2", "x^2+2x+1"),
        ("2√3", r"2\sqrt{3}"),
        ("2 · √ 3", r"\sqrt{12}"),
        ("√(3)", r"\sqrt{3}"),
        ("√(√(3)+(1))", r"\sqrt{\sqrt{3}+1}"),
        ("√{3}", r"\sqrt{3}"),
        ("√x", r"\sqrt{x}"),
        ("√2.5", r"\sqrt{2.5}"),
        ("5√2 cm", r"5\sqrt{2}"),
        ("5√2cm", r"5\sqrt{2}"),
        ("8√3/3", r"\frac{8\sqrt{3}}{3}"),
        ("(1+√5)/2", r"\frac{1+\sqrt{5}}{2}"),
        ("√12 = 2√3", r"2\sqrt{3}"),
        ("2√3 ≈ 3.46", r"2\sqrt{3}"),
        ("½", r"\frac{1}{2}"),
        ("¼", "0.25"),
        ("-¾", "-0.75"),
        ("2½", "2.5"),
        ("-2½ cm", "-2.5"),
        ("2½√3", r"\frac{5\sqrt{3}}{2}"),
        ("½√3", r"\frac{\sqrt{3}}{2}"),
        ("3⁄4", "0.75"),  # noqa: RUF001
        ("x²", "x^2"),
        ("a² + b²", "a^2+b^2"),
        ("x⁻¹", r"\frac{1}{x}"),
        ("2¹⁰", "1024"),
        ("≈5", "5"),
        ("5 cm²", "5"),
        ("5 cm^2", "5"),
        ("5 m²", "5"),
        ("5m²", "5m^2"),
        ("30⁰", "30"),
    ],
)
def test_equivalent(found: str, answer: str) -> None:
    assert geo3k.is_equivalent(found, answer)


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("**Answer**: 5", "5", True),
        ("**Answer:** 5", "5", True),
        ("Answer\uff1a5", "5", True),
        (r"\boxed5", "5", True),
        (r"so \boxed 5.", "5", True),
        (r"\boxed12", "1", False),
        ("\\boxed\n{5}", "5", True),
        (r"\boxed{A. 30}", "30", True),
        (r"\boxed{A. 30}", "A", True),
        (r"\boxed{A. 30}", "B", False),
        (r"\boxed{\textbf{(A) }30}", "30", True),
        (r"\boxed{\textbf{(A)}~30}", "A", True),
        (r"\boxed{\text{(A)}}", "A", True),
        (r"\boxed{(A) 2\sqrt{3}}", r"\sqrt{12}", True),
        (r"\boxed{A. 30 B. 40}", "30", False),
        (r"\boxed{A. 30 B. 40}", "40", False),
        (r"\boxed{A. 30 B. 40}", "A", False),
        (r"\boxed{A or B}", "A", False),
        (r"\boxed{A 30}", "A", False),
        (r"\boxed{30 \text{ degrees}}", "30", True),
        (r"\boxed{5\text{ cm}}", "5", True),
        (r"\boxed{\$5}", "5", True),
        (r"\boxed{x = 5}", "5", True),
        (r"\boxed{\frac12}", "0.5", True),
        (r"\boxed{-\frac{1}{2}}", "0.5", False),
        (r"\boxed{1,234}", "1234", True),
        (r"\boxed{3, 4}", "3", False),
        (r"\boxed{5 or 6}", "5", False),
        (r"\boxed{5 or 6}", "6", False),
        (r"\boxed{}", "0", False),
        ("<think>6</think><answer>5</answer>", "5", True),
        ("<answer>5</answer><answer>6</answer>", "5", False),
        ('{"answer": "2\\\\sqrt{3}"}', r"\sqrt{12}", True),
        ("### Final answer\n5 cm", "5", True),
        (r"not \boxed{5}, but \boxed{6}", "5", False),
        ("<answer>x<5</answer>", "x<5", True),
        ("<answer>1 < x < 5</answer>", "1<x<5", True),
        ("<answer>6 <answer>5</answer>", "5", True),
        ("<answer>5", "5", False),
        (r"<answer>4</answer><ANSWER>$\frac{1}{2}$</Answer>", "0.5", True),
        (r"\boxed{\boxed{\frac{1}{2}}}", "0.5", True),
        (r"\boxed{x = \boxed{3}}", "3", True),
        (r"\boxed{\text{5 cm}}", "5", True),
        (r"\boxed{\text{5 cm}^2}", "5", True),
        (r"\boxed{x = \mathrm{5~cm}}", "5", True),
        (r"\boxed{\text{50 percent}}", r"50\%", True),
        (r"\boxed{\text{5 or 6}}", "5", False),
        (r"\boxed{50\%}", "0.5", True),
        (r"\boxed{50\%}", "50", True),
        (r"\boxed{50\%}", "5", False),
        (r"\boxed{5}, as asked in \boxed{}", "5", True),
        (r"\boxed{4}, no: \boxed{5", "4", True),
        (r"\boxed{4}, no: \boxed{5", "5", False),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right.", True),
        (r"<think>\boxed{4}</think> It is \boxed{5}.", "5", True),
        (r"<think>\boxed{4}</think> Answer: 5", "5", True),
        (r"<think>\boxed{4}</think> I do not know.", "4", False),
        (r"<think>so \boxed{4}", "4", False),
        (r"so \boxed{4}</think> Answer: 5", "4", False),
        ("<think><answer>4</answer></think>", "4", False),
        ("\\boxed{\uff15}", "5", True),
        ("\u7b54\u6848\uff1a\uff15", "5", True),
        ("\\boxed{\uff08x\uff0b1\uff09^2}", "x^2+2x+1", True),
    ],
)
def test_forms_of_an_answer(response: str, answer: str, correct: bool) -> None:
    assert geo3k.score(response, {"answer": answer}).correct is correct


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        ("81", "80"),
        ("B", "A"),
        ("", "1"),
        (r"\frac{1}{0}", "1"),
        ("((((", "1"),
        ("3", "A"),
        ("a", "1"),
        ("√3", "3"),
        ("√(3)", "3"),
        ("2√3", "2"),
        ("2√3", "3"),
        ("2√3", "23"),
        ("2√3", r"\sqrt{23}"),
        ("2√3", r"3\sqrt{2}"),
        ("√23", r"2\sqrt{3}"),
        ("√2x", r"\sqrt{2x}"),
        ("√2x", r"\sqrt{2}x"),
        ("√1,234", "1"),
        ("√3 or √2", r"\sqrt{3}"),
        ("√(3", "3"),
        ("√", "0"),
        ("2³√8", "2"),
        ("3∛8", "3"),
        ("x²", "x2"),
        ("x²", "x"),
        ("x²", "2x"),
        ("3²", "3"),
        ("3²", "32"),
        ("9⁹⁹⁹", "9"),
        ("½", "12"),
        ("½", "2"),
        ("½", "1"),
        ("2½", "2"),
        ("2½", "1"),
        ("2½", "10.5"),
        ("2½√3", r"\sqrt{3}"),
        ("2½2", "2"),
        ("2^½", "2"),
        ("3⁄4", "3"),  # noqa: RUF001
        ("2·3", "2"),
        ("≈5", "6"),
        ("5 ≈ 6", "6"),
        ("5 cm²", "25"),
    ],
)
def test_not_equivalent(found: str, answer: str) -> None:
    assert not geo3k.is_equivalent(found, answer)


def test_values_and_format_are_configurable() -> None:
    row = {"answer": r"\sqrt{12}"}
    assert geo3k.score(r"so \boxed{2\sqrt{3}}", row) == Score(
        1.0, True, {"answer": 1.0, "format": 1.0}
    )
    assert geo3k.score(r"Answer: 2\sqrt{3}", row).reward == pytest.approx(0.9)
    assert geo3k.score(r"\boxed{3}", row, wrong=-1.0, format_reward=0.25).reward == -0.75
    assert geo3k.score("no idea", row, right=2.0, wrong=-1.0).reward == -1.0
    assert not geo3k.score(r"2\sqrt{3}", row).correct
    assert geo3k.score(r"2\sqrt{3}", row, bare=True).correct


@pytest.mark.parametrize("bracket", ["(", "{", "[", r"\sqrt{", r"\left("])
def test_deep_nesting_is_refused_before_it_is_parsed(
    bracket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(geo3k, "parse", parse)
    assert not geo3k.is_equivalent(bracket * 11 + "5", "6")
    with pytest.raises(AssertionError, match="parsed"):
        geo3k.is_equivalent(bracket * 10 + "5", "6")


HOSTILE = {
    "power": r"\boxed{9**9**9}",
    "latex power": r"\boxed{9^{9^{9}}}",
    "long exponent": r"\boxed{10^{999999999}}",
    "factorial": r"\boxed{99999999!}",
    "signs of powers": r"\boxed{9⁹⁹⁹⁹⁹⁹}",
    "a power of a power": r"\boxed{9⁹^99}",
    "nested roots": r"\boxed{" + "√(" * 60 + "2" + ")" * 60 + "}",
    "expansion": r"\boxed{(a+b+c+d+e+f)^{999}}",
    "megabyte": r"\boxed{" + "1+" * 500_000 + "1}",
    "megabyte of boxes": r"\boxed{" * 140_000,
    "megabyte of text": "Answer: " + "a" * 2**20,
    "nested": r"\boxed{" + r"\sqrt{" * 60 + "2" + "}" * 61,
    "sum": r"\boxed{\sum_{n=1}^{999} n^{999}}",
}


@pytest.fixture(scope="module")
def manager() -> Iterator[RewardManager]:
    parts = [Part("math", "geo3k", options={"format_reward": 0.0})]
    manager = RewardManager(
        parts, Reward(on_failure="zero", workers=1, timeout=scaled(3), memory_mb=2048)
    )
    yield manager
    asyncio.run(manager.close())


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_get_nothing_within_the_limit(manager: RewardManager, name: str) -> None:
    found = asyncio.run(manager.score(HOSTILE[name], Example("?", r"\frac{\pi}{7}")))
    assert (found.reward, found.correct) == (0.0, False)
    right = asyncio.run(manager.score(r"\boxed{\pi/7}", Example("?", r"\frac{\pi}{7}")))
    assert right.correct, "the next response is served"
