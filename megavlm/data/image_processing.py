"""Resized images as RGB pixels: a file for the rollout server, patches for the vision tower."""

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
_URL = b'"data:image/x-portable-pixmap;base64,'  # as JSON text


@dataclass(frozen=True)
class PatchFormat:
    """Format of a tower's input: the normalisation of pixels 0 to 255, and how patches are cut.

    mean, std: of each RGB channel. patch: pixels of a side. temporal: frames of a patch. merge:
    patches of a side that become one token; their patches follow one another.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int
    temporal: int
    merge: int

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "PatchFormat":
        """Return the format of dataclasses.asdict, as JSON has kept it."""
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})

    @classmethod
    def of(cls, processor: Any) -> "PatchFormat":
        """Return the format of transformers' Qwen2VLImageProcessor or of a video processor.

        Raises ValueError for one that does not normalise, which no Qwen-VL model has.
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
        """Return (t, h, w) in patches of frames of so many pixels."""
        return -(-frames // self.temporal), height // self.patch, width // self.patch

    def cut(self, pixels: Tensor) -> Tensor:
        """Return the patches [P, patch_dim] float32 of frames [F, H, W, 3] uint8, on their device.
        The last frame is repeated to fill a patch.
        """
        t, h, w = self.grid(*pixels.shape[:3])
        missing = t * self.temporal - len(pixels)
        frames = torch.cat([pixels, *[pixels[-1:]] * missing])
        merge, patch = self.merge, self.patch
        split = frames.view(t, self.temporal, h // merge, merge, patch, w // merge, merge, patch, 3)
        # Bytes are moved, then normalised with channels before pixels: about half the time.
        moved = split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, 3, -1)
        mean, std = (torch.tensor(x, device=pixels.device)[:, None] for x in (self.mean, self.std))
        return moved.to(torch.float32).sub_(mean).div_(std).flatten(1)


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """A resized image, for the rollout server and for the tower. `ProcessedVideo` extends it."""

    is_video: ClassVar[bool] = False

    key: str  # SHA-256 of size and RGB pixels: identifies the content
    # [F, H, W, 3] uint8, of one frame; the server's own resize does not change it. On the meta
    # device where only `request_text` has them, or nothing.
    pixels: Tensor
    format: PatchFormat
    digest: bytes = field(default=b"", kw_only=True)  # of its file, as stored

    @property
    def grid(self) -> tuple[int, int, int]:
        """(t, h, w) in patches."""
        return self.format.grid(*self.pixels.shape[:3])

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid)

    def patches(self, device: torch.device = CPU) -> Tensor:
        """Return the tower's input [P, patch_dim] float32 on a device, equal to AutoProcessor's
        pixel_values. Pixels are moved as they are, an eighth of its bytes.
        """
        return self.format.cut(self.content.to(device, non_blocking=True))

    def png(self) -> bytes:
        """Return the first frame as a PNG file."""
        file = BytesIO()
        # Lossless at any setting; the lowest compression is the fastest.
        Image.fromarray(self.content[0].numpy()).save(file, "PNG", compress_level=1)
        return file.getvalue()

    def ppm(self) -> tuple[bytes, memoryview]:
        """Return the first frame as a PPM file in two parts: its header, and the pixels as they
        are. It is made and read an order of magnitude faster than PNG
        (tests/benchmarks/bench_images.py).
        """
        return self._ppm_header, self.content[0].numpy().data

    @property
    def _ppm_header(self) -> bytes:
        return b"P6 %d %d 255\n" % (self.pixels.shape[2], self.pixels.shape[1])

    @cached_property
    def request_text(self) -> Tensor:
        """The first frame as servers on other machines take it: a data: URL of a PPM file, as a
        JSON string [n] uint8.
        """
        text = b"".join((_URL, base64.b64encode(b"".join(self.ppm())), b'"'))
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @cached_property
    def for_request(self) -> "ProcessedImage":
        """The image with its pixels in `request_text` alone."""
        image = dataclasses.replace(self.for_plan)
        vars(image)["request_text"] = self.request_text
        return image

    @cached_property
    def for_plan(self) -> "ProcessedImage":
        """The image without its pixels, which ranks read by themselves."""
        meta = torch.empty(self.pixels.shape, dtype=torch.uint8, device="meta")
        return dataclasses.replace(self, pixels=meta)

    @property
    def content(self) -> Tensor:
        """The pixels, of `request_text` if nothing else has them."""
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
        """Take the bounds on the pixels of a resized image; None takes the folder's own.

        Raises ValueError for bounds wider than the folder's: the rollout server applies those, and
        would resize the images again. Raises ValueError as `PatchFormat.of`.
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
    """LRU cache of processed images and videos, by a digest of their files. For several threads."""

    def __init__(self, max_bytes: int) -> None:
        """Bound the pixels in the cache to max_bytes in all."""
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
