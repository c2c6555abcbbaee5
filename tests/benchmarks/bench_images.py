"""`make bench`: prints what images cost rank 0: one image as files for a rollout server and as
pixels or patches; and the plan of a step of 512 prompts, for several numbers of ranks.
"""

import asyncio
import base64
import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from megavlm.data.loader import holding
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.trees import prompt_tree
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row
from megavlm.data.shared_pickle import SharedPickle
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.inference.bodies import IN_BODY, generate_body
from megavlm.inference.protocol import SamplingParams
from megavlm.inference.requests import _chunks, _in_files
from megavlm.parallel.shared_file import shared_file
from megavlm.training.step.image_plan import plan_images
from megavlm.training.step.pack_plan import Schedule
from megavlm.training.step.rank_images import image_places, sources_to_bytes
from megavlm.training.step.step_plan import (
    Minibatches,
    PackShape,
    StepPlan,
    plan_step,
    shown_images,
)
from tests.conftest import DATA
from tests.support.columns import columns

SIZE = (1148, 868)  # 1 megapixel
PROMPTS_PER_STEP, NUM_PROMPTS = 512, 16  # of which the costs are scaled up


def bench_images(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, ["What is it?"], seed=0)
    processor = Processor(tmp_path, DATA, family_of(tmp_path), cache_bytes=0)
    row = Row(0, "<image>?", "", (photo(),), "", "")
    image = processor.prompt(row).images[0]
    prepared = milliseconds(lambda: processor.prompt(row))
    print(f"\n{image.pixels.shape[2]} x {image.pixels.shape[1]} pixels, of rank 0's CPU time")
    print(f"{'decoded and resized':38}{prepared:8.1f} ms")

    def by_path() -> bytes:
        with shared_file(*image.ppm()) as path:
            return path.encode()

    def read_path(_: bytes) -> object:
        with shared_file(*image.ppm()) as path:
            return Image.open(path).load()

    forms: dict[str, tuple[Callable[[], bytes], Callable[[bytes], object]]] = {
        "PNG": (lambda: request(image.png()), read_file),
        "PPM": (lambda: request(b"".join(image.ppm())), read_file),
        "PPM by its path": (by_path, read_path),
        "JPEG as stored": (lambda: request(row.images[0]), read_file),
        "patches, as processed input": (
            lambda: json.dumps(image.patches().tolist()).encode(),
            lambda text: torch.tensor(json.loads(text)),
        ),
    }
    for name, (send, read) in forms.items():
        text, sent = send(), milliseconds(send)
        taken = milliseconds(partial(read, text)) - (sent if read is read_path else 0)
        print(
            f"{name + ' for a server':38}{sent:8.1f} ms, {len(text) / 1e6:6.1f} MB, "
            f"read in {taken:6.1f} ms"
        )
    for name, travels in {
        "patches": lambda: pickle.dumps(image.patches()),
        "pixels": lambda: pickle.dumps(image),
    }.items():
        took = milliseconds(travels)
        print(f"{name + ' for a rank':38}{took:8.1f} ms, {len(travels()) / 1e6:6.1f} MB")


@dataclass(frozen=True)
class Cost:
    """CPU seconds and bytes of rank 0."""

    seconds: float
    bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes)


def bench_step(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, ["What is it?"], seed=0)
    processor = Processor(tmp_path, DATA, family_of(tmp_path), cache_bytes=0)
    rows = [Row(i, "<image>?", "", (photo(),), "", "") for i in range(NUM_PROMPTS)]
    prompts = [processor.prompt(row) for row in rows]
    trees = [prompt_tree(p, [[7] * 256] * 8, [columns(256)] * 8) for p in prompts]
    images = {image.key: image for prompt in prompts for image in prompt.images}
    patches = {key: image.patches() for key, image in images.items()}
    packed = [SharedPickle.of((images[key].png(), patches[key])) for key in images]
    before_asked = measured(partial(before_requests, packed))
    remote, asked = (measured(requests_of(prompts, is_local=local)) for local in (False, True))
    print(f"\nrank 0's share of a step: {PROMPTS_PER_STEP} prompts of an image of 1 megapixel;")
    print("before: PNG files for servers, patches for every rank")
    print(f"{'ranks':32}{'before':>20}{'after':>20}{'seconds':>9}{'bytes':>7}")
    _show("requests to other machines", before_asked, remote)
    _show("requests to its own servers", before_asked, asked)
    for data_size, slots in ((1, 1), (2, 2), (4, 4)):
        shape = PackShape(vision_token_ids=processor.vision_token_ids)
        ranks = plan_step(
            [trees],
            num_ranks=data_size,
            max_tokens=2**14,
            schedule=Schedule(),
            cost=lambda tree: [float(len(segment.token_ids)) for segment in tree.segments],
        )
        before = measured(partial(before_plan, ranks, shape, patches, slots))
        after = measured(partial(after_plan, ranks, shape, prompts, slots))
        name = f"{data_size * slots} (data {data_size} x tensor {slots})"
        _show(name, before + before_asked, after + asked)


