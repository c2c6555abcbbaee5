"""What a disk does to a step after it was saved."""

import logging
from pathlib import Path

import pytest

from megavlm.checkpointing.atomic import partial_path
from megavlm.checkpointing.folder import latest_step, publish, step_folder
from megavlm.checkpointing.save import SaveTarget
from megavlm.checkpointing.saver import Saver
from tests.distributed.fork import launch
from tests.unit.checkpoints.ranks import ONE_RANK, make_hf, start


def damage(hf: Path, folder: Path) -> list[str]:
    """Saves two steps in the background, harms the second, and goes on from the first."""
    run = start(hf, ONE_RANK)
    where = Saver(SaveTarget(folder, hf), background=True)
    fingerprints = []
    with where as saver:
        for step in (1, 2):
            run.train(range(step, step + 1))
            saver.save(step, run.updater, extra={})
            fingerprints.append(run.fingerprint())
    messages = []
    for name in ("__0_0.distcp", "__0_1.distcp", "common.pt", "extra.json", "manifest.json"):
        path = step_folder(folder, 2) / name
        whole = path.read_bytes()
        for cut in (len(whole) - 1, 0):
            path.write_bytes(whole[:cut])
            with pytest.raises(ValueError, match=name.replace(".", r"\.")) as failure:
                run.load(folder)
            messages.append(str(failure.value))
        path.unlink()
        with pytest.raises(ValueError):
            run.load(folder, 2)
        path.write_bytes(whole)
    path = folder / "hf" / "tokenizer.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"hf/tokenizer\.json has 100 bytes"):
        run.load(folder)
    path.write_bytes(whole)
    run.load(folder, 1)
    assert run.fingerprint()[0] == fingerprints[0][0], "weights"
    run.load(folder)
    assert run.fingerprint()[0] == fingerprints[1][0]
    return messages


@pytest.mark.distributed
def test_a_truncated_file_is_named_and_the_step_before_loads(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", num_layers=1)
    (messages,) = launch(1, damage, hf, tmp_path / "run")
    for message in messages:
        assert str(step_folder(tmp_path / "run", 2)) in message and "\n" not in message
    assert "bytes; its manifest lists" in messages[0]


def test_a_damaged_tracker_is_never_replaced_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").write_text("step_00000003\n")
    assert latest_step(tmp_path) is None
    partial_path(step_folder(tmp_path, 1)).mkdir()
    (partial_path(step_folder(tmp_path, 1)) / "manifest.json").write_text("{}")
    publish(tmp_path, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/latest names a step, but no step is complete.",
        f"{tmp_path}/latest did not name a complete step: it is replaced.",
    ]
    assert latest_step(tmp_path) == 1


def test_an_empty_tracker_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And a step without a manifest is none."""
    for step in (1, 2, 3):
        step_folder(tmp_path, step).mkdir()
    for step in (1, 2):
        (step_folder(tmp_path, step) / "manifest.json").write_text("{}")
    for text in ("", "step_00000003\n", "\0\xff"):
        (tmp_path / "latest").write_text(text)
        caplog.clear()
        assert latest_step(tmp_path) == 2
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
