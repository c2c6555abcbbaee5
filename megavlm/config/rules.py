"""What a configuration must keep beyond types: ranges, and rules between keys.

Each rule raises ValueError with one sentence: the key, its value, the rule and the way out. Rules
that need files, ports or a world size are in megavlm/run/preflight.py.
"""

from megavlm.config.algorithm_rules import check_algorithm
from megavlm.config.bounds import out_of_range
from megavlm.config.checkpoint_rules import check_checkpoint
from megavlm.config.data_rules import check_data
from megavlm.config.environment_rules import check_environment
from megavlm.config.model_rules import check_model
from megavlm.config.rollout_rules import (
    check_adapters,
    check_oversample,
    check_rollout,
    check_router,
)
from megavlm.config.schema import Config, Evaluation, PolicyOptimization


def check(config: Config) -> None:
    """Raises ValueError for the first rule that the configuration breaks."""
    for name in config.to_dict():
        for key, value, bounds in out_of_range(getattr(config, name)):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"{name}.{key}={shown} is out of range: set it to "
                f"{'numbers' if isinstance(value, tuple) else 'a number'} {bounds}"
            )
    check_model(config)
    check_data(config.data)
    check_algorithm(config)
    check_environment(config)
    check_rollout(config.rollout)
    check_oversample(config)
    check_router(config.rollout)
    check_adapters(config.rollout, config.lora)
    _check_optimizer(config)
    _check_evaluation(config.evaluation, config)
    check_checkpoint(config)


def _check_optimizer(config: Config) -> None:
    optimizer, algorithm = config.optimizer, config.algorithm
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(
            f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}: "
            "lower it or raise the other"
        )
    if optimizer.warmup_steps > algorithm.policy_steps:
        critic = algorithm.steps - algorithm.policy_steps
        less = f" less algorithm.critic_warmup_steps={critic}" if critic else ""
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is above "
            f"algorithm.steps={algorithm.steps}{less}: the rate would never be reached; lower it "
            "or raise the number of steps"
        )


def _check_evaluation(evaluation: Evaluation, config: Config) -> None:
    wanted = [name for name in ("every", "before", "after") if getattr(evaluation, name)]
    generates = wanted or isinstance(config.algorithm, PolicyOptimization)
    if config.data.video_key is not None and generates:
        key = f"evaluation.{wanted[0]}" if wanted else f"algorithm.name={config.algorithm.name}"
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
