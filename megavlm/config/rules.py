"""What a configuration must keep beyond types: ranges, and rules between keys.

Each rule raises ValueError with one sentence: the key, its value, the rule and the way out. Rules
that need files, ports or a world size are in megavlm/training/preflight.py.
"""

from urllib.parse import urlsplit

from megavlm.config.bounds import out_of_range
from megavlm.config.schema import GRPO, SFT, Config, Evaluation, Rollout

# megatron-core's names; what needs no Transformer Engine.
RECOMPUTED_MODULES = {"core_attn", "mlp", "moe"}
# Options of the server that megavlm sets itself, and the key to set instead.
OWNED_SERVER_ARGS = {
    "model_path": "model.folder",
    "host": "rollout.mode=external",
    "port": "rollout.port",
    "tp": "rollout.tensor_parallel",
    "tp_size": "rollout.tensor_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "dtype": "model.dtype",
    "config": "rollout.server_args",
}
# Options that run code from a model folder or a request, and keys: those are random for each run.
REFUSED_SERVER_ARGS = {
    "trust_remote_code": "it runs code from the model folder",
    "enable_custom_logit_processor": "it runs code from requests",
    "api_key": "it would show in the process list, and each run makes its own",
    "admin_api_key": "it would show in the process list, and each run makes its own",
}


def check(config: Config) -> None:
    """Raises ValueError for the first rule that the configuration breaks."""
    for name in config.to_dict():
        for key, value, bounds in out_of_range(getattr(config, name)):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"{name}.{key}={shown} is out of range: set it to "
                f"{'numbers' if isinstance(value, tuple) else 'a number'} {bounds}"
            )
    _check_parallel(config)
    _check_data(config)
    if isinstance(config.algorithm, GRPO):
        _check_grpo(config, config.algorithm)
    else:
        _check_sft(config, config.algorithm)
    _check_rollout(config.rollout)
    _check_optimizer(config)
    _check_evaluation(config.evaluation, config)
    if config.checkpoint.verify_export and not config.checkpoint.export_hf:
        raise ValueError(
            "checkpoint.verify_export=true has nothing to verify with checkpoint.export_hf=false: "
            "set both or neither"
        )


def _check_parallel(config: Config) -> None:
    parallel = config.parallel
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError(
            "parallel.sequence=true splits activations over the tensor-parallel ranks, and "
            "parallel.tensor=1 has only one: set parallel.tensor above 1 or parallel.sequence=false"
        )
    if parallel.pipeline == 1:
        for key in ("virtual", "first_stage_layers", "last_stage_layers"):
            value = getattr(parallel, key)
            if value not in (1, None):
                raise ValueError(
                    f"parallel.{key}={value} is about pipeline stages, and parallel.pipeline=1 has "
                    "none: remove it or raise parallel.pipeline"
                )
    if parallel.data is not None and parallel.num_ranks % parallel.expert_ranks:
        raise ValueError(
            f"parallel.expert={parallel.expert} x parallel.expert_tensor={parallel.expert_tensor} "
            f"x parallel.pipeline={parallel.pipeline} does not divide the {parallel.num_ranks} "
            "ranks of the other axes: change one of them or raise parallel.data"
        )
    unknown = set(config.recompute.modules) - RECOMPUTED_MODULES
    if unknown:
        raise ValueError(
            f"recompute.modules names {sorted(unknown)[0]}, which cannot be recomputed alone: "
            f"choose from {', '.join(sorted(RECOMPUTED_MODULES))}"
        )
    if config.lora.rank and not (config.model.freeze_tower and config.model.freeze_merger):
        raise ValueError(
            f"lora.rank={config.lora.rank} trains adapters alone, so the tower cannot be trained "
            "itself: set model.freeze_tower=true and model.freeze_merger=true, and add "
            "vision.attention, vision.mlp or vision.merger to lora.targets to adapt it"
        )


def _check_data(config: Config) -> None:
    low, high = config.data.min_pixels, config.data.max_pixels
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"data.min_pixels={low} is above data.max_pixels={high}: lower it or raise the other"
        )
    if config.data.max_prompt_tokens > config.data.pack_tokens:
        raise ValueError(
            f"data.pack_tokens={config.data.pack_tokens} cannot hold a prompt of "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens}: raise it or lower the other"
        )


