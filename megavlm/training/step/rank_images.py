"""The images of a step that one rank encodes, and where it reads them from."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from threading import Lock
from typing import Self

from megavlm.arrays import from_bytes, to_bytes
from megavlm.config.schema import Config
from megavlm.data.media.audio import ProcessedAudio
from megavlm.data.media.image_processing import Grids, Medium, PatchFormat, ProcessedImage
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Rows
from megavlm.families import family_of
from megavlm.training.step.image_plan import ImagePlan, plan_images


@dataclass(frozen=True)
class ImagePlace:
    """Place of an image, video or clip in the training files: its row, and its number within the
    row.
    """

    row: int
    number: int
    medium: Medium


ImageSource = ImagePlace | ProcessedImage


def image_places(prompts: Sequence[Prompt]) -> dict[bytes, ImagePlace]:
    """Return the places of the prompts' images in the training files, by the digest of the image
    file. Images from the network are left out, so that they are not downloaded twice.
    """
    places = {}
    for prompt in prompts:
        if not prompt.row.is_fetched:
            counts = Counter[Medium]()
            for image in prompt.images:
                place = ImagePlace(prompt.row.index, counts[image.medium], image.medium)
                places[image.digest] = place
                counts[image.medium] += 1
    return places


class ImageReader:
    """Reads images from the training files. It opens the files at the first read."""

    def __init__(
        self, config: Config, processor: Processor | None = None, rows: Rows | None = None
    ) -> None:
        """Store a processor and rows that the rank has already opened, if it has."""
        self._config, self._processor, self._rows = config, processor, rows
        self._lock = Lock()  # guards the rows, which cache the blocks read last

    def read(self, place: ImagePlace, key: str) -> ProcessedImage:
        """Read and process an image. Raises ValueError if its pixels differ from the driver's."""
        with self._lock:
            processor, rows = self._opened
            row = rows[place.row]
        image = processor.image(row, place.number, place.medium)
        if image.key != key:
            raise ValueError(
                f"{row.source}: {place.medium} {place.number + 1} has other pixels than on rank 0: "
                "its file has changed, or this machine has another copy of it or other versions of "
                "the packages; give all machines the same, and restart"
            )
        return image

    def begin(self, place: ImagePlace, key: str) -> "Future[ProcessedImage]":
        """Start `read` in a thread."""
        return self._threads.submit(self.read, place, key)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # One thread per core of this rank: decoding and resizing release the GIL.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // ranks))

    @cached_property
    def _opened(self) -> tuple[Processor, Rows]:
        data = self._config.data
        processor = self._processor or Processor(
            self._config.model.folder, data, family_of(self._config.model.folder), cache_bytes=0
        )
        return processor, self._rows or Rows(data.train_files, data)


class RankImages:
    """The images of a step on one rank: the plan, and the sources of the images that it encodes."""

    def __init__(
        self, plan: ImagePlan, sources: Mapping[str, ImageSource], reader: ImageReader | None
    ) -> None:
        """Store the plan and the sources. reader: Reader for sources that are places; None if every
        source has its pixels.
        """
        self.plan, self._sources, self._reader = plan, dict(sources), reader
        self._pending: dict[int, Future[ProcessedImage]] = {}

    @classmethod
    def everywhere(cls, images: Mapping[str, ProcessedImage], slots: int) -> Self:
        """Return the batch of images that all ranks already have, for one data rank whose `slots`
        ranks encode them together.
        """
        grids = {key: image.grids for key, image in images.items()}
        costs = {key: _cost(grid) for key, grid in grids.items()}
        (plan,) = plan_images([list(images)], grids, costs, slots=slots)
        return cls(plan, images, None)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the images of several streamed batches as one, for a trained tower."""
        sources = {key: source for part in parts for key, source in part._sources.items()}
        return cls(ImagePlan.joined([part.plan for part in parts]), sources, parts[0]._reader)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to read images that this rank encodes, in threads."""
        for index in indices:
            source = self._sources[self.plan.keys[index]]
            if isinstance(source, ImagePlace) and index not in self._pending:
                assert self._reader is not None
                self._pending[index] = self._reader.begin(source, self.plan.keys[index])

    def load(self, indices: Sequence[int], *, keep: bool) -> list[ProcessedImage]:
        """Return images that this rank encodes. keep: Keep the pixels in memory, to encode them
        again. Raises ValueError as `ImageReader.read` does.
        """
        self.prefetch(indices)
        images = []
        for index in indices:
            key = self.plan.keys[index]
            source = self._sources[key]
            if isinstance(source, ImagePlace):
                source = self._pending.pop(index).result()
                if keep:
                    self._sources[key] = source
            images.append(source)
        return images


def sources_to_bytes(sources: Mapping[str, ImageSource]) -> bytes:
    """Serialize sources: a place as its fields, an image as its pixels."""
    images = {key: source for key, source in sources.items() if isinstance(source, ProcessedImage)}
    places = {key: astuple(x) for key, x in sources.items() if isinstance(x, ImagePlace)}
    formats = {key: asdict(image.format) for key, image in images.items()}
    lengths = {key: x.length for key, x in images.items() if isinstance(x, ProcessedAudio)}
    pixels = {key: image.contents[0] for key, image in images.items()}
    slices = {f"{key}.slices": x.slices for key, x in images.items() if x.slices is not None}
    return to_bytes(pixels | slices, {"places": places, "formats": formats, "lengths": lengths})


def sources_from_bytes(data: bytes) -> dict[str, ImageSource]:
    """Deserialize the sources from `sources_to_bytes`."""
    pixels, values = from_bytes(data)
    places = {key: ImagePlace(*place) for key, place in values["places"].items()}
    formats = {key: PatchFormat.from_values(how) for key, how in values["formats"].items()}
    images: dict[str, ProcessedImage] = {
        key: ProcessedAudio(key, pixels[key], formats.pop(key), length=number)
        for key, number in values["lengths"].items()
    }
    images |= {
        key: ProcessedImage(key, pixels[key], how, slices=pixels.get(f"{key}.slices"))
        for key, how in formats.items()
    }
    return places | images


def _cost(grids: Grids) -> float:
    """Return a relative cost of an image without a cost model. It grows with the number of patches
    and, because of attention within a frame, with its square.
    """
    return sum(t * h * w * (1.0 + h * w / 4096.0) for t, h, w in grids)
