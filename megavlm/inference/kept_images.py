"""Images that a server keeps, so that a later turn names them and does not send them again. The
client records the images that it has sent, with the same limit.

Not covered: images that are sent as frames (videos, and families that cut tiles or slices).
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from megavlm.inference.bodies import Body, Encoder

if TYPE_CHECKING:
    from megavlm.data.media.image_processing import ProcessedImage

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

BEGIN = "megavlm-image:"  # begin of the text that names an image; its key follows
LACKS = "this server does not keep the image"  # part of the refusal of a name
MOST_BYTES = 2**30  # of RGB pixels: 370 screenshots of 1280 x 768


class KeptImages(Generic[K, V]):
    """Values of the images that were used last, with at most `most_bytes` bytes of pixels."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()  # a server loads images in threads

    def get(self, key: K) -> V | None:
        """Return the value of an image and count it as used; return None if it is not kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep the value of an image with that many bytes of pixels."""
        self.drop(key)
        with self._lock:
            self._kept[key] = value, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._most_bytes:
                _, (_, freed) = self._kept.popitem(last=False)
                self._num_bytes -= freed

    def drop(self, key: K) -> None:
        with self._lock:
            _, freed = self._kept.pop(key, (None, 0))
            self._num_bytes -= freed


class SentImages:
    """Record of the images that a client has sent to servers that keep them."""

    def __init__(self) -> None:
        self._kept: dict[str, KeptImages[str, bool]] = {}
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> dict[str, float]:
        """Return counts since the last call, by the names of their metrics; {} without images.

        image_bytes_sent: Bytes of the pixels that were sent. images_named: Images that were named.
        images_refused: Images of them that were sent after all, because their server refused a
        request that named them.
        """
        taken, self._counts = self._counts, Counter()
        names = ("image_bytes_sent", "images_named", "images_refused")
        return {name: float(taken[name]) for name in names} if taken else {}

    def encoder(self, url: str, encoder: Encoder, *, keeps: bool) -> Encoder:
        """Return an encoder that names the images which a server keeps, and has `encoder` encode
        others. keeps: True if the server keeps images.
        """

        def image(shown: "ProcessedImage") -> Body:
            if keeps and self._of(url).get(shown.key):
                self._counts["images_named"] += 1
                return f'"{BEGIN}{shown.key}"'.encode()
            self._counts["image_bytes_sent"] += _num_bytes(shown)
            return encoder.image(shown)

        return Encoder(image, encoder.media)

    def answered(self, url: str, images: Iterable["ProcessedImage"]) -> None:
        """Note that a server has answered a request with these images."""
        for image in images:
            self._of(url).put(image.key, True, _num_bytes(image))

    def lost(self, url: str, images: Iterable["ProcessedImage"]) -> None:
        """Note that a server does not keep some of these images."""
        for image in images:
            self._counts["images_refused"] += self._of(url).get(image.key) is not None
            self._of(url).drop(image.key)

    def _of(self, url: str) -> KeptImages[str, bool]:
        return self._kept.setdefault(url, KeptImages())


def _num_bytes(image: "ProcessedImage") -> int:
    width, height = image.shown_size
    return 3 * width * height
