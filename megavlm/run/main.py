"""Entry points of a rank: `train` and `evaluate`."""

import os
import warnings

from megavlm.config.schema import Config
from megavlm.parallel import platform


def train(config: Config) -> None:
    """Trains as the configuration says; called on every rank that torchrun started."""
    _prepare()
    from megavlm.run.train import train as run

    run(config)


def evaluate(config: Config) -> None:
    """Evaluates one model or compares two; one rank does."""
    if os.environ.get("RANK", "0") == "0":
        _prepare()
        from megavlm.run.evaluate import evaluate_models

        evaluate_models(config)


def _prepare() -> None:
    """Before the first import of megatron-core."""
    # What megatron-core says of optional kernels, and of torch names that it still uses, at each
    # step and rank.
    warnings.filterwarnings("ignore", module=r"(megatron|torch\.distributed|torch\.nn)\.")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    platform.install()
