"""A tiny Qwen3.5 with a head that predicts a further token (mtp.*), and often guesses right; the
server arguments that draft with it, and with an EAGLE-3 head.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.draft_head import FOLDER

HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"
# What layers add to the embedding of a token.
ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
LAYERS = "model.language_model.layers."
LAST = LAYERS + "3."  # with full attention, as the head's own layer


def drafting(folder: Path) -> dict[str, Any]:
    """Return server arguments that draft with the head of a model folder, of either kind."""
    if not (folder / FOLDER).is_dir():
        return {"speculative_algorithm": "NEXTN"}
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(folder / FOLDER),
    }


def add_draft_head(source: Path, target: Path, like: int = 3) -> Path:
    """Copy a model folder, make the next token depend on the last one more than on others, and add
    a head that reads only that one. Returns `target`. like: The layer with attention that is also
    the head's.
    """
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("model.language_model.") and name.endswith(ADDED):
            tensor *= 0.05
    head = tensors[HEAD if HEAD in tensors else EMBEDDING]
    head *= 4
    size = head.shape[1]
    prefix = LAYERS + f"{like}."
    for name in [name for name in tensors if name.startswith(prefix)]:
        tensors["mtp.layers.0." + name.removeprefix(prefix)] = tensors[name].clone()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(size)  # zero-centered
    tensors["mtp.fc.weight"] = torch.eye(size, 2 * size)  # the embedding, without the hidden state
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
