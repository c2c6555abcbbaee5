"""Checks of the model that a run starts from: its HuggingFace folder and its checkpoint.

They read only file headers and JSON, and do not import torch. Tensors are compared with config.json
by a dry run (run/checks/dry_run.py) and when the weights are loaded.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megavlm import git_lfs
from megavlm.checkpointing.folder import (
    MANIFEST,
    check_family,
    check_no_adapters,
    is_checkpoint,
    locate_step,
    saved_config,
)
from megavlm.checkpointing.untrained import untrained_tensors
from megavlm.config.algorithm import DataTraining
from megavlm.config.schema import Config
from megavlm.demo_folder import demo_command
from megavlm.families import check_unquantised, family, family_of, language_values
from megavlm.models.common.eagle3 import check_head
from megavlm.models.folder_files import check_files, check_pickles
from megavlm.run.checks.layout import Values, check_sizes

# Suffixes of the config.json values that determine shapes of tensors.
_SIZES = ("_size", "_layers", "_heads", "_dim", "depth", "_experts")


def check_model(folder: Path, config: Config) -> Values:
    """Return the values of the model's config.json.

    Raises ValueError if `folder` is not a complete HuggingFace folder of a supported family, or if
    the layouts cannot split the model.
    """
    _check_fetched(folder)
    values = _read_json(folder, "config.json")
    family_of(folder)
    try:
        check_unquantised(values, folder)
        check_no_adapters(folder)
        check_pickles(folder)
        check_files(folder)
    except ValueError as error:
        raise ValueError(f"model.folder: {str(error).removesuffix('.')}") from error
    check_sizes(config, values, folder)
    if not isinstance(config.algorithm, DataTraining):
        _check_served(folder, values)
    check_weights(folder)
    _check_draft_head(folder, config, values)
    if not (folder / "tokenizer.json").is_file() and not (
        (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    ):
        raise ValueError(
            f"model.folder={folder} has no tokenizer (tokenizer.json): "
            "copy it from where the model came from"
        )
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((folder / name).is_file() for name in names):
        raise ValueError(
            f"model.folder={folder} has no image processor ({' or '.join(names)}): "
            "copy it from where the model came from"
        )
    return values


def _check_draft_head(folder: Path, config: Config, values: Values) -> None:
    """Raise ValueError if servers are to draft with a head that is not there, or if a head is to be
    trained that is none of the model's.
    """
    has_mtp = any(name.startswith("mtp.") for name in untrained_tensors(folder))
    kind, rollout, trains = family_of(folder).draft_head, config.rollout, config.speculation.train
    if trains and kind == "eagle3":
        make = f"make one with megavlm-convert draft-head {folder} HEAD_DIR"
        if rollout.draft_folder is None:
            raise ValueError(
                f"speculation.train=true trains an EAGLE-3 draft head with model.folder={folder}, "
                "but rollout.server_args.speculative_draft_model_path names none: "
                f"{make}, or set speculation.train=false"
            )
        check_head(Path(rollout.draft_folder), language_values(values), make)
    elif trains and not (has_mtp and kind == "mtp"):
        raise ValueError(
            "speculation.train=true trains the draft head mtp.* of Qwen3.5 or an EAGLE-3 head of "
            f"Qwen2.5-VL or Qwen3-VL, but model.folder={folder} has none: take a folder with it, "
            "or set speculation.train=false"
        )
    elif trains and rollout.draft_algorithm == "EAGLE3":
        raise ValueError(
            "speculation.train=true trains the draft head mtp.* of "
            f"model.folder={folder}, but rollout.server_args.speculative_algorithm=EAGLE3 drafts "
            "with another: set it to NEXTN and remove speculative_draft_model_path, or set "
            "speculation.train=false"
        )
    if rollout.draft_algorithm in ("NEXTN", "EAGLE") and not has_mtp:
        raise ValueError(
            f"rollout.server_args.speculative_algorithm={rollout.draft_algorithm} drafts "
            f"with the head mtp.* of Qwen3.5, but model.folder={folder} has no such tensors: take "
            "a folder with them, or remove it"
        )


def check_is_folder(folder: Path) -> None:
    """Raise ValueError for a model folder that does not exist. The message says how to get it."""
    if folder.is_dir():
        return
    if command := demo_command(folder):
        raise ValueError(f"model.folder={folder} does not exist: make it by {command}")
    raise ValueError(
        f"model.folder={folder} is not a folder: give a HuggingFace model folder; to download "
        f"one: hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir {folder}"
    )


def _check_served(folder: Path, values: Values) -> None:
    """Raise ValueError if the config.json lacks a value that SGLang reads. The server would end
    with a traceback.
    """
    sections = [name for name in ("text_config", "vision_config") if name in values]
    if len(sections) < 2:
        return  # an older folder, which SGLang reads as it is
    served = family(values["model_type"]).served_config(values)
    for section in sections:
        for name in sorted(served[section].keys() - values[section].keys()):
            raise ValueError(
                f"model.folder={folder}: SGLang reads {section}.{name} from config.json, but "
                f"it is missing: add {json.dumps({name: served[section][name]})[1:-1]} to {section}"
            )


def _check_fetched(folder: Path) -> None:
    """Raise ValueError if files of the folder are git-LFS pointers and not the files themselves."""
    pointers = []
    for path in sorted(folder.glob("*")):
        if path.is_file():
            with path.open("rb") as file:
                if git_lfs.is_pointer(file.read(64)):
                    pointers.append(path.name)
    if pointers:
        more = f" (and {len(pointers) - 1} more)" if len(pointers) > 1 else ""
        raise ValueError(f"model.folder={folder}: {pointers[0]}{more}: {git_lfs.FETCH}")


def check_weights(folder: Path) -> None:
    """Raise ValueError if safetensors files named by the index are missing or truncated.

    Reads only the headers.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"model.folder={folder} has no *.safetensors: give a complete model")
    index = "model.safetensors.index.json"
    if (folder / index).is_file():
        named = set(_read_json(folder, index).get("weight_map", {}).values())
        missing = sorted(named - {shard.name for shard in shards})
        if missing:
            raise ValueError(
                f"model.folder={folder} lacks the file {missing[0]} that its {index} names: "
                "download it again"
            )
    for shard in shards:
        try:
            with safe_open(shard, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{shard} is damaged ({error}): download it again") from error


def check_checkpoint(folder: Path, config: Config, values: Values) -> None:
    """Raise ValueError if `folder` is neither a checkpoint folder with a complete step nor the
    folder of a step, or if its model differs from the one in model.folder. values: The values of
    the latter's config.json.
    """
    if not is_checkpoint(folder):
        if command := demo_command(folder):
            raise ValueError(
                f"model.checkpoint={folder} holds no complete checkpoint: make it by {command}"
            )
        raise ValueError(
            f"model.checkpoint={folder} holds no complete checkpoint (no {MANIFEST}): create one "
            "with megavlm-convert import, or set model.checkpoint=null to start from the weights "
            "in model.folder"
        )
    step = locate_step(folder, None)
    check_family(step, values["model_type"])
    saved, ours = dict(_sizes(saved_config(step))), dict(_sizes(values))
    for name in saved.keys() & ours.keys():
        if saved[name] != ours[name]:
            raise ValueError(
                f"model.checkpoint={folder} holds a model with {name}={saved[name]}, but the one "
                f"in model.folder={config.model.folder} has {ours[name]}: name a folder and a "
                "checkpoint of one model"
            )


def _sizes(values: Values, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield (dotted key, value) of the sizes in a config.json and its sections."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{prefix}{key}.")
        elif type(value) is int and key.endswith(_SIZES):
            yield prefix + key, value


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    check_is_folder(folder)
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"model.folder={folder} has no {name}: give a HuggingFace model folder"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / name} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{folder / name} is not a JSON object: give a complete model folder")
    return values
