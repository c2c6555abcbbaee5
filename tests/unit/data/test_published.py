"""`megavlm data` against a stand-in of the hub's HTTP, in a process that reads HF_ENDPOINT."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megavlm.cli
from megavlm.config.load import load
from megavlm.data import published as published_module
from megavlm.data.rows import Rows
from megavlm.rewards.base import Example
from megavlm.rewards.registry import check_reward_row, load_reward
from megavlm.rollout.rewards import reward_parts
from megavlm.task import built_in_tasks
from tests.conftest import png, row, write_rows
from tests.fakes.service import Served
from tests.support.levels import slow
from tests.support.timeouts import scaled

SHA = "a" * 40
PUBLISHED = {p.name: p for task in built_in_tasks().values() if (p := task.published)}
REPOSITORY = PUBLISHED["geo3k"].repository
RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = ", ".join(PUBLISHED)
IMAGE = {"bytes": png(), "path": None}
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TEXT, TEXTS = pa.string(), pa.list_(pa.string())


@dataclass(frozen=True)
class Layout:
    """Data set as it is published. recipe: that takes it. train, test, others: its files. columns:
    with the values of one row. right, wrong: responses to it.
    """

    recipe: str
    train: list[str]
    test: list[str]
    others: list[str]
    columns: dict[str, tuple[Any, Any]]  # type, value
    right: str
    wrong: str


LAYOUTS = {
    "geo3k": Layout(
        "grpo/geo3k.yaml",
        ["data/train-00000-of-00001.parquet"],
        ["data/test-00000-of-00001.parquet"],
        ["data/validation-00000-of-00001.parquet"],
        {"images": (pa.list_(IMAGE_TYPE), [IMAGE]), "problem": (TEXT, "<image>x?")}
        | {"answer": (TEXT, "48"), "id": (pa.int64(), 1), "choices": (TEXTS, ["3", "48"])}
        | {"ground_truth": (TEXT, "B")},
        "<think>?</think> \\boxed{48}",
        "<think>?</think> \\boxed{49}",
    ),
    "chartqa": Layout(
        "tasks/qwen2_5_vl_7b_vqa.yaml",
        [
            "data/train-00000-of-00003-49492f364babfa44.parquet",
            "data/train-00001-of-00003-7302bae5e425bbc7.parquet",
            "data/train-00002-of-00003-194c9400785577a2.parquet",
        ],
        ["data/test-00000-of-00001-e2cd0b7a0f9eb20d.parquet"],
        ["data/val-00000-of-00001-0f11003c77497969.parquet", "README.md"],
        {"image": (IMAGE_TYPE, IMAGE), "query": (TEXT, "How much?"), "label": (TEXTS, ["14.5"])}
        | {"human_or_machine": (pa.int64(), 1)},
        "\\boxed{14}",
        "\\boxed{13}",
    ),
    "flickr30k": Layout(
        "tasks/qwen2_5_vl_7b_caption.yaml",
        [f"data/train-0000{part}-of-00009-0123456789abcdef.parquet" for part in range(9)],
        ["data/test-00000-of-00001-f4c5570f14a435eb.parquet"],
        ["data/val-00000-of-00001-0123456789abcdef.parquet"],
        {
            "image": (IMAGE_TYPE, IMAGE),
            "caption": (TEXTS, ["A dog runs.", "The brown dog runs on grass."]),
            "sentids": (TEXTS, ["0", "1"]),
        }
        | {name: (TEXT, "x") for name in ("split", "img_id", "filename")},
        "The brown dog runs on grass.",
        "Two people eat.",
    ),
    "streetview": Layout(
        "tasks/qwen2_5_vl_7b_geospot_ppo.yaml",
        [
            "data/train-00000-of-00006-9089804f14aaccce.parquet",
            "data/train-00001-of-00006-bbdd122ad37de970.parquet",
            "data/train-00002-of-00006-f8ce946916e330c8.parquet",
            "data/train-00003-of-00006-f8e97309feb01a88.parquet",
            "data/train-00004-of-00006-450fd3815b925113.parquet",
        ],
        ["data/train-00005-of-00006-a0dd1c677754786b.parquet"],
        ["dataset_infos.json"],
        {"image": (IMAGE_TYPE, IMAGE), "country_iso_alpha2": (TEXT, "SK")}
        | {"latitude": (TEXT, "48.3710587"), "longitude": (TEXT, "19.416553")}
        | {"address": (TEXT, "050103, Šuľa, Slovakia")},
        "Country: Slovakia\nCoordinates: 48.3710587, 19.416553",
        "Country: Slovakia\nCoordinates: 40.3710587, 19.416553",
    ),
}


class Hub(Served):
    """Hub with one data set. files: by path. fetched: paths of downloads, in order."""

    def __init__(self, name: str) -> None:
        super().__init__(_Handler)
        self.repository = PUBLISHED[name].repository
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    fake: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        repository = self.fake.repository
        api = f"/api/datasets/{repository}"
        if path.startswith(f"{api}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in self.fake.files.items()
            ]
            self._reply(json.dumps(listed).encode())
        elif path.startswith(api):
            siblings = [{"rfilename": name} for name in self.fake.files]
            info = {"id": repository, "sha": SHA, "siblings": siblings, "private": False}
            self._reply(json.dumps(info | {"tags": [], "downloads": 0, "likes": 0}).encode())
        elif path.startswith(resolved := f"/datasets/{repository}/resolve/{SHA}/"):
            name = path.removeprefix(resolved)
            if self.command == "GET":
                self.fake.fetched.append(name)
            self._reply(self.fake.files[name])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _reply(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()  # noqa: S324  # as git names a file


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub("geo3k") as server:
        for split, count in (("train", 3), ("test", 2), ("validation", 1)):
            path = tmp_path / f"{split}.parquet"
            rows = [{k: v for k, v in row().items() if k != "task"} for _ in range(count)]
            write_rows(path, rows)
            server.files[f"data/{split}-00000-of-00001.parquet"] = path.read_bytes()
        yield server


def fetch(folder: Path, endpoint: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "megavlm", "data", *words],
        cwd=folder,
        env=os.environ
        | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0"}
        | {"PYTHONPATH": str(RECIPES.parent)},
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )


@pytest.mark.parametrize("name", ["geo3k", *slow(*(x for x in PUBLISHED if x != "geo3k"))])
def test_a_data_set_is_downloaded_once_and_fits_its_recipe_and_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    layout, published = LAYOUTS[name], PUBLISHED[name]
    schema = pa.schema([(column, kind) for column, (kind, _) in layout.columns.items()])
    values = {column: value for column, (_, value) in layout.columns.items()}
    pq.write_table(pa.Table.from_pylist([values] * 2, schema), tmp_path / "rows.parquet")
    with Hub(name) as hub:
        for file in layout.train + layout.test + layout.others:
            hub.files[file] = (tmp_path / "rows.parquet").read_bytes()
        for _ in range(2):
            done = fetch(tmp_path, hub.url, name)
            assert done.returncode == 0, done.stderr
        assert sorted(hub.fetched) == sorted(layout.train + layout.test), "no other file"
    count = 2 * len(layout.train)
    assert done.stdout.startswith(f"# {count} rows to train on, 2 to test on\n")
    (tmp_path / "keys.yaml").write_text(done.stdout)
    printed = load(tmp_path / "keys.yaml", ["run.dir=x", "model.folder=x"])
    recipe = load(RECIPES / layout.recipe, ["run.dir=x", "model.folder=x"])
    for key in {"train_files", "test_files", "prompt_key", "image_keys", *published.keys}:
        assert getattr(printed.data, key) == getattr(recipe.data, key), key
    assert printed.environment.name == recipe.environment.name
    assert printed.reward.options.items() <= recipe.reward.options.items()
    assert f" megavlm data {name}" in (RECIPES / layout.recipe).read_text()

    monkeypatch.chdir(tmp_path)
    rows = Rows(printed.data.train_files, printed.data)
    assert len(rows) == count and len(Rows(printed.data.test_files, printed.data)) == 2
    found = Example(rows[0].problem, rows[0].answer, rows[0].category, extra=rows[0].extra)
    (part,) = reward_parts(printed)
    check_reward_row(part.name, found.columns(), part.options)
    score = load_reward(part.name, part.options)
    assert score(layout.right, found.columns(), **part.options).reward == 1.0
    assert score(layout.wrong, found.columns(), **part.options).reward < 0.9


def test_files_that_the_hub_no_longer_has_are_one_sentence(hub: Hub, tmp_path: Path) -> None:
    test = PUBLISHED["geo3k"].test
    hub.files["data/test-00000-of-00002.parquet"] = hub.files.pop(test)
    done = fetch(tmp_path, hub.url, "geo3k")
    assert done.returncode == 2 and not hub.fetched
    assert f"has no {test} any more; it has data/train-" in done.stderr
    assert "data/test-00000-of-00002.parquet" in done.stderr


def test_files_of_an_older_version_are_one_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.repository = PUBLISHED["chartqa"].repository
    old = tmp_path / "data/ChartQA/data/train-00000-of-00002.parquet"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"")
    done = fetch(tmp_path, hub.url, "chartqa")
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    assert f"remove what there is of data/{old.name}, and try again" in done.stderr


def test_another_layout_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    write_rows(path, [{"question": "How many?", "answer": "3"}])
    hub.files[PUBLISHED["geo3k"].test] = path.read_bytes()
    done = fetch(tmp_path, hub.url, "geo3k", "--to", "here")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "data.prompt_key" in done.stderr and "here/data/test-" in done.stderr


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        (
            "geo4k",
            2,
            f"megavlm: megavlm data geo4k: there are {NAMES}; name one of them, or the package of "
            "a task that has one\n",
        ),
        ("geo3k", 69, f"megavlm: {REPOSITORY} cannot be downloaded to data/geometry3k ("),
    ],
)
def test_an_unknown_name_and_no_network_are_one_sentence(
    tmp_path: Path, name: str, code: int, message: str
) -> None:
    done = fetch(tmp_path, "http://127.0.0.1:9", name)
    assert done.returncode == code and not done.stdout
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_an_error_without_a_message_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(published_module.HfApi, "list_repo_files", fail)
    with pytest.raises(ConnectionError, match=r"\(ReadTimeout\): try again"):
        published_module.fetch_data("geo3k", None)


def test_the_help_names_the_data_sets() -> None:
    assert megavlm.cli.PUBLISHED == NAMES
