"""Requirements on a server, checked with its own /server_info."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.config.transports import check_one_machine
from megavlm.inference.server_main import LOADER, VIDEOS

Version = tuple[int, ...]
# Oldest SGLang release with all that megavlm uses (the last is sessions of weight updates), and the
# newest that is tested.
OLDEST, NEWEST = (0, 5, 21), (0, 5, 23)
DRAFTING = (0, 5, 23)  # the release in which updates of a draft model's target are tested
IMAGE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
EXPOSE_ENVIRONMENT = "SGLANG_EXPOSE_OWN_ENV_VARS"  # makes /server_info list the server's variables

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Requirements:
    """Requirements on a server that was started elsewhere.

    fresh_images: True if training changes the vision tower. The server must then cache no image
    features, because SGLang does not drop them when weights change. sync: Transport of the weights
    that are pushed to it; None if none are. routed_experts: True if it must return the experts of
    tokens. kept_tokens: Tokens that it must be able to return as kept by top-p and top-k; 0 if it
    need not. expert_adapters: True if it gets adapters on experts. Only megavlm's plugin then finds
    the experts' own weights (megavlm_adapters.py); SGLang's scheduler would end with a KeyError.
    """

    fresh_images: bool = False
    sync: str | None = None
    routed_experts: bool = False
    kept_tokens: int = 0
    expert_adapters: bool = False

    def read(self, info: Mapping[str, Any]) -> tuple[int, str, bool]:
        """Return the server's number of ranks, its device, and whether it takes videos.

        Raises ValueError that says how the server must be started.
        """
        if self.fresh_images and _variable(info, IMAGE_CACHE) != "0":
            raise ValueError(
                f"does not report that it caches no image features, but training changes the "
                f"tower that makes them: start it with {IMAGE_CACHE}=0 and "
                f"{EXPOSE_ENVIRONMENT}=1 in its environment"
            )
        if self.routed_experts and info.get("enable_return_routed_experts") is not True:
            raise ValueError(
                "does not return the routed experts that algorithm.routing_replay=true "
                "replays: start it with --enable-return-routed-experts, or set routing_replay=false"
            )
        most = info.get("sampling_mask_max_tokens") or 0
        if self.kept_tokens > most:
            raise ValueError(
                f"returns at most {most} tokens that top-p and top-k keep, but "
                f"rollout.top_k={self.kept_tokens}: start SGLang 0.5.23 with "
                f"--sampling-mask-max-tokens {self.kept_tokens}, or lower rollout.top_k"
            )
        if self.kept_tokens and info.get("speculative_algorithm"):
            raise ValueError(
                "decodes speculatively, and then does not return the tokens that rollout.top_p and "
                "rollout.top_k keep: start it without --speculative-algorithm, or set "
                "rollout.top_p=1 and rollout.top_k=0"
            )
        loaders = info.get("custom_weight_loader") or ()
        if self.expert_adapters and LOADER not in loaders:
            raise ValueError(
                "was not started by megavlm, whose plugin rollout.lora=adapter needs for "
                "lora.targets=language.experts: start it with python -m megavlm.slurm.servers, or "
                "set rollout.lora=merged"
            )
        if self.sync is None and info.get("load_format") == "dummy":
            raise ValueError(
                "was started without weights, as servers of rollout.quantization=fp8 are, and gets "
                "none from this command: set rollout.mode=managed, or start it without quantization"
            )
        if not isinstance(info.get("tp_size"), int) or not isinstance(info.get("device"), str):
            raise ValueError("does not report its tp_size and device, as SGLang does")
        nodes = info.get("nnodes", 1)
        if self.sync is not None and info["device"] == "cuda" and nodes > 1:
            check_one_machine(self.sync, f"runs on {nodes} nodes")
        return info["tp_size"], info["device"], VIDEOS in loaders


def check_version(info: Mapping[str, Any]) -> None:
    """Raise ValueError if a server is older than the oldest supported SGLang; warn if it is newer
    than the newest tested.
    """
    version = server_version(info)
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    if version < OLDEST:
        raise ValueError(
            f"runs SGLang {info.get('version')}, but {oldest} to {newest} are supported: install "
            "one of these where the server runs"
        )
    if version < DRAFTING and info.get("speculative_algorithm"):
        raise ValueError(
            f"runs SGLang {info.get('version')} with speculative decoding, but needs "
            f"{'.'.join(map(str, DRAFTING))} or newer for it: update it, or start the server "
            "without --speculative-algorithm"
        )
    if version > NEWEST:
        logger.warning(
            "a rollout server runs SGLang %s; up to %s is tested, and weight updates may fail",
            info.get("version"),
            newest,
        )


def server_version(info: Mapping[str, Any]) -> Version:
    """Return the release in /server_info; (0,) if it has none."""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", str(info.get("version")))
    return (0,) if version is None else tuple(map(int, version.groups()))


def _variable(info: Mapping[str, Any], name: str) -> str | None:
    """Return an environment variable of the server's schedulers; None if they differ or do not
    report it.
    """
    states = info.get("internal_states")
    if not isinstance(states, list) or not states:
        return None
    values = {
        str(state.get("env_vars", {}).get(name)) for state in states if isinstance(state, dict)
    }
    return values.pop() if len(values) == 1 else None
