"""Prompts equal AutoProcessor's, and the server's own processing of our PNG changes nothing."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from megavlm.config.data import Data
from megavlm.data.media.image_decoding import decode
from megavlm.data.media.image_processing import ImageCache, ProcessedImage
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.families import FAMILIES, family_of
from megavlm.models.common.inputs import ResizedImages
from megavlm.models.common.qwen_tiny import TOKENS
from tests.conftest import DATA, read_rows
from tests.support.samples import auto_processor, image, our_processor, pixel_values

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
SIZES = [(56, 56), (28, 28), (1, 1), (17, 90), (333, 200), (640, 480), (2000, 60)]
MODES = ("L", "P", "RGBA", "CMYK")
IMAGES = [(size, "RGB") for size in SIZES] + [(SIZES[4], mode) for mode in MODES]


@pytest.fixture(scope="module")
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("qwen2_5_vl")


@pytest.fixture(scope="module")
def processor(folder: Path) -> Processor:
    return our_processor(folder)


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return auto_processor(folder)


def row(problem: str, *images: bytes) -> Row:
    return Row(3, problem, "red", images, "colour", "train.parquet:3")


def files(image: ProcessedImage) -> list[Image.Image]:
    """Return what a reader makes of the image's files."""
    return [Image.open(io.BytesIO(file)) for file in (b"".join(image.ppm()), image.png())]


@pytest.mark.parametrize(("size", "mode"), IMAGES)
@pytest.mark.parametrize(("family", "patch"), [("qwen2_5_vl", 14), ("qwen3_vl", 16)])
def test_patches_equal_autoprocessor_on_the_source_and_on_the_files(
    folder_of: Callable[[str], Path], family: str, patch: int, size: tuple[int, int], mode: str
) -> None:
    hf = auto_processor(folder_of(family))
    data = image(size, mode)
    ours = our_processor(folder_of(family)).prompt(row("<image>?", data)).images[0]
    for source in (decode(data), Image.open(io.BytesIO(data)), *files(ours)):
        theirs = hf.image_processor(images=[source], return_tensors="pt")
        assert torch.equal(ours.patches(), theirs["pixel_values"])
        assert list(ours.grid) == theirs["image_grid_thw"][0].tolist()
    for file in files(ours):
        assert file.mode == "RGB" and file.size == (ours.grid[2] * patch, ours.grid[1] * patch)


def conversation(problem: str, images: list[Image.Image], system: str | None) -> list[Any]:
    content: list[dict[str, Any]] = []
    for number, text in enumerate(problem.split("<image>")):
        if number > 0:
            content.append({"type": "image", "image": images[number - 1]})
        if text:
            content.append({"type": "text", "text": text})
    user = [{"role": "user", "content": content}]
    if system is None:
        return user
    return [{"role": "system", "content": [{"type": "text", "text": system}]}, *user]


