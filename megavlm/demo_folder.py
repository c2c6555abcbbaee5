"""The folder of each variant of the demo, and the command that makes a file in such a folder."""

import re
from pathlib import Path

from megavlm.families import DEMO as FAMILY
from megavlm.families import FAMILIES

ALGORITHM = "grpo"  # the demo's default
_FOLDER = re.compile(r"(?:^|/)runs/demo(?P<variant>-[^/]*?)??(?:-data-(?P<data>[^/]*))?(?:/|$)")


def demo_folder(
    algorithm: str = ALGORITHM, family: str = FAMILY, seed: int = 0, data: Path | None = None
) -> Path:
    """Return the folder of a variant of the demo: runs/demo without options, runs/demo-ppo-seed1
    with --algorithm ppo --seed 1.
    """
    parts = ["demo"]
    if algorithm != ALGORITHM:
        parts.append(algorithm)
    if family != FAMILY:
        parts.append(family)
    if seed:
        parts.append(f"seed{seed}")
    if data is not None:  # without the marks that a list of a recipe's key gives a meaning
        parts.append("data-" + re.sub(r"[^\w.-]+", "_", data.resolve().name))
    return Path("runs", "-".join(parts))


def demo_command(path: str | Path) -> str | None:
    """Return the command that makes `path`, None for a path outside the folders of the demo."""
    if not (found := _FOLDER.search(str(path))):
        return None
    words = ["make demo"]
    for part in (found["variant"] or "").split("-")[1:]:
        if part in FAMILIES:
            words.append(f"FAMILY={part}")
        elif re.fullmatch(r"seed\d+", part):
            words.append(f"SEED={part.removeprefix('seed')}")
        else:
            words.append(f"ENV={part}")
    if found["data"]:
        words.append(f"DATA=.../{found['data']}")
    return " ".join(words)
