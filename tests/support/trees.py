"""Trees and images of made-up sizes."""

from collections.abc import Sequence

import torch

from megavlm.data.media.image_processing import ProcessedImage
from megavlm.data.packs.packing import Pack, make_packs
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.trees import Segment, Tree, trees_to_arrays
from tests.support.columns import columns
from tests.support.prompts import make_image

IMAGE = 9


def segment(
    length: int,
    start: int,
    parent: int,
    columns: TargetColumns | None = None,
    images: tuple[str, ...] = (),
) -> Segment:
    """A prompt of image tokens, or a response of token 1."""
    ids = torch.full((length,), 1 if parent >= 0 else IMAGE)
    positions = text_positions(length, start)
    return Segment(ids, positions, parent, is_target=parent >= 0, columns=columns, images=images)


def hello() -> Tree:
    """Return the tree of the example in `Tree`: "Hello, world" with the responses "I" and "4!"."""
    tokens = [[9707, 11, 1879], [40, 151645], [19, 0, 151645]]
    return Tree(
        tuple(
            Segment(torch.tensor(ids), text_positions(len(ids), 3 * bool(i)), -(not i), bool(i))
            for i, ids in enumerate(tokens)
        )
    )


def tree(prompt: int, responses: Sequence[int], image: str) -> Tree:
    """Each response is a sequence. Each target token has its own number in `rewards`: its place in
    its response.
    """
    children = [
        segment(
            length,
            prompt,
            0,
            columns(
                length,
                rewards=torch.arange(float(length)),
                sequence_ids=torch.tensor(number).expand(length),
            ),
        )
        for number, length in enumerate(responses)
    ]
    return Tree((segment(prompt, 0, -1, images=(image,)), *children))


def empty_pack(columns: TargetColumns | None = None, **shape: int) -> Pack:
    """Return a pack of padding, whose columns have the fields of `columns`."""
    (pack,) = make_packs(trees_to_arrays([], {}, columns), (), [0], vision_token_ids=(), **shape)
    return pack


def image(key: str, side: int = 4) -> ProcessedImage:
    return make_image(key, side, side)
