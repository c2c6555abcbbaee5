"""What adapters are put on, and what one adapted linear is without other ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.config.lora import COMPONENTS, LoRA
from megavlm.models.common.components import LINEARS
from megavlm.models.common.lora_linear import LoRALinear, LoRAPart, Placement, is_adapter
from megavlm.models.common.lora_targets import choose, linear_names
from megavlm.models.common.vision_layers import PaddedLinear

LAYER = "language_model.decoder.layers"


class Tower(nn.Module):
    """Names as in Qwen3-VL, and a leaf name that the language model has too."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.attn, block.mlp = nn.Module(), nn.Module()
        block.attn.qkv, block.mlp.linear_fc1 = nn.Linear(2, 6), nn.Linear(2, 2)
        self.patch_embed = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([block])
        self.merger = nn.Sequential(nn.Linear(2, 2))
        self.deepstack_merger_list = nn.ModuleList([nn.Linear(2, 2)])

    def mergers(self) -> list[nn.Module]:
        return [self.merger, *self.deepstack_merger_list]


def names(tower: Any = None, moe: tuple[int, ...] = (0, 0)) -> dict[str, str]:
    config = SimpleNamespace(
        num_layers=len(moe),
        num_moe_experts=4 if any(moe) else None,
        moe_layer_freq=list(moe),
        linear_attention_freq=None,
        moe_shared_expert_intermediate_size=None,
    )
    return linear_names(config, tower)


def test_the_default_leaves_the_tower_alone() -> None:
    chosen = choose(("language.attention", "language.mlp"), names(Tower()), has_tower=True)
    assert len(chosen) == 8 and all(name.startswith(LAYER) for name in chosen)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("vision.attention", {"visual.blocks.0.attn.qkv"}),
        ("vision.mlp", {"visual.blocks.0.mlp.linear_fc1"}),
        ("vision.merger", {"visual.merger.0", "visual.deepstack_merger_list.0"}),
        ("visual.blocks.*.attn.qkv", {"visual.blocks.0.attn.qkv"}),
        ("language.experts", {f"{LAYER}.1.mlp.experts.linear_fc{i}" for i in (1, 2)}),
        ("language.mlp", {f"{LAYER}.0.mlp.linear_fc{i}" for i in (1, 2)}),
        (f"{LAYER}.*.linear_fc1", {f"{LAYER}.{n}.linear_fc1" for n in ("0.mlp", "1.mlp.experts")}),
        (f"{LAYER}.1.self_attention.linear_qkv", {f"{LAYER}.1.self_attention.linear_qkv"}),
    ],
)
def test_targets(target: str, expected: set[str]) -> None:
    assert choose((target,), names(Tower(), moe=(0, 1)), has_tower=True) == expected


@pytest.mark.parametrize("target", ["qkv", "linear_fc1", "*.linear_fc1", "*", "language.mlps"])
def test_a_leaf_name_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="choose from language"):
        LoRA(rank=1, targets=(target,)).check()


@pytest.mark.parametrize(
    "target", ["language.experts", f"{LAYER}.2.self_attention.linear_qkv", "visual.patch_embed"]
)
def test_a_target_without_match_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="matches nothing") as error:
        choose(("language.mlp", target), names(Tower()), has_tower=True)
    assert "language.attention, language.mlp, vision.attention" in str(error.value)
    assert f"{LAYER}.*.self_attention.linear_qkv" in str(error.value)


def test_only_ranks_with_the_tower_judge_its_targets() -> None:
    assert choose(("vision.mlp", "visual.blocks.9.*"), names(), has_tower=False) == set()
    with pytest.raises(ValueError, match="matches nothing"):
        choose(("visual.blocks.9.*",), names(Tower()), has_tower=True)


