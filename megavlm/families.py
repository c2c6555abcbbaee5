"""Model families that megavlm trains, by the `model_type` of a model folder's config.json.

A family is a package with five modules. A new family adds these, and a line in FAMILIES:

    config.py   `language_sizes`, `architecture`, `rotary`, `patch_sizes`: the model, as plain
                values; `FOLDER_NAMES`, what other files of a model folder repeat of them;
                `served_config`, if servers read values that transformers does not write;
                `served_values`, if they read others; `SERVER_NAMES`, if they name weights otherwise
    mapping.py  `mapping`: entries that map hub tensors to this model's tensors; `draft_mapping`,
                if its draft head can be trained
    vision.py   `VisionTower`
    inputs.py   `images`, `positions` and `model_inputs`: how images become pixels and tokens, the
                positions of tokens, and inputs of transformers' model; `videos` and `audio`, if
                prompts may have some
    tiny.py     `TINY`: tiny models of the demo and of tests, by model_type
    authors.py  `config_values` and `mapping`, if the authors' releases have a form of their own
                (AUTHORS)

They are imported when they are first used, so that a process that checks a recipe or prepares
prompts does not import megatron-core.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """A model family, by the dotted name of its package.

    served_modules: Part of the names of SGLang's modules that serve the family. A CPU server
        imports no other models, so it starts in less time. "" imports all.
    coordinates: Form in which the family was trained to name places in an image: relative (0 to
        1000 across and down) or pixels (of the image as the model sees it).
    server_args: SGLang's arguments with which it stores the family's weights as they are sent.
    draft_head: Kind of the draft head that can be trained: "mtp", which released folders have as
        `mtp.*`, or "eagle3", which has a folder of its own (models/common/eagle3.py). None for no
        head.
    """

    package: str
    served_modules: str = ""
    coordinates: Literal["relative", "pixels"] = "relative"
    server_args: Mapping[str, Any] = field(default_factory=dict)
    draft_head: Literal["mtp", "eagle3"] | None = None

    def language_sizes(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of `architecture` that layout rules need.

        text: The language model's values in a config.json.

        Raises KeyError with the name of a missing value.
        """
        return self._module("config").language_sizes(text)

    def architecture(self, hf_config: Any) -> dict[str, Any]:
        """Return the fields of common.config.LanguageConfig that describe the language model.

        hf_config: transformers' configuration.

        Raises ValueError for settings that are not implemented.
        """
        return self._module("config").architecture(hf_config)

    def rotary(self, hf_config: Any) -> Any:
        """Return the rotary embedding (common.architecture.Rotary). Raises ValueError for one that
        is not implemented.
        """
        return self._module("config").rotary(hf_config)

    def patch_sizes(self, hf_config: Any) -> Any:
        """Return the sizes of the tower's input (common.architecture.PatchSizes)."""
        return self._module("config").patch_sizes(hf_config)

    def folder_names(self) -> Any:
        """Return the names of values that files of a model folder repeat
        (common.architecture.FolderNames).
        """
        return self._module("config").FOLDER_NAMES

    def mapping(self, hf_config: Any, *, draft_head: bool = False) -> list[Any]:
        """Return an entry (common.mapping.Entry) for every tensor of the model, and with
        `draft_head` for every tensor of its draft head.
        """
        entries: list[Any] = self._module("mapping").mapping(hf_config)
        return [*entries, *self.draft_mapping(hf_config)] if draft_head else entries

    def draft_mapping(self, hf_config: Any) -> list[Any]:
        """Return an entry for every tensor of the draft head."""
        entries: list[Any] = self._module("mapping").draft_mapping(hf_config)
        return entries

    def tower(self, hf_config: Any) -> Any:
        """Return the vision tower (common.tower.Tower), randomly initialised."""
        return self._module("vision").VisionTower(hf_config)

    def images(self, hf_config: Any, processor: Any, data: Any, cache: Any) -> Any:
        """Return the images of prompts (data.image_processing.ImageProcessor).

        processor: transformers' processor.
        data: The section `data` of a recipe, with the bounds on pixels.
        cache: The data.image_processing.ImageCache of recent images.

        Raises ValueError for bounds that the family or the model folder does not allow.
        """
        return self._module("inputs").images(hf_config, processor, data, cache)

    def videos(self, hf_config: Any, processor: Any, data: Any, cache: Any) -> Any:
        """Return the videos of prompts (data.videos.VideoProcessor), or None for a family without
        `videos`. The arguments are as in `images`.
        """
        make = getattr(self._module("inputs"), "videos", None)
        return None if make is None else make(hf_config, processor, data, cache)

    def audio(self, hf_config: Any, processor: Any, cache: Any) -> Any:
        """Return the audio of prompts (data.audio.AudioProcessor), or None for a family without
        `audio`. The arguments are as in `images`.
        """
        make = getattr(self._module("inputs"), "audio", None)
        return None if make is None else make(hf_config, processor, cache)

    def positions(self, hf_config: Any) -> Callable[[Any, Sequence[Any]], tuple[Any, int]]:
        """Return a function of token ids [T] and the images and videos that they show, which
        returns the positions [3, T] (time, height, width) and the next position. Without M-RoPE the
        three are equal (data.positions.plain_positions).
        """
        return self._module("inputs").positions(hf_config)

    def model_inputs(
        self, hf_config: Any, token_ids: Any, positions: Any, images: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the inputs of transformers' model for one sequence, in addition to its tokens.

        token_ids: [T], at positions [3, T].
        images: The images and videos that they show.
        """
        return self._module("inputs").model_inputs(hf_config, token_ids, positions, images)

    def tiny(self) -> Mapping[str, Any]:
        """Return the parts of its tiny models (common.tiny.TinyFamily) by model_type."""
        models: Mapping[str, Any] = self._module("tiny").TINY
        return models

    def served_config(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a config.json, completed by values that SGLang reads and
        transformers may leave out. Families without `served_config` need none.
        """
        complete = getattr(self._module("config"), "served_config", dict)
        completed: dict[str, Any] = complete(values)
        return completed

    def authors_config(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of transformers' configuration for a config.json of the authors. Raises
        ValueError for settings that are not implemented.
        """
        completed: dict[str, Any] = self._module("authors").config_values(values)
        return completed

    def authors_mapping(self, hf_config: Any) -> list[Any]:
        """Return an entry (common.mapping.Entry) for every tensor in files of the authors."""
        entries: list[Any] = self._module("authors").mapping(hf_config)
        return entries

    def served_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values that SGLang must read in place of those of a config.json (its argument
        json_model_override_args). Families without `served_values` need none.
        """
        replace = getattr(self._module("config"), "served_values", None)
        replaced: dict[str, Any] = {} if replace is None else replace(values)
        return replaced

    def server_names(self) -> tuple[tuple[str, str], ...]:
        """Return pairs (pattern, replacement) that turn short names of HF tensors into SGLang's,
        where these differ otherwise than weight_sync.sglang_layout knows.
        """
        names: tuple[tuple[str, str], ...] = getattr(self._module("config"), "SERVER_NAMES", ())
        return names

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")


FAMILIES = {
    "qwen2_vl": Family("megavlm.models.qwen2_vl", "qwen"),
    "qwen2_5_vl": Family("megavlm.models.qwen2_5_vl", "qwen", "pixels", draft_head="eagle3"),
    "qwen3_vl": Family("megavlm.models.qwen3_vl", "qwen", draft_head="eagle3"),
    "qwen3_vl_moe": Family("megavlm.models.qwen3_vl", "qwen", draft_head="eagle3"),
    "qwen3_5": Family("megavlm.models.qwen3_5", "qwen", draft_head="mtp"),
    "qwen3_5_moe": Family("megavlm.models.qwen3_5", "qwen", draft_head="mtp"),
    "glm4v": Family("megavlm.models.glm4v", "glm4"),
    # On a GPU, SGLang would store the shared expert in the stacks of routed ones.
    "glm4v_moe": Family(
        "megavlm.models.glm4v", "glm4", server_args={"disable_shared_experts_fusion": True}
    ),
    "internvl": Family("megavlm.models.internvl", "intern"),
    "minicpmv4_6": Family("megavlm.models.minicpmv", "minicpmv"),
    "qwen3_omni_moe": Family("megavlm.models.qwen3_omni", "qwen"),
}

# Model types of folders in the form of a family's authors, where it is not transformers': the
# family's model type. Conversions read and write them; runs need transformers' form.
AUTHORS = {"internvl_chat": "internvl"}

DEMO = "qwen2_5_vl"  # family of a tiny model, if none is named


# Prefixes of hub tensors that the models here do not have: the head that predicts several tokens
# (multi-token prediction), and the models that speak. They are not trained, and an export copies
# them.
UNTRAINED = ("mtp.", "talker.", "code2wav.")

# Section of a config.json that describes the trained model, in folders that hold several models.
PART = "thinker_config"


def model_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of the trained model in the values of a config.json."""
    part = values.get(PART)
    return part if isinstance(part, Mapping) else values


def language_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of the language model in the values of a config.json. Older folders have
    them at the top level.
    """
    part = model_values(values)
    text: Mapping[str, Any] = part.get("text_config") or part
    return text


def check_unquantised(values: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError if a config.json names a quantisation. path: Its file or folder."""
    settings = values.get("quantization_config", model_values(values).get("quantization_config"))
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
        raise ValueError(
            f"{path} describes quantised weights ({method}), but they can be neither trained nor "
            "converted: take the model in bfloat16."
        )


def family(model_type: Any) -> Family:
    """Return the family of a `model_type`. Raises ValueError for any value that is not supported,
    since a config.json may hold anything.
    """
    if isinstance(model_type, str) and model_type in AUTHORS:
        raise ValueError(
            f"model_type {model_type!r} is the form of the model's authors, but a run needs "
            "transformers' form: take the release whose name ends in -HF, with the weights of this "
            "folder as model.checkpoint if they are others (megavlm-convert import reads them)."
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"model_type {model_type!r} is not supported: use one of {known}, or add a family "
            "(docs/guides/families.md)."
        )
    return FAMILIES[model_type]


def family_of(folder: str | Path) -> Family:
    """Return the family of the model in `folder`. Raises ValueError for a folder without a
    config.json, or with a model of another family.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"model.folder: {folder} has no config.json; give a model folder")
    try:
        return family(json.loads(file.read_text()).get("model_type"))
    except ValueError as error:
        raise ValueError(f"model.folder: {file}: {error}") from error
