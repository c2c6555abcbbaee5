"""A push as the trainer does it, from ranks of a layout to a real server; and what those ranks say
of the server's responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_tools.draft_head import FOLDER
from megavlm.config.lora import LoRA
from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.trees import Tree, prompt_tree
from megavlm.data.processor import Prompt
from megavlm.families import family
from megavlm.inference.protocol import Response, SamplingParams, adapter_name
from megavlm.inference.server_pool.receivers import Receiver, Receivers
from megavlm.model_config import model_config
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.mapping import Entry
from megavlm.models.common.model import VisionLanguageModel
from megavlm.parallel.collectives import broadcast_object
from megavlm.parallel.mesh import Mesh
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.trajectory import Group
from megavlm.training.forward_backward import compute_logprobs
from megavlm.training.gradient_buffers import wrap
from megavlm.training.step.vision_features import VisionFeatures
from megavlm.weight_sync.lora import AdapterWeights
from megavlm.weight_sync.ownership import SyncPlan, TrainerRanks
from megavlm.weight_sync.sglang_layout import audio_head_dim, linear_rows, vision_head_dim
from megavlm.weight_sync.sync import WeightSync
from megavlm.weight_sync.trainable import trained_entries
from megavlm.weight_sync.transports.base import Transport
from megavlm.weight_sync.transports.chain import ChainTransport
from megavlm.weight_sync.transports.disk import DiskTransport
from megavlm.weight_sync.transports.distributed import DistributedTransport
from megavlm.weight_sync.transports.tensor import TensorTransport
from megavlm.weight_sync.update import SyncReport, SyncSettings
from tests.fakes.receivers import FixedReceivers
from tests.parity.runs import build
from tests.parity.table import EXPERT_LAYOUTS, LAYOUTS, Ranks
from tests.support.calls import episode
from tests.support.columns import columns
from tests.support.families import entries_of, is_tower, vision_tokens
from tests.support.generation import generate
from tests.support.lora_reference import ALPHA, RANK
from tests.support.merged import add_pairs
from tests.support.timeouts import scaled

TIMEOUT = scaled(120)  # seconds for a request or a transfer


@dataclass(frozen=True)
class Trainer:
    """`weights`: a folder. `targets`: of adapters on it, with the pairs of `lora_reference`. `fp8`:
    quantise what is sent to the server. `delta`: send what has changed. `draft_head`: it is
    trained.
    """

    weights: Path
    layout: str = "TP2"
    freeze_tower: bool = True
    targets: tuple[str, ...] = ()
    fp8: bool = False
    delta: bool = False
    draft_head: bool = False

    @property
    def ranks(self) -> Ranks:
        return (LAYOUTS | EXPERT_LAYOUTS)[self.layout]

    @property
    def options(self) -> ModelOptions:
        return ModelOptions(
            freeze_tower=self.freeze_tower,
            freeze_merger=self.freeze_tower,
            draft_head=self.draft_head,
        )

    def start(self) -> tuple[Mesh, list[Entry], list[VisionLanguageModel]]:
        """On each rank."""
        config = model_config(self.weights)
        mesh, entries, chunks = build(self.weights, config, self.ranks, self.options)
        if self.targets:
            add_pairs(chunks, self.targets)
        return mesh, entries, chunks


def transport(kind: str, folder: Path) -> Transport:
    if kind == "disk":
        return DiskTransport(folder)
    if kind == "store":
        return ChainTransport(str(folder / "store"), "run", timeout=TIMEOUT)
    return (TensorTransport if kind == "tensor" else DistributedTransport)(timeout=TIMEOUT)


def push(
    receivers: Sequence[Receiver],
    kind: str,
    trainer: Trainer,
    scratch: Path,
    version: int,
    pause: str = "abort",
) -> SyncReport:
    """On each rank. Small buckets, so that there are several."""
    mesh, entries, chunks = trainer.start()
    way = transport(kind, scratch)
    sync = make_sync(trainer, mesh, entries, chunks, FixedReceivers(receivers), way, pause=pause)
    report = update(sync, trainer, chunks, version)
    assert sync.version == version
    sync.close()
    return report


def update(
    sync: WeightSync, trainer: Trainer, chunks: Sequence[VisionLanguageModel], version: int
) -> SyncReport:
    """Push the chunks' weights; as changes of other weights, if the trainer sends those: everything
    and what training changes are sent whole at first.
    """
    if trainer.delta:
        trained = [p.data for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        own = [tensor.clone() for tensor in trained]
        for tensor in trained:
            tensor.view(-1)[::997] *= -1  # which keeps the scales of blocks
        for earlier in (version - 2, version - 1):
            sync.update_weights(earlier)
        for tensor, mine in zip(trained, own, strict=True):
            tensor.copy_(mine)
    report = sync.update_weights(version)
    assert 0 < report.density < 0.1 or not trainer.delta, report
    return report


def make_sync(
    trainer: Trainer,
    mesh: Mesh,
    entries: list[Entry],
    chunks: list[VisionLanguageModel],
    receivers: Receivers,
    way: Transport,
    *,
    adapters: bool = False,
    pause: str = "abort",
) -> WeightSync:
    """`adapters`: not merged."""
    config = model_config(trainer.weights)
    ranks = TrainerRanks.of(config, mesh.layout, mesh.world_size, trainer.options)
    changed = trained_entries(entries, trainer.options, trainer.targets or None)
    heads = config.text_config.num_key_value_heads
    pairs = None
    if adapters:
        changed, settings = frozenset(), LoRA(rank=RANK, alpha=ALPHA, targets=trainer.targets)
        pairs = AdapterWeights.of(entries, settings, ranks, chunks, heads)
    return WeightSync(
        SyncPlan(entries, ranks, changed),
        chunks,
        way,
        SyncSettings(
            torch.bfloat16 if trainer.fp8 else torch.float32,
            num_kv_heads=heads,
            tied_embeddings=config.tie_word_embeddings,
            linear_rows=linear_rows(config.text_config),
            vision_head_dim=vision_head_dim(config.vision_config),
            audio_head_dim=audio_head_dim(config),
            server_names=family(config.model_type).server_names(),
            pause_mode=pause,
            timeout=TIMEOUT,
            bucket_bytes=2**19,
            fp8=trainer.fp8,
            delta=trainer.delta,
        ),
        receivers=receivers if mesh.is_driver else None,
        adapters=pairs,
        group=mesh.objects,
    )


def packs_of(
    trainer: Trainer,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Response]],
    context_size: int,
) -> list[Pack]:
    config = model_config(trainer.weights)
    return [
        make_pack(
            [tree_of(prompt, responses)],
            vision_token_ids=vision_tokens(config),
            multiple=2 if trainer.ranks.sequence else 1,
            context_size=context_size,
        )
        for prompt, responses in zip(prompts, groups, strict=True)
    ]


def tree_of(prompt: Prompt, responses: Sequence[Response]) -> Tree:
    """Return the tree of a prompt's responses. It has the experts that the server chose if it
    returned them, because one token in a million has two that are closer than rounding.
    """
    if any(response.routed_experts is None for response in responses):
        return prompt_tree(prompt, [response.token_ids.tolist() for response in responses])
    group = Group(prompt, episodes=[episode((prompt, response)) for response in responses])
    of_calls = [columns(len(response.token_ids)) for response in responses]
    return group_tree(group, of_calls, replays_routing=True)


def trainer_logprobs(
    trainer: Trainer,
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Response]],
    sampling_params: SamplingParams,
) -> list[Tensor]:
    """On each rank: log-probs of each prompt's responses, in their order; none on early stages."""
    mesh, _, chunks = trainer.start()
    packs = packs_of(trainer, prompts, groups, 1)
    wrapped = wrap(chunks)
    images = {image.key: image for prompt in prompts for image in prompt.images}
    scoring = Scoring(sampling_params.temperature, tuple(sampling_params.suppressed_ids))
    scores = compute_logprobs(wrapped, packs, VisionFeatures.everywhere(wrapped, images), scoring)
    assert bool(scores) == mesh.is_last_stage
    return [pack_scores.logprobs for pack_scores in scores]


