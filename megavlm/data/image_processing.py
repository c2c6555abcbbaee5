"""Resized images as RGB pixels, and their conversion to a file for the rollout server and to
patches for the vision tower.
"""

import base64
import dataclasses
import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from threading import Lock
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from megavlm.data.image_decoding import decode, image_size

CPU = torch.device("cpu")
_URL = b'"data:image/x-portable-pixmap;base64,'  # with the opening quote of a JSON string


@dataclass(frozen=True)
class PatchFormat:
    """Format of a tower's input: how pixels 0 to 255 are normalised, and how patches are cut.

    mean, std: Mean and standard deviation of each RGB channel.
    patch: Side of a patch in pixels.
    temporal: Number of frames in a patch.
    merge: Side in patches of the square that becomes one token; its patches are consecutive.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int
    temporal: int
    merge: int

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "PatchFormat":
        """Create the format from the values of dataclasses.asdict after a round trip via JSON."""
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})

    @classmethod
    def of(cls, processor: Any) -> "PatchFormat":
        """Return the format of transformers' Qwen2VLImageProcessor or of a video processor.

        Raises ValueError for a processor that does not normalise; every Qwen-VL model's does.
        """
        if not (processor.do_rescale and processor.do_normalize):
            raise ValueError("its image processor has do_rescale or do_normalize off; set both")
        # As transformers fuses them, bit for bit.
        mean, std = (
            tuple((torch.tensor(x) * (1.0 / processor.rescale_factor)).tolist())
            for x in (processor.image_mean, processor.image_std)
        )
        return cls(
            mean,
            std,
            processor.patch_size,
            processor.temporal_patch_size,
            processor.merge_size,
        )

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the grid (t, h, w) in patches of `frames` frames of height x width pixels."""
        return -(-frames // self.temporal), height // self.patch, width // self.patch

    def cut(self, pixels: Tensor) -> Tensor:
        """Return the patches [P, patch_dim] float32 of frames [F, H, W, 3] uint8, on the frames'
        device. The last frame is repeated if frames do not fill the last patch.
        """
        t, h, w = self.grid(*pixels.shape[:3])
        missing = t * self.temporal - len(pixels)
        frames = torch.cat([pixels, *[pixels[-1:]] * missing])
        merge, patch = self.merge, self.patch
        split = frames.view(t, self.temporal, h // merge, merge, patch, w // merge, merge, patch, 3)
        # Permuting bytes before the conversion to float takes about half the time.
        moved = split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, 3, -1)
        mean, std = (torch.tensor(x, device=pixels.device)[:, None] for x in (self.mean, self.std))
        return moved.to(torch.float32).sub_(mean).div_(std).flatten(1)


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """A resized image, for the rollout server and for the tower. `ProcessedVideo` extends it."""

    is_video: ClassVar[bool] = False

    key: str  # SHA-256 of size and RGB pixels: identifies the content
    # [F, H, W, 3] uint8, F = 1 for an image; the server's own resize does not change it. On the
    # meta device if only `request_text` holds the pixels, or if they were dropped.
    pixels: Tensor
    format: PatchFormat
    digest: bytes = field(default=b"", kw_only=True)  # SHA-256 of its file, as stored

    @property
    def grid(self) -> tuple[int, int, int]:
        """(t, h, w) in patches."""
        return self.format.grid(*self.pixels.shape[:3])

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid)

    def patches(self, device: torch.device = CPU) -> Tensor:
        """Return the tower's input [P, patch_dim] float32 on a device, equal to AutoProcessor's
        pixel_values. Pixels are moved to the device as uint8, with an eighth of the input's bytes.
        """
        return self.format.cut(self.content.to(device, non_blocking=True))

    def png(self) -> bytes:
        """Return the first frame as a PNG file."""
        file = BytesIO()
        # Lossless at any setting; the lowest compression is the fastest.
        Image.fromarray(self.content[0].numpy()).save(file, "PNG", compress_level=1)
        return file.getvalue()

    def ppm(self) -> tuple[bytes, memoryview]:
        """Return the first frame as a PPM file in two parts: the header, and the raw pixels. A PPM
        file is written and read an order of magnitude faster than a PNG file
        (tests/benchmarks/bench_images.py).
        """
        return self._ppm_header, self.content[0].numpy().data

    @property
    def _ppm_header(self) -> bytes:
        return b"P6 %d %d 255\n" % (self.pixels.shape[2], self.pixels.shape[1])

    @cached_property
    def request_text(self) -> Tensor:
        """The first frame for requests to servers on other machines: a data: URL of a PPM file,
        encoded as a JSON string [n] uint8.
        """
        text = b"".join((_URL, base64.b64encode(b"".join(self.ppm())), b'"'))
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @cached_property
    def for_request(self) -> "ProcessedImage":
        """The image with its pixels only in `request_text`."""
        image = dataclasses.replace(self.for_plan)
        vars(image)["request_text"] = self.request_text
        return image

    @cached_property
    def for_plan(self) -> "ProcessedImage":
        """The image without its pixels; the ranks read them from the data files again."""
        meta = torch.empty(self.pixels.shape, dtype=torch.uint8, device="meta")
        return dataclasses.replace(self, pixels=meta)

    @property
    def content(self) -> Tensor:
        """Pixels [F, H, W, 3], decoded from `request_text` if they were dropped."""
        if not self.pixels.is_meta:
            return self.pixels
        assert "request_text" in vars(self), "no pixels are left"
        file = bytearray(base64.b64decode(self.request_text.numpy().data[len(_URL) : -1]))
        pixels = torch.frombuffer(file, dtype=torch.uint8, offset=len(self._ppm_header))
        return pixels.view(1, *self.pixels.shape[1:])


