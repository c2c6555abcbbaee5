"""Rules of the `rollout` section: servers that megavlm starts, or running ones."""

from urllib.parse import urlsplit

from megavlm.config.algorithms import PolicyOptimization
from megavlm.config.schema import Config, LoRA, Rollout

# Options of the server that megavlm sets itself, and the key to set instead.
OWNED_SERVER_ARGS = {
    "model_path": "model.folder",
    "host": "rollout.mode=external",
    "port": "rollout.port",
    "tp": "rollout.tensor_parallel",
    "tp_size": "rollout.tensor_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "base_gpu_id": "rollout.gpus",
    "enable_memory_saver": "rollout.colocate",
    "dtype": "model.dtype",
    "config": "rollout.server_args",
}
# Options that run code from a model folder or a request, and keys: those are random for each run.
REFUSED_SERVER_ARGS = {
    "trust_remote_code": "it runs code from the model folder",
    "enable_custom_logit_processor": "it runs code from requests",
    "api_key": "it would show in the process list, and each run makes its own",
    "admin_api_key": "it would show in the process list, and each run makes its own",
}

# Environments of one response to the row's own prompt, whenever it comes (environments.registry).
STARTS_FROM_ROW = ("single_turn", "geo3k", "vqa", "caption", "geospot")

# What servers take as adapters (rollout.weights.adapters).
SERVED_TARGETS = ("language.attention", "language.mlp")


def check_rollout(rollout: Rollout) -> None:
    if rollout.mode == "external":
        _check_external(rollout)
    else:
        _check_managed(rollout)
    for url in rollout.urls:
        _check_url("urls", url)
    count = len(rollout.urls) if rollout.mode == "external" else rollout.servers
    if rollout.min_servers > count:
        raise ValueError(
            f"rollout.min_servers={rollout.min_servers} is more than the {count} servers that "
            "there are: lower it"
        )
    for name in rollout.server_args:
        plain = name.lstrip("-").replace("-", "_")
        if plain in OWNED_SERVER_ARGS:
            raise ValueError(
                f"rollout.server_args.{name} is set by megavlm: use {OWNED_SERVER_ARGS[plain]}"
            )
        if plain in REFUSED_SERVER_ARGS:
            raise ValueError(
                f"rollout.server_args.{name} is refused, because {REFUSED_SERVER_ARGS[plain]}: "
                "remove it"
            )


def _check_external(rollout: Rollout) -> None:
    if not rollout.urls:
        raise ValueError(
            "rollout.mode=external needs the servers' addresses: "
            "set rollout.urls=[http://HOST:PORT], or rollout.mode=managed to start a server"
        )
    if len({url.rstrip("/") for url in rollout.urls}) < len(rollout.urls):
        raise ValueError(f"rollout.urls={list(rollout.urls)} names a server twice: remove one")
    defaults = Rollout()
    for key in ("server_args", "port", "servers", "gpus", "colocate"):
        value = getattr(rollout, key)
        if value != getattr(defaults, key):
            shown = str(value).lower() if isinstance(value, bool) else value
            shown = list(value) if isinstance(value, tuple) else shown
            raise ValueError(
                f"rollout.{key}={shown} is for servers that megavlm starts, and "
                "rollout.mode=external starts none: remove it, or set rollout.mode=managed"
            )
    if rollout.router is not None:
        _check_url("router", rollout.router)


def _check_managed(rollout: Rollout) -> None:
    if rollout.urls or rollout.router is not None:
        key = "urls" if rollout.urls else "router"
        value = list(rollout.urls) or rollout.router
        raise ValueError(
            f"rollout.{key}={value} would not be used with rollout.mode=managed: "
            "set rollout.mode=external or remove it"
        )
    if rollout.port is not None and rollout.port + rollout.servers > 65536:
        raise ValueError(
            f"rollout.port={rollout.port} is the first of rollout.servers={rollout.servers} ports, "
            "which end at 65535: lower one of them"
        )
    _check_gpus(rollout)
    if rollout.colocate and rollout.sync == "distributed":
        raise ValueError(
            "rollout.sync=distributed is a group of processes that each have a GPU of their own, "
            "and rollout.colocate=true shares them: set rollout.sync to tensor or disk"
        )


