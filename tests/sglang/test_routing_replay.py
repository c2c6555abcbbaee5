"""Routes of a real server, replayed by the trainer's routers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megavlm.data.packing import make_pack
from megavlm.data.processor import Processor, Prompt
from megavlm.families import family_of
from megavlm.inference.protocol import Response, Sampling
from megavlm.inference.routes import route_shape
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.logprobs import Scoring
from megavlm.rollout.group_tree import CallTree
from megavlm.training.forward_backward import compute_logprobs
from tests.conftest import DATA
from tests.parity.runs import Run
from tests.parity.table import Ranks
from tests.sglang.conftest import Served, model_folder
from tests.sglang.questions import prompts
from tests.support.columns import columns
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("routing replay")]
TIE = 1e-6


def with_ties(source: Path, target: Path, seed: int) -> Path:
    """Copy a model folder with routers whose logits are equal but for rounding, which decides."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    path = target / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert routers
    for name in routers:
        tensors[name] = TIE * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    return target


@pytest.fixture(scope="module", params=["qwen3_vl_moe", *slow("qwen3_5_moe")])
def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("routed")
    folder = with_ties(model_folder(request.param), root / "served", seed=1)
    options = ServerOptions(
        folder, "float32", "cpu", server_args={"enable_return_routed_experts": True}
    )
    with ManagedServer(options, log_path=root / "server.log") as server:
        yield Served(folder, Processor(folder, DATA, family_of(folder)), server)


def sampling(served: Served) -> Sampling:
    suppressed = tuple(served.processor.suppressed_ids)
    shape = route_shape(served.folder)
    assert shape is not None
    return Sampling(1.0, 12, suppressed_ids=suppressed, routes=shape)


def test_logprobs_with_replay_are_the_servers(routed: Served, tmp_path: Path) -> None:
    """The trainer's routers differ by less than rounding in bf16, and choose other experts."""
    asked = prompts(routed.processor)
    groups = routed.client.generate(list(asked.values()), n=3, sampling=sampling(routed))
    calls = [
        (group, prompt, response)
        for group, (prompt, responses) in enumerate(zip(asked.values(), groups, strict=True))
        for response in responses
    ]
    for _, _, response in calls:
        assert response.routes is not None and response.routes.dtype == np.uint8
    replayed, chosen = differences(routed, calls, tmp_path)
    assert replayed < 1e-4
    assert chosen > 1e-2, "the routers would have chosen the same experts"


def differences(
    served: Served, calls: Sequence[tuple[int, Prompt, Response]], tmp_path: Path
) -> tuple[float, float]:
    """Return the largest difference of log-probs with and without replay. calls: Each with the
    number of its group.
    """
    other = with_ties(served.folder, tmp_path / "trainer", seed=2)
    (found,) = launch(1, compare, other, calls, sampling(served))
    return found


def compare(
    folder: Path, calls: Sequence[tuple[int, Prompt, Response]], how: Sampling
) -> tuple[float, float]:
    processor = Processor(folder, DATA, family_of(folder))
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    trees = [CallTree() for _ in range(1 + max(group for group, _, _ in calls))]
    for number, (group, prompt, response) in enumerate(calls):
        logprobs = torch.from_numpy(response.logprobs)
        size = len(logprobs)
        ids = torch.full((size,), number)
        of_call = columns(size, rollout_logprobs=logprobs, sequence_ids=ids)
        trees[group].add(number, prompt, response, of_call)
    images = {image.key: image for _, prompt, _ in calls for image in prompt.images}
    run = Run.start(folder, config, Ranks(), ModelOptions(), images)
    pack = make_pack(
        [tree.to_tree() for tree in trees], vision_token_ids=processor.vision_token_ids
    )
    assert pack.columns is not None and pack.routes is not None
    # One token a response has no routes: its last.
    assert int((~pack.routes.is_known).sum()) == len(calls)
    scoring = Scoring(how.temperature, how.suppressed_ids)
    found = []
    for computed in (pack, pack.without_routes()):
        (scores,) = compute_logprobs(run.wrapped, [computed], run.features(), scoring)
        found.append(float((scores.logprobs - pack.columns.rollout_logprobs).abs().max()))
    return found[0], found[1]