def _show(name: str, before: Cost, after: Cost) -> None:
    print(
        f"{name:32}{_text(before):>20}{_text(after):>20}"
        f"{before.seconds / after.seconds:9.1f}{before.bytes / max(after.bytes, 1):7.1f}"
    )


def before_requests(packed: Sequence[SharedPickle]) -> int:
    """Take the PNG files and patches of the workers, and make the requests' texts. Returns the
    bytes sent.
    """
    return sum(len(request(received.unpack()[0])) for received in packed)


def requests_of(prompts: Sequence[Prompt], *, is_local: bool) -> Callable[[], int]:
    """Return a function that takes what the workers made, and makes the pieces that are sent; it
    returns their bytes.
    """
    packed = [SharedPickle.of(holding(p, "pixels" if is_local else "requests")) for p in prompts]
    sampling_params = SamplingParams(temperature=1.0, max_new_tokens=256)

    async def send() -> int:
        count = 0
        for received in packed:
            with ExitStack() as files:
                encoder = _in_files(files) if is_local else IN_BODY
                body = generate_body([received.unpack()], 8, sampling_params, encoder)
                count += sum([len(piece) async for piece in _chunks(body)])
        return count

    return lambda: asyncio.run(send())


def before_plan(
    ranks: list[Minibatches], shape: PackShape, patches: Mapping[str, Tensor], slots: int
) -> int:
    """Pickle each rank's packs and patches, padded to the largest. Returns the bytes sent."""
    batches = []
    for minibatches in ranks:
        packs = [[make_pack(trees, **asdict(shape)) for trees in packs] for packs in minibatches]
        shown = {key: patches[key] for key in shown_images(minibatches)}
        batches.append((packs, shown))
    sizes = [len(pickle.dumps(batch)) for batch in batches for _ in range(slots)]
    return max(sizes) * (len(sizes) - 1)


def after_plan(
    ranks: list[Minibatches], shape: PackShape, prompts: Sequence[Prompt], slots: int
) -> int:
    images = {image.key: image for prompt in prompts for image in prompt.images}
    places = image_places(prompts)
    plan = StepPlan(
        minibatches=ranks,
        images=plan_images(
            [shown_images(minibatches) for minibatches in ranks],
            {key: image.grids for key, image in images.items()},
            {key: float(image.num_patches) for key, image in images.items()},
            slots=slots,
        ),
        sources={key: places.get(image.digest, image) for key, image in images.items()},
        num_tokens=0,
        tower_trained=False,
        shape=shape,
    )
    parts = [len(plan.part(data_rank)) for data_rank in range(len(ranks))]
    payloads = [plan.sources_of(*divmod(rank, slots)) for rank in range(len(ranks) * slots)]
    sent = sum(len(sources_to_bytes(sources)) for sources in payloads[1:])
    # Its own part goes to two other ranks, which pass it on.
    return sent + sum(parts[1:]) + min(2, slots - 1) * parts[0]


def measured(work: Callable[[], int]) -> Cost:
    """Return the cost of a whole step, from some of its prompts."""
    scale = PROMPTS_PER_STEP / NUM_PROMPTS
    return Cost(milliseconds(work) / 1000 * scale, round(work() * scale))


def _text(cost: Cost) -> str:
    return f"{cost.seconds:.2f} s, {cost.bytes / 1e6:,.0f} MB"


def request(file: bytes) -> bytes:
    """Return the part of a request's body that holds an image."""
    return json.dumps(base64.b64encode(file).decode("ascii")).encode()


def read_file(text: bytes) -> object:
    """Read an image of `request` as a server does."""
    return Image.open(BytesIO(base64.b64decode(json.loads(text)))).load()


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
