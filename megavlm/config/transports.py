"""Traits of the transports of weight updates.

They are declared here and not in the transports' own modules, because those import torch, and
checks of a recipe must not.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class TransportTraits:
    """Traits of a transport."""

    by_stage: bool
    """The first rank of each pipeline stage sends the stage's tensors, all stages at the same time.
    Otherwise rank 0 sends everything."""

    slices: bool
    """Each rank of a server with the megavlm loaders gets only the slices that it stores."""

    in_session: bool
    """Servers take the tensors only between begin_weight_update and end_weight_update."""

    one_machine: bool
    """Servers open handles of GPU memory, so that servers with GPUs must be on the machine of the
    trainer's rank 0."""

    colocates: bool
    """Trainer and servers may share GPUs."""


# By their name in `rollout.sync`.
TRANSPORT_TRAITS: Mapping[str, TransportTraits] = {
    "tensor": TransportTraits(
        by_stage=False, slices=True, in_session=True, one_machine=True, colocates=True
    ),
    "distributed": TransportTraits(
        by_stage=True,
        slices=True,
        in_session=True,
        one_machine=False,
        colocates=False,  # ranks of an NCCL group each need a GPU of their own
    ),
    "disk": TransportTraits(
        by_stage=True, slices=False, in_session=False, one_machine=False, colocates=True
    ),
}


def transports_with(**traits: bool) -> str:
    """Return the names of the transports with these traits, for an error: "tensor or disk"."""
    return " or ".join(
        name for name, held in TRANSPORT_TRAITS.items() if traits.items() <= asdict(held).items()
    )
