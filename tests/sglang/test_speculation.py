"""Speculative decoding with Qwen3.5's own draft head, on the real server."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from megavlm.data.processor import Processor
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.inference.protocol import Response, SamplingParams
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.rollout.groups import draft_metrics
from tests.conftest import DATA
from tests.parity.reference import Reference
from tests.sglang.conftest import Served, model_folder
from tests.sglang.pushes import Trainer, changed, push
from tests.sglang.questions import QUESTION, largest_difference, prompts
from tests.sglang.test_pauses import push_under_a_request, versions
from tests.sglang.test_weights import differences
from tests.support.draft_head import add_draft_head
from tests.support.fork import launch
from tests.support.forked_servers import forked
from tests.support.generation import generate

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.xdist_group("speculation"),
    pytest.mark.timeout(1200),
]
SHARED = {"draft.model.embed_tokens.weight", "draft.lm_head.weight"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("speculation")
    with serving(add_draft_head(model_folder("qwen3_5"), root / "model"), root) as served:
        yield served


@contextmanager
def serving(folder: Path, root: Path) -> Iterator[Served]:
    options = ServerOptions(
        folder, dtype="float32", device="cpu", server_args={"speculative_algorithm": "NEXTN"}
    )
    with forked(ManagedServer(options, log_path=root / "server.log")) as server:
        yield Served(folder, Processor(folder, DATA, family_of(folder)), server)


@pytest.fixture
def served(started: Served) -> Served:
    return started.restore()


def sampled(served: Served, temperature: float, *suppressed: int) -> list[Response]:
    """Responses whose log-probs are transformers'."""
    ids = (*served.processor.suppressed_ids, *suppressed)
    drawn = SamplingParams(temperature, 24, suppressed_ids=ids)
    by_name = prompts(served.processor)
    groups = generate(served.client, list(by_name.values()), n=3, sampling_params=drawn)
    reference = Reference(served.folder)
    for (name, prompt), responses in zip(by_name.items(), groups, strict=True):
        assert largest_difference(reference, prompt, responses, drawn) < 1e-4, name
    return [response for group in groups for response in group]


def accept_length(responses: Sequence[Response]) -> float:
    return draft_metrics(responses)["accept_length"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_targets(served: Served, temperature: float) -> None:
    responses = sampled(served, temperature)
    assert 1.05 < accept_length(responses) < 3.5
    # One in a hundred ends within a few tokens, and such ones may be equal.
    whole = [tuple(r.token_ids.tolist()) for r in responses if r.finish == "length"]
    assert len({*whole}) == len(whole) > 4


def test_suppressed_tokens_are_drafted_and_rejected(served: Served) -> None:
    """The draft model knows of no suppressed tokens: it proposes the likeliest."""
    greedy = sampled(served, 0.0)
    tokens = [token for response in greedy for token in response.token_ids.tolist()]
    likeliest = max(set(tokens), key=tokens.count)
    responses = sampled(served, 0.0, likeliest)
    assert min(accept_length(greedy), accept_length(responses)) > 1.3
    assert all(likeliest not in response.token_ids for response in responses)


@pytest.mark.parametrize("kind", ["tensor", "distributed", "disk"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_push_reaches_the_target_and_the_draft(
    served: Served, kind: str, trained: bool, tmp_path: Path
) -> None:
    """All of a draft head that is trained, and of another one what it shares with the target."""
    everything = draft_weights(served).keys()
    kept = everything - pushed(served, kind, tmp_path, trained)
    constants = {"draft.model.layers.0.rotary_emb.axis_map"}
    assert kept == (constants if trained else everything - SHARED)


def test_a_push_with_tied_embeddings(tmp_path: Path) -> None:
    sizes = {"family": "qwen3_5", "num_layers": 4, "init_std": 0.05, "tied_embeddings": True}
    make_tiny_model(tmp_path / "plain", [QUESTION] * 10, seed=3, max_vocab=300, **sizes)
    folder = add_draft_head(tmp_path / "plain", tmp_path / "model")
    with serving(folder, tmp_path) as served:
        assert accept_length(sampled(served, 0.0)) > 1
        assert pushed(served, "tensor", tmp_path) == {"draft.model.embed_tokens.weight"}


def pushed(served: Served, kind: str, tmp_path: Path, trained: bool = False) -> set[str]:
    """Push other weights, by which the server then samples. Returns the draft model's tensors that
    have changed. trained: The trainer has the draft head, too.
    """
    weights = changed(served.folder, tmp_path / "weights", tower=False, seed=7)
    before = draft_weights(served)
    report, _ = launch(
        2, push, [served.receiver], kind, Trainer(weights, draft_head=trained), tmp_path, 3
    )
    assert report.servers == 1 and report.checked
    after = differences(served, Reference(weights), 3, seed=0)
    assert max(after.values()) < 1e-4, after
    return different(before, draft_weights(served))


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_a_push_under_a_request(served: Served, pause: str, tmp_path: Path) -> None:
    request = push_under_a_request(served, pause, tmp_path)
    assert versions(request) == (["start"] if pause == "abort" else ["start", "5"])


def test_drafts_are_right_after_a_release(served: Served) -> None:
    """On a CPU nothing is released, so the test overwrites the draft model meanwhile."""
    before = draft_weights(served)
    post(served, "/release_memory_occupation", {"tags": ["weights"]})
    served.post("/weights_checker", {"action": "reset_tensors", "selector": "draft"})
    assert different(before, draft_weights(served)) == before.keys()
    post(served, "/resume_memory_occupation", {"tags": ["weights"]})
    assert different(before, draft_weights(served)) == SHARED, "the next push has these"


def post(served: Served, path: str, body: dict[str, list[str]]) -> None:
    """Send a request that SGLang answers with null."""
    keys = {"Authorization": f"Bearer {served.server.admin_key}"}
    httpx.post(served.server.url + path, json=body, headers=keys, timeout=60).raise_for_status()


def draft_weights(served: Served) -> dict[str, str]:
    """Checksums of the draft model's tensors."""
    answer = served.post("/weights_checker", {"action": "checksum", "selector": "draft"})
    return dict(answer["ranks"][0]["checksums"])


def different(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}
