"""Which code runs: a run writes it down, and the card of the model that it makes tells it."""

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def code_version() -> str:
    """`megavlm 0.1.0`, in a git checkout with the commit; `-dirty` where files differ from it."""
    commit, git = "", shutil.which("git")
    if git and (_ROOT / ".git").exists():
        command = [git, "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
        command += ["--exclude", "*"]  # tags
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"megavlm {version('megavlm')}" + (f", commit {commit}" if commit else "")
