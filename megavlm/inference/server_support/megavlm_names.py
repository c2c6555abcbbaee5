"""Names in classes of models: of weights in Intern-S1, and of a value in models within others.

SGLang 0.5.23 reads Intern-S1's weights only by the names that models of transformers 5 have in
memory. transformers itself writes hub files with the prefixes of its earlier releases.

Of a class that is only a wrapper of a model SGLang keeps the model alone (what `eval` returns), but
has given its layout of shared experts to the wrapper, and ends without it. It also does not ask the
language model within for the widths of its layers, and takes wrong ones for adapters.

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
    """Make SGLang's Intern-S1 read both names, and wrappers hand on the value. Classes are changed
    where SGLang looks them up, because importing them here would take a second of every server's
    start.
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
