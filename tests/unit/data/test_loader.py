"""The stream of prompts: its order, exact resumption with any number of workers, rows left out."""

import json
import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megavlm.config.data import Data
from megavlm.config.rollout import Rollout
from megavlm.data.loader import Held, PromptStream, held_for, holding
from megavlm.data.media.image_processing import PatchFormat, ProcessedImage
from megavlm.data.processor import Prompt, PromptTooLong
from megavlm.data.rows import Row, Rows
from tests.support.timeouts import scaled

DATA = Data(image_keys=(), category_key=None)


def make(row: Row) -> Prompt:
    """Row 7 is bad and row 8 too long where the text says so."""
    if row.problem.startswith("bad"):
        raise ValueError(f"{row.source}: broken")
    if row.problem.startswith("long"):
        raise PromptTooLong(f"{row.source}: too long")
    ids = torch.tensor([row.index, 1, 2])
    return Prompt(row, ids, (0,), ids.expand(3, -1).contiguous(), 3, ())


def write(path: Path, problems: list[str], group: int = 3) -> str:
    path.parent.mkdir(exist_ok=True)
    table = pa.table({"problem": problems, "answer": ["a"] * len(problems)})
    pq.write_table(table, path, row_group_size=group)
    return str(path)


def numbered(path: Path, count: int, first: int = 0) -> str:
    return write(path, [f"q{first + i}" for i in range(count)])


def stream(*files: str, **options: Any) -> PromptStream:
    place = {"seed": options.pop("seed", 3), "batch_size": options.pop("batch_size", 5)}
    data = replace(DATA, **options)
    return PromptStream(Rows(files, data), make, data, **place)


