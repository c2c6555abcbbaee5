"""Hooks with which a server's draft model writes its logits to files (`--forward-hooks`)."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Of Qwen3.5's head, and of EAGLE-3 heads.
ONLY_IN_DRAFTS = ["pre_fc_norm_hidden", "*.hidden_norm"]
# Set by a module that only the draft model has, before the logits of the same pass.
_is_draft: list[bool] = []


def hooks(folder: Path) -> list[dict[str, Any]]:
    """Return the hooks of a server that writes to `folder`."""
    place = {"folder": str(folder)}
    name = f"{__name__}:"
    return [
        {"name": "mark", "target_modules": ONLY_IN_DRAFTS, "hook_factory": name + "mark"},
        {
            "name": "write",
            "target_modules": ["logits_processor"],
            "hook_factory": name + "write",
            "config": place,
        },
    ]


def mark(config: dict[str, Any]) -> Callable[..., None]:
    return lambda module, given, output: _is_draft.append(True)


def write(config: dict[str, Any]) -> Callable[..., None]:
    """Write the token ids, positions in their sequence and logits of the slots of a pass."""
    numbers = itertools.count()

    def hook(module: Any, given: Any, output: Any) -> None:
        if not _is_draft:
            return
        _is_draft.clear()
        ids, hidden, head, batch, *_ = given
        logits = hidden @ head.weight[: module.config.vocab_size].t()
        torch.save(
            {
                "mode": batch.forward_mode.name,
                "ids": ids.clone(),
                "positions": batch.positions.clone(),
                "logits": logits.clone(),
            },
            Path(config["folder"]) / f"{next(numbers):05d}.pt",
        )

    return hook
