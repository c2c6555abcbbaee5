"""Parquet, JSONL, JSON and CSV: read block by block, here and at URLs."""

import base64
import csv
import gzip
import json
import math
import pickle
import subprocess
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megavlm.config.data import Data
from megavlm.data import rows as rows_module
from megavlm.data.rows import Rows
from megavlm.data.tables import formats
from megavlm.data.tables.files import DataFile, expand
from megavlm.rewards.base import Example
from megavlm.tasks.geospot import reward as geospot
from tests.conftest import LFS_POINTER, png, read_rows

ROOT = Path(__file__).parents[4]


def jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_jsonl_with_missing_keys_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"problem": "a", "answer": 1}\n\n{"problem": "b\u2028c", "answer": "2"}')
    first, second = read_rows([str(path)])
    assert (first.problem, first.answer, first.images, first.category) == ("a", "1", (), "")
    assert second.problem == "b\u2028c"
    assert [first.source, second.source] == [f"{path}:1", f"{path}:3"]  # lines, as editors count


def test_jsonl_s_escapes_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"problem": "\\ud83d\\uDE00", "answer": "\\\\ud800"}\n')
    (row,) = read_rows([str(path)])
    assert (row.problem, row.answer) == ("\N{GRINNING FACE}", "\\ud800")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"x\.jsonl:2: the line is not JSON"),
        ("[1]", r"x\.jsonl:2: the line is not a JSON object"),
        ('{"problem": "q"}', r"x\.jsonl:2: 'answer' is None; it must be text"),
        ('{"problem": "q", "answer": NaN}', r"x\.jsonl:2: 'answer' is None; it must be text"),
        ('{"problem": NaN, "answer": "a"}', r"x\.jsonl:2: 'problem' is None; it must be text"),
        ('{"problem": "\udce9"}', r"x\.jsonl:2: the line is not JSON .*can't decode byte 0xe9"),
        ('{"problem": "\udced\udca0\udc80"}', r"x\.jsonl:2: the line is not JSON .*decode"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"problem": "a", "answer": 1}\n' + line, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_rows([str(path)])


def test_jsonl_is_read_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "BLOCK_LINES", 4)
    file = jsonl(tmp_path / "x.jsonl", [{"problem": f"q{i}", "answer": i} for i in range(10)])
    rows = Rows([file], Data())
    assert rows.block_rows == [4, 4, 2] and len(rows) == 10
    assert sum(rows.block_bytes) == Path(file).stat().st_size
    assert [rows[i].answer for i in (9, 0, 5)] == ["9", "0", "5"]
    assert rows[-1].answer == "9"
    monkeypatch.setattr(formats, "BLOCK_BYTES", 1)
    assert Rows([file], Data()).block_rows == [1] * 10


@pytest.mark.parametrize("size", [1, 3, 256])
def test_jsonl_rows_are_named_by_their_line_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(formats, "BLOCK_LINES", size)
    path = tmp_path / "x.jsonl"
    path.write_text("\n" + "".join(f'{{"problem": "{i}"}}\r\n' + "\n" * (i % 3) for i in range(9)))
    lines = path.read_text().splitlines()
    rows = Rows([str(path)], Data(answer_key=None))
    for row in reversed(rows):
        number = int(row.source.removeprefix(f"{path}:"))
        assert lines[number - 1] == f'{{"problem": "{row.problem}"}}'


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('question,answer,region,seen\n"a, b",007,01,true\nc,1.50,,\n')
    keys = {"prompt_key": "question", "category_key": None, "extra_keys": ("region", "seen")}
    rows = read_rows([str(path)], image_keys=(), **keys)  # type: ignore[arg-type]
    assert [(row.problem, row.answer, dict(row.extra)) for row in rows] == [
        ("a, b", "007", {"region": "01", "seen": "true"}),
        ("c", "1.50", {"region": "", "seen": ""}),
    ]
    path.write_text("a,b\n1\n")
    with pytest.raises(ValueError, match=r"x\.csv: not a readable CSV file"):
        read_rows([str(path)])


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "PARQUET"])
def test_a_pointer_of_git_lfs_is_named_with_the_command_that_fetches_it(
    tmp_path: Path, suffix: str
) -> None:
    (tmp_path / f"x.{suffix}").write_bytes(LFS_POINTER)
    with pytest.raises(ValueError, match=rf"x\.{suffix}: a git-LFS pointer .* `git lfs pull`"):
        read_rows([str(tmp_path / f"x.{suffix}")])


