"""Trees without meaning, of given shapes, and what tree attention has to equal on them."""

import torch
from torch import Tensor

from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.trees import Segment, Tree
from tests.support.kernels import dense

Shape = list[tuple[int, int]]  # (tokens, parent) of each segment

FORESTS: dict[str, list[Shape]] = {
    "one sequence": [[(7, -1)]],
    "one response": [[(6, -1), (5, 0)]],
    "shared prompt": [[(9, -1), (4, 0), (1, 0), (6, 0)]],
    "two turns": [[(5, -1), (3, 0), (2, 1), (4, 1), (3, 0), (1, 4), (7, 4)]],
    "two roots": [[(4, -1), (3, -1), (2, 0)]],
    "several trees": [[(8, -1), (3, 0), (5, 0)], [(2, -1)], [(6, -1), (1, 0), (2, 1), (9, 0)]],
    "single tokens": [[(1, -1), (1, 0), (1, 0), (1, 2)], [(1, -1)], [(2, -1), (1, 0)]],
    "nothing": [],
}


def forest(shapes: list[Shape]) -> list[Tree]:
    return [
        Tree(
            tuple(
                Segment(torch.ones(n, dtype=torch.long), text_positions(n, 0), parent, parent >= 0)
                for n, parent in shape
            ),
        )
        for shape in shapes
    ]


def random_shape(generator: torch.Generator) -> Shape:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    count = draw(1, 7)
    return [(draw(1, 9), draw(-1, index - 1)) for index in range(count)]


def separate_sequences(
    shapes: list[Shape], query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Each segment computed in a sequence of its own, behind all that it continues; what follows
    the forest (the padding) is one more sequence. [T, heads, D] with [T, kv heads, D].
    """
    outputs, cursor = [], 0
    for shape in [*shapes, [(len(query) - sum(n for tree in shapes for n, _ in tree), -1)]]:
        paths: list[list[int]] = []
        for size, parent in shape:
            own = [*range(cursor, cursor + size)]
            paths.append([*(paths[parent] if parent >= 0 else []), *own])
            q, k, v = (x[paths[-1]] for x in (query, key, value))
            outputs.append(dense(q, k, v, scale, is_causal=True)[len(q) - size :])
            cursor += size
    return torch.cat(outputs)
