"""The trainer's draft head and the one of the real server compute the same logits."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavlm.data.processor import Processor, Prompt
from megavlm.families import family_of
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from megavlm.model_config import model_config
from tests.conftest import DATA
from tests.parity import models as parity_models
from tests.parity.cases import packs_of
from tests.parity.draft_heads import Headed, with_random_head
from tests.parity.reference import Sequences
from tests.parity.runs import difference
from tests.parity.table import Ranks
from tests.sglang.conftest import Served, model_folder
from tests.sglang.questions import prompts
from tests.support.draft_head import drafting
from tests.support.draft_hooks import hooks
from tests.support.fork import launch
from tests.support.forked_servers import forked
from tests.support.generation import generate

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.xdist_group("speculation"),
    pytest.mark.timeout(1200),
]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"])
def test_the_heads_of_trainer_and_server_are_equal(family: str, tmp_path: Path) -> None:
    """On texts and images, and on responses that branch from a prompt."""
    # Dense models have four layers, so that an EAGLE-3 head reads three. SGLang serves no model
    # with experts of which one layer is dense, as the matrix has it.
    folders = model_folder if family in ("qwen3_5", "qwen3_vl_moe") else parity_models.model_folder
    source = folders(family)
    folder = with_random_head(source, tmp_path / "model")
    written = tmp_path / "logits"
    written.mkdir()
    args = {
        **drafting(folder),
        "disable_radix_cache": True,  # every slot of a prompt is computed
        "forward_hooks": json.dumps(hooks(written)),
    }
    options = ServerOptions(folder, dtype="float32", device="cpu", server_args=args)
    with forked(ManagedServer(options, log_path=tmp_path / "server.log")) as server:
        served = Served(folder, Processor(folder, DATA, family_of(folder)), server)
        asked, theirs, cases = [*prompts(served.processor).values()], [], []
        client = served.client
        for prompt in asked:
            responses = []
            for _ in range(2):  # one after the other, so that a pass has one sequence
                # Each response has all of its tokens.
                drawn = SamplingParams(1.0, 12, suppressed_ids=(served.processor.eos_id,))
                ((response,),) = generate(client, [prompt], n=1, sampling_params=drawn)
                responses.append(response.token_ids.tolist())
                theirs.append(rows_of(written, prompt, responses[-1]))
            cases.append(Sequences(prompt, responses))
    (ours,) = launch(1, logits, folder, cases)
    compared = 0
    for mine, found in zip(ours, theirs, strict=True):
        for index, row in found.items():
            assert difference(torch.from_numpy(mine[index]), row) < 1e-5, index
            compared += 1
    assert compared >= 8 * 8


def rows_of(written: Path, prompt: Prompt, response: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return the server's logits that predict a token of the response, by its index, and delete the
    files. A slot that was computed twice had a draft that was rejected at first.
    """
    length, found = len(prompt.token_ids), dict[int, torch.Tensor]()
    for path in sorted(written.iterdir()):
        seen: dict[str, Any] = torch.load(path)
        path.unlink()
        if seen["mode"] == "DECODE":  # drafts of drafts
            continue
        places = zip(seen["positions"], seen["ids"], seen["logits"], strict=True)
        for position, token, row in places:
            index = int(position) + 2 - length  # of the token that the slot predicts
            if 1 <= index < len(response) and int(token) == response[index - 1]:
                found[index] = row
    return found


def logits(folder: Path, cases: Sequence[Sequences]) -> list[np.ndarray]:
    """Return the head's logits [S, V] of each response, each prompt's in one tree."""
    config = model_config(folder)
    headed = Headed(folder, config, Ranks(), head=True)
    passed = headed.backward(packs_of([cases], config, Ranks()), cases)
    ((_, _, hidden),) = passed.seen
    whole = hidden @ headed.run.chunks[-1].language_model.output_weight().detach().t()
    lengths = [len(response) for case in cases for response in case.responses]
    return [part.numpy() for part in whole.split(lengths)]
