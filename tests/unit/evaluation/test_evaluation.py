"""Evaluation with a policy of known behaviour behind a client that needs no server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.config.evaluation import Evaluation
from megavlm.data.chat.messages import Message
from megavlm.data.media.video_sources import VideoFile
from megavlm.data.rows import Row
from megavlm.evaluation.baselines import Known, blind_answers, exchange_images
from megavlm.evaluation.measures import Answer, measure_policy
from megavlm.evaluation.result import measure, wilson_interval
from megavlm.inference.protocol import Response, SamplingParams
from megavlm.observability.metrics import evaluation_scalars
from megavlm.rewards import boxed
from megavlm.rewards.base import Score
from megavlm.rewards.exact_match import score
from tests.support.responses import make_response


def row(index: int, problem: str, answer: str, category: str, image: bytes = b"") -> Row:
    return Row(index, problem, answer, (image or bytes([index]),), category, f"rows:{index}")


# The image's byte is the number of shapes: a policy that looks answers it.
TRAIN = [row(i, "How many?", str(i % 3), "count", bytes([i % 3])) for i in range(9)] + [
    row(9, "Colour?", "red", "colour"),
    row(10, "Colour?", "red", "colour"),
    row(11, "Colour?", "blue", "colour"),
]
TEST = [row(i, "How many?", str(i % 3), "count", bytes([i % 3])) for i in range(6)] + [
    row(6, "Colour?", "blue", "colour", b"\x07")
]


@dataclass
class LookingPolicy:
    """Counts right when it sees the image, says "a lot" when sampling, and "red" to colours."""

    asked: list[tuple[int, SamplingParams]]

    def generate(
        self, prompts: Sequence[Row], *, n: int, sampling_params: SamplingParams, **_: Any
    ) -> Any:
        assert n == 1
        self.asked.append((len(prompts), sampling_params))
        return [[self.respond(prompt, sampling_params)] for prompt in prompts]

    def respond(self, prompt: Row, sampling_params: SamplingParams) -> Response:
        if prompt.category == "colour":
            text = "red"
        elif sampling_params.temperature > 0:
            text = "a lot"
        else:
            text = str(prompt.images[0][0])
        return make_response(tuple(text.encode()), (0.0,) * len(text), "stop", "0")


def num_tokens(row: Row) -> int:
    return len(row.problem) + sum(map(len, row.images))


def run(policy: LookingPolicy, **options: Any) -> Any:
    measures = {name: options.pop(name, True) for name in ("sampled", "shuffled")}
    reward = options.pop("reward", score)

    def play(rows: Sequence[Row], how: SamplingParams) -> list[Answer]:
        groups = policy.generate(rows, n=1, sampling_params=how)
        texts = [bytes(response.token_ids.tolist()).decode() for (response,) in groups]
        return [
            Answer(text, found.correct, found.failure)
            for text, row in zip(texts, rows, strict=True)
            for found in [reward(text, {"answer": row.answer})]
        ]

    rows = options.pop("rows", TEST)
    return measure_policy(
        play,
        rows,
        num_tokens=options.pop("num_tokens", num_tokens),
        known=Known.of(options.pop("train", TRAIN), rows),
        sampling_params=SamplingParams(temperature=1.0, max_new_tokens=4),
        settings=Evaluation(**measures),
        seed=options.pop("seed", 0),
        **options,
    )


def test_every_measure() -> None:
    policy = LookingPolicy([])
    result = run(policy)
    assert evaluation_scalars(result.to_dict())["evaluation/greedy"] == pytest.approx(6 / 7)
    assert result.greedy.overall.share == pytest.approx(6 / 7)
    assert result.greedy.by_category["count"].share == 1
    assert result.greedy.by_category["colour"].share == 0
    assert result.sampled.by_category["count"].share == 0
    assert result.valid.overall.share == 1, "red is an answer of the colour rows"
    assert result.blind.by_category["count"].share == pytest.approx(2 / 6)
    assert result.blind.by_category["colour"].share == 0
    assert result.shuffled.by_category["count"].share < 1, "it looked, so other images hurt it"
    temperatures = [sampling_params.temperature for _, sampling_params in policy.asked]
    assert temperatures == [0.0, 1.0, 0.0] and all(count == len(TEST) for count, _ in policy.asked)


def test_rewards_that_failed_are_told() -> None:
    """They count as wrong, and nobody takes an outage for a bad model."""

    def failing(text: str, row: Any) -> Any:
        return Score(0.0, False, failure="remote" if row["answer"] == "blue" else None)

    result = run(LookingPolicy([]), reward=failing, sampled=False)
    assert result.to_dict()["failures"] == {"remote": 2}, "greedy and shuffled"
    told = "2 responses count as incorrect because their reward failed (remote 2)"
    assert told in result.line()
    assert evaluation_scalars(result.to_dict())["evaluation/failures"] == 2
    assert "failed" not in run(LookingPolicy([])).line()


def test_what_is_not_asked_for_costs_nothing() -> None:
    policy = LookingPolicy([])
    result = run(policy, sampled=False, shuffled=False)
    assert result.sampled is None and result.shuffled is None and len(policy.asked) == 1


def test_blind_answers_fall_back_to_the_category_and_then_to_all() -> None:
    questions = [row(0, "New?", "", "colour"), row(1, "New?", "", "new")]
    assert blind_answers(TRAIN, questions) == ["red", "0"]


def test_a_question_is_the_whole_chat_in_whatever_spelling() -> None:
    """A placeholder that stands first may be left out; an answer's white space is no part of it."""
    train = [row(0, "<image>What? ", " red", ""), row(1, "Why?", "blue", "")]
    before = (Message("user", "What?"), Message("assistant", "red"))
    train += [replace(row(2, "Sure?", "yes", ""), messages=(*before, Message("user", "Sure?")))] * 2
    questions = [row(3, "What?", "red", ""), row(4, "Sure?", "no", ""), replace(train[2], index=5)]
    assert blind_answers(train, questions) == [" red", "yes", "yes"]
    assert Known.of(train, questions).valid == {"": {"red", "blue", "yes"}}
    other = replace(train[2], messages=(*before[:1], Message("user", "Sure?")))
    assert blind_answers([*train[:2], train[0], other], questions[1:]) == [" red"] * 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=30),
    st.integers(0, 100),
)
def test_nobody_keeps_their_own_images(shown: list[tuple[int, int]], seed: int) -> None:
    """`shown`: how many images a row has, and which ones; some rows share theirs."""
    rows = [
        Row(i, "", str(i), tuple(bytes([which, j]) for j in range(number)), "", "")
        for i, (number, which) in enumerate(shown)
    ]
    exchanged = {row.index: row for row in exchange_images(rows, seed)}
    assert list(exchanged) == sorted(exchanged)
    for row in rows:
        others = [other for other in rows if len(other.images) == len(row.images)]
        most = max(sum(other.images == some.images for other in others) for some in others)
        if row.index in exchanged:
            after = exchanged[row.index]
            assert after.answer == row.answer and after.images != row.images
            assert after.images in [other.images for other in others]
        else:
            assert not row.images or 2 * most > len(others), "it could have got other images"


