"""Prompts with audio equal transformers' features and tokens, and their positions SGLang's."""

import base64
import io
import json
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from megavlm.data.media import audio_decoding
from megavlm.data.media.audio import ProcessedAudio
from megavlm.data.media.audio_decoding import decode_audio
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.families import family_of
from megavlm.model_config import model_config
from megavlm.rewards.base import Score
from megavlm.rollout.gateway.messages import ChatMessage, as_row
from megavlm.rollout.groups import sample_records
from megavlm.rollout.recorded import RecordedRollouts
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training.step.rank_images import sources_from_bytes, sources_to_bytes
from tests.conftest import DATA, read_rows
from tests.support.samples import auto_processor, chat_text, image, our_processor
from tests.unit.data.media.test_image_sources import lines
from tests.unit.data.rope_index import Tokens, sglang_rope_index
from tests.unit.rollout.scripted import Policy

RATE = 16_000


def samples(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.05, len(times))
    return (0.4 * np.sin(2 * np.pi * (300 + 100 * seed) * times) + noise).astype(np.float32)


def wav(values: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    """The samples as 16-bit integers."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((values * 32767).astype("<i2").repeat(channels).tobytes())
    return file.getvalue()


def flac(values: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        stream = out.add_stream("flac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((values * 32767).astype("i2")[None], "s16", "mono")
        frame.sample_rate = rate
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("qwen3_omni_moe")


def row(problem: str, *clips: bytes, images: int = 0) -> Row:
    shown = tuple(image((64, 90), seed=seed) for seed in range(images))
    return Row(0, problem, "", shown, "", "train.jsonl:3", audio=clips)


def prompt_of(folder: Path, problem: str, *lengths: float, images: int = 0) -> Prompt:
    clips = [wav(samples(length, seed)) for seed, length in enumerate(lengths)]
    return our_processor(folder).prompt(row(problem, *clips, images=images))


@pytest.mark.parametrize(
    ("problem", "lengths", "images"),
    [
        ("<audio>What is said?", (1.0,), 0),
        ("First <audio> then <image> and <audio>?", (0.31, 4.57), 1),
        ("<image><audio>", (2.23,), 1),
        ("What?", (1.5, 1.2), 0),
    ],
)
def test_a_prompt_equals_autoprocessor(
    folder: Path, problem: str, lengths: tuple[float, ...], images: int
) -> None:
    prompt = prompt_of(folder, problem, *lengths, images=images)
    theirs = auto_processor(folder)
    text = chat_text(folder, problem if "<" in problem else "<audio><audio>What?")
    clips = [item for item in prompt.images if isinstance(item, ProcessedAudio)]
    wholes = [decode_audio(wav(samples(length, i)), RATE) for i, length in enumerate(lengths)]
    # One by one: the end of a clip depends on the padding that longer neighbours bring.
    expected = [theirs(text="<|audio_pad|>", audio=[x], return_tensors="pt") for x in wholes]
    for clip, own in zip(clips, expected, strict=True):
        assert torch.equal(clip.patches().t(), own["input_features"][0])
        assert clip.num_tokens == own["input_ids"].numel()
    assert list(prompt.short_ids) == theirs.tokenizer(text)["input_ids"]
    assert our_processor(folder).num_tokens(prompt.row) == len(prompt.token_ids)

    config = model_config(folder)
    grids = [item.grid for item in prompt.images if item.medium == "image"]
    positions, following = sglang_rope_index(
        "qwen3_omni_moe",
        2,
        config.position_id_per_seconds,
        Tokens.of(config),
        prompt.token_ids,
        torch.tensor(grids) if grids else None,
        None,
        None,
        torch.tensor([len(clip.pixels) for clip in clips]),
    )
    assert torch.equal(prompt.positions, positions) and prompt.next_position == following


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_files_are_decoded_to_one_channel_at_the_models_rate(rate: int) -> None:
    values = samples(1.0, rate=rate)
    for data in (wav(values, rate), wav(values, rate, channels=2), flac(values, rate)):
        decoded = decode_audio(data, RATE)
        assert abs(len(decoded) - RATE) <= 32
        spectrum = np.abs(np.fft.rfft(decoded))
        assert abs(int(spectrum.argmax()) * RATE / len(decoded) - 300) < 2
        assert decoded.std() == pytest.approx(0.285, abs=0.01)


def test_a_column_of_audio(tmp_path: Path, folder: Path) -> None:
    values = samples(1.0)
    data = wav(values)
    (tmp_path / "a.wav").write_bytes(data)
    for cell in (
        "a.wav",
        ["a.wav"],
        {"path": "a.wav"},
        {"base64": base64.b64encode(data).decode()},
    ):
        files = lines(tmp_path / "x.jsonl", {"problem": "Hear", "answer": "1", "sound": cell})
        (read,) = read_rows(files, image_keys=(), audio_key="sound")
        assert read.audio == (data,)
    struct = {"array": values.tolist(), "sampling_rate": RATE}
    files = lines(tmp_path / "x.jsonl", {"problem": "<audio>", "answer": "", "sound": struct})
    (read,) = read_rows(files, image_keys=(), audio_key="sound")
    assert np.array_equal(decode_audio(read.audio[0], RATE), values)
    for part in (
        {"type": "audio", "audio": "a.wav"},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode()}},
    ):
        chat = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        files = lines(tmp_path / "x.jsonl", {"problem": chat, "answer": ""})
        (read,) = read_rows(files, image_keys=())
        assert (read.problem, read.audio) == ("<audio>What?", (data,))


def test_clips_that_cannot_be_used_are_one_sentence(
    tmp_path: Path, folder: Path, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = our_processor(folder)
    for data, message in (
        (b"nonsense", r"train\.jsonl:3: not audio that can be decoded"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://x/a.ts\n", "not audio that can be decoded"),
        (wav(samples(0.01)), r"a clip of 0\.010 s is too short"),
    ):
        for call in (processor.prompt, processor.num_tokens):
            with pytest.raises(ValueError, match=message):
                call(row("<audio>?", data))
    monkeypatch.setattr(audio_decoding, "MAX_SECONDS", 1)
    with pytest.raises(ValueError, match="longer than 1 s; cut it"):
        decode_audio(wav(samples(1.5)), RATE)
    other = our_processor(folder_of("qwen3_vl"))
    with pytest.raises(ValueError, match=r"train\.jsonl:3: models of this family take no audio"):
        other.prompt(row("<audio>?", wav(samples(1.0))))
    for cell, message in (
        ({"array": [[0.0]], "sampling_rate": RATE}, "must have one channel"),
        ({"array": [0.0], "sampling_rate": 0.5}, "whole number of samples"),
        ("../a.wav", "leaves the data file's folder"),
    ):
        files = lines(tmp_path / "x.jsonl", {"problem": "?", "answer": "", "sound": cell})
        with pytest.raises(ValueError, match=message):
            read_rows(files, image_keys=(), audio_key="sound")


def test_clips_are_processed_once_and_reach_other_ranks(folder: Path) -> None:
    processor = Processor(folder, DATA, family_of(folder))
    data = wav(samples(1.3))
    first, again = processor.prompt(row("?", data, data)).images
    assert first is again
    read = sources_from_bytes(sources_to_bytes({first.key: first}))[first.key]
    assert isinstance(read, ProcessedAudio)
    assert torch.equal(read.patches(), first.patches()) and read.grids == first.grids
    assert first.for_plan.grids == first.grids and first.for_plan.pixels.is_meta
    assert json.dumps(first.shapes) == f"[[130, 16, {first.num_tokens}]]"
    assert replace(first, length=3).num_tokens == 3


def test_a_step_with_audio_reads_as_it_was_written(tmp_path: Path, folder: Path) -> None:
    """A turn hears a clip that the row does not have, as an agent may send it."""
    processor = our_processor(folder)
    base = row("<audio>What?", wav(samples(1.0)))
    policy, prompt = Policy(processor, "1", "3"), processor.prompt(base)
    episode = Episode(prompt)
    for clip in (wav(samples(0.7, 2)), None):
        response = policy.respond()
        again = replace(base, problem="<audio>And?", audio=(clip,))
        following = clip and processor.next_turn(prompt, response.token_ids, again)
        episode.add_turn(response, "1", 0.0, Score(0.0, False), following)
    recorded = RecordedRollouts(tmp_path)
    recorded.save(1, [Group(prompt, episodes=[episode])])
    (read,) = recorded.load(1, [base], processor)
    for mine, theirs in zip(read.prompts, (prompt, episode.prompts[1]), strict=True):
        assert mine.token_ids.equal(theirs.token_ids) and mine.positions.equal(theirs.positions)
        for one, other in zip(mine.images, theirs.images, strict=True):
            assert one.key == other.key and one.patches().equal(other.patches())
    (record,) = sample_records([read], processor.pieces)
    ((_, make_png),) = record["images"]
    assert Image.open(io.BytesIO(make_png())).size == (100, 16), "the spectrogram"


def test_messages_of_a_gateway_hold_audio(folder: Path) -> None:
    data = wav(samples(1.0))
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode()}}
    message = ChatMessage.model_validate({"role": "user", "content": [part, "What?"]})
    read = as_row(row("?"), [message], (), lambda text: text)
    assert read.audio == (data,)
    prompt = our_processor(folder).prompt(read)
    assert prompt.token_ids.equal(our_processor(folder).prompt(row("<audio>What?", data)).token_ids)
    for given, problem in (({}, "input_audio has no data"), ({"data": "?"}, "audio is not base64")):
        with pytest.raises(ValueError, match=problem):
            ChatMessage.model_validate(
                {"role": "user", "content": [{**part, "input_audio": given}]}
            )
