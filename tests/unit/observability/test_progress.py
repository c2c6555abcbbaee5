"""Progress on a terminal and in a log."""

import io
import os
from collections.abc import Callable

import pytest

from megavlm.observability.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def in_log(clock: Clock, work: Callable[[Progress], None], is_quiet: bool = False) -> list[str]:
    stream = io.StringIO()
    with Progress(stream, started=990.0, is_quiet=is_quiet, clock=clock) as progress:
        work(progress)
    return stream.getvalue().splitlines()


def test_a_log_names_what_begins_and_when(clock: Clock) -> None:
    def work(progress: Progress) -> None:
        progress.begin("loading packages")
        clock.now += 65
        progress.begin("loading the model")

    assert in_log(clock, work) == ["[0:10] loading packages", "[1:15] loading the model"]


def test_a_log_gets_a_changed_detail_now_and_then(clock: Clock) -> None:
    def work(progress: Progress) -> None:
        for seconds, detail in ((29, "1 of 9"), (2, "2 of 9"), (3, "3 of 9"), (40, "2 of 9")):
            clock.now += seconds
            progress.show(detail)
        clock.now += 1
        progress.show("4 of 9")

    assert in_log(clock, work) == ["[0:41] 2 of 9", "[1:25] 4 of 9"]


def test_lines_of_a_long_run_become_rare(clock: Clock) -> None:
    def work(progress: Progress) -> None:
        for minute in range(24 * 60):
            clock.now += 60
            progress.show(f"minute {minute}")

    assert 50 < len(in_log(clock, work)) < 150


def test_the_time_left_follows_from_the_steps_of_this_process(clock: Clock) -> None:
    def work(progress: Progress) -> None:
        progress.count(20, 40)  # resumed
        clock.now += 100
        progress.count(25, 40)

    assert in_log(clock, work) == ["[1:50] step 26 of 40, about 5 min 00 s left"]


def test_a_quiet_one_prints_nothing(clock: Clock) -> None:
    def work(progress: Progress) -> None:
        progress.begin("loading")
        progress.line("resumed")

    assert in_log(clock, work, is_quiet=True) == []


def test_a_terminal_has_one_line_that_is_erased_at_the_end(clock: Clock) -> None:
    stream = Terminal()
    with Progress(stream, started=990.0, clock=clock) as progress:
        progress.count(2, 40)
        clock.now += 20
        progress.count(4, 40)
        progress.show("3 of 8 prompts answered")
        progress.line("[bold]step 4/40")
    shown = stream.getvalue()
    assert "step 5 of 40: 3 of 8 prompts answered" in shown
    assert "0:30 so far, about 6:00 left" in shown
    assert "[bold]step 4/40\n" in shown and shown.count("\n") <= 2
    assert shown.endswith("\x1b[1A\x1b[2K") or shown.rstrip("\x1b[?25h").endswith("\x1b[2K")


def test_a_forked_child_prints_past_the_live_line(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    with Progress(Terminal(), clock=clock):
        if (child := os.fork()) == 0:
            os.write(1, type(__import__("sys").stdout).__name__.encode())
            os._exit(0)
        os.waitpid(child, 0)
    assert "FileProxy" not in capfd.readouterr().out
