"""A checkpoint of somebody else, whose checksums are right, runs no code when training loads it."""

import pickle
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from megavlm.checkpointing.checksums import file_checksums
from megavlm.checkpointing.folder import Manifest, step_folder
from tests.security.test_pickles import Canary
from tests.support.fork import launch
from tests.unit.checkpointing.ranks import ONE_RANK, make_hf, start


def as_torch_file(attack: bytes, whole: bytes) -> bytes:
    """Return a file of torch.save with the attack as its pickle."""
    content = BytesIO()
    with zipfile.ZipFile(BytesIO(whole)) as source, zipfile.ZipFile(content, "w") as target:
        for name in source.namelist():
            is_pickle = name.endswith("data.pkl")
            target.writestr(name, attack if is_pickle else source.read(name))
    return content.getvalue()


def attacked(hf: Path, folder: Path, canary: Path) -> dict[str, str]:
    """Return what loading says of each attacked file of a step."""
    run = start(hf, ONE_RANK)
    run.train(range(1))
    run.save(folder, 1)
    step, attack, messages = step_folder(folder, 1), pickle.dumps(Canary(canary), protocol=2), {}
    for name in (".metadata", "common.pt", "random_00000.pt"):
        path = step / name
        whole = path.read_bytes()
        is_torch = zipfile.is_zipfile(BytesIO(whole))
        path.write_bytes(as_torch_file(attack, whole) if is_torch else attack)
        manifest = Manifest.read(step)
        replace(manifest, files=file_checksums(step, manifest.files)).write(step)
        with pytest.raises(ValueError) as failure:
            run.load(folder)
        messages[name] = str(failure.value)
        path.write_bytes(whole)
    return messages


@pytest.mark.distributed
def test_pickles_of_a_checkpoint_run_no_code(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    hf = make_hf(tmp_path / "hf", num_layers=1)
    (messages,) = launch(1, attacked, hf, tmp_path / "run", canary)
    assert not canary.exists()
    for name, message in messages.items():
        assert name in message, message
