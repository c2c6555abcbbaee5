"""Logits of two models, through transformers, on a text and on an image."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from checkpoint_tools.export_hf import write_hf
from checkpoint_tools.peft_folder import is_peft_folder
from checkpoint_tools.progress import Show, silent
from checkpoint_tools.step_adapters import has_adapters, step_adapters
from checkpoint_tools.weights import Weights, open_both
from megavlm.models.common.loading import HUB, Form
from megavlm.parallel.torchvision_ops import define_torchvision_operators

_TEXT = "The quick brown fox jumps over the lazy dog, and then?"


@dataclass(frozen=True)
class Difference:
    """The largest over all positions and the vocabulary. `relative`: to the largest logit of the
    first model, or of the second where the first has nothing but zeros. `token`: what stands at
    `position`; `vocabulary`: the entry that differs most.
    """

    prompt: str
    largest: float
    relative: float
    position: int
    token: str
    vocabulary: int

    def sentence(self) -> str:
        if self.largest == 0:
            return f"{self.prompt}: logits are equal"
        where = f"token {self.position} ({self.token!r}), vocabulary entry {self.vocabulary}"
        return (
            f"{self.prompt}: logits differ by at most {self.largest:.3g}, {self.relative:.3g} of "
            f"the largest, at {where}"
        )


def compare_logits(
    a: Path,
    b: Path,
    *,
    experts: tuple[Form, Form] = (HUB, HUB),
    alpha: float | None = None,
    show: Show = silent,
) -> list[Difference]:
    """Of HF folders or checkpoints, in fp32, one model in memory at a time. Both get the inputs
    that the processor of `a` makes. `experts`: the forms of their stacks, as in HubTensors.
    `alpha`: of adapters in a checkpoint, where nothing tells it.

    ValueError for adapters without a model, models of two families, vocabularies of different
    sizes, or logits that are not finite.
    """
    for path in (a, b):
        if is_peft_folder(path):
            raise ValueError(
                f"{path} holds adapters and no model, so there are no logits: merge them "
                f"(megavlm-convert lora-merge MODEL OUTPUT --adapter {path}) and compare that."
            )
    sides = open_both(a, b, experts)
    families = [weights.config.model_type for weights in sides]
    if families[0] != families[1]:
        raise ValueError(
            f"{a} is a {families[0]} and {b} a {families[1]}: logits of one family are compared."
        )
    if alpha is not None and not any(map(has_adapters, sides)):
        raise ValueError(f"neither {a} nor {b} holds adapters: leave --alpha out.")
    with ExitStack() as stack:
        left, right = (
            stack.enter_context(_hf_folder(weights, form, alpha, show))
            for weights, form in zip(sides, experts, strict=True)
        )
        inputs = _inputs(left)
        first, second = _logits(left, inputs), _logits(right, inputs)
        tokenizer = _processor(left).tokenizer
    differences = []
    for prompt, x in first.items():
        y = second[prompt]
        if x.shape != y.shape:
            raise ValueError(
                f"{a} and {b} have {x.shape[1]} and {y.shape[1]} logits a token: they cannot be "
                f"compared."
            )
        for path, logits in ((a, x), (b, y)):
            if not logits.isfinite().all():
                raise ValueError(
                    f"{path} has logits on the {prompt} prompt that are no numbers (NaN or "
                    f"infinite): they cannot be compared."
                )
        gap = (x - y).abs()
        place = int(gap.argmax())
        position, vocabulary = divmod(place, gap.shape[1])
        largest = float(gap.flatten()[place])
        token = tokenizer.convert_ids_to_tokens(int(inputs[prompt]["input_ids"][0, position]))
        scale = float(x.abs().max()) or float(y.abs().max())
        relative = largest / scale if scale else 0.0
        differences.append(Difference(prompt, largest, relative, position, token, vocabulary))
    return differences


@contextmanager
def _hf_folder(weights: Weights, experts: Form, alpha: float | None, show: Show) -> Iterator[Path]:
    """The folder itself, or what is made of it for as long as it is needed: an export of a
    checkpoint, or the same model with its experts as on the hub.
    """
    if weights.manifest is None and experts == HUB:
        yield weights.path
        return
    adapters = step_adapters(weights, alpha=alpha) if has_adapters(weights) else None
    with tempfile.TemporaryDirectory(prefix="megavlm-verify-") as folder:
        write_hf(weights, Path(folder) / "hf", adapters=adapters, show=show)
        yield Path(folder) / "hf"


def _inputs(folder: Path) -> dict[str, Any]:
    """A text and an image that is not alike anywhere, as the model's processor makes them."""
    processor = _processor(folder)
    steps = torch.linspace(0, 255, 112)
    channels = [steps.expand(112, 112), steps[:, None].expand(112, 112), steps.outer(steps) / 255]
    image = Image.fromarray(torch.stack(channels, dim=2).to(torch.uint8).numpy())
    content = {
        "text": [{"type": "text", "text": _TEXT}],
        "image": [{"type": "image", "image": image}, {"type": "text", "text": _TEXT}],
    }
    return {
        prompt: processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        for prompt, parts in content.items()
    }


@torch.no_grad()
def _logits(folder: Path, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """By prompt: [T, V]."""
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return {prompt: model(**values, use_cache=False).logits[0] for prompt, values in inputs.items()}


def _processor(folder: Path) -> Any:
    define_torchvision_operators()
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)
