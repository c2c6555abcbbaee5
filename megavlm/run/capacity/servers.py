"""`megavlm plan --servers`: prints how to start a recipe's servers on other nodes."""

import shlex
from collections.abc import Iterable

from megavlm.config.schema import Config
from megavlm.inference.server_args import ServerOptions, command_line
from megavlm.inference.server_pool.requirements import EXPOSE_ENVIRONMENT


def server_plan(config: Config) -> str:
    """Return bash assignments of the run directory, the GPUs per server, the server's environment,
    and SGLang's arguments except address and GPUs.
    """
    options = ServerOptions.from_config(config, config.model.folder, "cuda")
    variables = options.variables() | {EXPOSE_ENVIRONMENT: "1"}
    lines = [
        f"run_dir={shlex.quote(config.run.dir)}",
        f"tensor_parallel={options.tensor_parallel}",
        _array("server_environment", (f"{name}={value}" for name, value in variables.items())),
        _array("server_arguments", command_line(options.arguments())),
    ]
    return "\n".join(lines)


def _array(name: str, words: Iterable[str]) -> str:
    return f"{name}=({' '.join(map(shlex.quote, words))})"
