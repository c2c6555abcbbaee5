"""Processed images: RGB frames, the picture that rollout servers are sent, and the patches that a
vision tower takes. How an image becomes frames is its family's (`Family.images`).
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
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor

from megavlm.data.media.image_decoding import decode, image_size

Grid = tuple[int, int, int]  # (t, h, w) in patches
Grids = tuple[Grid, ...]  # of an image: one, or one for each part of another size
Medium = Literal["image", "video", "audio"]

CPU = torch.device("cpu")
_URL = b'"data:image/x-portable-pixmap;base64,'  # with the opening quote of a JSON string


@dataclass(frozen=True)
class PatchFormat:
    """Format of a tower's input: how pixels 0 to 255 of frames are normalised, and how patches are
    cut. A frame is an image, a tile of one, or a frame of a video.

    mean, std: Mean and standard deviation of each RGB channel.
    patch: Side of a patch in pixels.
    temporal: Number of frames in a patch.
    merge: Side in patches of the square that becomes one token; its patches are consecutive.
    sends_frames: Servers are sent an image's frames, as they are a video's. Otherwise they are sent
        its picture, and cut patches themselves.
    takes_patches: The server's tower takes frames that are sent cut in patches, as it does of a
        video. Otherwise it takes them normalised.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int
    temporal: int
    merge: int
    sends_frames: bool = False
    takes_patches: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "PatchFormat":
        """Create the format from the values of dataclasses.asdict after a round trip via JSON."""
        return cls(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})

    @classmethod
    def of(
        cls,
        processor: Any,
        *,
        patch: int,
        temporal: int,
        merge: int,
        sends_frames: bool = False,
        takes_patches: bool = False,
    ) -> "PatchFormat":
        """Return the format with the mean and the deviation of a processor of transformers.

        Raises ValueError for a processor that does not normalise.
        """
        if not (processor.do_rescale and processor.do_normalize):
            raise ValueError("its image processor has do_rescale or do_normalize off; set both")
        # As transformers fuses them, bit for bit.
        mean, std = (
            tuple((torch.tensor(x) * (1.0 / processor.rescale_factor)).tolist())
            for x in (processor.image_mean, processor.image_std)
        )
        return cls(mean, std, patch, temporal, merge, sends_frames, takes_patches)

    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the grid (t, h, w) in patches of `frames` frames of height x width pixels."""
        return -(-frames // self.temporal), height // self.patch, width // self.patch

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return frames [F, H, W, 3] uint8 as [F, 3, H, W] float32, on the frames' device."""
        mean, std = (
            torch.tensor(x, device=pixels.device)[:, None, None] for x in (self.mean, self.std)
        )
        return pixels.permute(0, 3, 1, 2).to(torch.float32).sub_(mean).div_(std)

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
    """An image for the rollout server and for the tower. `ProcessedVideo` and `ProcessedAudio`
    extend it.
    """

    medium: ClassVar[Medium] = "image"

    key: str  # SHA-256 of the picture's size and RGB pixels: identifies the content
    # [F, H, W, 3] uint8: frames for the tower, F = 1 for an image without tiles. On the meta device
    # if only `request_text` holds the pixels, or if they were dropped.
    pixels: Tensor
    format: PatchFormat
    digest: bytes = field(default=b"", kw_only=True)  # SHA-256 of its file, as stored
    # [H, W, 3] uint8: the picture that servers are sent and records show. Whatever the server does
    # with it must give the frames again. None: the first frame.
    picture: Tensor | None = field(default=None, kw_only=True)
    # [S, h, w, 3] uint8: slices of the picture, which have another size than `pixels`, an overview.
    slices: Tensor | None = field(default=None, kw_only=True)

    @property
    def grids(self) -> Grids:
        """(t, h, w) in patches of each part (`contents`)."""
        return tuple(self.format.grid(*shape) for shape in self.shapes)

    @property
    def grid(self) -> Grid:
        """(t, h, w) in patches of an image without slices."""
        (grid,) = self.grids
        return grid

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Frames, height and width in pixels of each part (`contents`)."""
        return tuple((len(x), x.shape[1], x.shape[2]) for x in (self.pixels, *self._slices))

    @property
    def _slices(self) -> tuple[Tensor, ...]:
        return () if self.slices is None else (self.slices,)

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height in pixels at which the model sees it."""
        height, width = self._picture.shape[:2]
        return width, height

    @property
    def num_patches(self) -> int:
        return sum(map(math.prod, self.grids))

    @property
    def num_tokens(self) -> int:
        """Number of tokens that its features replace."""
        return self.num_patches // self.format.merge**2

    def patches(self, device: torch.device = CPU) -> Tensor:
        """Return the tower's input [P, patch_dim] float32 on a device, equal to AutoProcessor's
        pixel_values. Pixels are moved to the device as uint8, with an eighth of the input's bytes.
        """
        parts = [self.format.cut(x.to(device, non_blocking=True)) for x in self.contents]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def frames(self) -> list[Tensor]:
        """Return the normalised frames [F, 3, H, W] float32 of each part (`contents`)."""
        return [self.format.normalised(x) for x in self.contents]

    def png(self) -> bytes:
        """Return the picture as a PNG file."""
        file = BytesIO()
        # Lossless at any setting; the lowest compression is the fastest.
        Image.fromarray(self._shown.numpy()).save(file, "PNG", compress_level=1)
        return file.getvalue()

    def ppm(self) -> tuple[bytes, memoryview]:
        """Return the picture as a PPM file in two parts: the header, and the raw pixels. A PPM file
        is written and read an order of magnitude faster than a PNG file
        (tests/benchmarks/bench_images.py).
        """
        return self._ppm_header, self._shown.numpy().data

    @property
    def _shown(self) -> Tensor:
        """The picture [H, W, 3], decoded from `request_text` if the pixels were dropped."""
        shown = self._picture
        if not shown.is_meta:
            return shown
        assert "request_text" in vars(self), "no pixels are left"
        file = bytearray(base64.b64decode(self.request_text.numpy().data[len(_URL) : -1]))
        pixels = torch.frombuffer(file, dtype=torch.uint8, offset=len(self._ppm_header))
        return pixels.view(shown.shape)

    @property
    def _picture(self) -> Tensor:
        return self.pixels[0] if self.picture is None else self.picture

    @property
    def _ppm_header(self) -> bytes:
        height, width, _ = self._picture.shape
        return b"P6 %d %d 255\n" % (width, height)

    @cached_property
    def request_text(self) -> Tensor:
        """The picture for requests to servers on other machines: a data: URL of a PPM file, encoded
        as a JSON string [n] uint8.
        """
        text = b"".join((_URL, base64.b64encode(b"".join(self.ppm())), b'"'))
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @cached_property
    def for_request(self) -> "ProcessedImage":
        """The image with its picture only in `request_text`, and without other pixels."""
        image = dataclasses.replace(self.for_plan)
        vars(image)["request_text"] = self.request_text
        return image

    @cached_property
    def for_plan(self) -> "ProcessedImage":
        """The image without its pixels; the ranks read them from the data files again."""
        picture, slices = (
            None if x is None else _without_memory(x) for x in (self.picture, self.slices)
        )
        pixels = _without_memory(self.pixels)
        return dataclasses.replace(self, pixels=pixels, picture=picture, slices=slices)

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """Frames [F, H, W, 3] of each part. An image with slices has two parts, the overview and
        the slices; any other image has one, which is kept by `for_request` if it has no tiles.
        """
        if self.pixels.is_meta and self.picture is None:
            return (self._shown[None],)
        assert not self.pixels.is_meta, "no frames are left"
        return self.pixels, *self._slices


