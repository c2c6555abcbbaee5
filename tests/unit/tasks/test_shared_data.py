"""Real questions: what is right is worth most, and what is wrong least, in every set."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megavlm.config.reward import Reward
from megavlm.rewards.base import Example, Score
from megavlm.rewards.manager import Part, RewardManager
from megavlm.tasks.caption.corpus import with_corpus
from tests.support.timeouts import scaled

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
NUM = 40  # rows of a set
SETS = {
    "geometry3k_examples": ("geo3k", {}),
    "math_vision_subset": ("geo3k", {}),
    "easy_vqa": ("vqa", {}),
    "coco_mini_vqa_derived": ("vqa", {}),
    "coco_mini_captions": ("caption", {"weights": {"rouge": 0.5, "keywords": 0.5}}),
    "osv5m_street": ("geospot", {}),
}


def rows(folder: Path, file: str = "train.parquet") -> list[dict[str, Any]]:
    table = pq.read_table(folder / file)
    return [row for row in table.slice(0, NUM).to_pylist()]


def scores(
    name: str, options: dict[str, Any], pairs: list[tuple[str, dict[str, Any]]]
) -> list[Score]:
    part = Part("it", name, options=options)

    async def run() -> list[Score]:
        manager = RewardManager(
            [part], Reward(on_failure="stop", workers=1, timeout=scaled(20), memory_mb=2048)
        )
        try:
            return await asyncio.gather(*(manager.score(text, example(row)) for text, row in pairs))
        finally:
            await manager.close()

    return asyncio.run(run())


def example(row: dict[str, Any]) -> Example:
    images = tuple(image["bytes"] for image in row.pop("images", ()))
    plain = {name: str(row[name]) for name in ("problem", "answer")}
    return Example(**plain, category=row["task"], images=images, extra=row)


@pytest.mark.parametrize("folder", SETS)
def test_the_true_answer_is_right_and_another_is_not(folder: str) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"no images at {SHARED}")
    name, options = SETS[folder]
    data = rows(SHARED / folder)
    wrap = r"\boxed{%s}" if name == "geo3k" else "%s"
    said = [*(row["answer"] for row in data), *["qx 77123"] * len(data)]
    pairs = [(wrap % text, dict(row)) for text, row in zip(said, data * 2, strict=True)]
    found = scores(name, options, pairs)
    right, wrong = found[: len(data)], found[len(data) :]
    assert all(score.correct for score in right), [
        row["answer"] for row, score in zip(data, right, strict=True) if not score.correct
    ]
    assert not any(score.correct for score in wrong)
    assert all(a.reward > b.reward for a, b in zip(right, wrong, strict=True))


def test_cider_ranks_a_image_s_own_captions_first(tmp_path: Path) -> None:
    folder = SHARED / "coco_mini_captions"
    if not folder.is_dir():
        pytest.skip(f"no images at {SHARED}")
    data = rows(folder)
    files = {"corpus_files": [str(folder / "train.parquet")]}
    options = {"weights": {"cider": 1.0}} | with_corpus(files, str(tmp_path))
    held = [row | {"references": row["references"][1:]} for row in data]
    own = [(row["references"][0], dict(rest)) for row, rest in zip(data, held, strict=True)]
    other = [(row["references"][0], dict(rest)) for row, rest in zip(data[1:], held, strict=False)]
    rewards = [score.reward for score in scores("caption", options, own + other)]
    means = [sum(x) / len(x) for x in (rewards[: len(own)], rewards[len(own) :])]
    assert 0.3 < means[0] < 3 and means[1] < 0.2


def test_a_whole_place_is_worth_one() -> None:
    folder = SHARED / "osv5m_street"
    if not folder.is_dir():
        pytest.skip(f"no images at {SHARED}")
    data = rows(folder, "test.parquet")
    said = [
        f"Country: {row['country']}\nRegion: {row['region']}\nCity: {row['city']}\n"
        f"Coordinates: {row['lat']}, {row['lon']}"
        for row in data
    ]
    found = scores("geospot", {}, [(text, dict(row)) for text, row in zip(said, data, strict=True)])
    assert [score.reward for score in found] == pytest.approx([1.0] * len(data))