def test_a_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "X.PARQUET"
    pq.write_table(pa.table({"problem": ["q"], "answer": ["a"]}), path)
    assert read_rows([str(path)], image_keys=(), category_key=None)[0].problem == "q"


def test_a_name_of_several_columns_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table(
        [["first"], ["last"], ["a"], ["a"]], names=["problem", "problem", "answer", "x"]
    )
    pq.write_table(table, tmp_path / "x.parquet")
    rows = read_rows([str(tmp_path / "x.parquet")], image_keys=(), category_key=None)
    assert rows[0].problem == "last"
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/x.parquet: 'problem' is the name of several columns: the last is read"
    ]


def test_an_empty_image_cell_is_a_bad_sample_and_null_is_a_row_without(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("problem,answer,images\nq,a,\n")
    rows = Rows([str(path)], Data(category_key=None))
    with pytest.raises(ValueError, match=r"x\.csv:0: column 'images': an image has neither"):
        _ = rows[0]
    records = [{"problem": "q", "answer": "a", "images": value} for value in (None, [], "", [""])]
    rows = Rows([jsonl(tmp_path / "x.jsonl", records)], Data(category_key=None))
    assert rows[0].images == rows[1].images == ()
    for index in (2, 3):
        with pytest.raises(ValueError, match="neither bytes nor a path"):
            _ = rows[index]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_geospot_table(tmp_path: Path, kind: str) -> None:
    """The recipe's columns are what the reward wants, whatever the table leaves out."""
    (tmp_path / "a.png").write_bytes(png())
    table = pa.table(
        {
            "image_url": ["a.png", "a.png", "a.png"],
            "country": ["Namibia", "NA", None],
            "region": ["Khomas", None, None],
            "city": ["Windhoek", None, "Lima"],
            "lat": [-22.56, None, -12.05],
            "lon": [17.08, math.nan, -77.04],
        }
    )
    path = tmp_path / f"spots.{kind}"
    if kind == "csv":
        path.write_text(
            "image_url,country,region,city,lat,lon\n"
            "a.png,Namibia,Khomas,Windhoek,-22.56,17.08\n"
            "a.png,NA,,,,\n"
            "a.png,,,Lima,-12.05,-77.04\n"
        )
    elif kind == "jsonl":
        jsonl(path, table.to_pylist())
    else:
        pq.write_table(table, path)
    recipe = yaml.safe_load((ROOT / "recipes" / "data" / "geospot_table.yaml").read_text())
    data = Data(**{k: tuple(v) if isinstance(v, list) else v for k, v in recipe["data"].items()})
    data.check()
    rows = read_rows(
        [str(path)],
        prompt_key=data.prompt_key,
        question=data.question,
        answer_key=data.answer_key,
        image_keys=data.image_keys,
        category_key=data.category_key,
        extra_keys=data.extra_keys,
    )
    assert rows[0].images == (png(),) and rows[0].problem == data.question
    assert [row.answer for row in rows] == ["Namibia", "NA", ""], "for the blind baseline"
    scores = [
        geospot.score(answer, Example(row.problem, row.answer, extra=row.extra).columns())
        for answer, row in zip(
            (
                "Country: Namibia\nRegion: Khomas\nCity: Windhoek\nCoordinates: -22.56, 17.08",
                "Country: Namibia",
                "Country: Peru\nCity: Lima\nCoordinates: -12.05, -77.04",
            ),
            rows,
            strict=True,
        )
    ]
    assert [score.reward for score in scores] == pytest.approx([1, 1, 1])
    assert [sorted(score.parts) for score in scores] == [
        ["city", "coordinates", "country", "region"],
        ["country"],
        ["city", "coordinates"],
    ]


def test_only_blocks_that_fit_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    records = [{"problem": f"q{i}", "answer": "a", "other": b"x" * 10_000} for i in range(12)]
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
    reads = []
    original = formats.ParquetTable.read

    def read(self: Any, block: int, columns: Any) -> Any:
        reads.append((block, columns))
        return original(self, block, columns)

    monkeypatch.setattr(formats.ParquetTable, "read", read)
    rows = Rows([str(path)], Data(image_keys=(), category_key=None))
    monkeypatch.setattr(rows_module, "CACHE_BYTES", sum(rows.block_bytes[:2]))
    assert [rows[i].problem for i in (0, 1, 3, 2, 0)] == ["q0", "q1", "q3", "q2", "q0"]
    assert reads == [(0, ["problem", "answer"]), (1, ["problem", "answer"])]
    _ = rows[6], rows[0], rows[3]
    assert [block for block, _ in reads] == [0, 1, 2, 1], "the last used stay"
    assert len(rows._cache) == 2


def test_texts_read_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    table = {"problem": ["<image>a", "b"], "answer": ["1", None], "images": [[b"x"], []]}
    pq.write_table(pa.table(table), path)
    rows = Rows([str(path)], Data(category_key=None))
    asked = []
    original = formats.ParquetTable.read
    monkeypatch.setattr(formats.ParquetTable, "read", lambda *a: asked.append(a[2]) or original(*a))
    (row,) = rows.texts()
    assert (row.problem, row.answer, row.images) == ("<image>a", "1", ())
    assert asked == [["problem", "answer"]]


THREADS = """
import os, sys
from megavlm.data.tables.files import expand
from megavlm.data.tables.formats import open_table

before = len(os.listdir("/proc/self/task"))
(file,) = expand(sys.argv[1:])
open_table(file).read(0, None)
assert len(os.listdir("/proc/self/task")) == before
"""


def test_arrow_reads_parquet_without_threads(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"problem": ["a", "b"]}), file)
    subprocess.run([sys.executable, "-c", THREADS, str(file)], check=True)


