"""Attention of SGLang's vision towers, image by image: what SGLang's own computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megavlm.families import FAMILIES
from megavlm.inference.server import ClaimedPort
from megavlm.inference.server_args import ServerOptions
from tests.support.forked_servers import forking_servers

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TOWERS = Path(__file__).with_name("towers.py")


def test_towers_of_all_families_give_the_same_features() -> None:
    """Images of several sizes, equal ones among them, a video, and windows in two blocks."""
    options, port = ServerOptions("m", dtype="float32", device="cpu"), ClaimedPort()
    with forking_servers():
        done = subprocess.run(
            [sys.executable, "-P", str(TOWERS), str(ROOT), str(port.number)],
            env=os.environ | options.environment(),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(FAMILIES)
    for difference, magnitude in found.values():
        assert difference < 1e-6 * magnitude and magnitude > 0.5
