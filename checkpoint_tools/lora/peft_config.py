"""PEFT's adapter_config.json: ranks and scales of its modules, and unsupported settings."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from megavlm.checkpointing.folder import PEFT_CONFIG

_READ = {
    "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_parameters",
}  # fmt: skip
# Settings of placement and training. The tensors already reflect them, or they no longer matter.
_IGNORED = {
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
# Initialisations that also change the base weights, and that PEFT repeats when it loads an
# adapter. PEFT ignores the case of some of these names.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_WAY_OUT = "merge it into its model with peft (merge_and_unload) and import that model instead"


@dataclass(frozen=True)
class Scale:
    """Factor of B A: alpha / rank, or alpha / sqrt(rank). Its square is stored exactly, and its
    sign is the sign of alpha.
    """

    alpha: float
    rank: int
    rank_stabilised: bool

    @property
    def square(self) -> Fraction:
        alpha, rank = Fraction(self.alpha), Fraction(self.rank)
        return alpha**2 / (rank if self.rank_stabilised else rank**2)

    @property
    def value(self) -> float:
        return math.copysign(math.sqrt(self.square), self.alpha)

    def alpha_for(self, rank: int) -> float:
        """Return the alpha with which alpha / rank gives the same scale at another rank."""
        if self.rank_stabilised:
            return self.alpha * rank / math.sqrt(self.rank)
        return self.alpha * rank / self.rank


@dataclass(frozen=True)
class PeftConfig:
    path: Path
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    parameters: tuple[str, ...]
    base: str | None

    def scale(self, name: str) -> Scale:
        """Return the scale of a module or parameter, by its name in the adapted model."""
        rank = self.ranks.get(_pattern(self.ranks, name), self.rank)
        alpha = self.alphas.get(_pattern(self.alphas, name), self.alpha)
        return Scale(alpha, rank, self.rank_stabilised)

    def targets_parameter(self, name: str) -> bool:
        return any(name == one or name.endswith(f".{one}") for one in self.parameters)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read adapter_config.json.

    Raises ValueError if it is not a LoRA configuration, or needs more than pairs (A, B).
    """
    path = folder / PEFT_CONFIG
    try:
        values = json.loads(path.read_bytes())
        if values["peft_type"] != "LORA":
            raise ValueError(f"peft_type {values['peft_type']!r} is not LORA")
        config = PeftConfig(
            path,
            int(values["r"]),
            float(values["lora_alpha"]),
            bool(values.get("use_rslora")),
            {key: int(value) for key, value in (values.get("rank_pattern") or {}).items()},
            {key: float(value) for key, value in (values.get("alpha_pattern") or {}).items()},
            tuple(values.get("target_parameters") or ()),
            values.get("base_model_name_or_path"),
        )
        if not all(map(math.isfinite, (config.alpha, *config.alphas.values()))):
            raise ValueError("an alpha is not finite")
        if 0 in (config.alpha, *config.alphas.values()):
            raise ValueError("an alpha of 0 disables the adapters")
        for pattern in (*config.ranks, *config.alphas):
            re.compile(pattern)
        if min(config.rank, *config.ranks.values(), 1) < 1:
            raise ValueError("a rank is below 1")
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a PEFT folder: it has no {PEFT_CONFIG}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, re.error) as error:
        raise ValueError(f"{path} is not a configuration of LoRA adapters: {error}.") from error
    _check_supported(path, values)
    return config


def config_values(
    *,
    rank: int,
    alpha: float,
    modules: Iterable[str],
    parameters: Iterable[str],
    doubled: str | None,
    base: str,
) -> dict[str, Any]:
    """Return adapter_config.json for adapters with one rank. doubled: pattern of the parameters
    that hold two projections side by side and therefore have twice the rank.
    """
    values: dict[str, Any] = {
        "alpha_pattern": {doubled: 2 * _plain(alpha)} if doubled else {},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {doubled: 2 * rank} if doubled else {},
        "revision": None,
        "target_modules": list(modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    if parameters := list(parameters):
        values["target_parameters"] = parameters
    return values


def _check_supported(path: Path, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in _READ | _IGNORED or not value:
            continue
        if key == "bias" and value == "none":
            continue
        if key == "init_lora_weights":
            if not str(value).lower().startswith(_CHANGES_BASE):
                continue
            raise ValueError(
                f"{path} has init_lora_weights={value!r}, but that changes the base weights: "
                f"convert it with peft (path_initial_model_for_weight_conversion) first."
            )
        raise ValueError(
            f"{path} has {key}={value!r}, but only plain pairs of LoRA matrices are supported: "
            f"{_WAY_OUT}."
        )


def _pattern(patterns: Iterable[str], name: str) -> str:
    """Return the first pattern that matches the end of a name, as PEFT does, else the name."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), name)


def _plain(alpha: float) -> float | int:
    """Return an integral alpha as an int, as it is usually written."""
    return int(alpha) if alpha == int(alpha) else alpha