def _check_gpus(rollout: Rollout) -> None:
    gpus, size = rollout.gpus, rollout.tensor_parallel
    if not gpus:
        return
    if len(gpus) != rollout.servers * size or len(set(gpus)) < len(gpus):
        raise ValueError(
            f"rollout.gpus={list(gpus)} must name {rollout.servers * size} different GPUs, for "
            f"rollout.servers={rollout.servers} x rollout.tensor_parallel={size}: name one for "
            "each rank, or none to take those after the trainer's"
        )
    for start in range(0, len(gpus), size):
        own = gpus[start : start + size]
        if own != tuple(range(own[0], own[0] + size)):
            raise ValueError(
                f"rollout.gpus={list(gpus)} gives one server {list(own)}, and a server takes GPUs "
                "that follow each other: order them so"
            )


def check_oversample(config: Config) -> None:
    rollout, algorithm, environment = config.rollout, config.algorithm, config.environment
    if rollout.oversample == 1 or not isinstance(algorithm, PolicyOptimization):
        return
    if rollout.router is not None:
        raise ValueError(
            f"rollout.oversample={rollout.oversample} aborts requests at servers, and "
            f"rollout.router={rollout.router} hides them: set rollout.router=null or "
            "rollout.oversample=1.0"
        )
    if not rollout.suppress_special_tokens:
        raise ValueError(
            f"rollout.oversample={rollout.oversample} goes on with aborted responses, in which a "
            "sampled image token would be taken for an image: set "
            "rollout.suppress_special_tokens=true or rollout.oversample=1.0"
        )
    if environment.name not in STARTS_FROM_ROW:
        raise ValueError(
            f"rollout.oversample={rollout.oversample} goes on with responses in later steps, when "
            f"environment.name={environment.name} may start differently: set "
            f"environment.name to one of {', '.join(STARTS_FROM_ROW)}, or rollout.oversample=1.0"
        )
    if algorithm.old_logprobs == "trainer" and algorithm.importance == "none":
        raise ValueError(
            f"rollout.oversample={rollout.oversample} trains on tokens that older weights sampled, "
            "for which algorithm.importance=none does not correct: set algorithm.importance=token "
            "or rollout.oversample=1.0"
        )


def check_router(rollout: Rollout) -> None:
    """sglang-router 0.3.2 writes requests anew, with the sampling parameters that it knows."""
    if rollout.router is not None and rollout.suppress_special_tokens:
        raise ValueError(
            f"rollout.router={rollout.router} leaves logit biases out of the requests that it "
            "passes on, and rollout.suppress_special_tokens=true is one: servers would sample from "
            "another distribution than the one that is trained; set "
            "rollout.suppress_special_tokens=false or rollout.router=null"
        )


def check_adapters(rollout: Rollout, lora: LoRA) -> None:
    if rollout.lora == "merged":
        return
    if lora.rank == 0:
        raise ValueError(
            "rollout.lora=adapter sends adapters, and lora.rank=0 trains none: "
            "set lora.rank, or rollout.lora=merged"
        )
    others = [target for target in lora.targets if target not in SERVED_TARGETS]
    if others:
        raise ValueError(
            f"rollout.lora=adapter cannot serve lora.targets={others[0]}: SGLang takes adapters on "
            f"{' and '.join(SERVED_TARGETS)} from a trainer; set rollout.lora=merged"
        )


def _check_url(key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # a port that is no number, or brackets that do not close
        whole = False
    if not whole or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"rollout.{key} holds {url!r}, which is no server's address: write http://HOST:PORT"
        )
    if "@" in parts.netloc:
        raise ValueError(
            f"rollout.{key} holds a user name or password for {parts.hostname}, which would be "
            "written to the run directory: give keys through the environment"
        )
