"""HuggingFace folder -> checkpoint folder."""

from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.family import read_mapping
from checkpoint_tools.output import output_folder
from megavlm.checkpointing import atomic, folder
from megavlm.checkpointing.checksums import checksums
from megavlm.checkpointing.writer import write_tensors
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import HUB, Form, HubTensors
from megavlm.models.common.mapping import Entry, by_key


def import_hf(
    hf_dir: Path, checkpoint_dir: Path, *, force: bool = False, experts: Form = HUB
) -> int:
    """Writes the weights as step 0, in the dtypes that they have. Returns the number of tensors.

    Reads one tensor, or one layer's stack of experts, at a time. `experts`: the form of stacks, as
    in HubTensors. ValueError, before anything is written, for another family, a missing, truncated
    or pickled weight file, a missing or unknown tensor, a shape that config.json does not give, or
    an output folder that is in use.
    """
    entries = read_mapping(hf_dir)
    groups = by_key(entries)
    tensors = HubTensors(entries, HFFolder(hf_dir), experts)
    shapes = {
        key: torch.empty(group[0].checkpoint_shape, dtype=tensors.dtype(group), device="meta")
        for key, group in groups.items()
    }
    with output_folder(checkpoint_dir, force=force, mark="step_*") as output:
        folder.copy_hf_files(hf_dir, output / folder.HF)
        step = atomic.partial(folder.step_folder(output, 0))
        step.mkdir()
        write_tensors(step, shapes, lambda key: _read(tensors, groups[key], shapes[key]))
        names = sorted(path.name for path in step.iterdir())
        folder.Manifest(step=0, has_optimizer=False, layout={}, files=checksums(step, names)).write(
            step
        )
        folder.publish(output, 0)
    return len(groups)


def _read(tensors: HubTensors, group: list[Entry], like: Tensor) -> Tensor:
    """The tensor of a key; experts stacked."""
    if group[0].expert is None:
        return tensors.read(group[0])
    stack = torch.empty_like(like, device="cpu")
    for row, entry in zip(stack, group, strict=True):
        row.copy_(tensors.read(entry))
    return stack
