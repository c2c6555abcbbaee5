"""What the ranks of any layout hold: counted against transformers, cut as the mapping says, and the
same as ranks that exist.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megavlm.config.lora import LoRA
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import local_tensors
from megavlm.models.common.mapping import shard_tensor
from megavlm.models.sizes import (
    ParameterSize,
    equal_ranks,
    rank_parameters,
)
from megavlm.parallel.fake import fake_rank, without_memory
from megavlm.parallel.mesh import Layout, build_mesh
from tests.support.families import build_in_transformers, entries_of, small_config
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.releases import RELEASES, released_config

BF16 = torch.bfloat16
SEQUENCE = ModelOptions(dtype=BF16, sequence=True)
UNEVEN = ModelOptions(dtype=BF16, sequence=True, first_stage_layers=11, last_stage_layers=11)


@dataclass(frozen=True)
class Cluster:
    layout: Layout
    world_size: int
    options: ModelOptions = SEQUENCE


CLUSTERS = {
    "Qwen2-VL-2B": Cluster(Layout(pipeline=4, virtual=7), 64),
    "Qwen2-VL-7B": Cluster(Layout(tensor=4), 8),
    "Qwen2-VL-72B": Cluster(Layout(tensor=8, pipeline=4, virtual=5, context=2), 512),
    "Qwen2.5-VL-3B": Cluster(Layout(tensor=8), 8),  # two key-value heads for eight ranks
    "Qwen2.5-VL-7B": Cluster(Layout(tensor=4, pipeline=2), 16, ModelOptions(head="both")),
    "Qwen2.5-VL-32B": Cluster(Layout(tensor=8, pipeline=2), 32),
    "Qwen2.5-VL-72B": Cluster(Layout(tensor=8, pipeline=8), 512),
    "Qwen3-VL-2B": Cluster(Layout(tensor=2, pipeline=2), 8),
    "Qwen3-VL-4B": Cluster(Layout(tensor=2, pipeline=2, virtual=3), 8),
    "Qwen3-VL-8B": Cluster(Layout(context=4), 8),
    "Qwen3-VL-32B": Cluster(Layout(tensor=8, pipeline=2), 32),
    "Qwen3-VL-30B-A3B": Cluster(Layout(expert=8), 8),
    "Qwen3-VL-235B-A22B": Cluster(Layout(tensor=4, pipeline=8, context=2, expert=8), 512, UNEVEN),
    "Qwen3.5-4B": Cluster(Layout(tensor=2), 4),
    "Qwen3.5-9B": Cluster(Layout(tensor=8, context=2), 16),  # four key-value heads for eight ranks
    "Qwen3.5-27B": Cluster(Layout(tensor=4, pipeline=2), 16),
    "Qwen3.5-35B-A3B": Cluster(Layout(tensor=2, expert=8), 16),
    "GLM-4.1V-9B-Thinking": Cluster(Layout(tensor=4), 8),  # two key-value heads for four ranks
    "GLM-4.6V": Cluster(Layout(tensor=4, pipeline=2, expert=8), 16),
    "InternVL3-8B-hf": Cluster(Layout(tensor=2), 8),  # its vocabulary is no multiple of four
    "InternVL3-78B-hf": Cluster(Layout(tensor=2, pipeline=8), 32),
    "InternVL3_5-8B-HF": Cluster(Layout(tensor=4), 8),
    "InternVL3_5-30B-A3B-HF": Cluster(Layout(expert=8), 8),
    "InternVL3_5-241B-A28B-HF": Cluster(
        Layout(tensor=4, pipeline=8, context=2, expert=8), 512, UNEVEN
    ),
    "MiniCPM-V-4.6": Cluster(Layout(tensor=2), 8),
    "Qwen3-Omni-30B-A3B": Cluster(Layout(tensor=2, expert=8), 8),
}


def stages(config: Any, cluster: Cluster, lora: LoRA | None = None) -> list[list[ParameterSize]]:
    """What one rank of each pipeline stage holds, not the same one in each."""
    layout, world_size = cluster.layout, cluster.world_size
    per_stage = world_size // layout.pipeline
    ranks = [stage * per_stage + stage % per_stage for stage in range(layout.pipeline)]
    return [
        rank_parameters(config, layout, world_size, rank, cluster.options, lora) for rank in ranks
    ]


def whole(parts: list[list[ParameterSize]], *, trained: bool = False) -> int:
    """Parameters of the whole model; of all of it or of what is trained."""
    distinct = {x.name: x for part in parts for x in part if x.trained or not trained}
    return sum(x.numel * x.pieces for x in distinct.values())


SMALL = ("Qwen2-VL-2B", "Qwen2.5-VL-32B", "Qwen3-VL-30B-A3B", "Qwen3.5-27B")


def test_every_release_has_a_cluster() -> None:
    assert CLUSTERS.keys() == RELEASES.keys()


@pytest.mark.parametrize("release", [*SMALL, *slow(*(x for x in RELEASES if x not in SMALL))])
def test_the_ranks_hold_the_model_once(release: str, tmp_path: Path) -> None:
    config, cluster = released_config(release, tmp_path), CLUSTERS[release]
    parts = stages(config, cluster)
    model = build_in_transformers(config)
    kept_buffers = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    theirs = sum(x.numel() for x in (*model.parameters(), *map(model.get_buffer, kept_buffers)))
    value_head = config.text_config.hidden_size + 1 if cluster.options.head == "both" else 0
    assert whole(parts) == theirs + value_head
    held = [name for part in parts for name in {x.name for x in part}]
    assert len(held) - len(set(held)) == (1 if tied_across_stages(config, cluster) else 0)
    kept = {x.name for part in parts for x in part if x.dtype != cluster.options.dtype}
    assert all(name.endswith((".A_log", ".router.expert_bias")) for name in kept)
    assert bool(kept) == release.startswith(("Qwen3.5", "GLM-4.6V", "MiniCPM"))


def tied_across_stages(config: Any, cluster: Cluster) -> bool:
    return bool(config.tie_word_embeddings) and cluster.layout.pipeline > 1


def test_a_layout_of_72b_to_the_byte(tmp_path: Path) -> None:
    """80 layers of 64 query and 8 key-value heads of 128, cut by 8 twice."""
    config = released_config("Qwen2.5-VL-72B", tmp_path)
    hidden, ffn, vocabulary = 8192, 29568, 152064
    rows = (64 + 2 * 8) * 128
    attention = (hidden * rows + rows + hidden * hidden) // 8 + hidden  # the norm is whole
    mlp = 3 * hidden * ffn // 8 + hidden
    first, middle, last = equal_ranks(config, *layout_of("Qwen2.5-VL-72B"))
    assert (first.ranks, middle.ranks, last.ranks) == (
        range(64),
        range(64, 448),
        range(448, 512),
    )
    assert by_component(middle.parameters) == {
        "attention": bf16(10 * attention),
        "mlp": bf16(10 * mlp),
    }
    tower = sum(x.numel() for x in build_in_transformers(config).model.visual.parameters())
    assert by_component(first.parameters) == {
        "embedding": bf16(hidden * vocabulary // 8),
        "attention": bf16(10 * attention),
        "mlp": bf16(10 * mlp),
        "tower": (tower, 2 * tower, 0),
    }
    assert by_component(last.parameters)["output"] == bf16(hidden * vocabulary // 8 + hidden)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_equal_ranks_hold_what_each_stage_holds(family: str) -> None:
    """Stages between the ends too: the mixture has experts in layers 0, 2 and 3 of four."""
    config, layout = small_config(family, num_layers=4), Layout(pipeline=4)
    groups = [*equal_ranks(config, layout, 4)]
    assert [rank for group in groups for rank in group.ranks] == [0, 1, 2, 3]
    for group in groups:
        held = by_component(group.parameters)
        for rank in group.ranks:
            assert by_component(rank_parameters(config, layout, 4, rank)) == held


def layout_of(release: str) -> tuple[Layout, int, ModelOptions]:
    cluster = CLUSTERS[release]
    return cluster.layout, cluster.world_size, cluster.options


Size = tuple[int, int, int]  # parameters, bytes, trained parameters


def bf16(parameters: int) -> Size:
    return parameters, 2 * parameters, parameters


def by_component(parameters: Iterable[ParameterSize]) -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    for x in parameters:
        numel, size, trained = sizes.get(x.component, (0, 0, 0))
        sizes[x.component] = numel + x.numel, size + x.bytes, trained + x.numel * x.trained
    return sizes


def test_experts_of_30b_to_the_byte(tmp_path: Path) -> None:
    """Of 48 layers: 16 of 128 experts, the router and the norm before it."""
    config = released_config("Qwen3-VL-30B-A3B", tmp_path)
    (everyone,) = equal_ranks(config, *layout_of("Qwen3-VL-30B-A3B"))
    assert everyone.ranks == range(8)
    sizes = by_component(everyone.parameters)
    assert sizes["experts"] == bf16(48 * (16 * 3 * 2048 * 768 + 128 * 2048 + 2048))
    assert "mlp" not in sizes


def test_experts_are_named_by_their_number_in_the_model(tmp_path: Path) -> None:
    config = released_config("Qwen3-VL-235B-A22B", tmp_path)
    # on stage 1, the eleven layers of stage 0 behind it; rank 9 of the stage has expert rank 1
    parameters = rank_parameters(config, CLUSTERS["Qwen3-VL-235B-A22B"].layout, 512, 64 + 9, UNEVEN)
    experts = [x for x in parameters if ".experts." in x.name]
    numbers = {int(x.name.split(".experts.")[1].split(".")[0]) for x in experts}
    layers = {int(x.name.split(".layers.")[1].split(".")[0]) for x in experts}
    assert (numbers, layers) == ({*range(16, 32)}, {*range(11, 23)})
    assert {x.pieces for x in experts} == {8}


@pytest.mark.parametrize(
    ("family", "layout", "world_size"),
    [
        ("qwen2_5_vl", Layout(tensor=2, pipeline=2, virtual=2), 4),
        ("qwen2_vl", Layout(tensor=4), 4),
        ("qwen3_vl", Layout(tensor=2, pipeline=4, context=2), 16),
        ("qwen3_vl_moe", Layout(tensor=2, pipeline=2, expert=2, expert_tensor=2), 8),
        ("qwen3_vl_moe", Layout(tensor=2, context=2, expert=2), 8),
    ],
)
def test_every_rank_holds_what_the_mapping_cuts(
    family: str, layout: Layout, world_size: int
) -> None:
    """All tensors of all ranks, by the mapping's own rules; each in as many pieces as it says."""
    config = small_config(family, num_layers=4)
    table = {named(entry.megatron, entry.expert): entry for entry in entries_of(config)}
    found: set[str] = set()
    for rank in range(world_size):
        for held in rank_parameters(config, layout, world_size, rank, ModelOptions(sequence=True)):
            entry = table[held.name]
            cuts = getattr(layout, entry.shard.axis)
            full = torch.empty(entry.megatron_shape, device="meta")
            assert held.shape == shard_tensor(entry, full, cuts - 1, cuts).shape
            spread = layout.expert if entry.expert is not None else 1
            assert held.pieces == spread * (1 if entry.shard.dim is None else cuts)
            found.add(held.name)
    assert found == table.keys()


