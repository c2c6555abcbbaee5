"""What a step's tensors do not tell of the adapters in it."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megavlm.checkpointing import folder as form
from megavlm.checkpointing.checksums import first_difference
from megavlm.checkpointing.reader import CONTENTS, StepReader
from megavlm.models.common.lora_linear import is_adapter

SETTINGS = "lora.json"


@dataclass(frozen=True)
class AdapterSettings:
    """`base`: the model that they belong to, by its name or folder; None where it is unknown."""

    rank: int
    alpha: float
    base: str | None

    def write(self, step: Path) -> None:
        (step / SETTINGS).write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(step: Path) -> "AdapterSettings | None":
        """None where the step has no such file; ValueError where it is garbage."""
        path = step / SETTINGS
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_bytes())
            rank, alpha, base = values["rank"], values["alpha"], values["base"]
            return AdapterSettings(int(rank), float(alpha), None if base is None else str(base))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{path} cannot be read as adapters' settings: {error!r}.") from error


def adapters(step: Path) -> set[str]:
    """The keys of a step's adapters; ValueError where its table of contents is damaged."""
    files = form.Manifest.read(step).files
    if problem := first_difference(step, files, files.keys() & {CONTENTS}):
        raise ValueError(problem)
    return adapter_keys(StepReader(step).tensors)


def adapter_keys(tensors: Iterable[str]) -> set[str]:
    return {key for key in tensors if is_adapter(key) and not key.startswith("optimizer.")}


def check_alpha(step: Path, alpha: float) -> None:
    """ValueError where the step's adapters were trained with another."""
    settings = AdapterSettings.read(step)
    if settings is not None and settings.alpha != alpha:
        raise ValueError(
            f"lora.alpha={alpha:g} is not what the adapters in {step} were trained with: set "
            f"lora.alpha={settings.alpha:g}"
        )
