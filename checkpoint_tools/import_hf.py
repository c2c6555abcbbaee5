"""HuggingFace folder -> checkpoint folder."""

from pathlib import Path

import torch

from checkpoint_tools.family import read_mapping
from checkpoint_tools.output import output_folder
from megavlm.checkpointing import atomic, folder
from megavlm.checkpointing.checksums import checksums
from megavlm.checkpointing.writer import write_tensors
from megavlm.models.common.loading import HFFolder, HubTensors


def import_hf(hf_dir: Path, checkpoint_dir: Path, *, force: bool = False) -> int:
    """Writes the weights as step 0, in the dtypes that they have. Returns the number of tensors.

    Reads one tensor at a time. ValueError, before anything is written where it can be known then,
    for another family, a missing, truncated or pickled weight file, a missing or unknown tensor, a
    shape that config.json does not give, or an output folder that is in use.
    """
    entries = read_mapping(hf_dir)
    table = {entry.megatron: entry for entry in entries}
    tensors = HubTensors(entries, HFFolder(hf_dir))
    shapes = {
        entry.megatron: torch.empty(entry.megatron_shape, dtype=tensors.dtype(entry), device="meta")
        for entry in entries
    }
    with output_folder(checkpoint_dir, force=force, mark="step_*") as output:
        folder.copy_hf_files(hf_dir, output / folder.HF)
        step = atomic.partial(folder.step_folder(output, 0))
        step.mkdir()
        write_tensors(step, shapes, lambda key: tensors.read(table[key]))
        names = sorted(path.name for path in step.iterdir())
        folder.Manifest(step=0, has_optimizer=False, layout={}, files=checksums(step, names)).write(
            step
        )
        folder.publish(output, 0)
    return len(entries)
