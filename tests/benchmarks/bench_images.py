"""`make bench`: prints what an image costs rank 0: as files for a rollout server, and as pixels or
patches for the ranks that encode it.
"""

import base64
import json
import pickle
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from PIL import Image

from megavlm.data.image_processing import ProcessedImage
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from tests.conftest import DATA

SIZE = (1148, 868)  # 1 megapixel


def bench_images(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, ["What is it?"], seed=0)
    processor = Processor(tmp_path, DATA, cache_bytes=0)
    row = Row(0, "<image>?", "", (photo(),), "", "")
    image = processor.prompt(row).images[0]
    prepared = milliseconds(lambda: processor.prompt(row))
    print(f"\n{image.pixels.shape[2]} x {image.pixels.shape[1]} pixels, of rank 0's CPU time")
    print(f"{'decoded and resized':32}{prepared:8.1f} ms")
    for name, make in {
        "PNG": lambda: image.file("PNG"),
        "BMP": lambda: image.file("BMP"),
    }.items():
        encode, text = milliseconds(make), base64.b64encode(make()).decode()
        send = milliseconds(lambda make=make: request(make()))
        read = milliseconds(lambda make=make: Image.open(BytesIO(make())).load()) - encode
        print(
            f"{name + ' for a server':32}{send:8.1f} ms, {len(text) / 1e6:6.1f} MB, "
            f"read in {read:6.1f} ms"
        )
    for name, travels in {
        "patches": lambda: pickle.dumps(image.patches()),
        "pixels": lambda: pickle.dumps(image),
    }.items():
        took = milliseconds(travels)
        print(f"{name + ' for a rank':32}{took:8.1f} ms, {len(travels()) / 1e6:6.1f} MB")
    before = milliseconds(lambda: before_step(image))
    after = milliseconds(lambda: (request(image.file("BMP")), pickle.dumps(image)))
    print(f"{'PNG and patches / BMP and pixels':32}{before / after:8.1f}")


def before_step(image: ProcessedImage) -> object:
    return request(image.file("PNG")), pickle.dumps(image.patches())


def request(file: bytes) -> bytes:
    """Return the part of a request's body that holds an image."""
    return json.dumps(base64.b64encode(file).decode("ascii")).encode()


def photo() -> bytes:
    """Return a JPEG with the noise of a camera."""
    content = BytesIO()
    smooth = Image.radial_gradient("L").resize(SIZE)
    noisy = Image.blend(smooth, Image.effect_noise(SIZE, 30), 0.2)
    Image.merge("RGB", (noisy, smooth, noisy)).save(content, "JPEG", quality=90)
    return content.getvalue()


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1000 * min(times)
