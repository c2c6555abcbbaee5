"""Values of `config.py` about images in the Qwen families and, in part, in GLM, as plain values."""

from typing import Any

from megavlm.models.common.architecture import FolderNames, PatchSizes

FOLDER_NAMES = FolderNames(
    sizes={
        "patch_size": "patch_size",
        "spatial_merge_size": "merge_size",
        "temporal_patch_size": "temporal_patch_size",
    },
    tokens={
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
)


def patch_sizes(hf_config: Any) -> PatchSizes:
    """Return the sizes of the tower's input."""
    vision = hf_config.vision_config
    return PatchSizes(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
