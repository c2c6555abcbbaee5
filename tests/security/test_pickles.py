"""Nothing that is loaded may run code."""

import pickle
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import read_rows

ROOT = Path(__file__).parents[2]


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_parquet_metadata_with_a_pickle(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    attack = pickle.dumps(Canary(canary))
    pickle.loads(attack)  # noqa: S301
    assert canary.exists(), "the attack works"
    canary.unlink()
    # Where pyarrow once unpickled an extension type.
    names = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    field = pa.field("images", pa.binary(), metadata={**names, b"ARROW:extension:metadata": attack})
    table = pa.table(
        [pa.array(["q"]), pa.array(["a"]), pa.array([None], type=pa.binary())],
        schema=pa.schema([("problem", pa.string()), ("answer", pa.string()), field]),
    ).replace_schema_metadata({b"pandas": attack, b"PANDAS_ATTRS": attack})
    pq.write_table(table, tmp_path / "x.parquet")
    (row,) = read_rows([str(tmp_path / "x.parquet")], category_key=None)
    assert row.problem == "q" and not canary.exists()


@pytest.mark.parametrize("name", ["x.pt", "x.npz", "x.pkl", "x.bin"])
def test_other_files_are_no_data(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / name).write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ValueError, match="not a data file by its name"):
        read_rows([str(tmp_path / name)])
    assert not canary.exists()


def test_no_source_asks_for_code_from_data() -> None:
    """No remote code of a model folder, no pickled tensors of others."""
    wrong = re.compile(
        r"trust_remote_code\s*=\s*True|weights_only\s*=\s*False|allow_pickle\s*=\s*T"
    )
    sources = [*(ROOT / "megavlm").rglob("*.py"), *(ROOT / "checkpoint_tools").rglob("*.py")]
    assert len(sources) > 50
    assert [str(path) for path in sources if wrong.search(path.read_text())] == []
