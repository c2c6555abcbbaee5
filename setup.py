import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# Read and not imported: pip builds without this folder on its path.
VERSION = re.findall('__version__ = "(.+)"', (ROOT / "megavlm/__init__.py").read_text())

setup(
    name="megavlm",
    version=VERSION[0],
    description="Reinforcement learning for vision-language models on megatron-core and SGLang",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megavlm*", "checkpoint_tools*"]),
    package_data={
        "megavlm": [
            "demo/*.html",
            "inference/server_support/*.dist-info/*",
            "observability/templates/*",
            "slurm/*.j2",
            "slurm/*.sh",
            "tasks/*/*.html",
            "tasks/*/*.svg",
        ]
    },
    install_requires=[
        "aiohttp>=3.11",
        "fsspec>=2024.6",
        "httpx>=0.28",
        "huggingface-hub>=1.0",
        "jinja2>=3.1",
        "math-verify==0.9.0",
        "matplotlib>=3.10",
        "megatron-core==0.16.1",
        "numpy>=2.0",
        "omegaconf>=2.3",
        "orjson>=3.10",
        "pillow>=11.0",
        "prometheus-client>=0.21",
        "psutil>=6.0",
        "pyarrow>=18.0",
        "pycountry>=24.6",
        "pydantic>=2.10",
        "regex>=2024.11",
        "rich>=13.0",
        "safetensors>=0.5",
        "scipy>=1.15",
        "tensorboard>=2.18",
        "tokenizers>=0.22",
        "torch>=2.11",
        "torchdata>=0.11",
        "torchvision>=0.26",
        "transformers>=5.12,<6",
        "typer>=0.15",
    ],
    extras_require={
        # The range that megatron-core 0.16.1 names; its torch extension is compiled on install.
        "gpu": ["transformer-engine[pytorch]>=2.9,<2.12"],
        # Gated DeltaNet's kernels (Qwen3.5), for a GPU.
        "linear-attention": ["fla-core>=0.6,<0.7"],
        # Experiment trackers (run.trackers).
        "wandb": ["wandb>=0.20"],
        # Video files in the data; videos stored as frames need no package.
        "video": [
            "av>=18",
        ],
        # Environments and tools of other libraries (environment.name, environment.tools). OpenEnv's
        # servers are reached by websockets; verifiers 0.4 has no classic interface.
        "gymnasium": [
            "gymnasium>=1.0,<2",
        ],
        "mcp": [
            "mcp>=2.0,<3",
        ],
        "openenv": [
            "websockets>=15",
        ],
        # Pages in a headless Chromium, which the system's packages provide.
        "browser": [
            "playwright>=1.60,<2",
        ],
        "verifiers": ["verifiers>=0.2,<0.4"],
        "sglang": ["sglang>=0.5.21,<=0.5.23"],
        "dev": [
            "hypothesis>=6.100",
            "mypy>=1.15",
            "openai>=2.8",
            "pytest>=8.3,<9.2",  # pytest-xdist 3.8 does not group the tests of later ones
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
        ],
    },
    entry_points={
        "console_scripts": [
            "megavlm = megavlm.cli:main",
            "megavlm-convert = checkpoint_tools.cli:main",
        ]
    },
)
