"""Corpus of captions with which the caption reward weighs words. The trainer writes it to a file,
because reward processes do not have the trainer's credentials and read no data files.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megavlm.data.tables.files import expand
from megavlm.data.tables.formats import open_table
from megavlm.rewards.words import text_of


def with_corpus(options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Write the captions of `corpus_files` to a file in `folder`, and return the options of the
    caption reward with `corpus`, the path of that file, instead of `corpus_files`.

    Raises ValueError for a file or column that is missing.
    """
    options = dict(options)
    files = options.pop("corpus_files", [])
    if not isinstance(files, Sequence) or isinstance(files, str):
        raise ValueError(f"caption's corpus_files are {files!r}: give a list of data files")
    if not files:
        return options
    key = options.get("reference_key", "references")
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".jsonl", delete=False) as file:
        for captions in _references(files, key):
            file.write(json.dumps(captions) + "\n")
    return options | {"corpus": file.name}


def _references(files: Sequence[str], key: str) -> Iterator[list[str]]:
    found = False
    for file in expand(files):
        table = open_table(file, [key])
        for number in range(len(table.block_rows)):
            block = table.read(number, [key])
            for index in range(table.block_rows[number]):
                value = block.record(index).get(key)
                texts = value if isinstance(value, list) else [value]
                if captions := [text_of(text) for text in texts if text]:
                    found = True
                    yield captions
    if not found:
        raise ValueError(
            f"{', '.join(files)}: no captions in {key!r}, the key that caption's options name"
        )
