"""Traits of the transports of weight updates.

They are declared here and not in the transports' own modules, because those import torch, and
checks of a recipe must not.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class TransportTraits:
    """Traits of a transport."""

    needs_loader: bool
    """Every trainer rank sends its own shards, and each rank of a server gets only what it stores,
    through the megavlm loader. Otherwise the first rank of each pipeline stage gathers the stage's
    tensors, and servers read whole ones."""

    one_machine: bool
    """Servers open handles of GPU memory, so that servers with GPUs must be on the machine of the
    trainer's rank 0."""

    colocates: bool
    """Trainer and servers may share GPUs."""


# By their name in `rollout.sync`.
TRANSPORT_TRAITS: Mapping[str, TransportTraits] = {
    "tensor": TransportTraits(needs_loader=True, one_machine=True, colocates=True),
    "distributed": TransportTraits(
        needs_loader=True,
        one_machine=False,
        colocates=False,  # ranks of an NCCL group each need a GPU of their own
    ),
    "store": TransportTraits(needs_loader=True, one_machine=False, colocates=False),
    "disk": TransportTraits(needs_loader=False, one_machine=False, colocates=True),
}


def check_one_machine(sync: str, found: str) -> None:
    """Raise ValueError if a transport reaches no GPU servers where they were `found`."""
    if TRANSPORT_TRAITS[sync].one_machine:
        raise ValueError(
            f"{found}, but rollout.sync={sync} hands servers handles of GPU memory that only "
            "processes on the machine of the trainer's rank 0 can open: set rollout.sync to "
            f"{transports_with(one_machine=False)}"
        )


def transports_with(**traits: bool) -> str:
    """Return the names of the transports with these traits, for an error: "tensor, store or
    disk".
    """
    held = TRANSPORT_TRAITS.items()
    *names, last = [name for name, own in held if traits.items() <= asdict(own).items()]
    return f"{', '.join(names)} or {last}" if names else last
