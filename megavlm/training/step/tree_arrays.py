"""Serialization of trees, as the driver sends them: a few arrays for all trees, and no object per
token.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megavlm.data.packing import Segment, Tree
from megavlm.data.target_tokens import TargetColumns, concatenate

_COLUMN = "column."  # prefix of columns with one value per target token
_SEGMENT_COLUMN = "segment_column."  # prefix of columns with one value per target segment


def trees_to_arrays(
    trees: Sequence[Tree], numbers: Mapping[str, int], columns: TargetColumns | None
) -> dict[str, Tensor]:
    """Serialize `trees` as arrays. numbers: Image key -> number by which the arrays refer to the
    image. columns: Columns of any target, which tell the fields of all; None if targets have none.

    Token ids and positions are stored in 32 bits. A column that is constant within each segment, as
    most are, is stored as one value per segment.
    """
    segments = [segment for tree in trees for segment in tree.segments]
    targets = [segment for segment in segments if segment.is_target]
    arrays = {
        "token_ids": _joined([s.token_ids for s in segments]).int(),
        "positions": torch.cat(
            [torch.empty(3, 0, dtype=torch.long), *[s.positions for s in segments]], 1
        ).int(),
        "segment_sizes": torch.tensor([len(s.token_ids) for s in segments], dtype=torch.int32),
        "parents": torch.tensor([s.parent for s in segments], dtype=torch.int32),
        "is_target": torch.tensor([s.is_target for s in segments], dtype=torch.bool),
        "num_segments": torch.tensor([len(tree.segments) for tree in trees], dtype=torch.int32),
        "num_images": torch.tensor([len(s.images) for s in segments], dtype=torch.int32),
        "images": torch.tensor([numbers[key] for s in segments for key in s.images]).int(),
    }
    if columns is not None:
        parts = [segment.columns for segment in targets if segment.columns is not None]
        assert len(parts) == len(targets), "all targets have columns, or none has"
        sizes = torch.tensor([len(segment.token_ids) for segment in targets], dtype=torch.long)
        starts = sizes.cumsum(0) - sizes
        for name, column in concatenate([columns.select(slice(0)), *parts]).present().items():
            first = column[starts]
            is_constant = torch.equal(first.repeat_interleave(sizes), column)
            prefix, values = (_SEGMENT_COLUMN, first) if is_constant else (_COLUMN, column)
            arrays[prefix + name] = values
    return arrays


def trees_from_arrays(arrays: Mapping[str, Tensor], keys: Sequence[str]) -> list[Tree]:
    """Deserialize trees from `trees_to_arrays`. keys: Image keys, by number."""
    sizes = arrays["segment_sizes"].tolist()
    is_target = arrays["is_target"].tolist()
    of_targets = [size for size, target in zip(sizes, is_target, strict=True) if target]
    columns = _columns(arrays, of_targets)
    token_ids = arrays["token_ids"].long().split(sizes)
    positions = arrays["positions"].long().split(sizes, dim=1)
    images = (keys[index] for index in arrays["images"].tolist())
    parents, num_images = arrays["parents"].tolist(), arrays["num_images"].tolist()
    segments = (
        Segment(
            ids,
            places,
            parent,
            target,
            next(columns) if target else None,
            tuple(next(images) for _ in range(count)),
        )
        for ids, places, parent, target, count in zip(
            token_ids, positions, parents, is_target, num_images, strict=True
        )
    )
    return [
        Tree(tuple(next(segments) for _ in range(count)))
        for count in arrays["num_segments"].tolist()
    ]


def empty_columns(arrays: Mapping[str, Tensor]) -> TargetColumns | None:
    """Return the targets' columns with no rows, to tell their fields; None if targets have none."""
    found = {name.partition(".")[2]: x[:0] for name, x in arrays.items() if _is_column(name)}
    return TargetColumns(**found) if found else None


def _columns(arrays: Mapping[str, Tensor], sizes: Sequence[int]) -> Iterator[TargetColumns | None]:
    """Yield the columns of each target segment."""
    lengths = torch.tensor(sizes, dtype=torch.long)
    whole = {
        name.partition(".")[2]: x if name.startswith(_COLUMN) else x.repeat_interleave(lengths)
        for name, x in arrays.items()
        if _is_column(name)
    }
    if not whole:
        yield from [None] * len(sizes)
        return
    pieces = [column.split(list(sizes)) for column in whole.values()]
    for values in zip(*pieces, strict=True):
        yield TargetColumns(**dict(zip(whole, values, strict=True)))


def _is_column(name: str) -> bool:
    return name.startswith((_COLUMN, _SEGMENT_COLUMN))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.long), *parts])
