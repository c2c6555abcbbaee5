"""Serialization of trees, as the driver sends them: a few arrays for all trees, and no object per
token.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megavlm.data.packs.packing import Segment, Tree
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.target_tokens import TargetColumns

_COLUMN = "column."  # prefix of columns with one value per target token
_SEGMENT_COLUMN = "segment_column."  # prefix of columns with one value per target segment


def trees_to_arrays(
    trees: Sequence[Tree], numbers: Mapping[str, int], columns: TargetColumns | None
) -> dict[str, Tensor]:
    """Serialize `trees` as arrays. numbers: Image key -> number by which the arrays refer to the
    image. columns: Columns of any target, which tell the fields of all; None if targets have none.

    Token ids and positions are stored in 32 bits; targets are text, of which the first position
    tells the others. A column whose segments each share one value, as most do, is stored as one
    value per segment.
    """
    segments = [segment for tree in trees for segment in tree.segments]
    targets = [segment for segment in segments if segment.is_target]
    arrays = {
        "token_ids": _joined([s.token_ids.int() for s in segments], torch.int32),
        "positions": torch.cat(
            [
                torch.empty(3, 0, dtype=torch.int32),
                *[s.positions.int() for s in segments if not s.is_target],
            ],
            1,
        ),
        "first_positions": _joined([s.positions[0, :1].int() for s in targets], torch.int32),
        "segment_sizes": torch.tensor([len(s.token_ids) for s in segments], dtype=torch.int32),
        "parents": torch.tensor([s.parent for s in segments], dtype=torch.int32),
        "is_target": torch.tensor([s.is_target for s in segments], dtype=torch.bool),
        "num_segments": torch.tensor([len(tree.segments) for tree in trees], dtype=torch.int32),
        "num_images": torch.tensor([len(s.images) for s in segments], dtype=torch.int32),
        "images": torch.tensor([numbers[key] for s in segments for key in s.images]).int(),
    }
    known = [segment.routes for segment in segments if segment.routes is not None]
    if known:
        counts = [0 if s.routes is None else len(s.routes) for s in segments]
        arrays["num_routes"] = torch.tensor(counts, dtype=torch.int32)
        arrays["routes"] = torch.cat(known)
    if columns is not None:
        parts = [segment.columns for segment in targets if segment.columns is not None]
        assert len(parts) == len(targets), "all targets have columns, or none has"
        for name, first in columns.present().items():
            values = [getattr(part, name) for part in parts]
            is_shared = all(x.stride() == (0,) or len(x) == 1 for x in values)
            key = (_SEGMENT_COLUMN if is_shared else _COLUMN) + name
            arrays[key] = _joined([x[:1] for x in values] if is_shared else values, first.dtype)
    return arrays


def trees_from_arrays(arrays: Mapping[str, Tensor], keys: Sequence[str]) -> list[Tree]:
    """Deserialize trees from `trees_to_arrays`. keys: Image keys, by number."""
    sizes = arrays["segment_sizes"].tolist()
    is_target = arrays["is_target"].tolist()
    of_targets = [size for size, target in zip(sizes, is_target, strict=True) if target]
    columns = _columns(arrays, of_targets)
    token_ids = arrays["token_ids"].long().split(sizes)
    of_others = [size for size, target in zip(sizes, is_target, strict=True) if not target]
    others = iter(arrays["positions"].long().split(of_others, dim=1))
    firsts = iter(arrays["first_positions"].tolist())
    positions = (
        text_positions(size, next(firsts)) if target else next(others)
        for size, target in zip(sizes, is_target, strict=True)
    )
    images = (keys[index] for index in arrays["images"].tolist())
    parents, num_images = arrays["parents"].tolist(), arrays["num_images"].tolist()
    routes: Sequence[Tensor | None] = [None] * len(sizes)
    if "routes" in arrays:
        routes = arrays["routes"].split(arrays["num_routes"].tolist())
    segments = (
        Segment(
            ids,
            places,
            parent,
            target,
            next(columns) if target else None,
            tuple(next(images) for _ in range(count)),
            its_routes,
        )
        for ids, places, parent, target, count, its_routes in zip(
            token_ids, positions, parents, is_target, num_images, routes, strict=True
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


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *parts])
