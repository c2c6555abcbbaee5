"""What a server that was started elsewhere must be, judged by its own /server_info."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OLDEST = (0, 5, 23)  # the release whose requests and weight loaders rollout/ is written for
IMAGES = "SGLANG_VLM_CACHE_SIZE_MB"
TOLD = "SGLANG_EXPOSE_OWN_ENV_VARS"  # a server then tells its own variables, without secrets


@dataclass(frozen=True)
class Requirements:
    """fresh_images: training changes the tower, and the server must keep no features of images,
    because SGLang never drops them when weights change. fresh_prefixes: its prefix cache must be
    off, because pushes do not flush it.
    """

    fresh_images: bool = False
    fresh_prefixes: bool = False

    def read(self, info: Mapping[str, Any]) -> tuple[int, str]:
        """Ranks and device of the server. ValueError says what it must be started with."""
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", str(info.get("version")))
        if version is None or tuple(map(int, version.groups())) < OLDEST:
            needed = ".".join(map(str, OLDEST))
            raise ValueError(f"runs SGLang {info.get('version')}, and {needed} or newer is needed")
        if self.fresh_images and _variable(info, IMAGES) != "0":
            raise ValueError(
                f"does not say that it keeps no features of images, and training changes the "
                f"tower that makes them: start it with {IMAGES}=0 and {TOLD}=1 in its environment"
            )
        if self.fresh_prefixes and not info.get("disable_radix_cache"):
            raise ValueError(
                "keeps prefixes of prompts, which rollout.pause=in_place leaves there under new "
                "weights: start it with --disable-radix-cache, or set rollout.pause=retract"
            )
        if not isinstance(info.get("tp_size"), int) or not isinstance(info.get("device"), str):
            raise ValueError("does not say its tp_size and device, as SGLang does")
        return info["tp_size"], info["device"]


def _variable(info: Mapping[str, Any], name: str) -> str | None:
    """An environment variable of its schedulers; None where they differ or do not tell."""
    states = info.get("internal_states")
    if not isinstance(states, list) or not states:
        return None
    values = {
        str(state.get("env_vars", {}).get(name)) for state in states if isinstance(state, dict)
    }
    return values.pop() if len(values) == 1 else None
