"""mrope_positions equals transformers' get_rope_index, integer for integer, for every family."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.data.positions import Span, mrope_positions, text_positions
from tests.unit.data.rope_index import MODELS, rope_index

TEXT, IMAGE, VIDEO = 1, 7, 8


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


def reference(family: str, mix: Mix) -> tuple[torch.Tensor, int]:
    vision = {"spatial_merge_size": mix.merge_size}
    if family == "qwen2_5_vl":
        vision["tokens_per_second"] = mix.tokens_per_second
    return rope_index(
        family,
        vision,
        mix.token_ids,
        (mix.token_ids == IMAGE) + 2 * (mix.token_ids == VIDEO),
        torch.tensor(mix.images) if mix.images else None,
        torch.tensor(mix.videos) if mix.videos else None,
        torch.tensor(mix.seconds_per_grid) if mix.videos else None,
    )


@st.composite
def mixes(draw: st.DrawFn, family: str) -> Mix:
    """Vision with text before, between and after; between is never empty (<|vision_end|>)."""
    merge_size = draw(st.sampled_from([1, 2, 3]))
    tokens_per_second = draw(st.sampled_from([1, 2, 4, 25]))
    size = st.integers(1, 6)
    items = draw(st.lists(st.tuples(st.booleans(), size, size, size), max_size=5))
    token_ids: list[int] = []
    images, videos, seconds_per_grid, spans = [], [], [], []

    def text(smallest: int) -> None:
        token_ids.extend([TEXT] * draw(st.integers(smallest, 5)))

    def vision(token_id: int, *new: Span) -> None:
        for span in new:
            if token_ids and token_ids[-1] != TEXT:
                text(1)
            t, h, w = span.grid
            token_ids.extend([token_id] * (t * h * w // merge_size**2))
            spans.append(span)

    text(0 if items else 1)
    for is_video, t, h, w in items:
        h, w = h * merge_size, w * merge_size
        if not is_video:
            images.append((1, h, w))
            vision(IMAGE, Span((1, h, w)))
            continue
        videos.append((t, h, w))
        seconds = draw(st.floats(0.02, 4.0))
        seconds_per_grid.append(seconds)
        if family.startswith("qwen3"):
            vision(VIDEO, *[Span((1, h, w))] * t)
        elif family == "qwen2_5_vl":
            time_step = float(tokens_per_second * torch.tensor(seconds))
            vision(VIDEO, Span((t, h, w), time_step))
        else:
            vision(VIDEO, Span((t, h, w)))
    text(0)
    return Mix(
        torch.tensor(token_ids),
        images,
        videos,
        seconds_per_grid,
        tokens_per_second,
        merge_size,
        spans,
    )


@pytest.mark.parametrize("family", MODELS)
def test_equals_transformers(family: str) -> None:
    @given(mixes(family))
    def check(mix: Mix) -> None:
        expected, expected_next = reference(family, mix)
        positions, next_position = mrope_positions(
            mix.token_ids, mix.spans, vision_token_ids=(IMAGE, VIDEO), merge_size=mix.merge_size
        )
        assert positions.dtype == torch.int64
        assert torch.equal(positions, expected)
        assert next_position == expected_next

    check()


def test_a_long_video_in_few_lines_has_later_times_than_the_text_after_it() -> None:
    token_ids = torch.tensor([TEXT, *[VIDEO] * 5, TEXT])
    positions, next_position = mrope_positions(
        token_ids, [Span((5, 2, 2), 2.5)], vision_token_ids=[VIDEO], merge_size=2
    )
    assert positions.tolist() == [
        [0, 1, 3, 6, 8, 11, 2],
        [0, 1, 1, 1, 1, 1, 2],
        [0, 1, 1, 1, 1, 1, 2],
    ]
    assert next_position == 12


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
