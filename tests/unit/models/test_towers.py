"""Vision towers against transformers' in fp32, features and every parameter's gradient; what a
frozen or recomputed tower keeps for backward.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megavlm.data.media.image_processing import Grid
from megavlm.models.common.vision_layers import rotary_angles, rotate
from tests.support.families import part
from tests.support.releases import RELEASES, released_config
from tests.support.towers import (
    FAMILIES,
    Pair,
    make_pair,
    make_patches,
    relative,
    their_features,
    tower_class,
    tower_config,
)

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5
# In patches; a window of Qwen2.5-VL has 8 x 8.
BATCHES: dict[str, list[Grid]] = {
    "one image": [(1, 4, 6)],
    "one token": [(1, 2, 2)],
    "exactly a window": [(1, 8, 8)],
    "windows at the edges": [(1, 20, 10)],
    "several of one size": [(1, 6, 4), (1, 6, 4), (1, 4, 6)],
    "a video": [(3, 6, 12)],
    "images and videos": [(1, 20, 10), (2, 4, 6), (1, 8, 16), (3, 18, 4), (1, 2, 2), (1, 4, 6)],
}
IMAGES = BATCHES["images and videos"]

every_family = pytest.mark.parametrize("family", FAMILIES)


def backward(pair: Pair, features: Tensor) -> None:
    """With every feature in the loss, each with a weight of its own."""
    generator = torch.Generator().manual_seed(2)
    (features * torch.randn(features.shape, generator=generator)).sum().backward()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.flatten(1) if parameter.dim() > 3 else parameter.grad
    return found


def saved_bytes(run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """What autograd keeps for backward, parameters not counted, and what `run` gave."""
    sizes = []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(sizes), result


@every_family
@pytest.mark.parametrize("grids", BATCHES.values(), ids=BATCHES)
def test_features_and_gradients(family: str, grids: Sequence[Grid]) -> None:
    pair, patches = make_pair(family), make_patches(grids)
    ours, theirs = pair.ours(patches, grids), their_features(pair.theirs, patches, grids)
    tokens = sum(t * h * w for t, h, w in grids) // pair.ours.merge_size**2
    assert ours.shape == (tokens, (1 + pair.ours.num_levels) * pair.ours.feature_size)
    assert relative(ours, theirs) < TOLERANCE

    backward(pair, ours)
    backward(pair, theirs)
    expected, actual = gradients(pair.theirs), gradients(pair.ours)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert relative(gradient, expected[name]) < TOLERANCE, name


@every_family
def test_bf16_is_no_farther_from_fp32_than_transformers(family: str) -> None:
    """Rotary embedding and RMSNorm compute in fp32 and round once. Tables of cos and sin in bf16
    would be farther.
    """
    exact, pair, patches = make_pair(family), make_pair(family), make_patches(IMAGES)
    pair.ours.bfloat16()
    pair.theirs.bfloat16()
    # A model that is loaded in bf16 keeps its frequencies in fp32.
    pair.theirs.rotary_pos_emb.inv_freq = exact.theirs.rotary_pos_emb.inv_freq
    with torch.no_grad():
        ours = pair.ours(patches, IMAGES)
        theirs = their_features(pair.theirs, patches, IMAGES)
        wide = their_features(exact.theirs, patches, IMAGES)
    assert ours.dtype == torch.bfloat16
    assert (ours - wide).norm() < 1.01 * (theirs - wide).norm()


def test_rotary_embedding_in_bf16_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(50, 4, 80, generator=generator).bfloat16().requires_grad_()
    cos, sin = rotary_angles(torch.randint(60, (50, 2), generator=generator), 80, 1e4)
    gradient = torch.randn(50, 4, 80, generator=generator).bfloat16()
    wide = narrow.float()
    first, second = wide.chunk(2, -1)
    exact = wide * cos + torch.cat([-second, first], -1) * sin
    (expected,) = torch.autograd.grad(exact, narrow, gradient.float())
    rotated = rotate(narrow, cos, sin)
    (actual,) = torch.autograd.grad(rotated, narrow, gradient)
    for ours, rounded in ((rotated, exact.bfloat16()), (actual, expected)):
        # Sums in fp32 in another order can round to the neighbour in rare places.
        assert (ours != rounded).float().mean() < 1e-3


class Operators(TorchDispatchMode):
    """Records every operator and the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor)]
        self.calls.append((func.overloadpacket.__name__, shapes))
        return func(*args, **(kwargs or {}))


@every_family
def test_a_layer_computes_its_rotary_embedding_in_three_operators_without_casts(
    family: str,
) -> None:
    patches, counts = make_patches(IMAGES), []
    for depth in (4, 5):
        tower = make_pair(family, depth=depth).ours.bfloat16().requires_grad_(False)
        for block in tower.blocks:  # on a GPU a norm is one operator, but on a CPU RMSNorm casts
            block.norm1, block.norm2 = nn.Identity(), nn.Identity()
        tower(patches, IMAGES)  # fills the caches of geometry
        with Operators() as operators:
            tower(patches, IMAGES)
        counts.append(Counter(name for name, _ in operators.calls))
    layer = counts[1] - counts[0]
    assert layer["_to_copy"] == layer["neg"] == 0
    gated = family in ("qwen2_5_vl", "glm4v", "glm4v_moe")
    assert layer["addcmul"] == 2 and layer["mul"] == 1 + 2 * (family == "qwen2_vl") + gated