def named(key: str, expert: int | None) -> str:
    return key if expert is None else key.replace("experts.experts", f"experts.{expert}")


REAL = Layout(tensor=2, pipeline=2, expert=2)


def test_ranks_that_exist_hold_the_same() -> None:
    options = ModelOptions(dtype=BF16, sequence=True, freeze_merger=False, head="both")
    config = small_config("qwen3_vl_moe", num_layers=4, tied_embeddings=True)
    for rank, real in enumerate(launch(4, hold, config, options)):
        parameters = rank_parameters(config, REAL, 4, rank, options)
        mine = [(x.name, x.shape, str(x.dtype), x.trained) for x in parameters]
        assert mine == real


def hold(config: Any, options: ModelOptions) -> list[tuple[str, tuple[int, ...], str, bool]]:
    (model,) = build_model(config, build_mesh(REAL), options)
    tensors = {x.data_ptr(): x for x in model.parameters()}
    held = local_tensors(model)
    assert {x.data.data_ptr() for x in held} == tensors.keys()
    return [
        (
            named(x.key, x.expert),
            tuple(x.data.shape),
            str(x.data.dtype),
            tensors[x.data.data_ptr()].requires_grad,
        )
        for x in held
    ]


def test_tied_embeddings_are_not_sent_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core moves them to the GPU for it, where a tensor without memory cannot go."""

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("Cannot copy out of meta tensor")

    monkeypatch.setattr(torch.Tensor, "cuda", refuse)
    config = small_config("qwen2_vl", tied_embeddings=True)
    for rank in range(2):  # both hold the embeddings
        assert rank_parameters(config, Layout(pipeline=2), 2, rank)


def test_what_is_frozen_is_not_trained(tmp_path: Path) -> None:
    config = released_config("Qwen3-VL-2B", tmp_path)
    for freeze_tower, freeze_merger in ((True, True), (True, False), (False, False)):
        options = ModelOptions(freeze_tower=freeze_tower, freeze_merger=freeze_merger)
        parameters = rank_parameters(config, Layout(), 1, 0, options)
        for held in parameters:
            if ".merger." in held.name or ".deepstack_merger_list." in held.name:
                assert held.trained is not freeze_merger
            else:
                assert held.trained is (held.component != "tower" or not freeze_tower)


@pytest.mark.slow
def test_adapters_alone_are_trained(tmp_path: Path) -> None:
    """rank x (in + out) of each projection, whatever the layout; the model itself is frozen."""
    release, rank = "Qwen3-VL-30B-A3B", 16
    config = released_config(release, tmp_path)
    options = ModelOptions(dtype=BF16, sequence=True)
    cluster = Cluster(Layout(tensor=2, pipeline=4, expert=4, expert_tensor=2), 64, options)
    targets = ("language.attention", "language.experts")
    parts = stages(config, cluster, LoRA(rank=rank, alpha=32, targets=targets))
    hidden, ffn, q, kv = 2048, 768, 32 * 128, 4 * 128
    attention = 2 * (hidden + q) + 2 * (hidden + kv)
    expert = 3 * (hidden + ffn)
    assert whole(parts, trained=True) == 48 * rank * (attention + 128 * expert)
    assert whole(parts) - whole(parts, trained=True) == sum(
        x.numel() for x in build_in_transformers(config).parameters()
    )


def test_a_layout_that_cannot_be_is_refused(tmp_path: Path) -> None:
    config = released_config("Qwen2.5-VL-3B", tmp_path)
    with pytest.raises(ValueError, match="does not divide the world size 12"):
        rank_parameters(config, Layout(tensor=8), 12, 0)
    with pytest.raises(ValueError, match=r"parallel.pipeline=5 .* the model's 36 layers"):
        rank_parameters(config, Layout(pipeline=5), 10, 0)
    assert not dist.is_initialized()


def test_nothing_is_left_of_a_fake_rank() -> None:
    with fake_rank(3, 4), without_memory():
        mesh = build_mesh(Layout(tensor=2))
        assert (mesh.rank, mesh.world_size, mesh.tensor_rank, mesh.data_rank) == (3, 4, 1, 1)
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert torch.empty(1).device.type == "cpu"


def test_a_process_with_ranks_is_left_alone() -> None:
    assert launch(2, refuse) == [2, 2]


def refuse() -> int:
    """How many ranks the tensor axis has afterwards."""
    build_mesh(Layout(tensor=2))
    with pytest.raises(AssertionError, match="use a new process"):
        with fake_rank(0, 8):
            raise RuntimeError("the group of this process was replaced")
    together = torch.ones(1)
    dist.all_reduce(together, group=parallel_state.get_tensor_model_parallel_group())
    return int(together)


def test_no_tensor_has_memory() -> None:
    with without_memory():
        made = [
            torch.empty(2, device="cpu"),
            torch.tensor([1.0], device=torch.device("cpu")),
            torch.zeros(3),
            torch.nn.Linear(2, 2, device="cpu").to(torch.device("cpu")).weight,
            torch.nn.Linear(2, 2).to(torch.float64).bias,
        ]
    assert {x.device.type for x in made} == {"meta"}
    assert made[-1].dtype == torch.float64
