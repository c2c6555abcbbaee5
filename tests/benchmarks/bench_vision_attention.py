"""`make bench`: prints how much faster a vision tower attends image by image on a CPU than under
SGLang's dense mask over all images of a batch.
"""

import os
import subprocess
import sys

from megavlm.inference.server_args import ServerOptions

PROGRAM = """
import time
import torch
from sglang.srt.layers.attention import vision

PATCHES, HEADS, SIZE = 756, 4, 24  # an image of 385 x 385 pixels in the demo's tower
form = dict(head_dim=SIZE, num_heads=HEADS, num_kv_heads=HEADS, flatten_batch=True)


def seconds(backend, images):
    total = images * PATCHES
    inputs = [torch.randn(total, HEADS, SIZE) for _ in range(3)]
    ends = torch.arange(0, total + 1, PATCHES)
    attention = backend(**form)
    times = []
    for _ in range(2):
        vision.VisionSdpaAttention._generate_mask_cache.cache_clear()
        start = time.process_time()
        attention(*inputs, 1, ends)
        times.append(time.process_time() - start)
    return min(times)


print()
for images in (1, 4, 8):
    own = seconds(vision.VisionSdpaAttention, images)
    ours = seconds(vision.QKV_BACKEND_IMPL["sdpa"], images)
    print(f"{images:3} images, one layer: dense mask / image by image {own / ours:8.1f}")
"""


def bench_vision_attention() -> None:
    options = ServerOptions("m", dtype="float32", device="cpu")
    subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], env=os.environ | options.environment(), check=True
    )
