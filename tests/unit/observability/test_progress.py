"""The line of a long wait, on a terminal and in a log."""

import io

from megavlm.observability.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, times: list[float]) -> str:
    now = [0.0]
    with Progress(stream, lambda: now[0]) as progress:
        for number, time in enumerate(times):
            now[0] = time
            progress.show(f"line {number}")
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then() -> None:
    assert show(io.StringIO(), [1, 9, 11, 12, 20, 22]) == "line 2\nline 5\n"


def test_a_short_wait_prints_nothing_to_a_log() -> None:
    assert show(io.StringIO(), [0.1, 5, 9]) == ""


def test_a_terminal_has_one_line_that_is_erased_at_the_end() -> None:
    shown = show(Terminal(), [1, 1.1, 2])
    assert "line 2" in shown and shown.count("\n") <= 2
    assert shown.endswith("\x1b[1A\x1b[2K")  # up, and erased
