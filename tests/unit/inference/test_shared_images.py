"""Pixels in shared memory, by SGLang's own class and what a server changes of it."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from megavlm.inference.server_main import shared_memory_of


@pytest.mark.slow
def test_responses_to_a_prompt_read_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader gets the pixels, what it writes to them is its own, and nothing is left."""
    # SGLang takes seconds, which every worker of pytest would spend to collect the tests.
    from sglang.srt.managers.mm_utils import ShmPointerMMData

    from megavlm.inference.server_support import megavlm_images

    monkeypatch.setattr(ShmPointerMMData, "__init__", ShmPointerMMData.__init__)
    megavlm_images.install()
    pixels, other = torch.rand(64, 96), torch.rand(8, 96)
    before = shared_memory_of(os.getpid())
    sent = [pickle.dumps(ShmPointerMMData(pixels, precomputed_hash=5)) for _ in range(3)]
    alone = pickle.dumps(ShmPointerMMData(other))
    files = [Path(name) for name in shared_memory_of(os.getpid()) - before]
    names = sorted(file.stat().st_nlink for file in files)
    assert names == [2, 2, 4, 4, 4, 4], "a name for each reader, and one to link to"

    for message in sent:
        pointer = pickle.loads(message)  # noqa: S301  # our own
        assert pointer.precomputed_hash == 5
        read = pointer.materialize()
        torch.testing.assert_close(read, pixels, rtol=0, atol=0)
        read.zero_()
    torch.testing.assert_close(pickle.loads(alone).materialize(), other)  # noqa: S301  # our own
    assert [file.stat().st_nlink for file in files if file.exists()] == [1, 1]
    del pixels, other, read
    assert not [file for file in files if file.exists()]
