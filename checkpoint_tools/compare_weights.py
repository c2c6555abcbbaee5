"""Bitwise comparison of two models on disk, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkpoint_tools.lora.step_adapters import has_adapters, recorded_settings
from checkpoint_tools.streaming import ShowProgress, no_progress, prefetch
from checkpoint_tools.weights import Weights
from megavlm.models.common.mapping import Entry

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LISTED = 10


@dataclass
class WeightComparison:
    """Counts of equal and different hub tensors; experts count row by row. first: descriptions of
    the first tensors that differ.
    """

    equal: int = 0
    different: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, problem: str | None) -> None:
        if problem is None:
            self.equal += 1
            return
        self.different += 1
        if len(self.first) < _LISTED:
            self.first.append(problem)


def compare_weights(
    a: Weights, b: Weights, *, show: ShowProgress = no_progress
) -> WeightComparison:
    """Compare dtype, shape and every bit of all tensors. Raises ValueError if one is unreadable."""
    result = WeightComparison()
    others = {(entry.megatron, entry.expert): entry for entry in b.entries()}
    pairs: list[tuple[Entry, Entry]] = []
    for entry in a.entries():
        other = others.pop((entry.megatron, entry.expert), None)
        problem = _alone(a) if other is None else _unlike(a, entry, b, other)
        if other is not None and problem is None:
            pairs.append((entry, other))
            continue
        for name in _names(entry):
            result.add(f"{name} {problem}")
    for entry in others.values():
        for name in _names(entry):
            result.add(f"{name} {_alone(b)}")
    _compare_extras(a, b, result)

    def read(pair: tuple[Entry, Entry]) -> tuple[list[str], tuple[Tensor, ...], tuple[Tensor, ...]]:
        entry, other = pair
        # By the names of `a`: `b` may have the form of the model's authors.
        return _names(entry), entry.to_hf(a.read(entry)), entry.to_hf(b.read(other))

    with show("verify", a.total_bytes) as advance:
        for names, left, right in prefetch(read, pairs):
            for name, x, y in zip(names, left, right, strict=True):
                problem = difference(x, y)
                result.add(problem and f"{name} {problem}")
                advance(x.nbytes)
    return result


def _compare_extras(a: Weights, b: Weights, result: WeightComparison) -> None:
    """Compare adapters and value heads in the format of checkpoints."""
    left, right = ({name for name, *_ in x.extras} for x in (a, b))
    if has_adapters(a) and has_adapters(b):
        alphas = [recorded_settings(x.path).get("alpha") for x in (a, b)]
        if alphas[0] != alphas[1]:
            result.add(f"adapters have alpha {alphas[0]} and {alphas[1]}")
    for name in sorted(left | right):
        if name not in left & right:
            result.add(f"{name} {_alone(a if name in left else b)}")
            continue
        assert a.reader is not None and b.reader is not None
        x, y = a.reader.read(name), b.reader.read(name)
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            result.add(f"{name} is {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}")
            continue
        problem = difference(x, y)
        result.add(problem and f"{name} {problem}")


def difference(a: Tensor, b: Tensor) -> str | None:
    """Describe how many entries of two tensors with the same dtype and shape differ in their bits,
    and the first such entry. Returns None if all are equal.
    """
    bits = _BITS[a.dtype.itemsize]
    unequal = a.contiguous().view(bits) != b.contiguous().view(bits)
    count = int(unequal.sum())
    if not count:
        return None
    place = unequal.flatten().view(torch.uint8).argmax()
    where = tuple(int(x) for x in torch.unravel_index(place, a.shape))
    return (
        f"differs in {count} of {a.numel()} entries, first at {list(where)}: "
        f"{a[where].item():.9g} and {b[where].item():.9g}"
    )


def _unlike(a: Weights, entry: Entry, b: Weights, other: Entry) -> str | None:
    """Describe how shapes or dtypes of two entries differ. Returns None if they agree."""
    if entry.checkpoint_shape != other.checkpoint_shape:
        return f"makes a Megatron tensor {entry.megatron_shape} and {other.megatron_shape}"
    left, right = a.dtypes[entry.megatron], b.dtypes[entry.megatron]
    return f"has dtypes {left} and {right}" if left != right else None


def _alone(weights: Weights) -> str:
    return f"is only in {weights.path}"


def _names(entry: Entry) -> list[str]:
    return [name if entry.expert is None else f"{name}[{entry.expert}]" for name in entry.hf]


def sentences(result: WeightComparison) -> Iterator[str]:
    """Describe the result, line by line."""
    total = result.equal + result.different
    if not result.different:
        yield f"All {total} tensors are equal, bit by bit."
        return
    yield f"{result.different} of {total} tensors differ:"
    for problem in result.first:
        yield f"  {problem}"
    if result.different > len(result.first):
        yield f"  and {result.different - len(result.first)} more"
