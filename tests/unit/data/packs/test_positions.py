"""mrope_positions equals the server's get_rope_index, integer for integer, for every family, and
transformers' but for what follows a video of Qwen2-VL and Qwen2.5-VL.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.data.packs.positions import Span, mrope_positions, text_positions
from tests.unit.data.rope_index import MODELS, Tokens, rope_index, sglang_rope_index

TEXT, START, IMAGE, VIDEO, BEGIN, END = 1, 5, 7, 8, 9, 10
ONE_RUN = ("qwen2_vl", "qwen2_5_vl")  # families whose videos have no text between their frames


@dataclass(frozen=True)
class Mix:
    """Text, images and videos, as transformers is given them."""

    token_ids: torch.Tensor
    images: list[tuple[int, int, int]]  # grids
    videos: list[tuple[int, int, int]]
    seconds_per_grid: list[float]
    tokens_per_second: int
    merge_size: int
    spans: list[Span]  # what we are given


def token_types(token_ids: torch.Tensor) -> torch.Tensor:
    """0 text, 1 image, 2 video: a video's tokens, or image tokens between its begin and end."""
    within = (token_ids == BEGIN).cumsum(0) > (token_ids == END).cumsum(0)
    shown = (token_ids == IMAGE) | (token_ids == VIDEO)
    return shown * (1 + (within | (token_ids == VIDEO)).long())


def reference(family: str, mix: Mix) -> tuple[torch.Tensor, int]:
    vision = {"spatial_merge_size": mix.merge_size}
    if family == "qwen2_5_vl":
        vision["tokens_per_second"] = mix.tokens_per_second
    return rope_index(
        family,
        vision,
        mix.token_ids,
        token_types(mix.token_ids),
        torch.tensor(mix.images) if mix.images else None,
        torch.tensor(mix.videos) if mix.videos else None,
        torch.tensor(mix.seconds_per_grid) if mix.videos else None,
    )


@st.composite
def mixes(draw: st.DrawFn, family: str, rates: Sequence[int], *, videos: bool = True) -> Mix:
    """Vision after its start token, with text before, between and after.

    rates: tokens per second.
    """
    merge_size = draw(st.sampled_from([1, 2, 3]))
    tokens_per_second = draw(st.sampled_from(rates))
    size, is_video = st.integers(1, 6), st.booleans() if videos else st.just(False)
    items = draw(st.lists(st.tuples(is_video, size, size, size), max_size=5))
    token_ids: list[int] = []
    images, clips, seconds_per_grid, spans = [], [], [], []

    def text(smallest: int) -> None:
        token_ids.extend([TEXT] * draw(st.integers(smallest, 5)))

    def vision(token_id: int, *new: Span) -> None:
        for span in new:
            text(0)
            token_ids.append(START)
            t, h, w = span.grid
            token_ids.extend([token_id] * (t * h * w // merge_size**2))
            spans.append(span)

    text(0 if items else 1)
    for is_clip, t, h, w in items:
        h, w = h * merge_size, w * merge_size
        if not is_clip:
            images.append((1, h, w))
            vision(IMAGE, Span((1, h, w)))
            continue
        clips.append((t, h, w))
        seconds = draw(st.floats(0.02, 4.0))
        seconds_per_grid.append(seconds)
        if family.startswith("qwen3"):
            vision(VIDEO, *[Span((1, h, w))] * t)
        elif family.startswith("glm"):
            token_ids.append(BEGIN)
            vision(IMAGE, *[Span((1, h, w))] * t)
            token_ids.append(END)
        elif family == "qwen2_5_vl":
            time_step = float(tokens_per_second * torch.tensor(seconds))
            vision(VIDEO, Span((t, h, w), time_step))
        else:
            vision(VIDEO, Span((t, h, w)))
    text(0)
    return Mix(
        torch.tensor(token_ids),
        images,
        clips,
        seconds_per_grid,
        tokens_per_second,
        merge_size,
        spans,
    )


def check_positions(mix: Mix, expected: torch.Tensor, expected_next: int) -> None:
    positions, next_position = mrope_positions(
        mix.token_ids, mix.spans, vision_token_ids=(IMAGE, VIDEO), merge_size=mix.merge_size
    )
    assert positions.dtype == torch.int64
    assert torch.equal(positions, expected)
    assert next_position == expected_next


@pytest.mark.parametrize("family", MODELS)
def test_equals_transformers(family: str) -> None:
    @given(mixes(family, [1, 2, 4, 25], videos=family not in ONE_RUN))
    def check(mix: Mix) -> None:
        check_positions(mix, *reference(family, mix))

    check()


@pytest.mark.parametrize("family", MODELS)
def test_equals_the_server(family: str) -> None:
    """With powers of two, as the models have: SGLang multiplies in another order."""

    @given(mixes(family, [1, 2, 4]))
    def check(mix: Mix) -> None:
        expected = sglang_rope_index(
            family,
            mix.merge_size,
            mix.tokens_per_second,
            Tokens(IMAGE, VIDEO, START, BEGIN, END, -1, -1),
            mix.token_ids,
            torch.tensor(mix.images) if mix.images else None,
            torch.tensor(mix.videos) if mix.videos else None,
            torch.tensor(mix.seconds_per_grid) if mix.videos else None,
        )
        check_positions(mix, *expected)

    check()


@pytest.mark.parametrize(
    ("grid", "time_step", "following"),
    [
        ((60, 28, 36), 2.0, 122),  # a minute: 59 * 2 + 1 after the start at 3
        ((6, 4, 6), 1.0, 9),  # Qwen2-VL
        ((1, 4, 6), 2.0, 6),
        ((3, 20, 4), 2.0, 13),
    ],
)
def test_text_after_a_video_starts_after_its_largest_position(
    grid: tuple[int, int, int], time_step: float, following: int
) -> None:
    t, h, w = grid
    token_ids = torch.tensor([TEXT, TEXT, START, *[VIDEO] * (t * h * w // 4), TEXT])
    positions, next_position = mrope_positions(
        token_ids, [Span(grid, time_step)], vision_token_ids=[VIDEO], merge_size=2
    )
    assert positions[:, -1].tolist() == [following] * 3
    assert next_position == following + 1
    assert int(positions[:, :-1].max()) == following - 1


def test_a_response_continues_where_transformers_would() -> None:
    token_ids = torch.tensor([TEXT, *[IMAGE] * 12, TEXT])
    given = {"spans": [Span((1, 4, 12))], "vision_token_ids": [IMAGE], "merge_size": 2}
    positions, start = mrope_positions(token_ids, **given)
    with_response, _ = mrope_positions(torch.cat([token_ids, torch.tensor([TEXT] * 3)]), **given)
    assert torch.equal(torch.cat([positions, text_positions(3, start)], dim=1), with_response)


@pytest.mark.parametrize("count", [3, 5])
def test_vision_tokens_that_do_not_match_the_grid_are_a_bug(count: int) -> None:
    token_ids = torch.tensor([TEXT, *[IMAGE] * count])
    with pytest.raises(AssertionError, match="not as many"):
        mrope_positions(token_ids, [Span((1, 4, 4))], vision_token_ids=[IMAGE], merge_size=2)


def test_text_inside_a_span_is_a_bug() -> None:
    token_ids = torch.tensor([IMAGE, IMAGE, TEXT, IMAGE, IMAGE])
    with pytest.raises(AssertionError, match="consecutive"):
        mrope_positions(token_ids, [Span((1, 4, 4))], vision_token_ids=[IMAGE], merge_size=2)
