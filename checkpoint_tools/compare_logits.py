"""Comparison of two models by the logits of transformers on a text and on an image."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from checkpoint_tools.export_hf import WriteOptions, write_hf
from checkpoint_tools.hf_config import has_authors_form
from checkpoint_tools.lora.peft_folder import is_peft_folder
from checkpoint_tools.lora.step_adapters import has_adapters, step_adapters
from checkpoint_tools.streaming import ShowProgress, no_progress
from checkpoint_tools.weights import Weights, open_both
from megavlm.model_config import model_config
from megavlm.models.common.loading import HUB, Form
from megavlm.models.linear_attention.in_transformers import use_plain_torch
from megavlm.parallel.torchvision_ops import define_torchvision_operators
from megavlm.temporary import temporary_folder

_TEXT = "The quick brown fox jumps over the lazy dog, and then?"


@dataclass(frozen=True)
class LogitDifference:
    """Largest difference over all positions and the vocabulary.

    relative: the difference divided by the largest logit of the first model, or of the second if
    the first has only zeros. token: the token at `position`. vocabulary: the entry that differs
    most.
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
    experts: tuple[Form | None, Form | None] = (None, None),
    alpha: float | None = None,
    show: ShowProgress = no_progress,
) -> list[LogitDifference]:
    """Compare the fp32 logits of two HuggingFace folders or checkpoints, one model in memory at a
    time, on inputs of the processor of `a`.

    experts: formats of their stacked experts, as in HubTensors. alpha: alpha of adapters in a
    checkpoint that does not record it. Raises ValueError for adapters without a model, models of
    two families, vocabularies of different sizes, or logits that are not finite.
    """
    for path in (a, b):
        if is_peft_folder(path):
            raise ValueError(
                f"{path} holds adapters but no model to compute logits with: merge them "
                f"(megavlm-convert lora-merge MODEL OUTPUT --adapter {path}) and compare that."
            )
    sides = open_both(a, b, experts)
    for weights in sides:
        if has_authors_form(weights.hf_files):
            raise ValueError(
                f"{weights.hf_files} has the form of the model's authors, and logits are computed "
                "by transformers: export it with --like a folder of transformers' form first."
            )
    families = [weights.config.model_type for weights in sides]
    if families[0] != families[1]:
        raise ValueError(
            f"{a} is a {families[0]} and {b} a {families[1]}: only logits of one family can be "
            f"compared."
        )
    if alpha is not None and not any(map(has_adapters, sides)):
        raise ValueError(f"neither {a} nor {b} holds adapters: leave --alpha out.")
    with ExitStack() as stack:
        left, right = (stack.enter_context(_hf_folder(weights, alpha, show)) for weights in sides)
        inputs = _inputs(left)
        first, second = _logits(left, inputs), _logits(right, inputs)
        tokenizer = _processor(left).tokenizer
    differences = []
    for prompt, x in first.items():
        y = second[prompt]
        if x.shape != y.shape:
            raise ValueError(
                f"{a} and {b} have {x.shape[1]} and {y.shape[1]} logits per token: they cannot "
                f"be compared."
            )
        for path, logits in ((a, x), (b, y)):
            if not logits.isfinite().all():
                raise ValueError(
                    f"{path} has logits on the {prompt} prompt that are NaN or infinite: they "
                    f"cannot be compared."
                )
        gap = (x - y).abs()
        place = int(gap.argmax())
        position, vocabulary = divmod(place, gap.shape[1])
        largest = float(gap.flatten()[place])
        token = tokenizer.convert_ids_to_tokens(int(inputs[prompt]["input_ids"][0, position]))
        scale = float(x.abs().max()) or float(y.abs().max())
        relative = largest / scale if scale else 0.0
        differences.append(LogitDifference(prompt, largest, relative, position, token, vocabulary))
    return differences


@contextmanager
def _hf_folder(weights: Weights, alpha: float | None, show: ShowProgress) -> Iterator[Path]:
    """Yield a HuggingFace folder with experts in the hub's format: the folder of the weights if it
    is one, else a temporary export.
    """
    if weights.manifest is None and weights.experts == HUB:
        yield weights.path
        return
    adapters = step_adapters(weights, alpha=alpha) if has_adapters(weights) else None
    with temporary_folder("megavlm-verify-") as folder:
        write_hf(weights, folder / "hf", adapters=adapters, options=WriteOptions(show=show))
        yield folder / "hf"


def _inputs(folder: Path) -> dict[str, Any]:
    """Return by prompt the inputs for a text, and for an image that has no repeating parts."""
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
    """Compute the logits [T, V] of each prompt."""
    define_torchvision_operators()
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForImageTextToText.from_pretrained(
        folder, config=model_config(folder), dtype=torch.float32
    )
    use_plain_torch(model)
    model.eval()
    # A weight may start anywhere in a mapped file, and kernels round depending on its alignment:
    # equal weights give equal logits only from memory of their own.
    for weight in (*model.parameters(), *model.buffers()):
        weight.data = weight.data.clone()
    return {prompt: model(**values, use_cache=False).logits[0] for prompt, values in inputs.items()}


def _processor(folder: Path) -> Any:
    define_torchvision_operators()
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)
