"""Checks of a run before a GPU or a server is started: files, columns, pictures, layout, port.

Each raises ValueError with one sentence that names the key, what is wrong and the way out. The
rules that need nothing but the configuration are in megavlm/config/rules.py. Not covered: memory,
the number of GPUs, prompts that are too long (the processor names their rows when it meets them).
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from megavlm.config.schema import GRPO, Config
from megavlm.data.images import decode
from megavlm.data.rows import read_rows
from megavlm.rewards import registry
from megavlm.rollout.errors import RolloutServerError
from megavlm.rollout.server import require_free

SUPPORTED = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)  # models.registry's families, without importing megatron-core
MANIFEST = "manifest.json"  # checkpointing.folder's, without importing megatron-core
SAMPLE = 2000  # rows of a data set whose pictures are decoded


def check(
    config: Config,
    *,
    world_size: int,
    phase: Literal["train", "evaluate"] = "train",
    files: bool = True,
) -> None:
    """Raises ValueError for the first thing that would end the run later.

    files=False leaves out everything but what the recipe alone decides, for recipes whose model
    and data are elsewhere.
    """
    check_layout(config, world_size)
    registry.get(config.reward.name)
    key = "data.train_files" if phase == "train" else "data.test_files"
    train_files = config.data.train_files if phase == "train" else ()
    if not (train_files if phase == "train" else config.data.test_files):
        raise ValueError(f"{key}=[] names no data: add {key}=[FILE.parquet]")
    if not files:
        return
    check_model(Path(config.model.folder), config)
    if config.model.checkpoint is not None:
        check_checkpoint(Path(config.model.checkpoint))
    check_run_dir(Path(config.run.dir))
    if config.rollout.mode == "managed" and config.rollout.port is not None:
        check_port(config.rollout.port)
    for file_list in (train_files, config.data.test_files):
        check_data(file_list, config)


def check_layout(config: Config, world_size: int) -> None:
    """`world_size` ranks make `parallel`'s axes, and each data-parallel rank gets work."""
    parallel = config.parallel
    size, data = parallel.model_size, parallel.data
    axes = " x ".join(
        f"parallel.{axis}={getattr(parallel, axis)}"
        for axis in ("tensor", "context", "pipeline")
        if axis == "tensor" or getattr(parallel, axis) > 1
    )
    if world_size % size:
        raise ValueError(
            f"{axes} does not divide the world size {world_size}: "
            f"start a multiple of {size} ranks or change the layout"
        )
    if data is not None and size * data != world_size:
        raise ValueError(
            f"{axes} x parallel.data={data} is {size * data} ranks, but the "
            f"world size is {world_size}: start {size * data} ranks, or set parallel.data=null "
            "to take what there is"
        )
    if world_size % parallel.expert_ranks:
        raise ValueError(
            f"parallel.expert={parallel.expert} x parallel.expert_tensor={parallel.expert_tensor} "
            f"x parallel.pipeline={parallel.pipeline} does not divide the world size {world_size}: "
            f"start a multiple of {parallel.expert_ranks} ranks or change the layout"
        )
    algorithm, ranks = config.algorithm, world_size // size
    if isinstance(algorithm, GRPO):
        work = algorithm.prompts_per_step // algorithm.minibatches
        keys = "algorithm.prompts_per_step / algorithm.minibatches"
    else:
        work, keys = algorithm.batch_size, "algorithm.batch_size"
    if work < ranks:
        raise ValueError(
            f"{keys} is {work}, too few for {ranks} data-parallel ranks: "
            "raise it or start fewer ranks"
        )


def check_model(folder: Path, config: Config) -> None:
    """A HuggingFace folder of a supported family, complete, that the layouts divide."""
    values = _read_json(folder, "config.json")
    family = values.get("model_type")
    if family not in SUPPORTED:
        raise ValueError(
            f"model.folder={folder} holds a model of type {family!r}, which is not supported: "
            f"use one of {', '.join(SUPPORTED)}"
        )
    text = values.get("text_config") or values  # older folders have the text keys at the top
    tensor, rollout = config.parallel.tensor, config.rollout.tensor_parallel
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        _check_divides("parallel.tensor", tensor, name, text, folder)
    # The server repeats key-value heads and pads the vocabulary.
    _check_divides("rollout.tensor_parallel", rollout, "num_attention_heads", text, folder)
    _check_stages(config, text, folder)
    _check_experts(config, text, folder)
    check_weights(folder)
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


