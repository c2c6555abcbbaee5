"""Rules of the `rollout` section: servers that megavlm starts, or running ones."""

from urllib.parse import urlsplit

from megavlm.config.schema import Rollout

# Options of the server that megavlm sets itself, and the key to set instead.
OWNED_SERVER_ARGS = {
    "model_path": "model.folder",
    "host": "rollout.mode=external",
    "port": "rollout.port",
    "tp": "rollout.tensor_parallel",
    "tp_size": "rollout.tensor_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
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


def check_rollout(rollout: Rollout) -> None:
    if rollout.mode == "external" and not rollout.urls:
        raise ValueError(
            "rollout.mode=external needs the servers' addresses: "
            "set rollout.urls=[http://HOST:PORT], or rollout.mode=managed to start a server"
        )
    if rollout.mode == "managed" and rollout.urls:
        raise ValueError(
            f"rollout.urls={list(rollout.urls)} would not be used with rollout.mode=managed: "
            "set rollout.mode=external or remove them"
        )
    for url in rollout.urls:
        _check_url(url)
    if rollout.mode == "external" and (rollout.server_args or rollout.port is not None):
        key = "server_args" if rollout.server_args else "port"
        raise ValueError(
            f"rollout.{key}={getattr(rollout, key)} is for a server that megavlm starts, and "
            "rollout.mode=external starts none: remove it, or set rollout.mode=managed"
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


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # a port that is no number, or brackets that do not close
        whole = False
    if not whole or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"rollout.urls holds {url!r}, which is no server's address: write http://HOST:PORT"
        )
    if "@" in parts.netloc:
        raise ValueError(
            f"rollout.urls holds a user name or password for {parts.hostname}, which would be "
            "written to the run directory: give keys through the environment"
        )
