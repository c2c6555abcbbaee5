"""Changes of the bytes of a bucket since they were last sent, as positions and values.

Numbers are compared as bits, after quantisation, so that what is restored is equal bit by bit for
every dtype. All functions are pure and loop over nothing.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ESCAPE = 255  # in gaps: skips that many numbers, and none of them has changed


class Delta(NamedTuple):
    """Changed numbers of a segment.

    form: "whole": every number is in `values`. "gaps": `places` has the distance of each changed
    number from the one before, in one byte, after an ESCAPE for each 255 numbers that are skipped.
    "bits": `places` has a bit for each number, the first in the lowest bit of a byte. places: uint8
    [bytes]. values: The new numbers, as integers of their size.

    Example, numbers 2 and 300 of 2,000: Delta("gaps", [3, 255, 43], values of two numbers).
    """

    form: Literal["whole", "gaps", "bits"]
    places: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.values.nbytes


def encode(new: Tensor, old: Tensor) -> Delta:
    """Return the changes from `old` to `new` in the form with the fewest bytes.

    new, old: [n] of one integer dtype with the size of the numbers.
    """
    changed = new != old
    positions = changed.nonzero().flatten()
    gaps = to_gaps(positions)
    bits = -(-len(new) // 8)
    sizes = {
        "gaps": len(gaps) + len(positions) * new.itemsize,
        "bits": bits + len(positions) * new.itemsize,
        "whole": new.nbytes,
    }
    form = min(sizes, key=lambda name: sizes[name])
    if form == "whole":
        return Delta("whole", gaps[:0], new)
    if form == "gaps":
        return Delta("gaps", gaps, new[positions])
    return Delta("bits", to_bits(changed), new[positions])


def apply(delta: Delta, held: Tensor) -> None:
    """Write the changed numbers into `held` [n], which has what the delta was computed against."""
    if delta.form == "whole":
        held.copy_(delta.values)
    elif delta.form == "gaps":
        held[to_positions(delta.places)] = delta.values
    else:
        held[from_bits(delta.places)] = delta.values


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
