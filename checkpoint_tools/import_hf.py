"""HuggingFace folder -> checkpoint folder."""

from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.ahead import one_ahead
from checkpoint_tools.family import read_mapping
from checkpoint_tools.hub_files import HubFiles
from checkpoint_tools.output import output_folder
from megavlm.checkpointing import atomic, folder
from megavlm.checkpointing.checksums import checksums
from megavlm.checkpointing.writer import RecordFile, write_contents
from megavlm.models.common.loading import HUB, Form, HubTensors
from megavlm.models.common.mapping import Entry, by_key


def import_hf(
    hf_dir: Path, checkpoint_dir: Path, *, force: bool = False, experts: Form = HUB
) -> int:
    """Writes the weights as step 0, in the dtypes that they have. Returns the number of tensors.

    Holds two tensors in memory, of experts one by one. `experts`: the form of stacks, as in
    HubTensors. ValueError, before anything is written, for another family, a missing, truncated
    or pickled weight file, a missing or unknown tensor, a shape that config.json does not give, or
    an output folder that is in use.
    """
    entries = read_mapping(hf_dir)
    groups = by_key(entries)
    tensors = HubTensors(entries, HubFiles(hf_dir), experts)
    whole = {
        key: torch.empty(group[0].checkpoint_shape, dtype=tensors.dtype(group), device="meta")
        for key, group in groups.items()
    }

    def read(entry: Entry) -> tuple[Entry, Tensor]:
        return entry, tensors.read(entry)

    with output_folder(checkpoint_dir, force=force, mark="step_*") as output:
        folder.copy_hf_files(hf_dir, output / folder.HF)
        step = atomic.partial(folder.step_folder(output, 0))
        step.mkdir()
        with RecordFile(step) as file:
            for entry, tensor in one_ahead(read, entries):
                if entry.expert is None:
                    file.add(entry.megatron, tensor)
                else:
                    offsets = (entry.expert, *(0 for _ in tensor.shape))
                    file.add(entry.megatron, tensor[None], offsets)
        write_contents(step, whole, file.records)
        names = {path.name for path in step.iterdir()} - {file.name}
        files = {file.name: file.sums, **checksums(step, sorted(names))}
        folder.Manifest(step=0, has_optimizer=False, layout={}, files=files).write(step)
        folder.publish(output, 0)
    return len(groups)
