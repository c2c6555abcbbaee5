"""Links of a chain of weight updates in a folder or object store, read by a server's rank.

A task has `folder`, a path or URL that fsspec opens; `links`, the names of a base and of the
changes that follow it; `target`, the number of the rank's manifest in each link; and `answer`, the
name of the file for this rank's answer. FOLDER/LINK/TARGET.json has for each stream and round
[file, bytes, checksum, parts of the changes].
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fsspec
import torch

Task = dict[str, Any]


def missing_links(task: Task, loaded: Sequence[str]) -> list[str]:
    """Return the links to load by a rank that has loaded those in `loaded` last: all of them if it
    holds none.
    """
    links: list[str] = task["links"]
    held = loaded[-1] if loaded else None
    return links[links.index(held) + 1 :] if held in links else links


def read_links(
    task: Task, links: Sequence[str], checksum: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor, Any]]:
    """Yield stream, round, content and changes of every file. Raises ValueError for a file whose
    checksum differs, before it is loaded.
    """
    files, root = fsspec.core.url_to_fs(task["folder"])
    for link in links:
        manifest = json.loads(files.cat_file(f"{root}/{link}/{task['target']}.json"))
        for stream, of_stream in enumerate(manifest["files"]):
            for number, (name, size, words, changes) in enumerate(of_stream):
                content = torch.zeros(0, dtype=torch.uint8)
                if read := files.cat_file(f"{root}/{name}"):
                    content = torch.frombuffer(bytearray(read), dtype=torch.uint8)
                if len(content) != size or checksum(content).tolist() != words:
                    raise ValueError(f"{task['folder']}/{name} is damaged")
                yield stream, number, content, changes


def write_answer(task: Task, answer: Any) -> None:
    """Write this rank's answer to the store."""
    files, root = fsspec.core.url_to_fs(task["folder"])
    files.makedirs(f"{root}/answers", exist_ok=True)
    files.pipe_file(f"{root}/{task['answer']}", json.dumps(answer).encode())
