"""What an EAGLE-3 head computes, in plain torch and on plain sequences (SGLang's
models/llama_eagle3.py), and a copy of a model with such a head.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint_tools.draft_head import FOLDER, make_draft_head
from tests.parity.reference import Reference, Sequences


def add_random_eagle3(source: Path, target: Path) -> Path:
    """Copy a model folder and put a head in it, in FOLDER, whose norms are drawn at random too."""
    shutil.copytree(source, target)
    make_draft_head(target, target / FOLDER, seed=11)
    path = target / FOLDER / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(12)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.2 * torch.randn_like(tensor)
        else:
            tensor.normal_(std=tensor.shape[1] ** -0.5)
    save_file(tensors, path, {"format": "pt"})
    return target


class Eagle3Reference:
    """A model in transformers with the head in its folder."""

    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        model: Any = self.reference.model
        self.text, self.lm_head = model.model.language_model, model.lm_head
        weights = load_file(folder / FOLDER / "model.safetensors")
        self.weights = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
        # before which hidden states are read, in a model with few layers
        count = len(self.text.layers)
        self.layers = [count - 3, count - 2, count - 1][-min(count, 3) :]

    def gradients(self) -> dict[str, Any]:
        return {f"mtp.{name}": tensor.grad for name, tensor in self.weights.items()}

    def logits(self, case: Sequences, response: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the logits [S, V] of the policy and of the head that predict a response."""
        seen: dict[str, Tensor] = {}
        hooks = []

        def keep(name: str, module: nn.Module) -> None:
            def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
                # the output layer is called again, for the response only
                seen.setdefault(name, args[0] if args else kwargs["inputs_embeds"])

            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

        keep("embeddings", self.text)
        keep("last", self.lm_head)
        for index in self.layers:
            keep(f"layer {index}", self.text.layers[index])
        with torch.no_grad():
            self.reference.scores(case.prompt, response)
        for handle in hooks:
            handle.remove()
        captured = torch.cat([seen[f"layer {index}"] for index in self.layers], -1)
        drafted = self._head(seen["embeddings"][:, 1:], captured[:, :-1])
        first, weight = len(case.prompt.token_ids) - 1, self.lm_head.weight.detach()
        policy = seen["last"] @ weight.t()
        return policy[0, first:-1], (drafted @ weight.t())[0, first - 1 : -1]

    def _head(self, embeddings: Tensor, captured: Tensor) -> Tensor:
        text, weights = self.text.config, self.weights
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads

        def norm(x: Tensor, name: str) -> Tensor:
            weight = weights[f"{name}.weight"]
            return F.rms_norm(x, weight.shape, weight, text.rms_norm_eps)

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, weights[f"{name}.weight"])

        layer = "layers.0."
        hidden = linear(captured, "fc")
        joined = torch.cat(
            [norm(embeddings, layer + "input_layernorm"), norm(hidden, layer + "hidden_norm")], -1
        )
        query, key, value = (
            linear(joined, f"{layer}self_attn.{x}_proj")
            .unflatten(-1, (-1, head_dim))
            .transpose(1, 2)
            for x in "qkv"
        )
        half = head_dim // 2
        theta = text.rope_parameters["rope_theta"]
        angles = torch.arange(hidden.shape[1])[:, None] / theta ** (torch.arange(half) / half)

        def turned(x: Tensor) -> Tensor:
            first, second = x.split(half, -1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        output = F.scaled_dot_product_attention(
            turned(query), turned(key), value, is_causal=True, enable_gqa=True
        )
        output = output.transpose(1, 2).flatten(-2)
        hidden = hidden + linear(output, layer + "self_attn.o_proj")
        normed = norm(hidden, layer + "post_attention_layernorm")
        gate = F.silu(linear(normed, layer + "mlp.gate_proj"))
        up = linear(normed, layer + "mlp.up_proj")
        return norm(hidden + linear(gate * up, layer + "mlp.down_proj"), "norm")
