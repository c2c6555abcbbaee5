"""Attention over SGLang's KV cache, of many sequences at a time: what SGLang's own computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.inference.server_args import ServerOptions
from tests.support.forked_servers import forking_servers

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("caches.py")


def test_all_kinds_of_sequences_give_the_same_attention() -> None:
    """Decoding, prompts, and prompts with a prefix in the cache, of equal and uneven lengths."""
    options = ServerOptions("m", dtype="float32", device="cpu")
    with forking_servers():
        done = subprocess.run(
            [sys.executable, "-P", str(PROGRAM)],
            env=os.environ | options.environment(),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 9
    for name, (difference, _, _) in found.items():
        assert difference < 1e-5, name
    # Responses that share most of their tokens read them once.
    read = {name: tokens for name, (_, tokens, _) in found.items()}
    eights = 2 * (420 + sum(range(11, 19)))  # both of the longer tree's length
    assert read["decoding, responses"] == eights + 2 * (110 + 11 + 12) + 61
    assert read["first tokens"] == 421 + 8 + 30 + 299 + 4
    assert read["decoding, short prompts"] == 36 * 41