def asked(prompts: list[Prompt]) -> list[str]:
    assert all(prompt.token_ids[0] == prompt.row.index for prompt in prompts)
    return [prompt.row.problem for prompt in prompts]


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    file = numbered(tmp_path / "x.parquet", 11)
    source = stream(file)
    epochs = [asked(source.take(11)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert asked(stream(file).take(33)) == [name for epoch in epochs for name in epoch]
    assert asked(stream(file, seed=4).take(11)) != epochs[0]


# 4: in mid-batch and mid-shard; 11: where an epoch ends; 25: in the third epoch; 0: at the start.
@pytest.mark.parametrize("before", [0, 4, 11, 25])
def test_the_next_batches_are_identical_with_and_without_workers(
    tmp_path: Path, before: int
) -> None:
    files = [numbered(tmp_path / "a.parquet", 7), numbered(tmp_path / "b.parquet", 4, 7)]
    straight = stream(*files)
    straight.take(before)
    state = json.loads(json.dumps(straight.state_dict()))
    expected = [asked(straight.take(5)) for _ in range(8)]
    for workers, batch_size in ((0, 5), (2, 5), (0, 3)):
        resumed = stream(*files, workers=workers, batch_size=batch_size)
        resumed.load_state_dict(state)
        assert [asked(resumed.take(5)) for _ in range(8)] == expected
        resumed.close()


def test_workers_state_is_of_what_was_taken_not_of_what_was_prepared(tmp_path: Path) -> None:
    file = numbered(tmp_path / "x.parquet", 50)
    straight, working = stream(file), stream(file, workers=2)
    for n in (3, 9, 1):
        assert asked(straight.take(n)) == asked(working.take(n))
        assert straight.state_dict() == working.state_dict()
    # Closing loses nothing either.
    working.close()
    assert asked(straight.take(8)) == asked(working.take(8))
    working.close()


def test_workers_end_with_the_stream_and_not_with_a_signal(tmp_path: Path) -> None:
    source = stream(numbered(tmp_path / "x.parquet", 50), workers=2)
    source.take(1)
    children = psutil.Process().children()
    workers = [child for child in children if child.cmdline() == psutil.Process().cmdline()]
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    source.take(40)
    source.close()
    deadline = time.monotonic() + scaled(120)
    while any(worker.is_running() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.is_running() for worker in workers)


def test_the_runs_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    source = stream(numbered(tmp_path / "x.parquet", 5), workers=1)
    source.take(3)
    source.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_and_long_rows_are_refused_or_left_out_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", ["q0", "bad", "q2", "long", "q4"])
    with pytest.raises(ValueError, match=r"x\.parquet:1: broken"):
        stream(file, long_prompts="skip").take(5)
    with pytest.raises(ValueError, match=r"x\.parquet:3: too long"):
        stream(file, bad_samples="skip").take(5)
    for workers in (0, 2):
        source = stream(file, bad_samples="skip", long_prompts="skip", workers=workers)
        assert Counter(asked(source.take(9))) == {"q0": 3, "q2": 3, "q4": 3}
        state = source.state_dict()
        assert source.skipped["bad"] >= 2 and source.skipped["long"] >= 2
        assert source.measures == {
            "skipped_bad": source.skipped["bad"],
            "skipped_long": source.skipped["long"],
        }
        assert any("x.parquet:1: broken" in reason for reason in source.reasons)
        again = stream(file, bad_samples="skip", long_prompts="skip")
        again.load_state_dict(state)
        assert again.skipped == source.skipped
        assert asked(again.take(4)) == asked(source.take(4))
        source.close()


def test_a_set_without_a_usable_row_does_not_go_on_for_ever(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", ["bad", "bad"])
    with pytest.raises(ValueError, match=r"none of 2 rows in a row can be used; .*broken"):
        stream(file, bad_samples="skip").take(1)


def test_data_sets_are_mixed_by_weight(tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "a.parquet", [f"a{i}" for i in range(5)])
    two = write(tmp_path / "two" / "a.parquet", [f"b{i}" for i in range(40)])
    source = stream(one, two, train_weights=(3.0, 1.0))
    drawn = asked(source.take(40))
    for n in range(1, 41):
        assert abs(sum(name[0] == "a" for name in drawn[:n]) - 0.75 * n) <= 1
    assert len(set(drawn)) == 5 + 10
    state = source.state_dict()
    expected = asked(source.take(17))
    again = stream(one, two, train_weights=(3.0, 1.0))
    again.load_state_dict(state)
    assert asked(again.take(17)) == expected
    with pytest.raises(ValueError, match=r"data\.train_weights: \[1\.0, 1\.0\], but the check"):
        stream(one, two, train_weights=(1.0, 1.0)).load_state_dict(state)


def test_other_data_or_seed_is_refused(tmp_path: Path) -> None:
    one, two = numbered(tmp_path / "a.parquet", 4), numbered(tmp_path / "b.parquet", 4, 4)
    state = stream(one, two).state_dict()
    changed = write(tmp_path / "c" / "b.parquet", ["q4", "q5", "q6", "Q7"])
    message = r"data\.train_files: the checkpoint was made with other data"
    for files in ((one,), (two, one), (one, changed)):
        with pytest.raises(ValueError, match=message):
            stream(*files).load_state_dict(state)
    moved = tmp_path / "moved.parquet"
    moved.write_bytes(Path(two).read_bytes())
    stream(one, str(moved)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"run\.seed: 1, but the checkpoint was made with 3"):
        stream(one, two, seed=1).load_state_dict(state)


def test_other_columns_are_other_data(tmp_path: Path) -> None:
    file = numbered(tmp_path / "a.parquet", 4)
    other = Rows([file], Data(image_keys=(), category_key=None, prompt_key="answer"))
    assert other.fingerprint() != Rows([file], DATA).fingerprint()


def test_no_rows_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.train_files: there are no rows"):
        stream(write(tmp_path / "x.parquet", []))
    full = numbered(tmp_path / "y.parquet", 2)
    with pytest.raises(ValueError, match=r"no rows to train on in entry 1"):
        stream(full, str(tmp_path / "x.parquet"), train_weights=(1.0, 1.0))


def show(row: Row) -> Prompt:
    """A prompt with one image twice."""
    pixels = torch.arange(2 * 4 * 3, dtype=torch.uint8).view(1, 2, 4, 3) + row.index
    shown = ProcessedImage(str(row.index), pixels, PatchFormat((0.0,), (1.0,), 1, 2, 2))
    return replace(make(row), images=(shown, shown))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("held", ["requests", "nothing"])
def test_images_arrive_as_texts_of_requests_or_without_pixels(
    tmp_path: Path, workers: int, held: Held
) -> None:
    data = replace(DATA, workers=workers)
    rows = Rows([numbered(tmp_path / "x.parquet", 5)], data)
    source = PromptStream(rows, show, data, seed=3, batch_size=5, held=held)
    for prompt in source.take(5):
        (image, same), (expected, _) = prompt.images, show(prompt.row).images
        assert same is image and image.grid == expected.grid and image.pixels.is_meta
        assert ("request_text" in vars(image)) is (held == "requests")
        if held == "requests":
            assert torch.equal(image.request_text, expected.request_text)
            assert torch.equal(image.contents[0], expected.pixels)
            assert torch.equal(image.patches(), expected.patches())
            assert image.png() == expected.png()
    source.close()


def test_only_servers_of_others_need_texts_of_requests() -> None:
    assert held_for(Rollout()) == "pixels"
    assert held_for(Rollout(mode="external", urls=("http://other:1",))) == "requests"


def test_images_of_the_network_keep_their_pixels() -> None:
    """Without requests, their pixels are what ranks are sent."""
    prompt = show(Row(0, "q", "a", (), "", "x:0", is_fetched=True))
    assert holding(prompt, "nothing") is prompt
