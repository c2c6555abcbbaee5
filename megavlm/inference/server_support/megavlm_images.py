"""Images in the first process of a server: one copy of their pixels in shared memory for all
responses, and hashes of their content.

For n responses to a prompt SGLang sends its ranks n + 1 requests, and writes the pixels to shared
memory for each: 25 MB and 23 ms of CPU time for an image of one megapixel. Here each request after
the first gets a hard link to the same file. As before, a rank removes the name in its request; the
file is freed with its last name.

SGLang caches features and prefixes by a hash of an image's patches, which each rank would compute
for each response. The first process could compute it once, but not where it has already handed the
patches over to the ranks in GPU memory, which it cannot open itself. Here it takes the hash of the
picture, which the trainer knows the image by.

A picture is kept after its first request. Later turns of its session name it by its key, and it is
neither sent, nor decoded, nor hashed again.
"""

import hashlib
import os
import secrets
import weakref
from io import BytesIO
from typing import Any

from PIL.Image import Image
from PIL.Image import open as open_image
from sglang.srt.managers.mm_utils import ShmPointerMMData
from sglang.srt.multimodal.cache import identity
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor, Modality

from megavlm.inference.kept_images import BEGIN, LACKS, KeptImages

FOLDER = "/dev/shm"  # noqa: S108
HASH = "megavlm_hash"  # attribute of a picture: its hash


def install() -> None:
    """Make SGLang write a tensor to shared memory only once while the tensor exists, hash pictures
    and not patches, and take pictures that it has had by their keys.
    """
    load, read = BaseMultimodalProcessor._load_single_item.__func__, identity._read_media_bytes
    write, process = ShmPointerMMData.__init__, BaseMultimodalProcessor.process_and_combine_mm_data
    written: dict[int, dict[str, Any]] = {}  # id of a tensor -> attributes of a pointer to it
    kept: KeptImages[int, Image] = KeptImages()

    def point(self: Any, tensor: Any, *arguments: Any, **keywords: Any) -> None:
        if (known := written.get(id(tensor))) is not None:
            vars(self).update(known, shm_name=_link(known["shm_name"]))
            return
        write(self, tensor, *arguments, **keywords)
        name = _link(self.shm_name)
        written[id(tensor)] = {**vars(self), "shm_name": name}
        weakref.finalize(tensor, forget, id(tensor), name)

    def forget(tensor_id: int, name: str) -> None:
        del written[tensor_id]
        os.unlink(f"{FOLDER}/{name}")

    def process_with_hashes(self: Any, media: Any, *arguments: Any, **options: Any) -> Any:
        made = process(self, media, *arguments, **options)
        # Media that the trainer has processed come with their hashes (megavlm_videos.py).
        items = [item for item in made[0] if item.is_image() and item.hash is None]
        pictures = [picture for picture in media.images or () if isinstance(picture, Image)]
        if len(items) == len(pictures):  # a model may cut a picture into several items
            for item, picture in zip(items, pictures, strict=True):
                if not hasattr(picture, HASH):
                    setattr(picture, HASH, content_hash(picture))
                item.hash = getattr(picture, HASH)
        for picture in pictures:
            if hasattr(picture, HASH):
                kept.put(getattr(picture, HASH), picture, 3 * picture.width * picture.height)
        return made

    def load_or_find(cls: Any, data: Any, modality: Any, *arguments: Any, **options: Any) -> Any:
        if modality is not Modality.IMAGE or not str(data).startswith(BEGIN):
            return load(cls, data, modality, *arguments, **options)
        return find(data)

    def find(name: str) -> Image:
        picture = kept.get(int(name.removeprefix(BEGIN)[:16], 16))
        if picture is None:
            raise ValueError(LACKS)  # SGLang answers with HTTP 400
        return picture

    def read_or_find(media: str | bytes) -> bytes:
        """For Qwen3-VL and Qwen3.5, SGLang reads the file of an image before it loads it."""
        if str(media).startswith(BEGIN):
            picture = find(str(media))
            # The bytes that were sent, by whose hash SGLang may have cached the patches.
            return b"P6 %d %d 255\n" % picture.size + picture.tobytes()
        content: bytes = read(media)
        picture = open_image(BytesIO(content)).convert("RGB")
        kept.put(content_hash(picture), picture, 3 * picture.width * picture.height)
        return content

    ShmPointerMMData.__init__ = point
    BaseMultimodalProcessor.process_and_combine_mm_data = process_with_hashes
    BaseMultimodalProcessor._load_single_item = classmethod(load_or_find)
    identity._read_media_bytes = read_or_find


def content_hash(picture: Image) -> int:
    """Return the first 8 bytes of `ProcessedImage.key`, as a number."""
    size = f"{picture.width}x{picture.height}:".encode()
    return int.from_bytes(hashlib.sha256(size + picture.tobytes()).digest()[:8], "big")


def _link(name: str) -> str:
    """Create a hard link whose name contains this process's id, as SGLang's shared-memory names
    do.
    """
    new = f"sgl_shm_mm_{os.getpid()}_{secrets.token_hex(4)}"
    os.link(f"{FOLDER}/{name}", f"{FOLDER}/{new}")
    return new
