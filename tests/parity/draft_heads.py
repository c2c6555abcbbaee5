"""What a draft head computes, in transformers' modules and on plain sequences."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megavlm.data.packs.positions import text_positions
from megavlm.models.common.draft_head import NUM_TOKENS
from tests.parity.reference import Reference, Sequences, token_weights
from tests.support.draft_head import EMBEDDING, HEAD, LAST


def add_random_head(source: Path, target: Path) -> Path:
    """Copy a model folder and add a head whose norms and weights are all drawn at random."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    size = tensors[HEAD if HEAD in tensors else EMBEDDING].shape[1]
    torch.manual_seed(11)
    for name in [name for name in tensors if name.startswith(LAST)]:
        like = tensors[name]
        drawn = like.roll(1, 0) + 0.2 * like.std() * torch.randn_like(like)
        tensors["mtp.layers.0." + name.removeprefix(LAST)] = drawn
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(size)
    tensors["mtp.fc.weight"] = torch.randn(size, 2 * size) / size**0.5
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


class HeadReference:
    """A model in transformers with the draft head of its folder."""

    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        model: Any = self.reference.model
        text = model.model.language_model
        like = text.layers[-1]
        weights = {
            name.removeprefix("mtp."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith("mtp.")
        }
        size = len(weights["norm.weight"])
        norm = type(text.norm)
        self.head = nn.ModuleDict(
            {
                "fc": nn.Linear(2 * size, size, bias=False),
                "pre_fc_norm_embedding": norm(size, eps=text.config.rms_norm_eps),
                "pre_fc_norm_hidden": norm(size, eps=text.config.rms_norm_eps),
                "layers": nn.ModuleList([type(like)(text.config, len(text.layers) - 1)]),
                "norm": norm(size, eps=text.config.rms_norm_eps),
            }
        )
        self.head.load_state_dict(weights)
        self.text, self.lm_head = text, model.lm_head

    def logits(self, case: Sequences, response: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the logits [S, V] of the policy and of the head that predict a response."""
        seen: dict[str, Any] = {}

        def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            seen.update(kwargs)

        hook = self.text.register_forward_pre_hook(keep, with_kwargs=True)
        last: list[Tensor] = []
        other = self.lm_head.register_forward_pre_hook(lambda _, given: last.append(given[0]))
        with torch.no_grad():
            self.reference.scores(case.prompt, response)
        hook.remove()
        other.remove()
        hidden, embeddings = last[0], seen["inputs_embeds"]
        after = text_positions(len(response), case.prompt.next_position)
        # of a token's parent
        positions = torch.cat([case.prompt.positions, after], dim=1)[:, None, :-1]
        head = self.head
        joined = torch.cat(
            [
                head["pre_fc_norm_embedding"](embeddings[:, 1:]),
                head["pre_fc_norm_hidden"](hidden[:, :-1]),
            ],
            -1,
        )
        slots = head["fc"](joined)
        length = slots.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        output = head["layers"][0](
            slots,
            position_embeddings=self.text.rotary_emb(slots, positions),
            attention_mask=mask,
        )
        output = output[0] if isinstance(output, tuple) else output
        drafted = head["norm"](output)
        first = len(case.prompt.token_ids) - 1
        with torch.no_grad():
            policy = self.lm_head(hidden)[0, first:-1]
        return policy, nn.functional.linear(drafted, self.lm_head.weight.detach())[0, first - 1 : -1]


def divergence(policy: Tensor, drafted: Tensor) -> Tensor:
    """Return the divergence [S] of the head's logits [S, V] from the policy's."""
    p, q = policy.softmax(-1), drafted.softmax(-1)
    top, index = p.topk(min(NUM_TOKENS, p.shape[-1]))
    same = q.gather(-1, index)
    rest = (1 - top.sum(-1)).clamp(min=0)
    others = 1 - same.sum(-1)
    return (top * (top / same).log()).sum(-1) + torch.xlogy(rest, rest / others)


def expect(folder: Path, cases: Sequence[Sequences]) -> dict[str, Any]:
    """Return the head's logits by sequence and response, their divergences, and its gradients."""
    reference = HeadReference(folder)
    logits, divergences = [], []
    for case in cases:
        for index, response in enumerate(case.responses):
            policy, drafted = reference.logits(case, response)
            values = divergence(policy, drafted)
            (values * token_weights(len(response), index)).sum().backward()
            logits.append(drafted.detach())
            divergences.append(values.detach())
    gradients = {f"mtp.{name}": x.grad for name, x in reference.head.named_parameters()}
    return {"logits": logits, "divergences": divergences, "gradients": gradients}
