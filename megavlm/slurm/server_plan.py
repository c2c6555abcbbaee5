"""`megavlm plan --servers`: prints how to start a recipe's servers on other nodes."""

import shlex
from collections.abc import Iterable

from megavlm.config.schema import Config
from megavlm.inference.server_args import ServerOptions, command_line
from megavlm.inference.server_pool.requirements import EXPOSE_ENVIRONMENT


def server_plan(config: Config, gpus: int | None = None) -> str:
    """Return bash assignments of the run directory, the GPUs per server, the server's environment,
    and SGLang's arguments except address and GPUs.

    gpus: GPUs of a rollout node. If given, `rollout.urls` are the nodes, each with its first port,
    and the overrides with the servers' addresses and the command of each node are assigned, too.
    """
    options = ServerOptions.from_config(config, config.model.folder, "cuda")
    variables = options.variables() | {EXPOSE_ENVIRONMENT: "1"}
    environment = [f"{name}={value}" for name, value in variables.items()]
    arguments = command_line(options.arguments())
    lines = [
        f"run_dir={shlex.quote(config.run.dir)}",
        f"tensor_parallel={options.tensor_parallel}",
        _array("server_environment", environment),
        _array("server_arguments", arguments),
    ]
    if gpus is None:
        return "\n".join(lines)
    nodes = [url.removeprefix("http://").rsplit(":", 1) for url in config.rollout.urls]
    ranks = options.tensor_parallel
    count, span = servers_of_nodes(ranks, len(nodes), gpus)
    addresses = [(host, int(port) + i) for host, port in nodes[::span] for i in range(count)]
    urls = ",".join(f"'http://{host}:{port}'" for host, port in addresses)
    lines.append(_array("addresses", ["rollout.mode=external", f"rollout.urls=[{urls}]"]))
    for index, (node, port) in enumerate(nodes):
        # A server listens on the address that the other nodes use, not on every interface.
        words = [config.run.dir, node, port, count, ranks, *arguments]
        if span > 1:  # SGLang takes up to six more ports after this one.
            host, first_port = addresses[index // span]
            words += ["--nnodes", span, "--node-rank", index % span]
            words += ["--dist-init-addr", f"{host}:{first_port + 1}"]
        command = ["env", *environment, "python", "-P", "-m", "megavlm.slurm.servers", *words]
        lines.append(_array(f"server_{index}", map(str, command)))
    return "\n".join(lines)


def servers_of_nodes(tensor_parallel: int, nodes: int, gpus: int) -> tuple[int, int]:
    """Return the number of servers of a rollout node with `gpus` GPUs, and of nodes of a server:
    several servers are on a node, or each takes several whole nodes.

    Raises ValueError if `nodes` nodes and their GPUs do not divide evenly.
    """
    count, span = max(gpus // tensor_parallel, 1), max(tensor_parallel // gpus, 1)
    if tensor_parallel > gpus and (tensor_parallel % gpus or nodes % span):
        raise ValueError(
            f"rollout.tensor_parallel={tensor_parallel} on {nodes} rollout nodes of {gpus} GPUs: a "
            "server of more GPUs than a node has takes whole nodes, so it must be a multiple of "
            "their GPUs, and the rollout nodes a multiple of a server's nodes; change one of them"
        )
    return count, span


def _array(name: str, words: Iterable[str]) -> str:
    return f"{name}=({' '.join(map(shlex.quote, words))})"