@every_family
def test_inputs_show_a_merger_with_the_wrong_gelu(family: str) -> None:
    pair, patches = make_pair(family), make_patches(IMAGES)
    with torch.no_grad():
        theirs = their_features(pair.theirs, patches, IMAGES)
        for merger in pair.ours.mergers():
            (gelu,) = [module for module in merger.modules() if isinstance(module, nn.GELU)]
            gelu.approximate = "tanh"
            assert relative(pair.ours(patches, IMAGES), theirs) > 10 * TOLERANCE
            gelu.approximate = "none"
        assert relative(pair.ours(patches, IMAGES), theirs) < TOLERANCE


@every_family
def test_recompute_changes_nothing_and_keeps_less(family: str) -> None:
    patches, kept, results = make_patches(IMAGES), {}, {}
    for recompute in (False, True):
        pair = make_pair(family)
        pair.ours.recompute = recompute
        kept[recompute], features = saved_bytes(lambda tower=pair.ours: tower(patches, IMAGES))
        backward(pair, features)
        results[recompute] = {"features": features.detach(), **gradients(pair.ours)}
    assert kept[True] < 0.5 * kept[False]
    for name, tensor in results[False].items():
        assert torch.equal(results[True][name], tensor), name


@every_family
@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_tower_keeps_nothing(family: str, recompute: bool) -> None:
    tower, patches = make_pair(family).ours, make_patches(IMAGES)
    tower.recompute = recompute
    trained, _ = saved_bytes(lambda: tower(patches, IMAGES))
    tower.requires_grad_(False)
    kept, features = saved_bytes(lambda: tower(patches, IMAGES))
    assert trained > 0 and kept == 0
    assert not features.requires_grad


@every_family
@pytest.mark.parametrize("recompute", [False, True])
def test_trained_mergers_of_a_frozen_tower(family: str, recompute: bool) -> None:
    """They get the gradients that they get in a trained tower, and its blocks keep nothing."""
    patches = make_patches(IMAGES)

    def run(mergers_only: bool, depth: int) -> tuple[int, nn.Module]:
        pair = make_pair(family, depth=depth)
        pair.ours.recompute = recompute
        pair.ours.requires_grad_(not mergers_only)
        for merger in pair.ours.mergers():
            merger.requires_grad_(True)
        kept, features = saved_bytes(lambda: pair.ours(patches, IMAGES))
        backward(pair, features)
        return kept, pair.ours

    kept, tower = run(mergers_only=True, depth=4)
    whole = gradients(run(mergers_only=False, depth=4)[1])
    for name, parameter in tower.named_parameters():
        if "merger" in name:
            assert torch.equal(parameter.grad, whole[name]), name
        else:
            assert parameter.grad is None, name
    assert run(mergers_only=True, depth=6)[0] == kept


@pytest.mark.parametrize("tapped", [[], [3], [2, 0], [0, 1, 2, 3]], ids=str)
def test_deepstack_levels(tapped: list[int]) -> None:
    """Any number of them; in the order of blocks, each with the merger of its place in the list."""
    pair, patches = (
        make_pair("qwen3_vl", deepstack_visual_indexes=tapped),
        make_patches(IMAGES),
    )
    assert pair.ours.num_levels == len(tapped) and len(pair.ours.mergers()) == 1 + len(tapped)
    with torch.no_grad():
        theirs = their_features(pair.theirs, patches, IMAGES)
        assert relative(pair.ours(patches, IMAGES), theirs) < TOLERANCE


@pytest.mark.parametrize("release", RELEASES)
def test_widths_of_released_towers_suit_tensor_cores(release: str, tmp_path: Path) -> None:
    """A product whose width is no multiple of 8 has slow kernels on a GPU: Qwen2.5-VL-3B and -7B
    have an MLP of 3,420.
    """
    config = released_config(release, tmp_path)
    config.vision_config.depth = config.vision_config.num_hidden_layers = 1
    config.vision_config.insert_layer_id = 0
    if hasattr(config.vision_config, "deepstack_visual_indexes"):
        config.vision_config.deepstack_visual_indexes = [0]
    with torch.device("meta"):
        tower = part(config.model_type, "vision").VisionTower(config).bfloat16()
        sizes = part(config.model_type, "config").patch_sizes(config)
        side = 32 if hasattr(tower, "cls_token") else 4 * sizes.merge  # 16 tokens
        patches = torch.empty(side**2, 3 * sizes.frames * sizes.side**2)
    with Operators() as operators:
        tower(patches, [(1, side, side)]).sum().backward()
    products = [x for x in operators.calls if x[0] in ("addmm", "mm")]
    assert len(products) > 15
    tokens = side**2 + 1  # of a tile with a class token: rows, which need no multiple
    for name, shapes in products:
        widths = [size for shape in shapes for size in shape if size != tokens]
        assert all(size % 8 == 0 for size in widths), (name, shapes)


def test_an_unknown_activation_is_named() -> None:
    config = tower_config("qwen3_vl", hidden_act="relu6")
    with pytest.raises(ValueError, match=r"hidden_act: 'relu6' .* gelu_pytorch_tanh"):
        tower_class("qwen3_vl")(config)
