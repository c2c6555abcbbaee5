"""mrope_positions equals transformers' get_rope_index, integer for integer."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig

from megavlm.data.positions import mrope_positions, text_positions
from megavlm.parallel.torchvision_ops import define_torchvision_operators

IMAGE, TEXT = 7, 1


def reference(
    token_ids: torch.Tensor, grids: list[tuple[int, int, int]], merge_size: int
) -> tuple[torch.Tensor, int]:
    """transformers' function on a model without weights (it reads only the config)."""
    define_torchvision_operators()
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    config = Qwen2_5_VLConfig(vision_config={"spatial_merge_size": merge_size})
    model = SimpleNamespace(
        config=config,
        get_vision_position_ids=lambda *args, **kwargs: Qwen2_5_VLModel.get_vision_position_ids(
            None, *args, **kwargs
        ),
    )
    positions, delta = Qwen2_5_VLModel.get_rope_index(
        model,
        token_ids[None],
        (token_ids == IMAGE).int()[None],
        torch.tensor(grids) if grids else None,
    )
    return positions[:, 0], int(delta) + len(token_ids)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[int, int, int]], int]:
    """Text, image, text, image, ...; text between images is never empty (<|vision_end|>)."""
    merge_size = draw(st.sampled_from([1, 2, 3]))
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=4))
    token_ids = [TEXT] * draw(st.integers(0 if sizes else 1, 5))
    for number, (h, w) in enumerate(sizes):
        token_ids += [IMAGE] * (h * w)
        token_ids += [TEXT] * draw(st.integers(0 if number == len(sizes) - 1 else 1, 5))
    grids = [(1, h * merge_size, w * merge_size) for h, w in sizes]
    return torch.tensor(token_ids), grids, merge_size


@settings(deadline=None)
@given(mixes())
def test_equals_transformers(mix: tuple[torch.Tensor, list[tuple[int, int, int]], int]) -> None:
    token_ids, grids, merge_size = mix
    expected, expected_next = reference(token_ids, grids, merge_size)
    positions, next_position = mrope_positions(
        token_ids, grids, image_token_id=IMAGE, merge_size=merge_size
    )
    assert positions.dtype == torch.int64
    assert torch.equal(positions, expected)
    assert next_position == expected_next


def test_a_response_continues_where_transformers_would() -> None:
    token_ids = torch.tensor([TEXT, *[IMAGE] * 12, TEXT])
    positions, start = mrope_positions(token_ids, [(1, 4, 12)], image_token_id=IMAGE, merge_size=2)
    with_response, _ = mrope_positions(
        torch.cat([token_ids, torch.tensor([TEXT] * 3)]),
        [(1, 4, 12)],
        image_token_id=IMAGE,
        merge_size=2,
    )
    assert torch.equal(torch.cat([positions, text_positions(3, start)], dim=1), with_response)


@pytest.mark.parametrize("count", [3, 5])
def test_image_tokens_that_do_not_match_the_grid_are_a_bug(count: int) -> None:
    token_ids = torch.tensor([TEXT, *[IMAGE] * count])
    with pytest.raises(AssertionError):
        mrope_positions(token_ids, [(1, 4, 4)], image_token_id=IMAGE, merge_size=2)