def test_rows_survive_pickling(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"problem": ["a"], "answer": ["1"]}), path)
    rows = Rows([str(path)], Data(image_keys=(), category_key=None))
    assert list(pickle.loads(pickle.dumps(rows))) == list(rows)  # noqa: S301


def test_any_fsspec_url_with_images_beside_it() -> None:
    files = fsspec.filesystem("memory")
    line = {"problem": "q", "answer": "a", "images": "images/one.png"}
    files.pipe("/set/train-0.jsonl", json.dumps(line).encode())
    files.pipe("/set/train-1.jsonl", json.dumps({**line, "images": "../secret.png"}).encode())
    files.pipe("/set/images/one.png", png())
    files.pipe("/secret.png", png())
    try:
        rows = Rows(["memory://set/train-*.jsonl"], Data())
        assert len(rows) == 2 and rows[0].images == (png(),)
        assert rows[0].source.startswith("memory://") and rows[0].source.endswith("train-0.jsonl:1")
        assert rows[0].dataset == "set/train-*"
        with pytest.raises(ValueError, match="leaves the data file's folder"):
            _ = rows[1]
        assert rows.fingerprint() == Rows(["memory://set/train-*.jsonl"], Data()).fingerprint()
    finally:
        files.store.clear()


def test_a_missing_package_and_an_unknown_protocol_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"s3://b/x\.parquet: s3:// needs a package .*s3fs"):
        expand(["s3://b/x.parquet"])
    with pytest.raises(ValueError, match="does not know this kind of address"):
        expand(["nonsense://b/x.parquet"])


def test_files_and_globs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        jsonl(tmp_path / f"{name}.jsonl", [{"problem": name, "answer": "1"}])
    (tmp_path / "notes.txt").touch()
    files = expand([str(tmp_path / "*.jsonl"), str(tmp_path / "b.jsonl")])
    assert [(Path(file.url).name, file.entry) for file in files] == [
        ("a.jsonl", 0),
        ("b.jsonl", 0),
        ("b.jsonl", 1),
    ]
    with pytest.raises(ValueError, match=r"none-\*\.jsonl: no such data file"):
        expand([str(tmp_path / "none-*.jsonl")])
    with pytest.raises(ValueError, match=r"notes\.txt: not a data file by its name"):
        expand([str(tmp_path / "notes.txt")])


