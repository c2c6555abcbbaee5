"""`megavlm data`: data sets on the HuggingFace hub that tasks use unchanged."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from omegaconf import OmegaConf

from megavlm.config.data import Data
from megavlm.data.rows import Rows, check_media
from megavlm.task import PublishedData, built_in_tasks, find_task

SAMPLE = 20  # rows of each split that are read, with their images


def fetch_data(name: str, folder: Path | None) -> str:
    """Download a data set's files to `folder`, and return the recipe's keys for them as YAML. Files
    that were downloaded before are kept.

    name: Name of a built-in task's data set, or of a task.
    folder: Target folder; None uses data/ and the repository's name.

    Raises ValueError for an unknown name and for files of another layout, and ConnectionError if
    the hub cannot be reached or refuses the request.
    """
    task, published = _find(name)
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
    sections = {"data": keys, "environment": {"name": task}}
    if published.reward:
        sections["reward"] = dict(published.reward)
    recipe = OmegaConf.to_yaml(OmegaConf.create(sections))
    return f"# {counts[0]:,} rows to train on, {counts[1]:,} to test on\n{recipe}"


def _find(name: str) -> tuple[str, PublishedData]:
    """Return the name of the task and its data set."""
    found = {task.published.name: key for key, task in built_in_tasks().items() if task.published}
    task = find_task(found.get(name, name))
    if task is None or task.published is None:
        raise ValueError(
            f"megavlm data {name}: there are {', '.join(found)}; name one of them, or the package "
            "of a task that has one"
        )
    return found.get(name, name), task.published


def _matching(listed: Sequence[str], pattern: str, repository: str) -> list[str]:
    if not (names := fnmatch.filter(listed, pattern)):
        raise ValueError(f"{repository} has no {pattern} any more; it has {', '.join(listed)}")
    return names


def _check(file: str, data: Data) -> int:
    """Return the number of rows. Raises ValueError if any of the first SAMPLE rows is unusable."""
    rows = Rows([file], data)
    for row in rows[:SAMPLE]:
        check_media(row)
    return len(rows)
