"""What transformers computes, one plain sequence at a time: the other side of every parity test."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from megavlm.data.processor import Picture, Prompt


@dataclass(frozen=True)
class Sequences:
    """A prompt and its responses, each to be one sequence of its own in transformers."""

    prompt: Prompt
    responses: Sequence[Sequence[int]]


class Reference:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()

    def logits(self, prompt: Prompt, response: Sequence[int]) -> Tensor:
        """Logits that predict each token of the response [len(response), V], with a graph."""
        ids = torch.cat([prompt.token_ids, torch.tensor(response)])[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.pictures:
            inputs |= {
                "pixel_values": torch.cat([picture.patches for picture in prompt.pictures]),
                "image_grid_thw": torch.tensor([picture.grid for picture in prompt.pictures]),
                "mm_token_type_ids": (ids == self.config.image_token_id).long(),
            }
        return self.model(**inputs, use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1]

    def logprobs(self, prompt: Prompt, response: Sequence[int], temperature: float = 1.0) -> Tensor:
        logits = self.logits(prompt, response).float() / temperature
        return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]

    def gradients(self, cases: Sequence[Sequences]) -> dict[str, Tensor]:
        """By checkpoint name: gradients of `weighted_loss` over all responses."""
        self.model.zero_grad()
        for case in cases:
            for index, response in enumerate(case.responses):
                logprobs = self.logprobs(case.prompt, response)
                (logprobs * token_weights(len(response), index)).sum().backward()
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.model.named_parameters()
        }


def token_weights(length: int, index: int) -> Tensor:
    """A different weight for each token, so that a swapped or shifted target shows."""
    return torch.linspace(0.5, 1.5, length) * (1 + 0.25 * index) / 10


def distinct_pictures(cases: Sequence[Sequences]) -> dict[str, Picture]:
    return {picture.key: picture for case in cases for picture in case.prompt.pictures}