@pytest.mark.parametrize(
    ("problem", "num_images", "system"),
    [
        ("<image>\nWhat color is it?  ", 1, None),
        ("First <image> then <image>: which é 漢 \\frac{1}{2}?", 2, "Answer with one word."),
        ("<image><image><image>", 3, None),
        ("No image at all.", 0, "Answer with one word."),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_equals_autoprocessor(
    folder_of: Callable[[str], Path], family: str, problem: str, num_images: int, system: str | None
) -> None:
    folder, hf = folder_of(family), auto_processor(folder_of(family))
    processor = Processor(folder, replace(DATA, system_prompt=system), family_of(folder))
    data = [image(SIZES[index + 3], seed=index) for index in range(num_images)]
    prompt = processor.prompt(row(problem, *data))
    messages = conversation(problem, [decode(source) for source in data], system)
    theirs = hf.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert torch.equal(prompt.token_ids, theirs["input_ids"][0])
    if data:
        assert torch.equal(pixel_values(folder, prompt), theirs["pixel_values"])
    text = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert list(prompt.short_ids) == hf.tokenizer(text)["input_ids"]
    assert prompt.short_ids.count(processor.image_token_id) == num_images
    assert prompt.positions.shape == (3, len(prompt.token_ids))
    # A row knows its length before its images are decoded.
    assert processor.num_tokens(row(problem, *data)) == len(prompt.token_ids)


def test_without_placeholders_images_come_first(processor: Processor) -> None:
    data = image((56, 56))
    plain = processor.prompt(row("What?", data, data))
    marked = processor.prompt(row("<image><image>What?", data, data))
    assert torch.equal(plain.token_ids, marked.token_ids)


def test_bounds_shrink_images_and_stay_within_the_folders(folder: Path, hf: Any) -> None:
    processor = Processor(
        folder, replace(DATA, min_pixels=28 * 28 * 8, max_pixels=28 * 28 * 20), family_of(folder)
    )
    for size in SIZES[:-1]:
        (ours,) = processor.prompt(row("<image>?", image(size))).images
        assert 8 <= ours.num_patches // 4 <= 20
        theirs = hf.image_processor(images=[files(ours)[0]])
        assert torch.equal(ours.patches(), torch.as_tensor(theirs["pixel_values"]))
    for wrong in (
        {"min_pixels": 784, "max_pixels": None},
        {"min_pixels": None, "max_pixels": 10**9},
    ):
        with pytest.raises(ValueError, match=r"data\.min_pixels.*data\.max_pixels.*3136 to 200704"):
            Processor(folder, replace(DATA, **wrong), family_of(folder))


def test_a_image_that_the_server_would_resize_again_is_refused(folder: Path, hf: Any) -> None:
    config = AutoConfig.from_pretrained(folder)
    images_of = type(hf.image_processor)(min_pixels=56 * 56, max_pixels=28 * 28 * 16)
    processor = SimpleNamespace(image_processor=images_of)
    images = ResizedImages(config, processor, DATA, ImageCache(0))
    assert images.image(image((900, 60))).num_patches == 15 * 4
    with pytest.raises(ValueError, match=r"2000 x 60 pixels becomes 644 x 28, .* crop it"):
        images.image(image((2000, 60)))


def test_same_content_has_one_key_and_same_bytes_are_processed_once(processor: Processor) -> None:
    png, other = image((60, 60)), image((60, 60), seed=1)
    file = io.BytesIO()
    Image.open(io.BytesIO(png)).save(file, "PNG", compress_level=0)
    first, again, copy, different = processor.prompt(
        row("?", png, png, file.getvalue(), other)
    ).images
    assert first is again and first is not copy
    assert first.key == copy.key != different.key


def test_cache_forgets_the_least_recently_used(folder: Path) -> None:
    size = 56 * 56 * 3  # bytes of the pixels of one image
    processor = Processor(folder, DATA, family_of(folder), cache_bytes=2 * size)
    data = [image((56, 56), seed=seed) for seed in range(3)]

    def one(index: int) -> int:
        return id(processor.prompt(row("?", data[index])).images[0])

    kept = [processor.prompt(row("?", source)).images[0] for source in data[:2]]
    assert one(0) == id(kept[0])
    one(2)  # pushes out 1, not 0
    assert one(0) == id(kept[0])
    assert one(1) != id(kept[1])


def test_errors_name_the_row(folder: Path, processor: Processor) -> None:
    with pytest.raises(ValueError, match=r"train\.parquet:3: not an image"):
        processor.prompt(row("<image>?", b"nonsense"))
    with pytest.raises(ValueError, match=r"train\.parquet:3: not an image"):
        processor.num_tokens(row("<image>?", b"nonsense"))
    with pytest.raises(ValueError, match=r"train\.parquet:3: 'problem' holds '<\|image_pad\|>'"):
        processor.prompt(row("<image>? <|image_pad|>", image((56, 56))))
    with pytest.raises(ValueError, match=r"train\.parquet:3: .*aspect ratio"):
        processor.prompt(row("<image>?", image((6000, 20))))
    short = Processor(folder, Data(max_prompt_tokens=10), family_of(folder))
    with pytest.raises(ValueError, match=r"train\.parquet:3: .*data\.max_prompt_tokens=10"):
        short.prompt(row("<image>What color is it?", image((56, 56))))


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.folder: .* has no config\.json"):
        Processor(tmp_path, DATA, family_of(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"model\.folder: .*model_type 'gpt2' is not supported"):
        Processor(tmp_path, DATA, family_of(tmp_path))


def test_answers_and_suppressed_ids(folder: Path, processor: Processor) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert processor.eos_id == end
    assert processor.encode_answer("red") == [*tokenizer.encode("red"), end]
    assert processor.decode([*processor.encode_answer(" red "), 0]) != ""
    assert processor.decode(processor.encode_answer(" red ")) == "red"
    vocab_size = config.text_config.vocab_size
    assert processor.vocab_size == vocab_size
    expected = {tokenizer.convert_tokens_to_ids(token) for token in TOKENS.special} - {end}
    expected |= set(range(len(tokenizer), vocab_size))
    assert set(processor.suppressed_ids) == expected
    assert processor.image_token_id in expected


TURN, TEXT = "<|im_end|>", "<|endoftext|>"


@pytest.mark.parametrize(
    ("tokenizer_end", "generation_ends", "config_end", "end", "stops"),
    [
        (TURN, [TURN, TEXT], None, TURN, {TURN, TEXT}),
        (TURN, [TEXT, TURN], TEXT, TURN, {TURN, TEXT}),
        (TEXT, [TURN, TEXT], None, TURN, {TURN, TEXT}),
        (TEXT, TURN, None, TURN, {TURN, TEXT}),
        (TEXT, None, TURN, TURN, {TURN, TEXT}),
        (TURN, TEXT, None, TURN, {TURN, TEXT}),
        (TURN, None, None, TURN, {TURN}),
        (TEXT, TEXT, None, TEXT, {TEXT}),
        (TEXT, None, None, TEXT, {TEXT}),
        (TURN, [TURN, "red"], None, TURN, {TURN, "red"}),
    ],
)
def test_a_turn_ends_as_the_template_ends_it_if_servers_stop_there(
    folder: Path,
    tmp_path: Path,
    tokenizer_end: str,
    generation_ends: Any,
    config_end: str | None,
    end: str,
    stops: set[str],
) -> None:
    mine = tmp_path / "model"
    shutil.copytree(folder, mine)
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    config = json.loads((mine / "config.json").read_text())
    text = config["text_config"] | {"eos_token_id": config_end and ids(config_end)}
    edit(mine / "config.json", text_config=text)
    edit(mine / "tokenizer_config.json", eos_token=tokenizer_end)
    edit(mine / "generation_config.json", eos_token_id=generation_ends and ids(generation_ends))
    ours = our_processor(mine)
    assert ours.eos_id == ids(end) and set(ours.stop_ids) == {ids(token) for token in stops}
    assert ours.encode_answer("red")[-1] == ids(end)
    assert set(ours.suppressed_ids) & {ids(TURN), ids(TEXT)} == {ids(TURN), ids(TEXT)} - {ids(end)}
    for token in stops:
        assert ours.decode([*ids(["What"]), ids(token)]) == "What"


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.skipif(not SHARED.is_dir(), reason="real images (../shared/data) are not here")
@pytest.mark.parametrize(
    "name",
    [
        "coco_mini_captions",
        "coco_mini_vqa_derived",
        "easy_vqa",
        "geometry3k_examples",
        "math_vision_subset",
        "osv5m_street",
    ],
)
def test_real_images_equal_autoprocessor(processor: Processor, hf: Any, name: str) -> None:
    for item in read_rows([str(SHARED / name / "train.parquet")])[:8]:
        (ours,) = processor.prompt(item).images
        for source in (decode(item.images[0]), *files(ours)):
            theirs = hf.image_processor(images=[source], return_tensors="pt")
            assert torch.equal(ours.patches(), theirs["pixel_values"])
