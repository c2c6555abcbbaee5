"""Every released model by its configuration alone: the mapping covers what transformers builds and
what our tower has, and the ranks of the Megatron model hold what it cuts.
"""

from pathlib import Path

import pytest
import torch

from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import MEMORY, HubTensors
from megavlm.models.common.mapping import by_key, shard_tensor
from megavlm.models.sizes import rank_parameters
from megavlm.parallel.mesh import Layout
from tests.support.families import build_in_transformers, entries_of
from tests.support.releases import RELEASES, released_config

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
    text = config.text_config
    count = getattr(text, "num_experts", None) or getattr(text, "n_routed_experts", None)
    for key, group in by_key(entries).items():  # asserts one entry of a key, or experts in order
        if group[0].expert is not None:
            assert len(group) == group[0].hf_shapes[0][0] == count, key


@every_release
def test_a_rank_holds_what_the_mapping_cuts_for_it(release: str, tmp_path: Path) -> None:
    """Every tensor of the Megatron model, in its shape; of language layers, which are alike, one
    for each level of DeepStack.
    """
    config = released_config(release, tmp_path, num_hidden_layers=3)
    size, options = 8, ModelOptions(sequence=True)
    text = config.text_config
    while text.num_attention_heads % size or text.vocab_size % size:
        with pytest.raises(ValueError, match=f"parallel.tensor={size}"):
            rank_parameters(config, Layout(tensor=size), size, size - 1, options)
        size //= 2
    layout = Layout(tensor=size)
    expected: dict[str, tuple[int, ...]] = {}
    for key, group in by_key(entries_of(config)).items():
        entry = group[0]
        cuts = getattr(layout, entry.shard.axis)
        full = torch.empty(entry.megatron_shape, device="meta")
        shape = tuple(shard_tensor(entry, full, cuts - 1, cuts).shape)
        for one in group:
            name = key.replace(".experts.experts.", f".experts.{one.expert}.")
            expected[name] = shape
    held = rank_parameters(config, layout, size, size - 1, options)
    assert {x.name: x.shape for x in held} == expected
