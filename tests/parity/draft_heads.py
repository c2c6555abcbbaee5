"""What a draft head computes, in transformers' modules and on plain sequences."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megavlm.data.packs.packing import Pack
from megavlm.families import family, family_of
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.draft_head import NUM_TOKENS
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.parallel.mesh import build_mesh
from megavlm.training.forward_backward import forward_backward
from megavlm.training.gradient_buffers import reduce_gradients, without_reduction, wrap
from megavlm.training.step.vision_features import VisionFeatures
from tests.parity.eagle3_reference import Eagle3Reference, add_random_eagle3
from tests.parity.reference import Reference, Sequences, distinct_images, token_weights
from tests.parity.runs import Name, Run, load_with_head
from tests.parity.table import Ranks
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

    def gradients(self) -> dict[str, Any]:
        return {f"mtp.{name}": x.grad for name, x in self.head.named_parameters()}

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
        positions = torch.arange(hidden.shape[1] - 1).expand(3, 1, -1)
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
        weight = self.lm_head.weight.detach()
        return (hidden @ weight.t())[0, first:-1], (drafted @ weight.t())[0, first - 1 : -1]


def divergence(policy: Tensor, drafted: Tensor) -> Tensor:
    """Return the divergence [S] of the head's logits [S, V] from the policy's."""
    p, q = policy.softmax(-1), drafted.softmax(-1)
    top, index = p.topk(min(NUM_TOKENS, p.shape[-1]))
    same = q.gather(-1, index)
    rest = (1 - top.sum(-1)).clamp(min=0)
    others = 1 - same.sum(-1)
    return (top * (top / same).log()).sum(-1) + torch.xlogy(rest, rest / others)


def with_random_head(source: Path, target: Path) -> Path:
    """Copy a model folder and add a head of the family's kind."""
    is_eagle3 = family_of(source).draft_head == "eagle3"
    return (add_random_eagle3 if is_eagle3 else add_random_head)(source, target)


def expect(folder: Path, cases: Sequence[Sequences]) -> dict[str, Any]:
    """Return the head's logits by sequence and response, their divergences, and its gradients."""
    is_eagle3 = family_of(folder).draft_head == "eagle3"
    reference = Eagle3Reference(folder) if is_eagle3 else HeadReference(folder)
    logits, divergences = [], []
    for case in cases:
        for index, response in enumerate(case.responses):
            policy, drafted = reference.logits(case, response)
            values = divergence(policy, drafted)
            (values * token_weights(len(response), index)).sum().backward()
            logits.append(drafted.detach())
            divergences.append(values.detach())
    gradients = reference.gradients()
    return {"logits": logits, "divergences": divergences, "gradients": gradients}


class Passed(NamedTuple):
    """Gradients of this rank before and after the sum over ranks, and on the last stage each part
    of a pack with the head's divergences and hidden states at its targets.
    """

    own: dict[Name, Tensor]
    summed: dict[Name, Tensor]
    seen: list[tuple[Pack, Tensor, Tensor]]


class Headed:
    """This rank's part of a model, with or without its head."""

    def __init__(
        self,
        folder: Path,
        config: Any,
        ranks: Ranks,
        *,
        head: bool,
        shard_optimizer: bool = False,
    ) -> None:
        self.mesh, parts = build_mesh(ranks.mesh), family(config.model_type)
        options = ModelOptions(
            freeze_tower=False, freeze_merger=False, sequence=ranks.sequence, draft_head=head
        )
        self.entries = parts.mapping(config, draft_head=head)
        chunks = build_model(config, self.mesh, options)
        load_with_head(chunks, self.entries, folder, self.mesh)
        wrapped = [] if shard_optimizer else wrap(chunks, shard_optimizer=False)
        self.run = Run(self.mesh, self.entries, chunks, wrapped, {})

    def backward(self, packs: Sequence[Pack], cases: Sequence[Sequences]) -> "Passed":
        last = self.run.chunks[-1]
        kept: list[Tensor] = []
        seen: list[tuple[Pack, Tensor, Tensor]] = []
        if last.draft_head is not None:
            last.draft_head.register_forward_hook(lambda _, given, output: kept.append(output))

        def loss(pack: Pack, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
            assert pack.columns is not None
            total = (scores.logprobs * pack.columns.loss_weights).sum()
            if scores.draft_divergence is not None:
                total = total + (scores.draft_divergence * pack.columns.loss_weights).sum()
                hidden = last._at_targets(kept[-1].detach(), pack)
                seen.append((pack, scores.draft_divergence.detach(), hidden))
            return total, {}

        parts = [pack.part(self.mesh.context_rank) for pack in packs]
        features = VisionFeatures.everywhere(self.run.wrapped, distinct_images(cases))
        for chunk in self.run.wrapped:
            chunk.zero_grad_buffer()
        with without_reduction(self.run.wrapped):
            forward_backward(self.run.wrapped, parts, features, Scoring(), loss)
        own = self._gradients()
        reduce_gradients(self.run.wrapped)
        return Passed(own, self._gradients(), seen)

    def _gradients(self) -> dict[Name, Tensor]:
        return {name: x.main_grad.clone().view(x.shape) for name, x in self.run.trained()}
