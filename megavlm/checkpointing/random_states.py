"""Random states of a rank: Python, numpy, torch, the device, and megatron-core's named states."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import random as megatron_random


def random_states_file(step: Path, rank: int) -> Path:
    return step / f"random_{rank:05d}.pt"


def write_random_states(file: Path) -> None:
    state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = state
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        # Read as megatron-core reads it: on a CPU the device's generator is torch's own.
        "device": megatron_random._get_cuda_rng_state(),
        "megatron": megatron_random.get_cuda_rng_tracker().get_states(),
    }
    torch.save(states, file)


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states that `write_random_states` wrote."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    megatron_random._set_cuda_rng_state(states["device"])
    torch.set_rng_state(states["torch"])
    megatron_random.get_cuda_rng_tracker().set_states(states["megatron"])
