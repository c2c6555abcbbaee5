"""Entry points of a rank: `train` and `evaluate`."""

import os
import warnings

from megavlm.config.schema import Config
from megavlm.parallel import platform


def train(config: Config) -> None:
    """Train a recipe. Called on every rank that torchrun started."""
    _prepare()
    from megavlm.run.train import train as run

    run(config)


def evaluate(config: Config) -> None:
    """Evaluate one model or compare two; rank 0 does all of it."""
    if os.environ.get("RANK", "0") == "0":
        _prepare()
        from megavlm.run.evaluate import evaluate_models

        evaluate_models(config)


def _prepare() -> None:
    """Install the platform; call it before the first import of megatron-core."""
    # megatron-core warns at each step and rank of optional kernels and of deprecated torch names.
    warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed|torch\.nn)\.")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    platform.install()
