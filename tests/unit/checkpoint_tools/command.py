"""megavlm-convert as a user sees it."""

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
