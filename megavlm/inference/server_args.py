"""SGLang's launch options: its command-line arguments and its environment."""

import ast
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megavlm import sglang_cpu
from megavlm.config.algorithm import PolicyOptimization, replays_routing
from megavlm.config.lora import SERVED_TARGETS
from megavlm.config.schema import Config
from megavlm.families import Family, family, language_values

ServerArgs = Mapping[str, str | int | float | bool | list[str] | None]

GPU_ARGS: ServerArgs = {
    # SGLang's rule for models with a vision tower would leave 0.3 of 80 GB free.
    "mem_fraction_static": 0.85,
    # SGLang sets 22 for Qwen3-VL on Hopper, which serves a stream of requests well; a step's
    # prompts arrive together, and decoding would begin with a part of them.
    "prefill_decode_interval": 0,
    # SGLang chooses GPU memory on some machines. See `Rollout.check` on why it must not.
    "mm_feature_transport": "cpu",
}
OVERRIDES = "json_model_override_args"
EAGLE3_MODULE = "llama_eagle3"  # SGLang's module of EAGLE-3 heads
FP8_BLOCK = 128  # rows and columns of weights with a scale of their own
# Modules that SGLang would quantise beside the language model's linear layers: towers, mergers, and
# two of Gated DeltaNet that have less than a block of rows.
NOT_QUANTISED = ("visual", "vision_model", "mlp1", "in_proj_a", "in_proj_b")
# Quantised servers start without weights: the model folder has none with scales, and the first
# update sends all of them.
FP8_ARGS: ServerArgs = {
    "load_format": "dummy",
    OVERRIDES: json.dumps(
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": NOT_QUANTISED,
            }
        }
    ),
}
# Others of SGLang's kernels repack weights or scales when they are loaded, some of them in place.
FP8_GPU_ARGS: ServerArgs = {"fp8_gemm_backend": "triton", "moe_runner_backend": "triton"}
MAX_GRAPH_REQUESTS = 1024  # CUDA graphs of more would take gigabytes and minutes of a start
IMAGE_CACHE_MB = 512  # features of 50 images of one megapixel of a 7B
# SGLang keeps no copy of released weights in host memory: each push sends all of them, from GPU to
# GPU, which takes less time than copying them to the host and back. It cannot release the memory of
# its graphs of prefills, and does not start with them.
SHARED_GPU_ARGS: ServerArgs = {"enable_memory_saver": True, "disable_prefill_cuda_graph": True}


