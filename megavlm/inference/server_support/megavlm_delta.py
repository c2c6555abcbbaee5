"""Changes of the bytes of a bucket since they were last sent, as positions and values.

Bytes are compared in pairs, after quantisation, so that what is restored is equal bit by bit for
every dtype. All functions are pure and loop over segments only. Trainer and servers share them.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ESCAPE = 255  # in gaps: skips that many numbers, and none of them has changed
SEGMENT = 2**25  # numbers that are compared at a time, 64 MiB; positions take up to 8 times as much
Form = Literal["whole", "gaps", "bits"]


class Delta(NamedTuple):
    """Changed numbers of a segment.

    form: "whole": every number is in `values`. "gaps": `places` has the distance of each changed
    number from the one before, in one byte, after an ESCAPE for each 255 numbers that are skipped.
    "bits": `places` has a bit for each number, the first in the lowest bit of a byte. places: uint8
    [bytes]. values: The new numbers. changed: How many numbers have changed.

    Example, numbers 2 and 300 of 2,000: Delta("gaps", [3, 255, 43], values of two numbers, 2).
    """

    form: Form
    places: Tensor
    values: Tensor
    changed: int


class Part(NamedTuple):
    """Part of a written bucket: the form of a segment, and the bytes of the segment, of its values
    and of its places, which follow the values.
    """

    form: Form
    length: int
    values: int
    places: int

    @property
    def nbytes(self) -> int:
        """Bytes in the written bucket, padded so that the next values are aligned."""
        return self.values + self.places + self.places % 2


def write(new: Tensor, base: Tensor, out: Tensor) -> tuple[list[Part], int]:
    """Write the changes of a bucket to `out`, and return its parts and the number of changes.

    new: The bucket, uint8 [bytes]. base: Its first numbers as they were last sent, int16 [n], on
    any device. What follows them in the bucket is written whole. out: uint8, at least as large as
    the bucket.
    """
    parts: list[Part] = []
    count = start = 0
    numbers = new[: base.nbytes].view(base.dtype)
    for mine, before in zip(numbers.split(SEGMENT), base.split(SEGMENT), strict=True):
        delta = encode(mine, before.to(new.device))
        part = Part(delta.form, mine.nbytes, delta.values.nbytes, len(delta.places))
        end = start + part.values
        out[start:end] = delta.values.view(torch.uint8)
        out[end : end + part.places] = delta.places
        parts.append(part)
        count += delta.changed
        start += part.nbytes
    if rest := len(new) - base.nbytes:
        parts.append(Part("whole", rest, rest, 0))
        out[start : start + rest] = new[base.nbytes :]
    return parts, count


def restore(parts: Sequence[Part], written: Tensor, held: Tensor) -> None:
    """Bring a bucket up to date.

    written: What `write` wrote, uint8. held: The bucket, uint8 [bytes], as it was last sent.
    """
    start = place = 0
    for part in parts:
        end = start + part.values
        segment, values = held[place : place + part.length], written[start:end]
        places = written[end : end + part.places]
        if part.form == "whole":
            segment.copy_(values)
        else:
            find = to_positions if part.form == "gaps" else from_bits
            segment.view(torch.int16)[find(places)] = values.view(torch.int16)
        start, place = start + part.nbytes, place + part.length


def encode(new: Tensor, old: Tensor) -> Delta:
    """Return the changes from `old` to `new`, int16 [n], in the form with the fewest bytes."""
    changed = new != old
    positions = changed.nonzero().flatten()
    gaps, bits = to_gaps(positions), -(-len(new) // 8)
    values, count = new[positions], len(positions)
    if new.nbytes <= values.nbytes + min(len(gaps), bits):
        return Delta("whole", gaps[:0], new, count)
    if len(gaps) <= bits:
        return Delta("gaps", gaps, values, count)
    return Delta("bits", to_bits(changed), values, count)


def to_gaps(positions: Tensor) -> Tensor:
    """Return the gaps [bytes] of increasing positions [c] as uint8."""
    distances = positions.diff(prepend=positions.new_full((1,), -1))
    ends = (distances // ESCAPE + 1).cumsum(0)
    count = int(ends[-1]) if len(ends) else 0
    gaps = torch.full((count,), ESCAPE, dtype=torch.uint8, device=positions.device)
    gaps[ends - 1] = (distances % ESCAPE).to(torch.uint8)
    return gaps


def to_positions(gaps: Tensor) -> Tensor:
    """Return the positions [c] of gaps [bytes]."""
    return gaps.cumsum(0)[gaps != ESCAPE] - 1


def to_bits(changed: Tensor) -> Tensor:
    """Return a mask [n] as bytes, padded with zeros."""
    padded = torch.nn.functional.pad(changed.to(torch.uint8), (0, -len(changed) % 8))
    return (padded.view(-1, 8) << _places(changed.device)).sum(1, dtype=torch.uint8)


def from_bits(bits: Tensor) -> Tensor:
    """Return the positions [c] of the bits that are set."""
    return (bits[:, None] >> _places(bits.device) & 1).flatten().nonzero().flatten()


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
