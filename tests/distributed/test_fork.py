"""A test's ranks: what one raises, and that it dies or hangs, is told."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.support import fork
from tests.support.fork import launch
from tests.support.timeouts import scaled

pytestmark = pytest.mark.distributed


def fail(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("no such layout")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", r"rank 1 of 2:\n[^$]*ValueError: no such layout"),
        ("dies", r"rank 1 of 2:\ndied without a word"),
        ("hangs", rf"ranks \[0, 1\] gave no result within {scaled(1)} s"),
    ],
)
def test_a_failure_is_told_and_the_next_launch_works(
    monkeypatch: pytest.MonkeyPatch, how: str, error: str
) -> None:
    monkeypatch.setattr(fork, "GRACE", 0.5)
    with pytest.raises(RuntimeError if how != "hangs" else TimeoutError, match=error):
        launch(2, fail, how, timeout=1 if how == "hangs" else 60)
    assert launch(2, dist.get_rank) == [0, 1]
