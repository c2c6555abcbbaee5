"""Adapters in a step: their settings in lora.json, and the keys of their tensors."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megavlm.checkpointing.checksums import first_difference
from megavlm.checkpointing.folder import LORA_SETTINGS, Manifest
from megavlm.checkpointing.reader import CONTENTS, StepReader
from megavlm.models.common.lora_linear import is_adapter


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of adapters that cannot be read from their tensors.

    base: Name or folder of the model that the adapters belong to, None if unknown.
    """

    rank: int
    alpha: float
    base: str | None

    def write(self, step: Path) -> None:
        (step / LORA_SETTINGS).write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(step: Path) -> "AdapterSettings | None":
        """Read the settings of a step, None if it has none. Raises ValueError if the file is
        damaged.
        """
        path = step / LORA_SETTINGS
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_bytes())
            rank, alpha, base = values["rank"], values["alpha"], values["base"]
            return AdapterSettings(int(rank), float(alpha), None if base is None else str(base))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{path} cannot be read as adapter settings: {error!r}.") from error


def saved_adapter_keys(step: Path) -> set[str]:
    """Return the keys of a step's adapters. Raises ValueError if its table of contents is
    damaged.
    """
    files = Manifest.read(step).files
    if problem := first_difference(step, files, files.keys() & {CONTENTS}):
        raise ValueError(problem)
    return adapter_keys(StepReader(step).tensors)


def adapter_keys(tensors: Iterable[str]) -> set[str]:
    return {key for key in tensors if is_adapter(key) and not key.startswith("optimizer.")}


def check_alpha(step: Path, alpha: float) -> None:
    """Raise ValueError if the adapters of the step were trained with another alpha."""
    settings = AdapterSettings.read(step)
    if settings is not None and settings.alpha != alpha:
        raise ValueError(
            f"lora.alpha={alpha:g} differs from the alpha that the adapters in {step} were trained "
            f"with: set lora.alpha={settings.alpha:g}"
        )
