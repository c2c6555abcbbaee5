"""`megavlm data` against a stand-in of the hub's HTTP, in a process that reads HF_ENDPOINT."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.load import load
from megavlm.data.published import PUBLISHED
from tests.conftest import row, write_rows
from tests.timeouts import scaled

SHA = "a" * 40
REPOSITORY = PUBLISHED["geo3k"].repository
RECIPES = Path(__file__).parents[3] / "recipes"


class Hub(ThreadingHTTPServer):
    """Hub with one data set. files: by path. fetched: paths of downloads, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api = f"/api/datasets/{REPOSITORY}"
        if path.startswith(f"{api}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in self.server.files.items()
            ]
            self._reply(json.dumps(listed).encode())
        elif path.startswith(api):
            siblings = [{"rfilename": name} for name in self.server.files]
            info = {"id": REPOSITORY, "sha": SHA, "siblings": siblings, "private": False}
            self._reply(json.dumps(info | {"tags": [], "downloads": 0, "likes": 0}).encode())
        elif path.startswith(resolved := f"/datasets/{REPOSITORY}/resolve/{SHA}/"):
            name = path.removeprefix(resolved)
            if self.command == "GET":
                self.server.fetched.append(name)
            self._reply(self.server.files[name])
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

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()  # noqa: S324  # as git names a file


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        for split, count in (("train", 3), ("test", 2), ("validation", 1)):
            path = tmp_path / f"{split}.parquet"
            rows = [{k: v for k, v in row().items() if k != "task"} for _ in range(count)]
            write_rows(path, rows)
            server.files[f"data/{split}-00000-of-00001.parquet"] = path.read_bytes()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


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


def test_a_data_set_is_downloaded_once_and_its_keys_are_the_recipe_s(
    hub: Hub, tmp_path: Path
) -> None:
    for _ in range(2):
        done = fetch(tmp_path, hub.url, "geo3k")
        assert done.returncode == 0, done.stderr
    published = PUBLISHED["geo3k"]
    assert sorted(hub.fetched) == sorted([published.train, published.test]), "no other split"
    (tmp_path / "keys.yaml").write_text(done.stdout)
    assert done.stdout.startswith("# 3 rows to train on, 2 to test on\n")
    printed = load(tmp_path / "keys.yaml", ["run.dir=x", "model.folder=x"])
    recipe = load(RECIPES / "grpo/qwen2_5_vl_7b_geo3k.yaml")
    for key in ("train_files", "test_files", "category_key", "prompt_key", "image_keys"):
        assert getattr(printed.data, key) == getattr(recipe.data, key), key
    assert printed.environment.name == recipe.environment.name
    assert "#   megavlm data geo3k\n" in (RECIPES / "grpo/geo3k.yaml").read_text()


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
        ("geo4k", 2, "megavlm: megavlm data geo4k: there are geo3k; name one of them\n"),
        ("geo3k", 69, f"megavlm: {REPOSITORY} cannot be downloaded to data/geometry3k ("),
    ],
)
def test_an_unknown_name_and_no_network_are_one_sentence(
    tmp_path: Path, name: str, code: int, message: str
) -> None:
    done = fetch(tmp_path, "http://127.0.0.1:9", name)
    assert done.returncode == code and not done.stdout
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
