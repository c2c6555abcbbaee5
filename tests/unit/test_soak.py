"""What the soak run calls growth."""

import os
from pathlib import Path

from tests.soak.growth import Sample, table, take_sample


def samples(slope: float) -> list[Sample]:
    """A measure that grows fast at the start, as memory does, and by `slope` a step later."""
    early = [Sample(step, {"memory_mb rank 0": 500.0 + 10 * step}) for step in range(50)]
    late = [
        Sample(50 + step, {"memory_mb rank 0": 1000.0 + slope * step + step % 3})
        for step in range(51)
    ]
    return [*early, *late]


def test_growth_of_the_second_half_alone_counts() -> None:
    assert table(samples(0.0))[1] == []
    assert table(samples(1.0))[1] == ["memory_mb rank 0"]


def test_a_sample_holds_this_process(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(b"x" * 2**20)
    before = take_sample(os.getpid(), tmp_path, 1).values
    files = [(tmp_path / f"{n}").open("w") for n in range(8)]
    after = take_sample(os.getpid(), tmp_path, 2).values
    for file in files:
        file.close()
    (name,) = [name for name in after if name.startswith("descriptors")]
    assert after[name] - before[name] == 8 and after["logs_mb all"] == 1.0
