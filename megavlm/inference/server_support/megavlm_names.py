"""Changes to SGLang's model classes: Intern-S1 accepts both names of a weight, and a wrapper passes
values on to the model that it contains.

SGLang 0.5.23 reads Intern-S1's weights only by the names that models of transformers 5 have in
memory. transformers itself writes hub files with the prefixes of its earlier releases.

If a class only wraps a model, SGLang keeps the wrapped model (the result of `eval`) and drops the
wrapper. It sets the layout of shared experts on the wrapper, so the model lacks it and the server
ends. It also does not ask the wrapped language model for the widths of its layers, and uses wrong
widths for adapters.

SGLang loads this module as a plugin (megavlm_plugins.dist-info).
"""

from typing import Any

PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def install() -> None:
    """Make SGLang's Intern-S1 accept both names of a weight, and wrappers pass values on.

    Classes are changed where SGLang looks them up, because importing them here would take a second
    of every server's start.
    """
    from sglang.srt.models.registry import ModelRegistry

    registry = type(ModelRegistry)
    resolve = registry.resolve_model_cls

    def resolve_with_names(self: Any, architectures: Any) -> Any:
        model, name = resolve(self, architectures)
        if "_mapping_interns1_name" in vars(model) and not hasattr(model, "megavlm_names"):
            model.megavlm_names, translate = True, model._mapping_interns1_name
            model._mapping_interns1_name = lambda model, hf: translate(model, in_memory(hf))
        if not hasattr(model, "eval"):
            model.shared_experts_config = property(None, hand_on)
        return model, name

    registry.resolve_model_cls = resolve_with_names


def hand_on(wrapper: Any, shared_experts: Any) -> None:
    """Give the model within a wrapper its layout of shared experts, and the widths of its language
    model's layers.
    """
    model = wrapper.eval()
    model.shared_experts_config = shared_experts
    if hasattr(model.llm, "get_hidden_dim"):
        model.get_hidden_dim = model.llm.get_hidden_dim


def in_memory(hf: str) -> str:
    """Return a tensor's name in models of transformers 5."""
    for old, new in PREFIXES.items():
        if hf.startswith(old):
            return new + hf.removeprefix(old)
    return hf