def check_weights(folder: Path) -> None:
    """safetensors files, all that the index names, none cut short (only headers are read)."""
    shards = sorted(folder.glob("*.safetensors"))
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if not shards and pickles:
        raise ValueError(
            f"model.folder={folder} holds pickled weights ({sorted(pickles)[0].name}), which can "
            "run any code when they are loaded: save them as safetensors (save_pretrained in "
            "transformers) where you trust them"
        )
    if not shards:
        raise ValueError(f"model.folder={folder} has no *.safetensors: give a complete model")
    index = "model.safetensors.index.json"
    if (folder / index).is_file():
        named = set(_read_json(folder, index).get("weight_map", {}).values())
        missing = sorted(named - {shard.name for shard in shards})
        if missing:
            raise ValueError(
                f"model.folder={folder} lacks {missing[0]}, which its {index} names: "
                "download it again"
            )
    for shard in shards:
        try:
            with safe_open(shard, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{shard} is damaged ({error}): download it again") from error


def check_checkpoint(folder: Path) -> None:
    """A checkpoint folder with a complete step, or a step's own folder."""
    if not any(folder.glob(MANIFEST)) and not any(folder.glob(f"step_*/{MANIFEST}")):
        raise ValueError(
            f"model.checkpoint={folder} holds no complete checkpoint (no {MANIFEST}): make one by "
            "megavlm-convert import, or set model.checkpoint=null to take model.folder's weights"
        )


def check_run_dir(folder: Path) -> None:
    """It is, or can be made, a directory that this user writes to."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not writable" if existing.is_dir() else "is a file"
        raise ValueError(f"run.dir={folder} cannot be written, because {existing} {reason}")


def check_port(port: int) -> None:
    try:
        require_free(port)
    except RolloutServerError as error:
        raise ValueError(str(error)) from error


def check_data(files: Sequence[str], config: Config) -> None:
    """Files, columns, placeholders of all rows; the pictures of the first SAMPLE rows."""
    data = config.data
    rows = read_rows(
        files,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        image_key=data.image_key,
        category_key=data.category_key,
        video_key=data.video_key,
    )
    if files and not rows:
        raise ValueError(f"{', '.join(files)}: no rows; give data files that have some")
    for row in rows[:SAMPLE]:
        for number, image in enumerate(row.images, 1):
            try:
                decode(image)
            except ValueError as error:
                raise ValueError(f"{row.source}: picture {number}: {error}") from error


def _check_stages(config: Config, text: dict[str, Any], folder: Path) -> None:
    """Every chunk of every pipeline stage gets layers, as many as its neighbours."""
    parallel = config.parallel
    if parallel.pipeline == 1:
        return
    layers, stages = text.get("num_hidden_layers"), parallel.pipeline
    if not isinstance(layers, int):
        raise ValueError(f"{folder / 'config.json'} has no num_hidden_layers: give a whole folder")
    given = [parallel.first_stage_layers, parallel.last_stage_layers]
    named = [count for count in given if count is not None]
    left, middle = layers - sum(named), stages - len(named)
    even = left % middle == 0 and left > 0 if middle else left == 0
    per_stage = [*named, *([left // middle] if middle and even else [])]
    if not even or any(count % parallel.virtual for count in per_stage):
        raise ValueError(
            f"parallel.pipeline={stages} with parallel.virtual={parallel.virtual}, "
            f"parallel.first_stage_layers={given[0]} and parallel.last_stage_layers={given[1]} "
            f"does not split the model's {layers} layers: stages without a number of their own "
            "must have equally many, and each stage a multiple of parallel.virtual"
        )


def _check_experts(config: Config, text: dict[str, Any], folder: Path) -> None:
    parallel = config.parallel
    experts = text.get("num_experts") or 0
    if not experts:
        for axis in ("expert", "expert_tensor"):
            if getattr(parallel, axis) > 1:
                raise ValueError(
                    f"parallel.{axis}={getattr(parallel, axis)} divides experts, and the model in "
                    f"{folder} has none: set parallel.{axis}=1"
                )
        return
    _check_divides("parallel.expert", parallel.expert, "num_experts", text, folder)
    _check_divides(
        "parallel.expert_tensor", parallel.expert_tensor, "moe_intermediate_size", text, folder
    )
    if parallel.tensor > 1 and not parallel.sequence:
        raise ValueError(
            f"parallel.tensor={parallel.tensor} with experts needs sequence parallelism, or every "
            "rank of the tensor axis would send the same tokens to them: set parallel.sequence=true"
        )


def _check_divides(axis: str, size: int, name: str, values: dict[str, Any], folder: Path) -> None:
    count = values.get(name)
    if not isinstance(count, int):
        raise ValueError(f"{folder / 'config.json'} has no {name}: give a complete model folder")
    if count % size:
        raise ValueError(
            f"{axis}={size} does not divide the model's {name}={count}: "
            f"set {axis} to a number that does"
        )


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"model.folder={folder} is no folder: give one in HuggingFace's form")
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"model.folder={folder} has no {name}: give a model's folder") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / name} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{folder / name} is not a JSON object: give a complete model folder")
    return values
