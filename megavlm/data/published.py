"""`megavlm data`: published data sets on the HuggingFace hub that recipes can use unchanged."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, snapshot_download
from omegaconf import OmegaConf

from megavlm.config.data import Data
from megavlm.data.rows import Rows, check_images

SAMPLE = 20  # rows of each split that are read, with their images


@dataclass(frozen=True)
class PublishedData:
    """A data set on the hub.

    train, test: Globs of its files.
    keys: Keys of the `data` section that fit the data set.
    sections: Keys of other sections that fit it.
    """

    repository: str
    train: str = "data/train-*.parquet"
    test: str = "data/test-*.parquet"
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
    "chartqa": PublishedData(
        "HuggingFaceM4/ChartQA",
        keys={
            "image_keys": ("image",),
            "prompt_key": "query",
            "answer_key": "label",
            "category_key": "human_or_machine",
        },
        # A number may be 5 % off, as in the relaxed accuracy by which ChartQA is reported.
        sections={"environment": {"name": "vqa"}, "reward": {"options": {"relative": 0.05}}},
    ),
    "flickr30k": PublishedData(
        "umaru97/flickr30k_train_val_test",
        keys={
            "image_keys": ("image",),
            "prompt_key": None,
            "question": "Describe the image in one sentence.",
            "answer_key": "caption",
            "category_key": None,
            "extra_keys": ("caption",),
        },
        sections={
            "environment": {"name": "caption"},
            "reward": {"options": {"reference_key": "caption"}},
        },
    ),
    # The data set has only one split: the last of its six files is used for testing.
    "streetview": PublishedData(
        "stochastic/random_streetview_images_pano_v0.0.2",
        "data/train-0000[0-4]-of-00006-*.parquet",
        "data/train-00005-of-00006-*.parquet",
        keys={
            "image_keys": ("image",),
            "prompt_key": None,
            "question": (
                "Where was this panorama taken? End with two lines: Country: ..., "
                "Coordinates: LATITUDE, LONGITUDE"
            ),
            "answer_key": "country_iso_alpha2",
            "category_key": None,
            "extra_keys": ("latitude", "longitude"),
        },
        sections={"environment": {"name": "geospot"}},
    ),
}


def fetch_data(name: str, folder: Path | None) -> str:
    """Download a data set's files to `folder`, and return the recipe's keys for them as YAML. Files
    that were downloaded before are kept.

    folder: Target folder; None uses data/ and the repository's name.

    Raises ValueError for an unknown name and for files of another layout, and ConnectionError if
    the hub cannot be reached or refuses the request.
    """
    if name not in PUBLISHED:
        raise ValueError(f"megavlm data {name}: there are {', '.join(PUBLISHED)}; name one of them")
    published = PUBLISHED[name]
    repository, patterns = published.repository, (published.train, published.test)
    folder = folder or Path("data", repository.rpartition("/")[2])
    try:
        listed = HfApi().list_repo_files(repository, repo_type="dataset")
        files = [_matching(listed, pattern, repository) for pattern in patterns]
        names = [name for matched in files for name in matched]
        snapshot_download(repository, repo_type="dataset", local_dir=folder, allow_patterns=names)
    except (OSError, httpx.HTTPError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConnectionError(
            f"{repository} cannot be downloaded to {folder} ({reason}): try again; what has "
            "arrived is kept"
        ) from error
    for pattern, expected in zip(patterns, files, strict=True):
        found = {str(path.relative_to(folder)) for path in folder.glob(pattern)}
        if different := sorted(found ^ set(expected)):
            raise ValueError(
                f"{folder} is not what {repository} has: remove what there is of "
                f"{', '.join(different)}, and try again"
            )
    train, test = (str(folder / pattern) for pattern in patterns)
    keys = {"train_files": [train], "test_files": [test], **published.keys}
    counts = [_check(file, Data(**published.keys)) for file in (train, test)]
    recipe = OmegaConf.to_yaml(OmegaConf.create({"data": keys, **published.sections}))
    return f"# {counts[0]:,} rows to train on, {counts[1]:,} to test on\n{recipe}"


def _matching(listed: Sequence[str], pattern: str, repository: str) -> list[str]:
    if not (names := fnmatch.filter(listed, pattern)):
        raise ValueError(f"{repository} has no {pattern} any more; it has {', '.join(listed)}")
    return names


def _check(file: str, data: Data) -> int:
    """Return the number of rows. Raises ValueError if any of the first SAMPLE rows is unusable."""
    rows = Rows([file], data)
    for row in rows[:SAMPLE]:
        check_images(row)
    return len(rows)