class ImageProcessor:
    """Image processor of a model folder, with tighter pixel bounds and a cache of recent images."""

    def __init__(
        self,
        image_processor: Any,  # transformers' Qwen2VLImageProcessor
        *,
        min_pixels: int | None,
        max_pixels: int | None,
        cache: "ImageCache",
    ) -> None:
        """Set the bounds on the number of pixels of a resized image; None uses the folder's bound.

        Raises ValueError for bounds wider than the folder's: the rollout server applies the
        folder's bounds and would resize the images again. Also raises ValueError as
        `PatchFormat.of` does.
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
        self._format = PatchFormat.of(image_processor)
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
            image = dataclasses.replace(self._process(decode(data)), digest=digest)
            self._cache.put(digest, image)
        return image

    def num_tokens(self, data: bytes) -> int:
        """Return the image's number of tokens, from its header only. Raises ValueError for a header
        that cannot be read.
        """
        width, height = image_size(data)
        bounds = {"min_pixels": self._low, "max_pixels": self._high}
        patches = self._processor.get_number_of_image_patches(height, width, bounds)
        return patches // self.merge_size**2

    def _process(self, image: Image.Image) -> ProcessedImage:
        # Not the processor's own resize: its arguments differ between releases of transformers.
        from transformers.image_processing_backends import TorchvisionBackend
        from transformers.image_utils import SizeDict
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        processor = self._processor
        values = processor.process_image(image)[None]
        side = processor.patch_size * processor.merge_size
        height, width = values.shape[-2:]
        height, width = smart_resize(height, width, side, self._low, self._high)
        size = SizeDict(height=height, width=width)
        resized = TorchvisionBackend.resize(processor, values, size, processor.resample)
        pixels = resized.permute(0, 2, 3, 1).contiguous()
        key = hashlib.sha256(f"{width}x{height}:".encode() + pixels.numpy().tobytes()).hexdigest()
        processed = ProcessedImage(key, pixels, self._format)
        # Rounding to whole patches can move a narrow image out of the bounds again.
        if processor.get_number_of_image_patches(height, width, {}) != processed.num_patches:
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels becomes {width} x {height}, "
                "which the rollout server would resize again; crop it"
            )
        return processed


class ImageCache:
    """Thread-safe LRU cache of processed images and videos, by a digest of their files."""

    def __init__(self, max_bytes: int) -> None:
        """Limit the pixels of all cached images to max_bytes."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = Lock()
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()

    def get(self, digest: bytes) -> ProcessedImage | None:
        with self._lock:
            if digest not in self._images:
                return None
            self._images.move_to_end(digest)
            return self._images[digest]

    def put(self, digest: bytes, image: ProcessedImage) -> None:
        with self._lock:
            if digest in self._images:
                return
            self._images[digest] = image
            self._bytes += image.pixels.nbytes
            while self._bytes > self._max_bytes:
                _, oldest = self._images.popitem(last=False)
                self._bytes -= oldest.pixels.nbytes