def test_digest_of_a_large_file_takes_its_end_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megavlm.data.tables.files.WHOLE_BYTES", 2**20)
    path = tmp_path / "x.jsonl"
    content = bytearray(3 * 2**20)
    digests = set()
    for change in (None, 0, 2**21, len(content) - 1):
        if change is not None:
            content[change] += 1
        path.write_bytes(content)
        digests.add(DataFile(str(path), 0, "").digest())
    assert len(digests) == 4


COLUMNS: list[tuple[pa.Array, str]] = [
    (pa.array([0.1], pa.float32()), "0.1"),
    (pa.array([0.1], pa.float64()), "0.1"),
    (pa.array([np.float16(0.1)], pa.float16()), "0.1"),
    (pa.array([3.0], pa.float32()), "3.0"),
    (pa.array([7, None], pa.int64()).slice(0, 1), "7"),
    (pa.array([2**63], pa.uint64()), str(2**63)),
    (pa.array([True]), "True"),
    (pa.array([Decimal("1.50")]), "1.50"),
    (pa.array([Decimal("0")], pa.decimal128(20, 10)), "0.0000000000"),
    (pa.array([date(2024, 1, 2)]), "2024-01-02"),
    (pa.array([datetime(2024, 1, 2, 3, 4, 5)], pa.timestamp("ns")), "2024-01-02 03:04:05"),
    (pa.array([datetime(2024, 1, 2, 3)], pa.timestamp("s", "UTC")), "2024-01-02 03:00:00+00:00"),
    (pa.array([time(3, 4, 5)]), "03:04:05"),
    (pa.array([timedelta(days=1, hours=2)], pa.duration("us")), "1 days 02:00:00"),
    (pa.array([timedelta(seconds=-1.5)], pa.duration("ns")), "-1 days +23:59:58.500000"),
    (pa.array(["red"]).dictionary_encode(), "red"),
    (pa.array([0.1], pa.float32()).dictionary_encode(), "0.1"),
    (pa.array(["red"], pa.large_string()), "red"),
    (pa.array([[0.1, 2]], pa.list_(pa.float32())), "0.1"),
    (pa.array([[date(2024, 1, 2)]]), "2024-01-02"),
]


@pytest.mark.parametrize(("column", "text"), COLUMNS, ids=lambda x: str(getattr(x, "type", x)))
def test_an_answer_is_the_text_that_pandas_prints(
    tmp_path: Path, column: pa.Array, text: str
) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"problem": ["q"], "answer": column, "task": column}), path)
    (row,) = read_rows([str(path)], image_keys=())
    assert row.answer == text
    if not pa.types.is_list(column.type):
        assert row.category == text
        if not pa.types.is_decimal(column.type):
            import pandas as pd  # here: it takes half a second

            assert str(pd.Series(column.to_pandas()).iloc[0]) == text


def test_numbers_of_32_bits_reach_rewards_as_they_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    spot = pa.struct([("lat", pa.float32()), ("name", pa.string())])
    table = {"lat": pa.array([0.1, None], pa.float32()), "spots": pa.array([[(0.1, "a")], None],
             pa.list_(spot)), "problem": ["q", "q"], "answer": ["a", "a"]}  # fmt: skip
    pq.write_table(pa.table(table), path)
    first, second = read_rows(
        [str(path)], image_keys=(), category_key=None, extra_keys=("lat", "spots")
    )
    assert first.extra == {"lat": 0.1, "spots": [{"lat": 0.1, "name": "a"}]}
    assert second.extra == {"lat": None, "spots": None}


