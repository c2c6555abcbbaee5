"""Every released model by its configuration alone: the mapping covers what transformers builds and
what our tower has, and every tensor can be cut.
"""

from pathlib import Path

import pytest
import torch

from megavlm.models.common.loading import MEMORY, HubTensors
from megavlm.models.common.mapping import by_key, shard_tensor
from tests.unit.models.families import build_in_transformers, entries_of, part
from tests.unit.models.releases import RELEASES, released_config

every_release = pytest.mark.parametrize("release", RELEASES)


@every_release
def test_the_mapping_covers_every_tensor_of_transformers_once(release: str, tmp_path: Path) -> None:
    config = released_config(release, tmp_path)
    entries = entries_of(config)
    tensors = dict(build_in_transformers(config).state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    HubTensors(entries, tensors, MEMORY)  # refuses a missing or unknown name, and another shape
    rows = [(name, entry.expert) for entry in entries for name in entry.hf]
    assert len(rows) == len(set(rows))
    for key, group in by_key(entries).items():  # asserts one entry of a key, or experts in order
        if group[0].expert is not None:
            assert len(group) == group[0].hf_shapes[0][0] == config.text_config.num_experts, key


@every_release
def test_the_mapping_has_the_towers_tensors(release: str, tmp_path: Path) -> None:
    config = released_config(release, tmp_path)
    with torch.device("meta"):
        tower = part(config.model_type, "vision").VisionTower(config.vision_config)
    ours = {f"visual.{name}": tuple(x.shape) for name, x in tower.state_dict().items()}
    entries = entries_of(config)
    visual = {x.megatron: x.megatron_shape for x in entries if x.megatron.startswith("visual.")}
    assert visual == ours


@every_release
def test_every_tensor_can_be_cut(release: str, tmp_path: Path) -> None:
    """By every size that divides the heads, as megatron-core wants it."""
    config = released_config(release, tmp_path)
    first = [group[0] for group in by_key(entries_of(config)).values()]
    kinds = {(entry.megatron_shape, entry.shard): entry for entry in first}
    for size in (1, 2, 4, 8):
        if config.text_config.num_attention_heads % size:
            continue
        for (shape, shard), entry in kinds.items():
            full = torch.empty(shape, device="meta")
            piece = shard_tensor(entry, full, size - 1, size)
            assert piece.numel() * (1 if shard.dim is None else size) == full.numel()