def _without_memory(pixels: Tensor) -> Tensor:
    return torch.empty(pixels.shape, dtype=torch.uint8, device="meta")


class ImageProcessor:
    """Images of a family's prompts, with a cache of recent ones. A family defines `process` and
    `num_patches`, and `prompt_ids` if its prompts show other tokens for an image.

    token_id: The token that a chat template writes for an image, and that features replace.
    format: Format of the tower's input.
    """

    def __init__(self, token_id: int, format_: PatchFormat, cache: "ImageCache") -> None:
        self.token_id, self.format, self._cache = token_id, format_, cache

    def process(self, picture: Image.Image) -> ProcessedImage:
        """Return a decoded image as frames. Raises ValueError for one that cannot be used."""
        raise AssertionError("a family defines how its images are processed")

    def num_patches(self, width: int, height: int) -> int:
        """Return the number of patches of an image of this size."""
        raise AssertionError("a family defines how many patches an image has")

    def prompt_ids(self, num_tokens: int, size: tuple[int, int], number: int) -> list[int]:
        """Return the tokens of a prompt for an image whose features replace num_tokens of them.

        size: Width and height of its picture. number: Its place among the prompt's images, from 0.
        """
        return [self.token_id] * num_tokens

    def image(self, data: bytes) -> ProcessedImage:
        """Decode and process an encoded image, or return it from the cache.

        Raises ValueError for bytes that are not an image, and as `process` does.
        """
        digest = hashlib.sha256(data).digest()
        image = self._cache.get(digest)
        if image is None:
            image = dataclasses.replace(self.process(decode(data)), digest=digest)
            self._cache.put(digest, image)
        return image

    def prompt_length(self, data: bytes, number: int) -> int:
        """Return the number of tokens of a prompt for an image, from its header only.
        `prompt_ids` describes `number`. Raises ValueError for a header that cannot be read.
        """
        size = image_size(data)
        return len(self.prompt_ids(self.num_patches(*size) // self.format.merge**2, size, number))

    def processed(
        self, frames: Tensor, picture: Tensor | None = None, slices: Tensor | None = None
    ) -> ProcessedImage:
        """Return an image of frames [F, H, W, 3] uint8. picture, slices: See `ProcessedImage`;
        without a picture there is one frame.
        """
        shown = frames[0] if picture is None else picture
        size = f"{shown.shape[1]}x{shown.shape[0]}:".encode()
        key = hashlib.sha256(size + shown.numpy().tobytes()).hexdigest()
        return ProcessedImage(key, frames, self.format, picture=picture, slices=slices)


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
            self._bytes += _bytes_of(image)
            while self._bytes > self._max_bytes:
                _, oldest = self._images.popitem(last=False)
                self._bytes -= _bytes_of(oldest)


def _bytes_of(image: ProcessedImage) -> int:
    held = (image.pixels, image.picture, image.slices)
    return sum(x.nbytes for x in held if x is not None)
