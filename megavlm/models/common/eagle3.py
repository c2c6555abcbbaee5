"""EAGLE-3 draft head of one layer (arXiv 2503.01840): the folder in which it lies, as plain values.

The folder has the form of published heads, which SGLang reads: a config.json, and a
model.safetensors with SGLang's names. Everything in its config.json follows from the model that it
drafts for. Nothing here imports torch, so that a recipe can be checked without it.

Source: SGLang 0.5.23 (models/llama_eagle3.py, models/qwen3_vl.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megavlm.models.common.architecture import count

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Values of a head's config.json that published heads may leave out or set, and what they are in a
# head that is trained. Others would add tensors, or count positions or channels in another way.
DEFAULTS = {
    "attention_bias": False,
    "bias": False,
    "fc_norm": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "mrope_section": None,
    "norm_before_fc": False,
    "norm_output": False,
    "rope_scaling": None,
    "rope_type": "default",
    "tie_word_embeddings": False,
    "use_aux_norm": False,
}


def captured_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers, from 0, whose input hidden states the head reads: the ones that SGLang
    chooses, and the last three or fewer in a model that has no such layers.
    """
    chosen = (2, num_layers // 2, num_layers - 3)
    if 2 < chosen[1] < chosen[2]:
        return chosen
    return tuple(range(max(num_layers - 3, 0), num_layers))


def head_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a head.

    values: The language model's values in a config.json, in the form of transformers 5 or of older
    files. Raises KeyError with the name of a missing value.
    """
    rope = values.get("rope_parameters") or values
    heads, hidden = count(values, "num_attention_heads"), count(values, "hidden_size")
    layers = captured_layers(count(values, "num_hidden_layers"))
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": count(values, "intermediate_size"),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": count(values, "num_key_value_heads"),
        "head_dim": values.get("head_dim") or hidden // heads,
        "rms_norm_eps": values["rms_norm_eps"],
        "rope_theta": rope["rope_theta"],
        "max_position_embeddings": count(values, "max_position_embeddings"),
        "vocab_size": count(values, "vocab_size"),
        # Null, with untied embeddings: servers draft with the target's embedding and output layer.
        "draft_vocab_size": None,
        "tie_word_embeddings": False,
        # SGLang counts the layers after which it captures.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
    }


def check_head(folder: Path, values: Mapping[str, Any], make: str) -> None:
    """Raise ValueError if a folder has no head that can be trained with the model.

    values: As in `head_values`. make: Command that makes a head.
    """
    path = folder / "config.json"
    try:
        held = json.loads(path.read_text())
        with safe_open(folder / "model.safetensors", framework="np") as file:
            names = set(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} has no EAGLE-3 draft head ({error}): {make}") from error
    held |= held.get("rope_parameters") or {}
    expected = {**DEFAULTS, **head_values(values)}
    del expected["max_position_embeddings"]
    for key, value in expected.items():
        if (found := held.get(key, DEFAULTS.get(key))) != value:
            raise ValueError(
                f"{path} has {key}={json.dumps(found)}, but a head that is trained has "
                f"{json.dumps(value)}: {make}"
            )
    if unknown := sorted(name for name in names if name.startswith(("d2t", "t2d", "lm_head"))):
        raise ValueError(
            f"{folder} has {unknown[0]}, but a head that is trained has the model's vocabulary and "
            f"output layer: {make}"
        )
