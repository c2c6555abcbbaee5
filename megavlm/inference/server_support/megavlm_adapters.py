"""Weights of experts under their own names in a server with adapters on them, and towers without.

SGLang 0.5.23 moves a layer's experts into `experts.base_layer` when it adds adapters, but keeps
looking for `experts.w13_weight` when it loads weights, and ends with a KeyError. The first update
of a run sends every weight.

Of some models it would also put adapters on linear layers of the tower that have the names of the
language model's, under the numbers of the language model's layers.

SGLang loads this module as a plugin (megavlm_plugins.dist-info).
"""

from typing import Any

TOWERS = {"vision_model", "vpm", "audio_tower"}  # SGLang's names


def install() -> None:
    """Make SGLang's layer with adapters name the weights of its experts, as its others do, and find
    no layers in towers.
    """
    from sglang.srt.lora import lora_manager
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    make = FusedMoEWithLoRA.__init__

    def make_named(self: Any, base_layer: Any, *args: Any, **options: Any) -> None:
        make(self, base_layer, *args, **options)
        for name, parameter in base_layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    FusedMoEWithLoRA.__init__ = make_named
    find = lora_manager.get_layer_id

    def find_in_language_model(name: str) -> int | None:
        return find(name) if TOWERS.isdisjoint(name.split(".")) else None

    lora_manager.get_layer_id = find_in_language_model