def test_videos_and_audio_are_exchanged_too() -> None:
    videos = [(VideoFile(bytes([i])),) for i in range(4)]
    rows = [replace(row(i, "?", "0", "count", b"x"), videos=videos[i]) for i in range(4)]
    exchanged = exchange_images(rows, 0)
    assert len(exchanged) == 4
    assert sorted(row.videos[0].data for row in exchanged) == [b"\0", b"\1", b"\2", b"\3"]
    assert all(row.videos != videos[row.index] for row in exchanged)
    heard = exchange_images([replace(x, videos=(), audio=(bytes([x.index]),)) for x in rows], 0)
    assert sorted(row.audio[0] for row in heard) == [b"\0", b"\1", b"\2", b"\3"]
    assert all(row.audio != (bytes([row.index]),) for row in heard)


def test_a_prompt_that_would_outgrow_all_others_is_left_out() -> None:
    long = row(0, "How many shapes are there?", "0", "count", b"\x00")
    short = row(1, "How many?", "1", "count", b"\x01" * 20)
    result = run(LookingPolicy([]), rows=[long, short])
    assert result.shuffled.overall.count == 1 and result.greedy.overall.count == 2


def test_rows_without_images_cannot_be_shuffled() -> None:
    text_only = [Row(i, "Colour?", "red", (), "colour", "") for i in range(3)]
    result = run(LookingPolicy([]), rows=text_only)
    assert result.shuffled is None and result.greedy.overall.share == 1


def test_rows_without_answers_tell_nothing_of_a_blind_baseline() -> None:
    mute = [replace(row, answer="") for row in TEST]
    result = run(LookingPolicy([]), rows=mute, train=[replace(row, answer="") for row in TRAIN])
    assert result.blind is None and result.valid is None and result.shuffled is not None
    assert run(LookingPolicy([]), rows=mute).blind is None
    some = run(LookingPolicy([]), rows=[*mute, *TEST])
    assert some.blind.overall.count == len(TEST)
    assert some.blind.by_category["count"].share == pytest.approx(2 / 6)


def test_the_blind_baseline_needs_no_form() -> None:
    result = run(LookingPolicy([]), reward=boxed.score)
    assert result.greedy.overall.share == 0
    assert result.blind.by_category["count"].share == pytest.approx(2 / 6)


@given(st.integers(1, 200), st.data())
def test_interval_holds_the_share(count: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, count))
    low, high = wilson_interval(successes, count)
    assert 0 <= low <= successes / count <= high <= 1


def test_interval_of_a_textbook_case() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_measure_sorts_categories() -> None:
    result = measure([True, False, True], ["b", "a", "b"])
    assert list(result.by_category) == ["a", "b"] and result.by_category["b"].count == 2
