"""What transformers computes, one plain sequence at a time: the other side of every parity test."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from megavlm.data.packs.positions import text_positions
from megavlm.data.processor import ProcessedImage, Prompt
from megavlm.families import family
from megavlm.model_config import model_config
from megavlm.models.linear_attention.in_transformers import use_plain_torch
from megavlm.parallel.torchvision_ops import define_torchvision_operators


@dataclass(frozen=True)
class Sequences:
    """A prompt and its responses, each to be one sequence of its own in transformers."""

    prompt: Prompt
    responses: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Scores:
    """Of the tokens of one response: logits [S, V] and values [S]."""

    logits: Tensor
    values: Tensor

    def logprobs(self, response: Sequence[int], temperature: float = 1.0) -> Tensor:
        logits = self.logits.float() / temperature
        return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


class Reference:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        define_torchvision_operators()
        self.config = model_config(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, config=self.config, dtype=dtype
        ).eval()
        use_plain_torch(self.model)
        self.value_weight, self.value_bias = (
            x.requires_grad_() for x in value_parameters(self.config.text_config.hidden_size)
        )

    def scores(self, prompt: Prompt, response: Sequence[int]) -> Scores:
        """Of each token of the response, with a graph."""
        ids = torch.cat([prompt.token_ids, torch.tensor(response)])
        after = text_positions(len(response), prompt.next_position)
        positions = torch.cat([prompt.positions, after], dim=1)
        inputs = family(self.config.model_type).model_inputs(
            self.config, ids, positions, prompt.images
        )
        inputs |= {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        hidden = self._hidden(inputs)[0, len(prompt.token_ids) - 1 : -1]
        values = hidden.float() @ self.value_weight + self.value_bias
        return Scores(self.model.lm_head(hidden), values)

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Input of the output layer: not all models have a part that computes it of all media."""
        seen: list[Tensor] = []
        hook = self.model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        self.model(**inputs, use_cache=False)
        hook.remove()
        return seen[0]

    def gradients(
        self, cases: Sequence[Sequences], *, tokens: bool = True, values: bool = False
    ) -> dict[str, Tensor]:
        """By transformers' names: gradients of `weighted_loss` over all responses. Those of the
        value head are left in `value_weight` and `value_bias`.
        """
        self.model.zero_grad()
        self.value_weight.grad = torch.zeros_like(self.value_weight)
        self.value_bias.grad = torch.zeros_like(self.value_bias)
        for case in cases:
            for index, response in enumerate(case.responses):
                scores = self.scores(case.prompt, response)
                logprobs = scores.logprobs(response) if tokens else None
                weighted_loss(
                    logprobs, scores.values if values else None, token_weights(len(response), index)
                ).backward()
        saved = self.model.state_dict()
        buffers = {name: x for name, x in self.model.named_buffers() if name in saved}
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in (*self.model.named_parameters(), *buffers.items())
        }


def weighted_loss(logprobs: Tensor | None, values: Tensor | None, weights: Tensor) -> Tensor:
    """A different weight for each token; values count with another sign and size."""
    loss = weights.new_zeros(())
    if logprobs is not None:
        loss = loss + (logprobs * weights).sum()
    if values is not None:
        loss = loss - 0.3 * (values * weights).sum()
    return loss


def token_weights(length: int, index: int) -> Tensor:
    """A different weight for each token, so that a swapped or shifted target shows."""
    return torch.linspace(0.5, 1.5, length) * (1 + 0.25 * index) / 10


def value_parameters(hidden_size: int) -> tuple[Tensor, Tensor]:
    """A value head's weight [H] and bias [], the same in every process."""
    generator = torch.Generator().manual_seed(17)
    return torch.randn(hidden_size, generator=generator), torch.tensor(0.4)


def distinct_images(cases: Sequence[Sequences]) -> dict[str, ProcessedImage]:
    return {image.key: image for case in cases for image in case.prompt.images}
