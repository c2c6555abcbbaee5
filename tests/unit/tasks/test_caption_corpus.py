"""Captions for CIDEr-D from any data files, handed to reward processes as one file."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megavlm import temporary
from megavlm.config.load import load
from megavlm.rewards.base import Example
from megavlm.rollout.rewards import make_reward_manager
from megavlm.tasks.caption.corpus import with_corpus

CAPTIONS = [["a red bus drives by", "a bus"], ["two dogs play outside here"]]


def test_captions_of_every_kind_of_file_and_of_globs(tmp_path: Path) -> None:
    rows = [{"references": captions, "other": 1} for captions in (*CAPTIONS, None)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.csv").write_text("references,other\n01,2\n,3\n")
    files = [f"{tmp_path}/a*.parquet", f"file://{tmp_path}/b.jsonl", str(tmp_path / "c.csv")]
    (tmp_path / "out").mkdir()
    options = with_corpus({"corpus_files": files, "weights": {}}, str(tmp_path / "out"))
    assert options.keys() == {"weights", "corpus"}
    lines = Path(options["corpus"]).read_text().splitlines()
    assert list(map(json.loads, lines)) == [*CAPTIONS, *CAPTIONS, ["01"]]


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"captions": ["a"]}\n')
    for files, problem in (
        ("a.jsonl", "give a list of data files"),
        ([str(tmp_path / "none.jsonl")], "no such data file"),
        ([str(tmp_path / "a.jsonl")], "no captions in 'references'"),
    ):
        with pytest.raises(ValueError, match=problem):
            with_corpus({"corpus_files": files}, str(tmp_path))


def test_the_judge_of_a_recipe_weighs_words_by_it_and_takes_it_away(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"references": x}) + "\n" for x in CAPTIONS))
    recipe = write_recipe(
        data={"train_files": [str(file)]},
        environment={"name": "caption"},
        reward={"options": {"weights": {"cider": 0.1}, "corpus_files": "${data.train_files}"}},
    )
    manager = make_reward_manager(load(recipe))
    row = Example("?", "", extra={"references": CAPTIONS[1]})
    found = asyncio.run(manager.score("Two dogs play outside here.", row))
    assert found.reward == pytest.approx(1.0)
    assert len(list(tmp_path.glob("megavlm_rewards_*/*.jsonl"))) == 1
    asyncio.run(manager.close())  # not when it is collected: ranks end without that
    assert not list(tmp_path.glob("megavlm_rewards_*"))


def test_folders_of_killed_runs_are_removed(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of managers that live, nor young ones."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "megavlm_rewards_left"
    left.mkdir()
    (left / "corpus.jsonl").touch()
    config = load(write_recipe())
    managers = [make_reward_manager(config)]
    assert left.exists()
    monkeypatch.setattr(temporary, "LEFT_FOR", 0.0)
    managers += [make_reward_manager(config), make_reward_manager(config)]
    assert not left.exists()
    assert len(list(tmp_path.glob("megavlm_rewards_*"))) == len(managers)
    for manager in managers:
        asyncio.run(manager.close())
