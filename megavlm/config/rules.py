"""What a configuration must keep beyond types: ranges, and rules between keys.

Each rule raises ValueError with one sentence: the key, its value, the rule and the way out. Rules
that need files, ports or a world size are in megavlm/training/preflight.py.
"""

from megavlm.config.bounds import out_of_range
from megavlm.config.model_rules import check_model
from megavlm.config.rollout_rules import check_rollout
from megavlm.config.schema import GRPO, SFT, Config, Evaluation


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
    _check_data(config)
    if isinstance(config.algorithm, GRPO):
        _check_grpo(config, config.algorithm)
    else:
        _check_sft(config, config.algorithm)
    check_rollout(config.rollout)
    _check_optimizer(config)
    _check_evaluation(config.evaluation, config)
    if config.checkpoint.verify_export and not config.checkpoint.export_hf:
        raise ValueError(
            "checkpoint.verify_export=true has nothing to verify with checkpoint.export_hf=false: "
            "set both or neither"
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
