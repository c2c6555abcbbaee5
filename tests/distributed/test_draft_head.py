"""The draft head has a learning rate and clipping of its own, and the policy's update is the same
bit by bit with the head and without it.
"""

from pathlib import Path

import pytest
import torch

from megavlm.config.optimizer import Optimizer
from megavlm.config.speculation import Speculation
from megavlm.models.common.loading import local_tensors
from megavlm.training.optimizer import build_updater
from tests.parity.cases import packs_of
from tests.parity.draft_heads import Headed, add_random_head
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.table import LAYOUTS, Ranks
from tests.support.cache import cached_folder
from tests.support.fork import launch

pytestmark = pytest.mark.distributed
TRAINED = Speculation(train=True, lr=1e-2)
CLIPPED = Speculation(train=True, lr=1e-2, clip_grad=1e-9)


def test_the_update_of_the_policy_is_the_same() -> None:
    source, ranks = model_folder("qwen3_5"), LAYOUTS["TP2+SPxPP2"]
    folder = cached_folder(
        f"draft-head-{source.name}", "", lambda target: add_random_head(source, target)
    )
    for settings, clipped, without in zip(
        *(launch(4, update, folder, ranks, x) for x in (TRAINED, CLIPPED, None)), strict=True
    ):
        (weights, norms), (weights_clipped, norms_clipped), (policy, plain) = (
            settings,
            clipped,
            without,
        )
        assert norms == norms_clipped
        assert norms["gradient_norm"] == plain["gradient_norm"] > 0.1, "it is clipped"
        assert norms["draft_gradient_norm"] == pytest.approx(norms["expected"], rel=1e-5)
        head = weights.keys() - policy.keys()
        for name in policy:
            assert (weights[name] == policy[name]).all(), name
            assert (weights_clipped[name] == policy[name]).all(), name
        for name in head:
            step = abs(weights[name] - weights_clipped[name]).max()
            assert 5e-3 < step < 2e-2, (name, step)


def update(
    folder: Path, ranks: Ranks, settings: Speculation | None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return this rank's parameters after an update, and the norms of gradients."""
    made = inputs_of(folder)
    cases = made.sequences("mixed")
    headed = Headed(folder, made.config, ranks, head=settings is not None, shard_optimizer=True)
    updater = build_updater(
        headed.run.chunks,
        Optimizer(lr=1e-3, clip_grad=0.1),
        headed.mesh,
        num_steps=9,
        speculation=settings,
    )
    headed.run.wrapped = updater.chunks
    updater.zero_gradients()
    passed = headed.backward(packs_of([cases], made.config, ranks), cases)
    squares = torch.zeros(1)
    for chunk in headed.run.chunks:
        if chunk.draft_head is not None:
            for parameter in chunk.draft_head.parameters():
                cut = getattr(parameter, "tensor_model_parallel", False)
                if cut or headed.mesh.groups.tp.rank() == 0:
                    squares += parameter.main_grad.square().sum()
    torch.distributed.all_reduce(squares)
    norms = updater.step() | {"expected": float(squares.sqrt())}
    assert passed.own
    return {
        x.key: x.data.detach().clone() for c in headed.run.chunks for x in local_tensors(c)
    }, norms
