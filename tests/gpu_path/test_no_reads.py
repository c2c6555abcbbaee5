"""A step on a device whose values the host cannot read: torch's meta device in place of a GPU.
Whatever would wait for the device (a copy to the host, a number, a mask as an index) raises, in
forward and in backward, and shapes, dtypes and devices are those of a GPU.

Not fake CUDA tensors: torch's CPU build can neither index them nor run their backward. Experts are
left out: megatron-core's own dispatcher reads their token counts.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from megavlm.config.algorithm import PPO
from megavlm.config.distillation import Distillation
from megavlm.data.packs.packing import Pack
from megavlm.data.packs.token_sets import TokenSets
from megavlm.data.processor import ProcessedImage
from megavlm.models.build import build_model
from megavlm.models.common import attention_backends
from megavlm.models.common.attention import TreeAttention
from megavlm.models.common.attention_backends import BACKENDS
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.models.common.model import VisionLanguageModel
from megavlm.models.linear_attention import gated_delta_net
from megavlm.models.linear_attention.chunked_rule import chunk_gated_delta_rule
from megavlm.parallel import platform
from megavlm.parallel.mesh import build_mesh
from megavlm.training.losses import Update, policy_loss, with_value_loss
from tests.parity.cases import packs_of
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import distinct_images
from tests.parity.table import FAMILIES, LAYOUTS
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.lora_reference import heard

pytestmark = pytest.mark.distributed
DEVICE = torch.device("meta")
SCORING = Scoring(temperature=0.7, suppressed_ids=(3, 5))
SETTINGS = PPO(critic="shared", importance="token", reject_below=0.5, entropy_coefficient=0.1)

FORWARD = Distillation(divergence="forward_topk", top_k=1)


def as_on_a_gpu() -> None:
    """Make this process believe in a GPU, and torch allocate where it is told. For forked ranks."""
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        setattr(torch, name, getattr(torch, name).__closure__[0].cell_contents)
    platform.has_gpu = lambda: True
    torch.cuda.current_device = lambda: DEVICE
    dist.all_reduce = lambda *args, **kwargs: None  # over one rank
    attention_backends._compiled = lambda function: function
    gated_delta_net.choose_rule = lambda: chunk_gated_delta_rule  # which plans on the host
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    flex_attention._validate_device = lambda *_: None
    MoELayer.forward = lambda self, hidden, *args, **kwargs: (hidden * 1.0, None)


def move(model: nn.Module) -> None:
    """Replace parameters and buffers by ones without values."""
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                new = torch.empty_like(old, device=DEVICE)
                module._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=DEVICE)


def one_pass(model: VisionLanguageModel, pack: Pack, images: list[ProcessedImage]) -> Tensor:
    """Return the loss of a pack, checked on the way."""
    pack = pack.to(DEVICE)
    rows = model.encode([image.grids for image in images], [range(len(images))], images)
    features = {image.key: x for image, x in zip(images, rows, strict=True)}
    assert all(x.dtype == torch.bfloat16 and x.device == DEVICE for x in features.values())
    scores = model(pack, features, SCORING)
    for column in (scores.logprobs, scores.entropy, scores.values, scores.divergence):
        assert column is not None
        assert column.shape == (pack.num_targets,)
        assert column.dtype == torch.float32 and column.device == DEVICE
    given = scores.logprobs.detach()
    assert pack.columns is not None
    columns = replace(pack.columns, values=given, returns=given, advantages=given)
    numbers = torch.zeros(pack.num_targets, dtype=torch.int64, device=DEVICE)
    pack.columns = replace(columns, teacher_logprobs=given, teacher_ids=numbers)
    policy = policy_loss(SETTINGS, Update(kl_coefficient=0.0, distillation=FORWARD))
    loss, measures = with_value_loss(SETTINGS, policy, critic_alone=False)(pack, scores)
    assert loss.dtype == torch.float32
    for number in (loss, *measures.values()):  # sums of which variances are taken are in float64
        assert number.dtype in (torch.float32, torch.float64)
        assert number.device == DEVICE and number.shape == ()
    return loss


def step(folder: Path, backend: str) -> list[str]:
    """Run a pass without gradients and one with them. Returns the parameters without a gradient
    after the backward.
    """
    inputs, ranks = inputs_of(folder), LAYOUTS["one rank"]
    options = ModelOptions(
        dtype=torch.bfloat16, freeze_tower=False, freeze_merger=False, head="both"
    )
    (model,) = build_model(inputs.config, build_mesh(ranks.mesh), options)
    cases = inputs.sequences(heard(inputs.config))
    (pack,) = packs_of([cases], inputs.config, ranks)
    sizes, ids = torch.ones(pack.num_targets).int(), pack.target_ids
    pack = replace(
        pack, kept=TokenSets.of(sizes, ids), teacher=TokenSets.of(sizes, ids, -torch.ones(len(ids)))
    )
    images = list(distinct_images(cases).values())
    as_on_a_gpu()
    move(model)
    for module in model.modules():
        if isinstance(module, TreeAttention):
            module.backend = BACKENDS[backend]
    with torch.no_grad():
        one_pass(model, pack, images)
    one_pass(model, pack, images).backward()
    return [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *((family, "flash") for family in FAMILIES),
        *(("qwen3_5_moe", backend) for backend in ("sdpa", "flex")),
        *slow(
            *(
                (family, backend)
                for family in FAMILIES
                for backend in ("sdpa", "flex")
                if family != "qwen3_5_moe"
            )
        ),
    ],
)
def test_a_step_reads_nothing(family: str, backend: str) -> None:
    folder = model_folder(family)
    (missing,) = launch(1, step, folder, backend)
    experts = (".mlp.experts.", ".mlp.shared_experts.", ".mlp.router.")
    assert [name for name in missing if not any(part in name for part in experts)] == []
