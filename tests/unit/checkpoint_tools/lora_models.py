"""Adapters that PEFT makes on transformers' tiny models, and what it computes with them."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megavlm.model_config import model_config
from megavlm.parallel.torchvision_ops import define_torchvision_operators

PROJECTIONS = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "gate_up", "down")]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Tensors = dict[str, Tensor]


def load(folder: Path) -> Any:
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        folder, config=model_config(folder), dtype=torch.float32
    )
    return model.eval()


def make_adapters(hf: Path, folder: Path, **settings: Any) -> Any:
    """A PEFT folder with random pairs; PEFT's model, which computes with them."""
    from peft import LoraConfig, get_peft_model

    if "qwen3_vl_moe" in str(hf) and "target_modules" not in settings:
        settings["target_parameters"] = STACKS
    settings = {"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS} | settings
    model = get_peft_model(load(hf), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model.eval()


def load_adapters(hf: Path, folder: Path) -> Any:
    """PEFT's model, with every tensor of the folder in it and nothing else adapted."""
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(load(hf), folder)
    # It looks for the patterns' names among modules only, and finds those of parameters later.
    problems = [str(one.message) for one in caught if "_pattern keys did not match" not in str(one)]
    assert not [problem for problem in problems if "adapter" in problem or "keys" in problem]
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapted) == len(load_file(folder / "adapter_model.safetensors"))
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(1))
    result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().abs().max() / y.detach().abs().max())


def configure(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path, {"format": "pt"})
