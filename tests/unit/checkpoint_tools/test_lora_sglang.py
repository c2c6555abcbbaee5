"""SGLang's own reader of adapters on what lora-export writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from checkpoint_tools.lora.export_adapters import export_adapters
from checkpoint_tools.lora.import_adapters import import_adapters
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from tests.unit.checkpoint_tools.conftest import Folder
from tests.unit.checkpoint_tools.lora_models import make_adapters


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"])
def test_sglang_finds_every_pair(family: str, hf_folder: Folder, tmp_path: Path) -> None:
    define_torchvision_operators()
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    hf = hf_folder(family)
    make_adapters(hf, tmp_path / "peft", alpha_pattern={"v_proj": 12})
    import_adapters(tmp_path / "peft", tmp_path / "checkpoint", base=hf)
    export_adapters(tmp_path / "checkpoint", tmp_path / "out", separate=True)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    text = AutoConfig.from_pretrained(hf).text_config
    nothing: Any = None  # neither a loader nor kernels are asked for
    adapter = LoRAAdapter("ours", LoRAConfig(str(tmp_path / "out")), text, nothing, nothing)
    adapter.initialize_weights_from_tensors(tensors)
    assert adapter.scaling == 1.5
    for number, layer in enumerate(adapter.layers):
        place = f"base_model.model.model.language_model.layers.{number}"
        fused = layer.weights[f"{place}.self_attn.qkv_proj.lora_A.weight"]
        parts = [tensors[f"{place}.self_attn.{x}_proj.lora_A.weight"] for x in "qkv"]
        assert torch.equal(fused, torch.cat(parts))
        is_moe = any(f"{place}.mlp.experts." in name for name in tensors)
        mlps = (
            [f"mlp.experts.{expert}" for expert in range(text.num_experts)] if is_moe else ["mlp"]
        )
        linears = [f"{mlp}.{linear}" for mlp in mlps for linear in ("gate_up_proj", "down_proj")]
        assert set(layer.weights) == {
            f"{place}.{name}.lora_{side}.weight"
            for name in ("self_attn.qkv_proj", "self_attn.o_proj", *linears)
            for side in "AB"
        }