@dataclass(frozen=True)
class ServerOptions:
    """Options of one SGLang server, wherever it runs.

    dtype: "float32", "bfloat16", ... device: "cpu" or "cuda". tensor_parallel: Number of ranks.
    cache_images: Keep image features across requests. It must be false if training changes the
    vision tower, because SGLang does not drop cached features when weights change. server_args:
    Further SGLang arguments, by their Python names; a value of None removes a default of megavlm.
    """

    model_folder: str | Path
    dtype: str
    device: str
    tensor_parallel: int = 1
    cache_images: bool = True
    server_args: ServerArgs = field(default_factory=dict)

    @staticmethod
    def from_config(
        config: Config, model_folder: str | Path, device: str, *, num_nodes: int = 1
    ) -> "ServerOptions":
        """Return the options of a recipe's servers. num_nodes: Nodes with `rollout.servers`."""
        return ServerOptions(
            model_folder,
            config.model.dtype,
            device,
            config.rollout.tensor_parallel,
            cache_images=not config.trains_tower,
            server_args=_server_args(config, device, num_nodes),
        )

    def arguments(self) -> dict[str, Any]:
        """Return SGLang's arguments, except address and GPUs."""
        arguments = {
            "model_path": str(self.model_folder),
            "device": self.device,
            "dtype": self.dtype,
            "tp_size": self.tensor_parallel,
            **(sglang_cpu.ARGS if self.device == "cpu" else {}),
            **(sglang_cpu.LINEAR_ARGS if self.device == "cpu" and self._is_linear else {}),
            **(self._family.server_args if self._family else {}),
            "log_level": "warning",
            **self.server_args,
        }
        if self._family and (replaced := self._family.served_values(self._model_values)):
            given = json.loads(arguments.get(OVERRIDES) or "{}")
            arguments[OVERRIDES] = json.dumps({**replaced, **given})
        return arguments

    @property
    def _is_linear(self) -> bool:
        """True for a model with linear attention layers."""
        return "linear_num_key_heads" in language_values(self._model_values)

    @property
    def _model_values(self) -> dict[str, Any]:
        """The model's config.json, {} if there is none."""
        path = Path(self.model_folder) / "config.json"
        values: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        return values

    @property
    def _family(self) -> Family | None:
        """The model's family, None without a config.json."""
        values = self._model_values
        return family(values["model_type"]) if values else None

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a server on any machine."""
        variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        variables["PYTHONFAULTHANDLER"] = "1"  # stack traces in the log, see ServerProcess.abort
        if not self.cache_images:
            variables["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        elif self.device == "cuda":  # SGLang turns it off for Qwen3-VL on Hopper, if it is not set
            variables["SGLANG_VLM_CACHE_SIZE_MB"] = str(IMAGE_CACHE_MB)
        if self.server_args.get("enable_memory_saver"):
            variables["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # release the memory of graphs, too
        if self.dtype == "float32":
            # SGLang's default of bfloat16, even in a float32 model, changes log-probs by 1e-1.
            variables["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
        return variables

    def environment(self, first_core: int = 0) -> dict[str, str]:
        """Return this process's environment, with torchrun's variables removed and SGLang's added.

        first_core: On a CPU, each rank of a tensor-parallel server is bound to one core. The first
            rank gets this core, and the others the cores after it.
        """
        torchrun = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC")
        variables = {
            name: value
            for name, value in os.environ.items()
            if not any(word in name for word in torchrun)
        }
        variables |= self.variables()
        if self.device == "cpu":
            served = self._family.served_modules if self._family else ""
            if served and self.server_args.get("speculative_draft_model_path") is not None:
                served += f",{EAGLE3_MODULE}"
            variables |= sglang_cpu.variables(served, self.tensor_parallel, first_core)
        return variables


def _server_args(config: Config, device: str, num_nodes: int) -> dict[str, Any]:
    """Return the recipe's server arguments, and the ones that the run needs."""
    rollout = config.rollout
    needed: dict[str, Any] = {}
    if device == "cuda":
        needed |= {**GPU_ARGS, **_graph_args(config, num_nodes)}
        if rollout.colocate:  # on a CPU there is nothing to release
            needed |= SHARED_GPU_ARGS
    if rollout.lora == "adapter":
        needed |= {
            "enable_lora": True,
            "max_lora_rank": config.lora.rank,
            "lora_target_modules": list(
                dict.fromkeys(
                    module for target in config.lora.targets for module in SERVED_TARGETS[target]
                )
            ),
        }
        if device == "cpu":
            needed["lora_backend"] = "torch_native"
    if rollout.quantization == "fp8":
        needed |= {**FP8_ARGS, **(FP8_GPU_ARGS if device == "cuda" else {})}
    if replays_routing(config.algorithm):
        needed["enable_return_routed_experts"] = True
    return {**needed, **rollout.server_args}


def _graph_args(config: Config, num_nodes: int) -> dict[str, int]:
    """Return the largest number of requests that decode in a CUDA graph. It is the number that a
    server of this run has at once; SGLang's default of 256, or 512 from tensor_parallel=4 on, may
    be below.
    """
    rollout, algorithm = config.rollout, config.algorithm
    if not isinstance(algorithm, PolicyOptimization):
        return {}
    servers = len(rollout.urls) or rollout.servers * num_nodes
    prompts = math.ceil(algorithm.prompts_per_step * rollout.steps_started / servers)
    requests = min(prompts, rollout.concurrency) * algorithm.responses_per_prompt
    return {"cuda_graph_max_bs_decode": min(requests, MAX_GRAPH_REQUESTS)}


def command_line(arguments: ServerArgs) -> list[str]:
    """Return SGLang's command-line arguments. True becomes a flag; False and None are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            words.append("--" + name.replace("_", "-"))
            listed = value if isinstance(value, list | tuple) else [value]
            words += [] if value is True else [str(item) for item in listed]
    return words


def option_names() -> set[str]:
    """Return the names of sglang.launch_server's options, in their Python form.

    They are read from SGLang's source, because importing it takes many seconds and needs GPU
    packages.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("SGLang is not installed here: rollout.mode=managed starts it")
    folder = Path(spec.submodule_search_locations[0], "srt")
    files = [folder / "server_args.py", *(folder / "arg_groups" / "fields").glob("*.py")]
    return {name for file in files for name in _names(ast.parse(file.read_bytes()))}


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the fields of a module's classes, and the flags written as "--name" in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"--[a-z0-9-]+", node.value):
                yield node.value[2:].replace("-", "_")
