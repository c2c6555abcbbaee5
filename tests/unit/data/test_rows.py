"""Reading Parquet: every form of the image column, and every mistake named by file and row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megavlm.config.data import Data
from megavlm.data.media.video_sources import Video
from megavlm.data.rows import Row, Rows
from tests.conftest import read_rows

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
VIDEO = pa.struct([("frames", pa.list_(pa.binary())), ("fps", pa.float64())])
NAN = float("nan")
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def write(path: Path, images: list[Any], type_: pa.DataType, **columns: list[Any]) -> str:
    size = len(images)
    table = {"problem": ["<image>q"] * size, "answer": ["a"] * size, "task": ["t"] * size}
    table["images"] = pa.array(images, type=type_)
    pq.write_table(pa.table(table | columns), path)
    return str(path)


@pytest.mark.parametrize(
    ("images", "type_"),
    [
        ([[{"bytes": b"one", "path": None}]], pa.list_(IMAGE)),
        ([{"bytes": b"one", "path": "ignored.png"}], IMAGE),
        ([[b"one"]], pa.list_(pa.binary())),
        ([b"one"], pa.binary()),
        ([["images/one.png"]], pa.list_(pa.string())),
        (["images/one.png"], pa.string()),
        ([[{"bytes": None, "path": "images/one.png"}]], pa.list_(IMAGE)),
    ],
)
def test_forms_of_the_image_column(tmp_path: Path, images: list[Any], type_: pa.DataType) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "one.png").write_bytes(b"one")
    file = write(tmp_path / "x.parquet", images, type_)
    assert read_rows([file]) == [Row(0, "<image>q", "a", (b"one",), "t", f"{file}:0")]


def test_rows_of_several_files_are_numbered_through(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{name}.parquet", [[b"1"], [b"2"]], pa.list_(pa.binary()))
        for name in "ab"
    ]
    rows = read_rows(files)
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.source for row in rows] == [f"{file}:{i}" for file in files for i in range(2)]


def test_keys_numbers_and_missing_categories(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.parquet",
        [[b"1"], [b"2"]],
        pa.list_(pa.binary()),
        question=["x", "y"],
        value=[3, 4],
        task=[None, "t"],
        level=[1.5, NAN],
    )
    keys = {"prompt_key": "question", "answer_key": "value"}
    rows = read_rows([file], **keys)
    assert [(row.problem, row.answer, row.category) for row in rows] == [
        ("x", "3", ""),
        ("y", "4", "t"),
    ]
    rows = read_rows([file], **keys, category_key="level")
    assert [row.category for row in rows] == ["1.5", ""]
    assert {row.category for row in read_rows([file], category_key=None)} == {""}


def test_text_only_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", [None, []], pa.list_(pa.binary()), problem=["a", "b"])
    assert [row.images for row in read_rows([file])] == [(), ()]


def test_no_image_column(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", [[b"1"]], pa.list_(pa.binary()), problem=["<image>?"])
    (row,) = read_rows([file], image_keys=())
    assert (row.problem, row.images) == ("<image>?", ())


@pytest.mark.parametrize(
    ("videos", "type_"),
    [
        ([[{"frames": [b"one", b"two"], "fps": 2}]], pa.list_(VIDEO)),
        ([{"frames": [b"one", b"two"], "fps": 2.0}], VIDEO),
        (
            [{"frames": ["one.png", "two.png"], "fps": 2}],
            pa.struct([("frames", pa.list_(pa.string())), ("fps", pa.int32())]),
        ),
        (
            [[{"frames": [{"bytes": b"one"}, {"path": "two.png"}], "fps": 2}]],
            pa.list_(pa.struct([("frames", pa.list_(IMAGE)), ("fps", pa.float32())])),
        ),
    ],
)
def test_forms_of_the_video_column(tmp_path: Path, videos: list[Any], type_: pa.DataType) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    column = pa.array(videos, type=type_)
    file = write(
        tmp_path / "x.parquet", [None], pa.list_(pa.binary()), problem=["<video>q"], videos=column
    )
    (row,) = read_rows([file], video_key="videos")
    assert row.videos == (Video((b"one", b"two"), 2.0),)
    (row,) = read_rows([file])
    assert row.videos == (), "no column is read that no key names"


@pytest.mark.parametrize(
    ("videos", "problem", "message"),
    [
        ([], "<video>", "1 <video> placeholders in 'problem' but 0 videos in 'videos'"),
        ([{"frames": [b"1"], "fps": 0.0}], "", r"a video's fps is 0\.0; it must be"),
        ([{"frames": [b"1"], "fps": float("inf")}], "", r"a video's fps is inf"),
        ([{"frames": [b"1"], "fps": float("nan")}], "", r"a video's fps is nan"),
        ([{"frames": [b"1"], "fps": None}], "", r"a video's fps is None"),
        ([{"frames": None, "fps": 1.0}], "", "a video has neither bytes nor a path"),
        ([{"frames": [None], "fps": 1.0}], "", "an image has neither bytes nor a path"),
        ([None], "", "a video has neither bytes nor a path"),
    ],
)
def test_bad_videos_are_named(
    tmp_path: Path, videos: list[Any], problem: str, message: str
) -> None:
    column = pa.array([videos], type=pa.list_(VIDEO))
    file = write(
        tmp_path / "x.parquet", [None], pa.list_(pa.binary()), problem=[problem], videos=column
    )
    with pytest.raises(ValueError, match=rf":0: (column 'videos': )?{message}"):
        read_rows([file], video_key="videos")


@pytest.mark.parametrize(
    ("images", "columns", "message"),
    [
        ([[b"1", b"2"]], {}, r"x\.parquet:0: 1 <image> placeholders in 'problem' but 2 images"),
        ([[b"1"]], {"problem": ["<image><image>"]}, r":0: 2 <image> placeholders .* 1 images"),
        ([None], {}, r":0: 1 <image> placeholders .* 0 images"),
        ([[b"1"], [b"2"]], {"answer": ["a", None]}, r":1: 'answer' is None; it must be text"),
        ([[b"1"], [b"2"]], {"answer": [1.0, NAN]}, r":1: 'answer' is None; it must be text"),
        ([[b"1"]], {"problem": [NAN]}, r":0: 'problem' is None; it must be text"),
        ([[b"1"]], {"problem": [["a"]]}, r":0: 'problem' is \['a'\]; it must be text"),
        ([[None]], {}, r":0: column 'images': an image has neither bytes nor a path"),
    ],
)
def test_bad_rows_are_named(
    tmp_path: Path, images: list[Any], columns: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "x.parquet", images, pa.list_(pa.binary()), **columns)
    with pytest.raises(ValueError, match=message):
        read_rows([file])


KEYS = ("video_start", "video_end", "fps", "nframes", "max_pixels", "resized_height", "other")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_beside_a_file_that_is_not_read_is_refused(tmp_path: Path, key: str) -> None:
    """In columns and in parts, of images, videos and frames; a null is no key."""
    (tmp_path / "a").write_bytes(b"file")
    file = {"path": "a", "bytes": None}

    def rows(name: str, item: Any) -> list[Row]:
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps({"problem": "?", "answer": "1", name: item}))
        chosen = {"video_key": "video"} if name == "video" else {"image_keys": ("image",)}
        return read_rows([str(path)], **{"image_keys": (), "category_key": None, **chosen})

    for name, item, is_named in (
        ("image", file, "an image"),
        ("image", [file], "an image"),
        ("video", file, "a video"),
        ("video", [file], "a video"),
        ("video", {"frames": [file, file], "fps": 2.0}, "an image"),
    ):
        one = item[0] if isinstance(item, list) else item
        changed = one["frames"][1] if "frames" in one else one
        assert rows(name, item)
        changed[key] = None
        assert rows(name, item)
        changed[key] = 0
        with pytest.raises(ValueError, match=rf"l:1: column '{name}': {is_named} has the key"):
            rows(name, item)
        del changed[key]
    with pytest.raises(ValueError, match="a video has the key 'nframes'"):
        rows("video", {"frames": [file, file], "fps": 2.0, "nframes": 2})


def test_a_file_need_not_have_the_categories_of_the_default(tmp_path: Path) -> None:
    records = [{"problem": "?", "answer": "1", "task": "01"}, {"problem": "?", "answer": "1"}]
    for name, kept in (("with", records[:1]), ("without", records[1:])):
        pq.write_table(pa.Table.from_pylist(kept), tmp_path / f"{name}.parquet")
        (tmp_path / f"{name}.jsonl").write_text("".join(map(json.dumps, kept)))
        heads, cells = kept[0].keys(), kept[0].values()
        (tmp_path / f"{name}.csv").write_text(f"{','.join(heads)}\n{','.join(cells)}\n")
    for kind in ("parquet", "jsonl", "csv"):
        files = [str(tmp_path / f"{name}.{kind}") for name in ("with", "without")]
        rows = Rows(files, Data(image_keys=()))
        assert [row.category for row in rows] == ["01", ""], kind
        assert [row.category for row in rows.texts()] == ["01", ""]
        assert [row.category for row in read_rows(files, image_keys=(), category_key=None)] == [
            ""
        ] * 2


def test_bad_files_and_columns_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", [[b"1"]], pa.list_(pa.binary()))
    with pytest.raises(ValueError, match=r"missing\.parquet: no such data file"):
        read_rows([str(tmp_path / "missing.parquet")])
    with pytest.raises(ValueError, match=r"no column 'q' \(data\.prompt_key\); it has problem, "):
        read_rows([file], prompt_key="q")
    with pytest.raises(ValueError, match=r"no column 'kind' .*null means no categories"):
        read_rows([file], category_key="kind")
    with pytest.raises(ValueError, match=r"no column 'film' \(data\.video_key\).*means no videos"):
        read_rows([file], video_key="film")
    (tmp_path / "y.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"y\.parquet: not a readable Parquet file"):
        read_rows([str(tmp_path / "y.parquet")])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.png", "leaves the data file's folder"),
        ("/etc/hostname", "leaves the data file's folder"),
        ("link.png", "leaves the data file's folder"),
        ("http://169.254.169.254/x.png", "169.254.169.254 is not a public address"),
        ("file:///etc/hostname", "only http, https and data URLs are read"),
        ("absent.png", "no image at"),
    ],
)
def test_image_paths_stay_in_the_folder(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    file = write(tmp_path / "data" / "x.parquet", [name], pa.string())
    with pytest.raises(ValueError, match=message):
        read_rows([file])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://10.0.0.5/x.png", "10.0.0.5 is not a public address"),
        ("http://localhost:8000/x.png", "127.0.0.1 is not a public address"),
        ("https://[::1]/x.png", "::1 is not a public address"),
        ("https://me:secret@a.org/x.png", "URL holds credentials"),
        ("https://example.org/x.png", None),
    ],
)
def test_a_row_that_is_not_fetched_has_urls_that_could_be(
    tmp_path: Path, url: str, message: str | None
) -> None:
    rows = Rows([write(tmp_path / "x.parquet", [url], pa.string())], Data(category_key=None))
    if message is None:
        assert (rows.peek(0).images, rows.peek(0).num_unfetched) == ((), 1)
        return
    with pytest.raises(ValueError, match=f":0: column 'images': .*{message}"):
        rows.peek(0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="real images (../shared/data) are not here")
def test_reads_every_real_set() -> None:
    files = sorted(SHARED.glob("*/*.parquet"))
    assert files
    for file in files:
        rows = read_rows([str(file)])
        assert rows and all(row.images and row.answer and row.category for row in rows)
        assert {row.dataset for row in rows} == {f"{file.parent.name}/{file.stem}"}


def test_the_first_of_a_list_of_answers_is_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"problem": "?", "label": label}) for label in (["14", "15"], [7], "x")]
    path.write_text("\n".join(lines))
    rows = read_rows([str(path)], answer_key="label", image_keys=())
    assert [row.answer for row in rows] == ["14", "7", "x"]
    path.write_text('{"problem": "?", "label": []}\n')
    with pytest.raises(ValueError, match=r"'label' is \[\]; it must be text or a number"):
        read_rows([str(path)], answer_key="label", image_keys=())


def test_extra_columns_are_kept_for_rewards(tmp_path: Path) -> None:
    images = [[b"one"], [b"two"]]
    columns: dict[str, list[Any]] = {"lat": [1.5, NAN], "city": [None, "X"]}
    file = write(tmp_path / "rows.parquet", images, pa.list_(pa.binary()), **columns)
    first, second = read_rows([file], extra_keys=("lat", "city"))
    assert first.extra == {"lat": 1.5, "city": None}
    assert second.extra == {"lat": None, "city": "X"}
    first, second = read_rows([file], answer_key="city", extra_keys=("city",))
    assert (first.answer, second.answer) == ("", "X"), "the reward says whether it must be there"
    with pytest.raises(ValueError, match=r"no column 'lon' \(data.extra_keys\)"):
        read_rows([file], extra_keys=("lon",))