def test_a_json_list_is_read_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "BLOCK_LINES", 4)
    monkeypatch.setattr(formats, "BLOCK_BYTES", 64)  # of a read
    records = [{"problem": f'q{i} é 漢 [{{ \\" ', "answer": i, "x": [{}] * i} for i in range(10)]
    for number, text in enumerate(
        (
            json.dumps(records),
            json.dumps(records, indent=2, ensure_ascii=False),
            "\ufeff \n" + json.dumps(records, ensure_ascii=False) + "\n\n",
        )
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        rows = Rows([str(path)], Data(category_key=None))
        assert [rows[i].answer for i in (9, 0, 5)] == ["9", "0", "5"] and len(rows) == 10
        assert [row.problem for row in rows] == [record["problem"] for record in records]
        assert rows[3].source == f"{path}:3" and rows[3].dataset.endswith(f"/{number}")
        assert len(rows.block_rows) > 1


def test_a_json_file_may_have_an_object_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"problem": "a", "answer": 1}\n{"problem": "b", "answer": 2}\n')
    rows = read_rows([str(path)])
    assert [(row.answer, row.source) for row in rows] == [("1", f"{path}:1"), ("2", f"{path}:2")]
    path.write_text('{"problem": "a", "answer": 1}')
    assert [row.answer for row in read_rows([str(path)])] == ["1"]
    path.write_text("[]")
    assert read_rows([str(path)]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "data": [{"problem": "q"}]\n}', "the file is not a list"),
        ('[{"problem": "q"}, 3]', "item 1 is not an object"),
        ('[{"problem": "q"} {"problem": "r"}]', "Expecting ',' delimiter"),
        ('[{"problem": "q"}', "Expecting ',' delimiter"),
        ('[{"problem": "\udce9"}]', "can't decode byte 0xe9"),
        ("", "Expecting value"),
    ],
    ids=lambda x: x[:20],
)
def test_a_json_file_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"x\.json: not a JSON list .*{message}"):
        read_rows([str(path)])


def test_a_json_list_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LIST_BYTES", 20)
    (tmp_path / "x.json").write_text(json.dumps([{"problem": "what?"}]))
    with pytest.raises(ValueError, match=r"x\.json: a JSON list may have 20 bytes.*jq -c"):
        read_rows([str(tmp_path / "x.json")])


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "X.JSONL"])
def test_compressed_files_equal_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(formats, "BLOCK_LINES", 3)
    records = [{"problem": f"q{i}", "answer": str(i)} for i in range(10)]
    plain = {
        ".jsonl": "".join(json.dumps(record) + "\n" for record in records),
        ".json": json.dumps(records),
        ".csv": "problem,answer\n" + "".join(f"q{i},{i}\n" for i in range(10)),
    }[Path(name).suffix.lower()]
    (tmp_path / name).write_text(plain)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(plain.encode()))
    given, packed = (
        Rows([str(tmp_path / file)], Data(image_keys=(), category_key=None))
        for file in (name, f"{name}.gz")
    )
    assert packed.block_rows == given.block_rows and packed.block_bytes == given.block_bytes
    for index in (9, 0, 5):
        first, second = given[index], packed[index]
        assert (first.problem, first.dataset) == (second.problem, second.dataset)
    assert packed.fingerprint() == Rows([f"{tmp_path}/{name}.gz"], packed._data).fingerprint()
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(plain.encode())[:-9])
    with pytest.raises(ValueError, match=r"\.gz: not a whole gzip file"):
        Rows([str(tmp_path / f"{name}.gz")], Data(image_keys=(), category_key=None))
    (tmp_path / f"{name}.gz").write_text(plain)
    with pytest.raises(ValueError, match=r"\.gz: not a whole gzip file"):
        Rows([str(tmp_path / f"{name}.gz")], Data(image_keys=(), category_key=None))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_cells_of_several_megabytes(tmp_path: Path, suffix: str) -> None:
    data = png() + bytes(3 * 2**20)  # what follows an image is not read
    image = "data:image/png;base64," + base64.b64encode(data).decode()
    record = {"problem": "a\n" * 2**20, "answer": "red", "images": image}
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([record, record]), path)
    elif suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(record))
            writer.writeheader()
            writer.writerows([record, record])
    else:
        path.write_text(json.dumps([record] * 2) if suffix == "json" else json.dumps(record))
    row = read_rows([str(path)], category_key=None)[-1]
    assert row.problem == record["problem"] and row.images == (data,)
    if suffix in ("json", "jsonl"):
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "a" * 2**22}]
        chat = {"problem": [{"role": "user", "content": parts}], "answer": "red"}
        path.write_text(json.dumps([chat]) if suffix == "json" else json.dumps(chat))
        (row,) = read_rows([str(path)])
        assert row.images == (data,) and row.problem == "<image>" + "a" * 2**22
