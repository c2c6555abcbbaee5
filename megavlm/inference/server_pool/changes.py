"""Changes to the external servers of a run, as `megavlm servers` asks for them.

Each is a file in RUN_DIR/servers, named after the server's URL, that holds "add" or "remove". The
run reads the folder every second, and a resumed run reads it at its start. So a change outlives
both processes, works over a shared file system, and the last word on a server holds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from megavlm.writing import write_whole

FOLDER = "servers"  # in the run directory
Change = Literal["add", "remove"]


def ask_for(run_dir: Path, url: str, change: Change) -> None:
    """Write a change for the run to make."""
    write_whole(run_dir / FOLDER / quote(url, safe=""), change.encode())


def asked_changes(run_dir: Path) -> dict[str, Change]:
    """Return the last change that was asked for each server, by URL."""
    files = sorted((run_dir / FOLDER).glob("[!.]*"))  # a file that is being written has a dot
    return {
        unquote(file.name): "add" if file.read_bytes() == b"add" else "remove" for file in files
    }


def changed_urls(urls: Sequence[str], changes: dict[str, Change]) -> list[str]:
    """Return the URLs of a run's servers after the changes. urls: `rollout.urls` of its recipe."""
    added = [url for url, change in changes.items() if change == "add" and url not in urls]
    return [url for url in urls if changes.get(url) != "remove"] + added
