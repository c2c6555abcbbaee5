"""What a disk does to a step after it was saved."""

import errno
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megavlm.checkpointing.atomic import partial_path
from megavlm.checkpointing.folder import (
    Manifest,
    complete_steps,
    latest_step,
    publish,
    step_folder,
)
from megavlm.checkpointing.retention import Retention, prune
from megavlm.checkpointing.save import SaveTarget, save_checkpoint
from megavlm.checkpointing.saver import Saver
from megavlm.process import CheckpointError
from tests.support.fork import launch
from tests.unit.checkpointing.ranks import ONE_RANK, Name, Run, make_hf, start


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


def damaged_newest(hf: Path, folder: Path) -> list[tuple[list[int], bool]]:
    """Damages the newest of two steps, resumes from the other, and saves again, at first in vain;
    only the last step is to be kept. Returns the steps that are there each time, and whether the
    one that is loaded is as it was saved.
    """
    seen: list[tuple[list[int], bool]] = []
    run, states = start(hf, ONE_RANK), []
    for step in (1, 2):
        run.train(range(step, step + 1))
        run.save(folder, step)
        states.append(run.weights())
    shard = step_folder(folder, 2) / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    def resumed(step: int | None, expected: dict[Name, torch.Tensor]) -> Run:
        run = start(hf, ONE_RANK, seed=99)
        run.load(folder, step)
        found = run.weights()
        is_equal = found.keys() == expected.keys() and all(
            torch.equal(found[name], x) for name, x in expected.items()
        )
        seen.append((complete_steps(folder), is_equal))
        return run

    with pytest.raises(ValueError, match=r"step_00000002/__0_0\.distcp"):
        start(hf, ONE_RANK).load(folder)
    prune(folder, 1, Retention(last=1))
    run = resumed(1, states[0])
    run.train(range(2, 3))
    target = SaveTarget(folder, retention=Retention(last=1))
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, named in ((full, "No space left"), (OSError(), "OSError")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Manifest, "write", Mock(side_effect=error))
            with pytest.raises(CheckpointError, match=named):
                save_checkpoint(target, 2, run.updater, extra={})
    resumed(1, states[0])
    save_checkpoint(target, 2, run.updater, extra={})
    resumed(None, run.weights())
    return seen


@pytest.mark.distributed
def test_the_only_good_step_is_not_deleted_for_a_damaged_newest_one(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", num_layers=1)
    ((pruned, failed, saved),) = launch(1, damaged_newest, hf, tmp_path / "run")
    assert pruned == ([1, 2], True)
    assert 1 in failed[0] and failed[1]
    assert saved == ([2], True), "now that it is good"


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
    assert latest_step(tmp_path / "none") is None
    for step in (1, 2, 3):
        step_folder(tmp_path, step).mkdir()
    for step in (1, 2):
        (step_folder(tmp_path, step) / "manifest.json").write_text("{}")
    for text in ("", "step_00000003\n", "\0\xff"):
        (tmp_path / "latest").write_text(text)
        caplog.clear()
        assert latest_step(tmp_path) == 2
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
    (tmp_path / "latest").unlink()
    assert latest_step(tmp_path) == 2