class Group:
    """A process group as far as nothing is communicated."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def adapted(base: nn.Module, group: Any = None, cut: Any = None, **options: Any) -> LoRALinear:
    rows = base.weight.size(0)  # type: ignore[union-attr,operator]
    options = {"name": "a.b", "parts": [LoRAPart("proj", rows, rank=4, scale=0.3)], **options}
    return LoRALinear(base, placement=Placement(cut, group or Group()), **options)


def randomised(layer: LoRALinear) -> LoRALinear:
    for b in layer.lora_B.values():
        nn.init.normal_(b)
    return layer


def test_adapters_that_are_off_leave_the_base() -> None:
    base, x = nn.Linear(8, 6), torch.randn(5, 8)
    expected = base(x)
    layer = randomised(adapted(base))
    assert not torch.equal(layer(x), expected)
    layer.enabled = False
    assert torch.equal(layer(x), expected)


def test_new_adapters_change_nothing() -> None:
    base, x = nn.Linear(8, 6).bfloat16(), torch.randn(5, 8).bfloat16()
    layer = adapted(base)
    assert torch.equal(layer(x), base(x)) and torch.equal(layer.merged_weight(), base.weight)
    assert layer.lora_A.dtype == layer.lora_B["proj"].dtype == torch.bfloat16


def test_adapters_of_a_layer_with_padded_widths() -> None:
    torch.manual_seed(0)
    up, down = (randomised(adapted(x)) for x in (PaddedLinear(8, 6, 16), PaddedLinear(6, 8, 8)))
    x = torch.randn(5, 8)
    wide = up(x)
    output = down(wide)
    hidden = F.linear(x, up.merged_weight(), up.bias)
    torch.testing.assert_close(wide, F.pad(hidden, (0, 10)))
    torch.testing.assert_close(output, F.linear(hidden, down.merged_weight(), down.bias))
    output.sum().backward()
    assert all(p.grad.shape == p.shape for layer in (up, down) for p in layer.parameters())


def test_merging_rounds_once() -> None:
    torch.manual_seed(0)
    layer = randomised(adapted(nn.Linear(64, 32).bfloat16()))
    ((_, a, b),) = layer.pairs()
    exact = layer.weight.double() + 0.3 * b.double() @ a.double()
    assert torch.equal(layer.merged_weight(), exact.bfloat16())


def test_a_is_drawn_as_peft_does_and_the_same_under_every_layout() -> None:
    parts = [LoRAPart(name, 6, rank, scale=1.0) for name, rank in (("q", 30), ("k", 20))]
    whole = adapted(nn.Linear(64, 12), parts=parts).lora_A
    assert whole.abs().max() <= 64**-0.5 and whole.abs().max() > 0.99 * 64**-0.5
    assert abs(whole.std() * (3 * 64) ** 0.5 - 1) < 0.05 and not torch.equal(whole[:20], whole[30:])
    for rank in range(2):
        group = Group(2, rank)
        replicated = adapted(nn.Linear(64, 12), group, "rows", parts=parts)
        assert torch.equal(replicated.lora_A, whole)
        cut = adapted(nn.Linear(32, 12), group, "columns", parts=parts)
        assert torch.equal(cut.lora_A, whole.chunk(2, 1)[rank])
    assert not torch.equal(adapted(nn.Linear(64, 12), parts=parts, seed=1).lora_A, whole)
    assert not torch.equal(adapted(nn.Linear(64, 12), parts=parts, name="c").lora_A, whole)


def test_a_state_dict_has_the_keys_of_the_base() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    plain = set(model.state_dict())
    model[1] = randomised(adapted(model[1]))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert set(state) == plain | {"1.lora_A", "1.lora_B_proj"}
    assert {key for key in state if is_adapter(key)} == set(state) - plain
    other = nn.Sequential(nn.Linear(4, 6), adapted(nn.Linear(6, 6), seed=5))
    assert other.load_state_dict(state) == ([], [])
    for key, value in other.state_dict().items():
        assert torch.equal(value, state[key])
    assert other.state_dict(keep_vars=True)["1.lora_A"] is other[1].lora_A
    alone = adapted(nn.Linear(6, 6))
    missing, unexpected = alone.load_state_dict(state, strict=False)
    assert set(missing) == {"base.weight", "base.bias", "lora_A", "lora_B_proj"} and unexpected


class NormInside(nn.Module):
    """Transformer Engine's LayerNormLinear as megatron-core calls it: asked for the norm's output
    it adds that to its answer, which is a tuple only where it gives the bias back.
    """

    def __init__(self, gives_bias: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))
        self.gives_bias = gives_bias
        self.return_layernorm_output = False

    def forward(self, x: Tensor) -> Any:
        normed = nn.functional.rms_norm(x, (4,))
        output: Any = normed @ self.weight.t()
        if self.gives_bias:
            return (
                (output, self.bias, normed) if self.return_layernorm_output else (output, self.bias)
            )
        return ((output, normed) if self.return_layernorm_output else output), None


@pytest.mark.parametrize("gives_bias", [False, True])
def test_adapters_take_what_a_norm_inside_the_base_gives(gives_bias: bool) -> None:
    base, x = NormInside(gives_bias), torch.randn(5, 1, 4)
    expected, expected_bias = base(x)
    layer = randomised(adapted(base))
    ((_, a, b),) = layer.pairs()
    output, bias = layer(x)
    added = 0.3 * nn.functional.rms_norm(x, (4,)) @ a.t() @ b.t()
    torch.testing.assert_close(output, expected + added)
    assert bias is expected_bias
    layer.enabled = False
    assert torch.equal(layer(x)[0], expected) and layer(x)[1] is expected_bias


def test_the_components_are_those_that_recipes_name() -> None:
    assert tuple(LINEARS) == COMPONENTS
