"""Sampled rollouts of a run: samples/rollouts.jsonl, and each image once under its content key.

A few groups of up to a hundred steps are kept, so that the folder does not grow with the run.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megavlm.observability.records import Record, append_record, keep_records
from megavlm.writing import write_whole

SAMPLES_FOLDER = "samples"
SAMPLES_FILE = "rollouts.jsonl"
MAX_STEPS, GROUPS = 100, 4  # sampled steps of a run, and groups of each


class SampleWriter:
    """Writes sampled groups; used by one process, the driver."""

    def __init__(
        self,
        run_dir: Path | str,
        start_step: int = 0,
        *,
        num_steps: int,
    ) -> None:
        """Open the file. start_step: see MetricsWriter. num_steps: length of the whole run."""
        self.folder = Path(run_dir) / SAMPLES_FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._num_steps = num_steps
        self._every = -(-num_steps // MAX_STEPS)
        keep_records(self.folder / SAMPLES_FILE, lambda record: record["step"] <= start_step)

    def is_due(self, step: int) -> bool:
        """Return True for steps whose samples are kept: the first, the last, and some between."""
        return step in (1, self._num_steps) or step % self._every == 0

    def write(self, step: int, groups: Sequence[Mapping[str, Any]]) -> list[Record]:
        """If the step is due, write a few of the groups, of as many categories as possible. Returns
        the written records, in which images are replaced by their file names.

        A group has `prompt`, `answer`, `category`, `source`, `images` and `responses`. `images`
        holds (content key, function that returns a PNG) in the order of the prompt. Each response
        has `text`, `reward`, `correct`, `parts`, `finish` and `turns`; `turns` are its later turns,
        each with `message`, `images` and `text`. `tokens` of a response or turn is a function that
        returns its tokens as (text, log-prob).
        """
        if not self.is_due(step):
            return []
        written = []
        for group in _spread(groups)[:GROUPS]:
            responses = [self._response(response) for response in group["responses"]]
            record = {"step": step, **self._with_names(group), "responses": responses}
            append_record(self.folder / SAMPLES_FILE, record)
            written.append(record)
        return written

    def _response(self, response: Mapping[str, Any]) -> dict[str, Any]:
        turns = [_with_tokens(self._with_names(turn)) for turn in response.get("turns", ())]
        return _with_tokens(response) | ({"turns": turns} if turns else {})

    def _with_names(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Write the item's images, and return the item with their file names instead of them."""
        names = []
        for key, make_png in item["images"]:
            path = self.image_path(key)
            names.append(path.name)
            if not path.exists():
                write_whole(path, make_png())
        return {**item, "images": names}

    def image_path(self, key: str) -> Path:
        return self.folder / f"{key}.png"


def _with_tokens(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, "tokens": item["tokens"]()} if "tokens" in item else dict(item)


def _spread(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the groups in an order that takes one of each category in turn."""
    by_category: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for group in groups:
        by_category[group["category"]].append(group)
    turns = zip_longest(*by_category.values())
    return [group for turn in turns for group in turn if group is not None]
