"""`megavlm data`: published data sets that recipes use as they are, from the HuggingFace hub."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import snapshot_download
from omegaconf import OmegaConf

from megavlm.config.data import Data
from megavlm.data.rows import Rows, check_images

SAMPLE = 20  # rows of each split that are read, with their images


@dataclass(frozen=True)
class PublishedData:
    """A data set of the hub. train, test: its files. keys: of the `data` section, and `sections`
    of others, that fit it.
    """

    repository: str
    train: str
    test: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)


PUBLISHED = {
    "geo3k": PublishedData(
        "hiyouga/geometry3k",
        "data/train-00000-of-00001.parquet",
        "data/test-00000-of-00001.parquet",
        keys={"category_key": None},
        sections={"environment": {"name": "geo3k"}},
    ),
}


def fetch_data(name: str, folder: Path | None) -> str:
    """Download a data set's files to `folder`, going on with what is there, and return the recipe's
    keys for them as YAML. folder: None takes data/ and the repository's name.

    Raises ValueError for an unknown name and for files of another layout, and ConnectionError if
    the hub cannot be reached or refuses.
    """
    if name not in PUBLISHED:
        raise ValueError(f"megavlm data {name}: there are {', '.join(PUBLISHED)}; name one of them")
    published = PUBLISHED[name]
    folder = folder or Path("data", published.repository.rpartition("/")[2])
    files = [published.train, published.test]
    try:
        snapshot_download(
            published.repository, repo_type="dataset", local_dir=folder, allow_patterns=files
        )
    except (OSError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(
            f"{published.repository} cannot be downloaded to {folder} ({reason}): try again; what "
            "has arrived is kept"
        ) from error
    train, test = (str(folder / file) for file in files)
    keys = {"train_files": [train], "test_files": [test], **published.keys}
    counts = [_check(file, Data(**published.keys)) for file in (train, test)]
    recipe = OmegaConf.to_yaml(OmegaConf.create({"data": keys, **published.sections}))
    return f"# {counts[0]:,} rows to train on, {counts[1]:,} to test on\n{recipe}"


def _check(file: str, data: Data) -> int:
    """Return the number of rows. Raises ValueError if one of the first cannot be used."""
    rows = Rows([file], data)
    for row in rows[:SAMPLE]:
        check_images(row)
    return len(rows)
