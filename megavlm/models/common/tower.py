"""Base class of the families' vision towers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megavlm.data.media.image_processing import Grid, ProcessedImage
from megavlm.models.common.components import model_part
from megavlm.models.common.vision_layers import Segments


class Tower(nn.Module):
    """Vision tower. `forward` takes patches [P, patch] of all images and videos and their grids,
    and returns [P / merge_size^2, (1 + num_levels) * feature_size], image after image. A row has
    the merged features, followed by DeepStack level 0, 1, ..., in one tensor because autograd does
    not track nested lists.

    merger: The module that computes the merged features.
    separate_qkv: Queries, keys and values are three projections in HF, one linear layer here.
    recompute: Recompute each block in the backward pass instead of keeping its activations. A
        frozen part has no graph and keeps nothing in either case.

    Modules are named as `components` describes.
    """

    merge_size: int
    feature_size: int
    num_levels: int = 0
    separate_qkv: bool = False
    recompute: bool = False
    blocks: nn.ModuleList
    merger: nn.Module

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        raise AssertionError("a family defines its tower")

    def encode(self, images: Sequence[ProcessedImage]) -> Tensor:
        """Return the features [tokens, (1 + num_levels) * feature_size] of images, at least one,
        image after image.
        """
        device = next(self.parameters()).device
        patches = torch.cat([image.patches(device) for image in images])
        features: Tensor = self(patches, [grid for image in images for grid in image.grids])
        return features

    def projections(self, linear: str) -> tuple[str, ...]:
        """Return the names of the HF projections in a linear layer, in order. Each has the same
        number of its rows. linear: The layer's name in the tower.
        """
        name = linear.rpartition(".")[2]
        return ("q_proj", "k_proj", "v_proj") if self.separate_qkv and name == "qkv" else (name,)

    def mergers(self) -> list[nn.Module]:
        """Return the modules that model.freeze_merger controls, including DeepStack mergers."""
        found: list[nn.Module] = []
        for name, child in self.named_children():
            if model_part(f"visual.{name}.") == "merger":
                found += child if isinstance(child, nn.ModuleList) else [child]
        return found

    def run_blocks(
        self,
        x: Tensor,
        segments: Sequence[Segments],
        rotary: Sequence[Tensor] = (),
        taps: Sequence[int] = (),
        first: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run x [P, D] through as many blocks as there are segments, all or those from `first` on;
        block first + i attends within segments[i]. rotary: cos and sin [P, 1, d]; empty for blocks
        without a rotary embedding.

        Returns the last hidden states, and the hidden states after each block in `taps`, in the
        order of blocks.
        """
        tapped = []
        blocks = self.blocks[first : first + len(segments)]
        for index, (block, attended) in enumerate(zip(blocks, segments, strict=True), first):
            x = self.run_block(block, x, *rotary, attended)
            if index in taps:
                tapped.append(x)
        return x, tapped

    def run_block(self, block: nn.Module, x: Tensor, *others: Any) -> Tensor:
        """Return block(x, *others), recomputed in the backward pass if `recompute` says so."""
        # Blocks without gradients are not checkpointed: a checkpoint would keep their inputs.
        is_trained = x.requires_grad or any(p.requires_grad for p in block.parameters())
        if self.recompute and is_trained:
            # Blocks use no random numbers, so no random state has to be restored.
            made: Tensor = checkpoint(
                block, x, *others, use_reentrant=False, preserve_rng_state=False
            )
            return made
        return block(x, *others)
