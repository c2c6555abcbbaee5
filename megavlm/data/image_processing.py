"""Resized images: a PNG for the rollout server, patches for the vision tower."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from megavlm.data.image_decoding import decode, image_size


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """A resized image, for the rollout server and for the tower. `ProcessedVideo` extends it."""

    is_video: ClassVar[bool] = False

    key: str  # SHA-256 of size and RGB pixels: identifies the content
    png: bytes  # lossless RGB, which the server's own resize does not change
    patches: Tensor  # [P, patch_dim] float32, equal to AutoProcessor's pixel_values
    grid: tuple[int, int, int]  # (t, h, w) in patches


class ImageProcessor:
    """Image processor of a model folder, with tighter pixel bounds and a cache of recent images."""

    def __init__(
        self,
        image_processor: Any,  # transformers' Qwen2VLImageProcessor
        *,
        min_pixels: int | None,
        max_pixels: int | None,
        cache: "PatchCache",
    ) -> None:
        """Take the bounds on the pixels of a resized image; None takes the folder's own.

        Raises ValueError for bounds wider than the folder's: the rollout server applies those, and
        would resize the images again.
        """
        smallest = image_processor.size["shortest_edge"]
        largest = image_processor.size["longest_edge"]
        low = smallest if min_pixels is None else min_pixels
        high = largest if max_pixels is None else max_pixels
        if not smallest <= low <= high <= largest:
            raise ValueError(
                f"data.min_pixels={low}, data.max_pixels={high}: they must lie in this order "
                f"within {smallest} to {largest}, the bounds of the model folder's image "
                "processor, which the rollout server applies again"
            )
        self.merge_size: int = image_processor.merge_size
        self._processor = image_processor
        self._low, self._high = low, high
        self._cache = cache

    def image(self, data: bytes) -> ProcessedImage:
        """Decode and process an encoded image, or return it from the cache.

        Raises ValueError for bytes that are not an image, and for an image so narrow that resizing
        it twice gives another size than resizing it once.
        """
        digest = hashlib.sha256(data).digest()
        image = self._cache.get(digest)
        if image is None:
            image = self._process(decode(data))
            self._cache.put(digest, image)
        return image

    def num_tokens(self, data: bytes) -> int:
        """Return the number of the image's tokens, from its header alone. Raises ValueError as
        `image`.
        """
        width, height = image_size(data)
        bounds = {"min_pixels": self._low, "max_pixels": self._high}
        patches = self._processor.get_number_of_image_patches(height, width, bounds)
        return patches // self.merge_size**2

    def _process(self, image: Image.Image) -> ProcessedImage:
        # Not the processor's own resize, whose arguments differ between releases of transformers.
        from transformers.image_processing_backends import TorchvisionBackend
        from transformers.image_utils import SizeDict
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        processor = self._processor
        pixels = processor.process_image(image)[None]
        side = processor.patch_size * processor.merge_size
        height, width = pixels.shape[-2:]
        height, width = smart_resize(height, width, side, self._low, self._high)
        size = SizeDict(height=height, width=width)
        resized = TorchvisionBackend.resize(processor, pixels, size, processor.resample)[0]
        features = processor(images=[resized], do_resize=False, return_tensors="pt")
        t, h, w = features["image_grid_thw"][0].tolist()
        # Rounding to whole patches can move a narrow image out of the bounds again.
        if processor.get_number_of_image_patches(height, width, {}) != t * h * w:
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels becomes {width} x {height}, "
                "which the rollout server would resize again; crop it"
            )
        pixels = resized.permute(1, 2, 0).contiguous().numpy()
        png = BytesIO()
        Image.fromarray(pixels).save(png, "PNG", compress_level=1)
        return ProcessedImage(
            key=hashlib.sha256(f"{width}x{height}:".encode() + pixels.tobytes()).hexdigest(),
            png=png.getvalue(),
            patches=features["pixel_values"],
            grid=(t, h, w),
        )


class PatchCache:
    """LRU cache of processed images and videos, by a digest of their files."""

    def __init__(self, max_bytes: int) -> None:
        """Bound the patches in the cache to max_bytes in all."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()

    def get(self, digest: bytes) -> ProcessedImage | None:
        if digest not in self._images:
            return None
        self._images.move_to_end(digest)
        return self._images[digest]

    def put(self, digest: bytes, image: ProcessedImage) -> None:
        self._images[digest] = image
        self._bytes += image.patches.nbytes
        while self._bytes > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self._bytes -= oldest.patches.nbytes
