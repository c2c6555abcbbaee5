"""Pixels in shared memory and hashes of images, by SGLang's own classes and what a server changes
of them.
"""

import base64
import json
import os
import pickle
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megavlm.data.media.image_processing import ProcessedImage
from megavlm.inference.bodies import processed_media
from megavlm.inference.server_main import shared_memory_of
from tests.parity.models import model_folder
from tests.sglang.test_videos import shown, video_prompts
from tests.support.samples import our_processor


@pytest.mark.slow
def test_responses_to_a_prompt_read_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader gets the pixels, what it writes to them is its own, and nothing is left."""
    # SGLang takes seconds, which every worker of pytest would spend to collect the tests.
    from sglang.srt.managers.mm_utils import ShmPointerMMData

    from megavlm.inference.server_support import megavlm_images

    monkeypatch.setattr(ShmPointerMMData, "__init__", ShmPointerMMData.__init__)
    megavlm_images.install()
    pixels, other = torch.rand(64, 96), torch.rand(8, 96)
    before = shared_memory_of(os.getpid())
    sent = [pickle.dumps(ShmPointerMMData(pixels, precomputed_hash=5)) for _ in range(3)]
    alone = pickle.dumps(ShmPointerMMData(other))
    files = [Path(name) for name in shared_memory_of(os.getpid()) - before]
    names = sorted(file.stat().st_nlink for file in files)
    assert names == [2, 2, 4, 4, 4, 4], "a name for each reader, and one to link to"

    for message in sent:
        pointer = pickle.loads(message)  # noqa: S301  # our own
        assert pointer.precomputed_hash == 5
        read = pointer.materialize()
        torch.testing.assert_close(read, pixels, rtol=0, atol=0)
        read.zero_()
    torch.testing.assert_close(pickle.loads(alone).materialize(), other)  # noqa: S301  # our own
    assert [file.stat().st_nlink for file in files if file.exists()] == [1, 1]
    del pixels, other, read
    assert not [file for file in files if file.exists()]


class Handle:
    """What the ranks get in place of patches: GPU memory that the first process cannot open."""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield SGLang's processing of loaded media, up to the handles that its ranks are sent. Hashing
    a handle raises, as in CUDA.
    """
    from sglang.srt.managers import mm_utils
    from sglang.srt.multimodal.cache import identity
    from sglang.srt.multimodal.processors import base_processor

    from megavlm.inference.server_support import megavlm_images

    def hash_feature(feature: Any) -> int:
        raise RuntimeError(f"invalid device context of {feature}")

    class OnGpu(base_processor.BaseMultimodalProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self._processor, self._tokenizer, self.use_cuda_ipc = None, None, True
            image, video = base_processor.Modality.IMAGE, base_processor.Modality.VIDEO
            self.ATTR_NAME_TO_MODALITY = {
                "pixel_values": image,
                "image_grid_thw": image,
                "pixel_values_videos": video,
                "video_grid_thw": video,
            }
            self.FEATURE_NAMES = ["pixel_values", "pixel_values_videos"]

        def process_mm_data(self, input_text: str, images: Any, **options: Any) -> Any:
            grids = torch.tensor([[1, x.height // 14, x.width // 14] for x in images])
            ids = [token for t, h, w in grids.tolist() for token in [9] * (h * w // 4) + [1]]
            patches = torch.rand(int(grids.prod(1).sum()), 3)
            return {
                "input_ids": torch.tensor(ids),
                "pixel_values": patches,
                "image_grid_thw": grids,
            }

        async def process_mm_data_async(self, *arguments: Any, **options: Any) -> None: ...

        def _wrap_tensor_for_cuda_ipc(self, tensor: torch.Tensor) -> Any:
            return Handle()

    patched = base_processor.BaseMultimodalProcessor
    monkeypatch.setattr(mm_utils, "hash_feature", hash_feature)
    monkeypatch.setattr(mm_utils.ShmPointerMMData, "__init__", None)
    monkeypatch.setattr(patched, "process_and_combine_mm_data", patched.process_and_combine_mm_data)
    monkeypatch.setattr(identity, "_read_media_bytes", identity._read_media_bytes)
    monkeypatch.setattr(patched, "_load_single_item", vars(patched)["_load_single_item"])
    megavlm_images.install()
    tokens = base_processor.MultimodalSpecialTokens(image_token_id=9, video_token_id=8)

    def run(media: Any) -> list[Any]:
        items, _, _ = OnGpu().process_and_combine_mm_data(media, tokens)
        for item in items:
            assert isinstance(item.feature, Handle)
            item.set_pad_value()  # as the first process and the ranks do
        return items

    yield run


def loaded(images: tuple[ProcessedImage, ...]) -> Any:
    """Return images as SGLang has loaded them from a request."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultiModalProcessorOutput

    pictures = [Image.open(BytesIO(b"".join(image.ppm()))) for image in images]
    return BaseMultiModalProcessorOutput(input_text="", images=pictures)


@pytest.mark.slow
def test_images_whose_patches_cannot_be_read_are_cached_by_their_content(process: Any) -> None:
    """A request has one or several images, also of earlier turns, and another server or epoch finds
    the same hashes.
    """
    processor = our_processor(model_folder("qwen2_5_vl"))
    images = shown(processor, "<image>, <image> or <image>?", images=3).images
    hashes = [[item.hash for item in process(loaded(images[:count]))] for count in (1, 2, 3)]
    assert hashes[-1] == [int(image.key[:16], 16) for image in images]
    assert len({*hashes[-1]}) == 3
    assert hashes[:2] == [hashes[-1][:1], hashes[-1][:2]]


@pytest.mark.slow
def test_videos_whose_patches_cannot_be_read_come_with_their_hashes(process: Any) -> None:
    from megavlm.inference.server_support import megavlm_videos

    processor = our_processor(model_folder("qwen2_5_vl"))
    token_ids = processor.image_token_id, processor.video_token_id, None
    for name, prompt in video_prompts(processor).items():
        content = b"".join(processed_media(prompt))
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        text = base64.b64encode(content).decode()
        media = megavlm_videos.processed(prompt.token_ids.tolist(), text, token_ids)
        found = {item.hash for item in process(media)}
        assert {medium["hash"] for medium in header["media"]} <= found, name
