"""megavlm-convert as a user sees it."""

from pathlib import Path

import pytest

from checkpoint_tools.cli import main


def run(*arguments: object) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as exit_:
        main([str(x) for x in arguments])
    code = exit_.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one that a refusal prints, and nothing else."""
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and error.endswith(".\n"), error
    assert error.count("\n") == 1
    return error.removeprefix("error: ").strip()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence of a command that is refused."""
    capsys.readouterr()
    assert run(*arguments) == 2
    return sentence(capsys)


def assert_nothing_partial(folder: Path) -> None:
    assert not [
        path for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".metadata"
    ]