def _check_grpo(config: Config, algorithm: GRPO) -> None:
    prompts, minibatches = algorithm.prompts_per_step, algorithm.minibatches
    if prompts % minibatches:
        raise ValueError(
            f"algorithm.minibatches={minibatches} must divide algorithm.prompts_per_step={prompts}:"
            " a minibatch holds whole groups of responses; change one of them"
        )
    ranks = config.parallel.data or 1
    if prompts // minibatches < ranks:
        raise ValueError(
            f"algorithm.prompts_per_step={prompts} over algorithm.minibatches={minibatches} leaves "
            f"fewer prompts than parallel.data={ranks} ranks: raise the first or lower another"
        )
    responses, new = algorithm.responses_per_prompt, config.rollout.max_new_tokens
    longest = config.data.max_prompt_tokens + responses * new
    if longest > config.data.pack_tokens:
        raise ValueError(
            f"data.pack_tokens={config.data.pack_tokens} cannot hold a prompt and its responses: "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + {responses} x "
            f"rollout.max_new_tokens={new} is {longest}; raise it or lower one of the others"
        )
    if config.rollout.top_p != 1:
        raise ValueError(
            f"rollout.top_p={config.rollout.top_p} cuts the distribution that the trainer scores "
            "whole, so its log-probs would not be the sampler's: set rollout.top_p=1.0 for grpo"
        )


def _check_sft(config: Config, algorithm: SFT) -> None:
    ranks = config.parallel.data or 1
    if algorithm.batch_size < ranks:
        raise ValueError(
            f"algorithm.batch_size={algorithm.batch_size} is less than a row for each of "
            f"parallel.data={ranks} ranks: raise it or lower the other"
        )


def _check_rollout(rollout: Rollout) -> None:
    if rollout.mode == "external" and not rollout.urls:
        raise ValueError(
            "rollout.mode=external needs the servers' addresses: "
            "set rollout.urls=[http://HOST:PORT], or rollout.mode=managed to start a server"
        )
    if rollout.mode == "managed" and rollout.urls:
        raise ValueError(
            f"rollout.urls={list(rollout.urls)} would not be used with rollout.mode=managed: "
            "set rollout.mode=external or remove them"
        )
    for url in rollout.urls:
        _check_url(url)
    if rollout.mode == "external" and (rollout.server_args or rollout.port is not None):
        key = "server_args" if rollout.server_args else "port"
        raise ValueError(
            f"rollout.{key}={getattr(rollout, key)} is for a server that megavlm starts, and "
            "rollout.mode=external starts none: remove it, or set rollout.mode=managed"
        )
    for name in rollout.server_args:
        plain = name.lstrip("-").replace("-", "_")
        if plain in OWNED_SERVER_ARGS:
            raise ValueError(
                f"rollout.server_args.{name} is set by megavlm: use {OWNED_SERVER_ARGS[plain]}"
            )
        if plain in REFUSED_SERVER_ARGS:
            raise ValueError(
                f"rollout.server_args.{name} is refused, because {REFUSED_SERVER_ARGS[plain]}: "
                "remove it"
            )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
    except ValueError:  # a port that is no number, or brackets that do not close
        whole = False
    if not whole or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"rollout.urls holds {url!r}, which is no server's address: write http://HOST:PORT"
        )
    if "@" in parts.netloc:
        raise ValueError(
            f"rollout.urls holds a user name or password for {parts.hostname}, which would be "
            "written to the run directory: give keys through the environment"
        )


def _check_optimizer(config: Config) -> None:
    optimizer, steps = config.optimizer, config.algorithm.steps
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(
            f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}: "
            "lower it or raise the other"
        )
    if optimizer.warmup_steps > steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is above algorithm.steps={steps}: "
            "the rate would never be reached; lower it or raise the other"
        )


def _check_evaluation(evaluation: Evaluation, config: Config) -> None:
    wanted = [name for name in ("every", "before", "after") if getattr(evaluation, name)]
    if config.data.video_key is not None and (wanted or isinstance(config.algorithm, GRPO)):
        key = f"evaluation.{wanted[0]}" if wanted else "algorithm.name=grpo"
        raise ValueError(
            f"data.video_key={config.data.video_key} with {key}: the rollout servers do not take "
            "videos yet; use algorithm.name=sft without evaluation, or data.video_key=null"
        )
    if wanted and not config.data.test_files:
        key = f"evaluation.{wanted[0]}"
        raise ValueError(
            f"{key}={str(getattr(evaluation, wanted[0])).lower()} needs questions to evaluate on: "
            f"set data.test_files=[FILE.parquet] or turn {key} off"
        )
