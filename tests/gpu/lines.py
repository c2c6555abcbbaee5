"""Results of the GPU kit: a JSON line for each check, printed as soon as it is known."""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 1500  # characters of an error


def report(check: str, fault: str | None = None, **values: Any) -> None:
    """Print the result of a check. fault: a sentence that says what is wrong, None if it passed."""
    print(json.dumps({"check": check, "fault": fault, **values}), flush=True)


@contextmanager
def checking(check: str) -> Iterator[None]:
    """Report an error within the context as the check's fault, so that the next check runs."""
    try:
        yield
    except Exception as error:  # one kernel's error must not hide the others
        traceback.print_exc()
        report(check, fault=shortened(f"{type(error).__name__}: {error}"))


def shortened(text: str) -> str:
    """Leave out the middle of a long text: a program's output tells at its end why it failed."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 3]} ... {text[-LONGEST // 3 * 2 :]}"