def push_and_compare(
    served: Any,
    kind: str,
    trainer: Trainer,
    scratch: Path,
    version: int,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams,
    refit: bool,
    adapters: bool,
) -> tuple[SyncReport, float]:
    """On each rank: a push, and the largest difference between the log-probs of the server, which
    answers after it, and this rank's of the same tokens; 0 where it computes none. `refit`: the
    server needs every tensor.
    """
    mesh, entries, chunks = trainer.start()
    receivers = FixedReceivers([replace(served.receiver, needs_all=refit)])
    way = transport(kind, scratch)
    sync = make_sync(trainer, mesh, entries, chunks, receivers, way, adapters=adapters)
    if adapters:  # the one before is unloaded
        sync.update_weights(version - 1)
        sampling_params = replace(sampling_params, adapter=adapter_name(version))
    report = update(sync, trainer, chunks, version)
    groups = None
    if mesh.is_driver:
        sampling_params = replace(sampling_params, cache_key=str(version))
        groups = generate(
            served.client, prompts, n=2, sampling_params=sampling_params, weight_version=version
        )
    groups = broadcast_object(groups, mesh)
    sync.close()  # which unloads adapters
    packs = [
        pack.part(mesh.context_rank)
        for pack in packs_of(trainer, prompts, groups, mesh.layout.context)
    ]
    wrapped = wrap(chunks)
    images = {image.key: image for prompt in prompts for image in prompt.images}
    scoring = Scoring(sampling_params.temperature, tuple(sampling_params.suppressed_ids))
    largest = 0.0
    scores = compute_logprobs(wrapped, packs, VisionFeatures.everywhere(wrapped, images), scoring)
    for pack, group, mine in zip(packs, groups, scores, strict=False):  # none on early stages
        theirs = torch.tensor([p for response in group for p in response.logprobs])
        if len(pack.target_index):
            difference = (mine.logprobs - theirs[pack.target_index]).abs().max()
            largest = max(largest, float(difference))
    return report, largest


def changed(folder: Path, to: Path, *, tower: bool, seed: int) -> Path:
    """The folder with noise on what is trained of its language model and of an EAGLE-3 head, and on
    its tower if asked.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    entries = entries_of(model_config(folder))
    frozen = {name for entry in entries if entry.frozen for name in entry.hf}
    for name in sorted(tensors.keys() - frozen):
        if tower or not is_tower(name):
            tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=generator)
    with_tensors(folder, to, tensors)
    if (folder / FOLDER).is_dir():
        head = load_file(folder / FOLDER / "model.safetensors")
        head = {
            name: x + 0.02 * torch.randn(x.shape, generator=generator) for name, x in head.items()
        }
        with_tensors(folder / FOLDER, to / FOLDER, head)
    return to


def with_tensors(folder: Path, to: Path, tensors: dict[str, Tensor]) -> Path:
    """The folder's files with other weights."""
    to.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to
