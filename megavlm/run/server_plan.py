"""How a recipe's servers are started elsewhere: what launch/slurm.sbatch asks."""

import shlex
from collections.abc import Iterable

from megavlm.config.schema import Config
from megavlm.inference.server_args import arguments, image_variables, recipe_args, serving_args
from megavlm.inference.server_pool.requirements import TOLD
from megavlm.models.options import trains_tower


def server_plan(config: Config) -> str:
    """Assignments for bash: GPUs of a server, its environment, and SGLang's arguments but for the
    address and the GPUs.
    """
    size = config.rollout.tensor_parallel
    values = serving_args(
        config.model.folder, config.model.dtype, "cuda", size, recipe_args(config, "cuda")
    )
    variables = image_variables(not trains_tower(config)) | {TOLD: "1"}
    lines = [
        f"tensor_parallel={size}",
        _array("server_environment", (f"{name}={value}" for name, value in variables.items())),
        _array("server_arguments", arguments(values)),
    ]
    return "\n".join(lines)


def _array(name: str, words: Iterable[str]) -> str:
    return f"{name}=({' '.join(map(shlex.quote, words))})"
