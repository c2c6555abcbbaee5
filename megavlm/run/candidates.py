"""Models of any form as folders that a rollout server takes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint_tools.export_hf import export_hf
from checkpoint_tools.lora_merge import lora_merge
from megavlm.config.schema import Config
from megavlm.run.candidate_paths import kind


@contextmanager
def served_folder(config: Config, name: str | None) -> Iterator[Path]:
    """A HuggingFace folder for as long as the context. name: a checkpoint, a HuggingFace folder, or
    an adapter's, which is merged into the recipe's model; None: the recipe's model.

    Raises ValueError for what is none of them, or does not go together.
    """
    model = config.model
    own = Path(model.checkpoint or model.folder)
    if config.rollout.mode == "external":
        yield Path(model.folder)  # whose processor the servers' model has
        return
    path = own if name is None else Path(name)
    found = kind(path)
    if found == "hf":
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="megavlm-evaluate-") as folder:
        target = Path(folder) / "hf"
        if found == "adapter":
            lora_merge(own, target, adapter=path)
        else:
            export_hf(path, target)
        yield target
