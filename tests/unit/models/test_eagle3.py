"""The folder of an EAGLE-3 draft head: the layers that it reads, and heads that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoint_tools.draft_head import make_draft_head
from checkpoint_tools.hf_config import read_config
from megavlm.families import language_values
from megavlm.models.common.eagle3 import captured_layers, check_head
from tests.unit.checkpointing.ranks import make_hf


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [
        (48, (2, 24, 45)),
        (36, (2, 18, 33)),
        (7, (2, 3, 4)),
        (6, (3, 4, 5)),
        (4, (1, 2, 3)),
        (2, (0, 1)),
    ],
)
def test_the_layers_are_sglang_s(num_layers: int, layers: tuple[int, ...]) -> None:
    """In models with enough layers; tiny ones have the last."""
    assert captured_layers(num_layers) == layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("eagle3") / "model", family="qwen3_vl", num_layers=4)


def values_of(model: Path) -> Any:
    return language_values(json.loads((model / "config.json").read_text()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 32}, "has draft_vocab_size=32, but a head that is trained has null"),
        ({"num_hidden_layers": 2}, "has num_hidden_layers=2"),
        ({"num_key_value_heads": 1}, "has num_key_value_heads=1"),
        ({"rope_theta": 1e4}, "has rope_theta=10000.0"),
        ({"rope_scaling": {"mrope_section": [2, 1, 1]}}, "has rope_scaling="),
        ({"rope_parameters": {"rope_theta": 1e4}}, "has rope_theta=10000.0"),
        ({"rope_parameters": {"mrope_section": [2, 1, 1]}}, "has mrope_section=[2, 1, 1]"),
        ({"fc_norm": True}, "has fc_norm=true"),
        ({"eagle_config": {"norm_before_fc": True}}, "has eagle_config="),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "has eagle_config="),
        ({"architectures": ["LlamaForCausalLM"]}, 'has architectures=["LlamaForCausalLM"]'),
    ],
)
def test_heads_of_other_forms_are_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    head = tmp_path / "head"
    make_draft_head(model, head, seed=0)
    check_head(head, values_of(model), "make one")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError) as caught:
        check_head(head, values_of(model), "make one")
    assert message in str(caught.value) and str(caught.value).endswith(": make one")


def test_a_head_with_a_vocabulary_of_its_own_is_refused(model: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    with pytest.raises(ValueError, match="has no EAGLE-3 draft head"):
        check_head(head, values_of(model), "make one")
    make_draft_head(model, head, seed=0)
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"d2t": np.zeros(4)}, head / "model.safetensors")
    with pytest.raises(ValueError, match="has d2t, but"):
        check_head(head, values_of(model), "make one")


def test_a_new_head_depends_on_its_seed(model: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_draft_head(model, tmp_path / name, seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    hidden = read_config(model).text_config.hidden_size
    assert a["fc.weight"].shape == (hidden, 3 * hidden)
    assert all((a[name] == b[name]).all() for name in a)
    assert not (a["fc.weight"] == c["fc.weight"]).all()
    other = make_hf(tmp_path / "other", family="qwen2_vl")
    with pytest.raises(ValueError, match="is a model of qwen2_vl, but EAGLE-3"):
        make_draft_head(other, tmp_path / "d", seed=0)
