"""The reward curve in characters."""

import pytest

from megavlm.observability.terminal_chart import HEIGHT, WIDTH, terminal_chart


def test_a_rising_reward_rises() -> None:
    lines = terminal_chart([(1, 0.0), (2, 0.5), (3, 1.0)], "Reward").splitlines()
    assert lines[0] == "Reward" and len(lines) == HEIGHT + 2
    wide = WIDTH // 3
    assert lines[1] == "      1 ┤" + " " * 2 * wide + "█" * wide
    assert lines[HEIGHT].startswith("      0 ┤" + "▁" * wide + "█" * wide)
    assert lines[-1].startswith(" " * 9 + "step 1") and lines[-1].endswith("3")


@pytest.mark.parametrize(
    "values", [[0.0], [0.0, 0.0], [-1.0, -2.0], [1e-9, 5.0], [0.3] * 1000, [0.1, 0.2] * 40]
)
def test_any_curve_fits(values: list[float]) -> None:
    lines = terminal_chart(list(enumerate(values, 1)), "Reward").splitlines()
    assert len(lines) == HEIGHT + 2 and max(map(len, lines)) <= WIDTH + 12
    assert all(set(line[9:]) <= set(" ▁▂▃▄▅▆▇█") for line in lines[1:-1])


def test_neighbours_share_a_bar_as_their_mean() -> None:
    steps = [(step, float(step % 2)) for step in range(1, 4 * WIDTH + 1)]
    assert "    0.5 ┤" + "█" * WIDTH in terminal_chart(steps, "Reward").splitlines()
