"""Check at the start of a run that every trainer machine can read the files that its ranks read
later: the model, and the training files, because ranks read the images that they encode from them.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megavlm.checkpointing.all_ranks import run_on_all_ranks
from megavlm.config.schema import Config
from megavlm.data.tables.files import expand, find_filesystem, has_protocol

# Key of the recipe, and path or URL.
Named = tuple[str, str]


def check_reachable_files(config: Config) -> None:
    """Raise ValueError on every rank if a machine cannot read a file that rank 0's machine has.
    Collective.
    """
    is_driver = dist.get_rank() == 0
    wanted = run_on_all_ranks("start", lambda: reachable_files(config) if is_driver else [])[0]
    looks = int(os.environ.get("LOCAL_RANK", "0")) == 0  # one rank per machine
    answers = run_on_all_ranks(
        "start", lambda: (socket.gethostname(), unreadable(wanted) if looks else [])
    )
    hosts: dict[Named, list[str]] = defaultdict(list)
    for host, lacking in answers:
        for name in lacking:
            hosts[name].append(host)
    if hosts:
        (key, path), lacking_hosts = next(iter(hosts.items()))
        others = f" (and {len(hosts) - 1} more files)" if len(hosts) > 1 else ""
        raise ValueError(
            f"{key}: {path}{others} cannot be read on {', '.join(lacking_hosts)}, but every "
            "machine of the trainer reads it: put it where all of them have it under one path"
        )


def reachable_files(config: Config) -> list[Named]:
    """Return the files that every machine reads: all local files, and the first file of each data
    set behind a URL.
    """
    files = [("model.folder", str(Path(config.model.folder) / "config.json"))]
    if config.model.checkpoint is not None:
        files.append(("model.checkpoint", config.model.checkpoint))
    seen = set()
    for file in expand(config.data.train_files):
        if not has_protocol(file.url) or file.entry not in seen:
            files.append(("data.train_files", file.url))
        seen.add(file.entry)
    return files


def unreadable(files: Sequence[Named]) -> list[Named]:
    """Return the files that this machine cannot read."""
    found = []
    for key, name in files:
        filesystem, path = find_filesystem(name)
        is_local = not has_protocol(name)
        if not (os.access(name, os.R_OK) if is_local else filesystem.exists(path)):
            found.append((key, name))
    return found
