import gc
import os

gc.disable()  # until all tests are collected (conftest.py)

from megavlm.parallel import platform  # noqa: E402

# Before any test imports megatron. MEGAVLM_GPU_PATH=1: as on a GPU, but for kernels and NCCL.
if os.environ.get("MEGAVLM_GPU_PATH"):
    from tests.gpu_path import stage

    stage.install()
else:
    platform.install()
