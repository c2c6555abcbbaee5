"""Rules between sections, the check of a whole configuration, and defaults derived from it.

Rules that need files, ports or a world size are in megavlm/run/checks/preflight.py.
"""

import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

from megavlm.config.algorithm import DPO, DataTraining, PolicyOptimization, replays_routing
from megavlm.config.checkpoint import nearest_metrics
from megavlm.config.evaluation import EVALUATION, MEASURES
from megavlm.config.lora import SERVED_TARGETS
from megavlm.config.schema import Config
from megavlm.config.section import Section, out_of_range

LEAST_PACK_TOKENS = 4096


def check_ranges(config: Config) -> None:
    """Raise ValueError for the first number outside its range. The message is one sentence."""
    for name, section in _sections(config).items():
        for key, value, bounds in out_of_range(section):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"{name}.{key}={shown} is out of range: set it to "
                f"{'numbers' if isinstance(value, tuple) else 'a number'} {bounds}"
            )


def check(config: Config) -> None:
    """Raise ValueError for the first rule between keys that the configuration breaks.

    The message is one sentence that names the key, its value, the rule and how to fix it.
    """
    for section in _sections(config).values():
        section.check()
    _check_lora(config)
    _check_rates(config)
    _check_algorithm(config)
    _check_pack(config)
    _check_curriculum(config)
    _check_staleness(config)
    _check_quantization(config)
    _check_replay(config)
    _check_routing_replay(config)
    _check_distillation(config)
    _check_speculation(config)
    _check_adapters(config)
    _check_warmup(config)
    _check_optimizer(config)
    _check_evaluation(config)
    _check_checkpoint(config)
    _check_profile(config)


def _sections(config: Config) -> dict[str, Section]:
    return {item.name: getattr(config, item.name) for item in fields(config)}


def _check_lora(config: Config) -> None:
    lora, model = config.lora, config.model
    if lora.rank and not (model.freeze_tower and model.freeze_merger):
        raise ValueError(
            f"lora.rank={lora.rank} trains only adapters, so the tower cannot be trained "
            "itself: set model.freeze_tower=true and model.freeze_merger=true, and add "
            "vision.attention, vision.mlp or vision.merger to lora.targets to adapt it"
        )
    if lora.dropout and lora.adapts_tower and config.recompute.tower:
        raise ValueError(
            f"lora.dropout={lora.dropout} with adapters in the tower needs recompute.tower=false, "
            "because recomputation would drop other entries: set one of them to 0 or false"
        )


def _check_rates(config: Config) -> None:
    """Check that the parts with a learning rate of their own are trained."""
    for part in ("tower", "merger"):
        rate = getattr(config.optimizer, f"{part}_lr")
        if rate is None or config.lora.adapts_tower or not getattr(config.model, f"freeze_{part}"):
            continue
        raise ValueError(
            f"optimizer.{part}_lr={rate} is for a part that is trained, but "
            f"model.freeze_{part}=true: set model.freeze_{part}=false, add adapters in the tower "
            "to lora.targets, or remove it"
        )


def _check_speculation(config: Config) -> None:
    """Check that servers draft with the head that is trained, and that they can be sent it."""
    key, algorithm, rollout = "speculation.train=true", config.algorithm, config.rollout
    if rollout.draft_folder is not None and rollout.sync == "disk":
        raise ValueError(
            f"rollout.server_args.speculative_draft_model_path={rollout.draft_folder} with "
            "rollout.sync=disk: SGLang's loader would look for the policy's weights in the draft "
            "model, too; choose another rollout.sync"
        )
    if not config.speculation.train:
        return
    if isinstance(algorithm, DPO):
        raise ValueError(
            f"{key} teaches the head that drafts what a policy samples, but algorithm.name=dpo "
            "samples nothing: set speculation.train=false"
        )
    if isinstance(algorithm, DataTraining):
        return
    if rollout.draft_algorithm is None:
        raise ValueError(
            f"{key} trains the head with which servers draft tokens, but they draft none with it: "
            "set rollout.server_args.speculative_algorithm=NEXTN (Qwen3.5), or EAGLE3 with "
            "speculative_draft_model_path (other families), or speculation.train=false"
        )
    if config.lora.rank and rollout.lora == "adapter":
        raise ValueError(
            f"{key} sends the draft head in each weight update, but rollout.lora=adapter sends "
            "only adapters: set rollout.lora=merged, or speculation.train=false"
        )


def _check_algorithm(config: Config) -> None:
    algorithm, rejected = config.algorithm, config.data.rejected_key
    if isinstance(algorithm, DPO) != (rejected is not None):
        raise ValueError(
            f"data.rejected_key={rejected or 'null'} with algorithm.name={algorithm.name}: dpo "
            "compares responses with rejected ones, and nothing else does; set both or neither"
        )
    if isinstance(algorithm, DataTraining):
        return
    new = config.rollout.max_new_tokens
    if algorithm.overlong_buffer > new:
        raise ValueError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} is above "
            f"rollout.max_new_tokens={new}, of which it is a part: lower it"
        )


def _check_pack(config: Config) -> None:
    environment, data = config.environment, config.data
    if not isinstance(config.algorithm, PolicyOptimization):
        return
    least = data.max_prompt_tokens + config.rollout.max_new_tokens
    if environment.max_tokens is not None and environment.max_tokens < least:
        raise ValueError(
            f"environment.max_tokens={environment.max_tokens} cannot hold a prompt and a response: "
            f"data.max_prompt_tokens={data.max_prompt_tokens} + rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens} is {least}; raise it, or lower one of the others"
        )
    longest, new = longest_tree(config, episodes=1), config.rollout.max_new_tokens
    if longest <= data.pack_tokens:
        return
    held = f"data.pack_tokens={data.pack_tokens} cannot hold a prompt and"
    way_out = "set it to null, raise it, or lower one of the others"
    if environment.max_turns == 1:
        raise ValueError(
            f"{held} one response: data.max_prompt_tokens={data.max_prompt_tokens} + "
            f"rollout.max_new_tokens={new} is {longest}; {way_out}"
        )
    raise ValueError(
        f"{held} one episode: environment.max_turns={environment.max_turns} responses of "
        f"rollout.max_new_tokens={new} with observations of environment.max_observation_tokens="
        f"{environment.max_observation_tokens} between them make up to {longest} tokens; {way_out}"
    )


def _check_curriculum(config: Config) -> None:
    parts = config.reward.parts
    for number, stage in enumerate(config.curriculum.stages):
        if parts and (unknown := sorted(set(stage.weights) - set(parts))):
            raise ValueError(
                f"curriculum.stages[{number}].weights names {unknown[0]!r}, but reward.parts "
                f"has {', '.join(parts)}"
            )


def _check_staleness(config: Config) -> None:
    """Check what goes on over a weight push (rollout.max_staleness, rollout.oversample) or while
    the trainer trains (rollout.streaming, too).
    """
    rollout, algorithm = config.rollout, config.algorithm
    if not isinstance(algorithm, PolicyOptimization):
        return
    key = f"rollout.max_staleness={rollout.max_staleness}"
    if rollout.oversample > rollout.max_staleness + 1:
        raise ValueError(
            f"rollout.oversample={rollout.oversample} starts the prompts of more steps than the "
            f"{rollout.max_staleness + 1} that {key} allows: lower the one or raise the other"
        )
    if rollout.max_staleness and algorithm.importance == "none":
        raise ValueError(
            f"{key} trains on tokens that older weights sampled, for which "
            "algorithm.importance=none does not correct: set algorithm.importance=token with "
            "algorithm.old_logprobs=trainer, or rollout.max_staleness=0"
        )
    if rollout.streaming and rollout.colocate:
        raise ValueError(
            "rollout.streaming=true trains while the servers generate, but rollout.colocate=true "
            "has "
            "them take turns on the same GPUs: set one of them to false"
        )
    if rollout.is_ahead and rollout.router is not None:
        key, off = (key, 0) if rollout.max_staleness else ("rollout.streaming=true", "false")
        raise ValueError(
            f"{key} sends requests to servers that have taken the last push, but "
            f"rollout.router={rollout.router} hides them: set rollout.router=null or "
            f"{key.partition('=')[0]}={off}"
        )
    if rollout.is_stale and rollout.lora == "adapter":
        raise ValueError(
            f"{key} goes on with responses after a push, but rollout.lora=adapter unloads the "
            "adapter that they began with: set rollout.lora=merged or rollout.max_staleness=0"
        )


def _check_quantization(config: Config) -> None:
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.quantization is None:
        return
    key = f"rollout.quantization={rollout.quantization}"
    if config.model.dtype != "bfloat16":
        raise ValueError(
            f"{key} quantises weights in bfloat16, the only form in which its servers compute, but "
            f"model.dtype={config.model.dtype}: set model.dtype=bfloat16 or "
            "rollout.quantization=null"
        )
    if not isinstance(algorithm, PolicyOptimization):
        return
    if algorithm.importance == "none" and algorithm.old_logprobs == "trainer":
        raise ValueError(
            f"{key} samples from rounded weights, for which algorithm.importance=none does not "
            "correct: set algorithm.importance=token or rollout.quantization=null"
        )


def _check_replay(config: Config) -> None:
    if isinstance(config.algorithm, PolicyOptimization):
        return
    for key, value in (
        ("run.record_rollouts=true", config.run.record_rollouts),
        (f"rollout.replay={config.rollout.replay}", config.rollout.replay is not None),
    ):
        if value:
            raise ValueError(
                f"{key} is about rollouts, but algorithm.name={config.algorithm.name} trains on "
                "answers of the data: remove it"
            )


def _check_routing_replay(config: Config) -> None:
    router = config.rollout.router
    if replays_routing(config.algorithm) and router is not None:
        raise ValueError(
            "algorithm.routing_replay=true asks servers for the experts of tokens, but "
            f"rollout.router={router} passes on only the keys that it knows: set the first to "
            "false or the second to null"
        )


def _check_distillation(config: Config) -> None:
    key, algorithm, rollout = "distillation.teachers", config.algorithm, config.rollout
    teachers, data = config.distillation.teachers, config.data
    if not teachers:
        return
    if not isinstance(algorithm, PolicyOptimization):
        raise ValueError(
            f"{key} scores what the policy samples, but algorithm.name={algorithm.name} samples "
            "nothing: remove it"
        )
    if rollout.temperature != 1:
        raise ValueError(
            f"{key} scores at temperature 1, but rollout.temperature={rollout.temperature}: set it "
            "to 1.0"
        )
    if config.distillation.is_forward and rollout.samples_likeliest:
        raise ValueError(
            "distillation.divergence=forward_topk needs the policy's probability of each of the "
            f"teacher's tokens, but rollout.top_p={rollout.top_p:g} and rollout.top_k="
            f"{rollout.top_k} give some 0, where it is infinite: set them to 1 and 0, or set "
            "distillation.divergence=sampled"
        )
    for medium, column in (("videos", "video_key"), ("audio", "audio_key")):
        if (given := getattr(data, column)) is not None:
            raise ValueError(
                f"{key} is sent no {medium}, but data.{column}={given}: set it to null or remove "
                f"{key}"
            )
    known = ("answer", *data.extra_keys)
    for name, teacher in teachers.items():
        if teacher.rows and data.category_key is None:
            raise ValueError(
                f"{key}.{name}.rows are values of data.category_key, which is null: set it to a "
                "column"
            )
        if others := [column for column in teacher.columns if column not in known]:
            raise ValueError(
                f"{key}.{name}.hint has the column {others[0]!r}, but it may only have those of "
                f"{', '.join(known)}: add it to data.extra_keys"
            )
        if teacher.is_policy and rollout.max_staleness:
            raise ValueError(
                f"{key}.{name} is the policy itself with the weights that sampled, but "
                f"rollout.max_staleness={rollout.max_staleness} samples with several: set it to 0, "
                f"or {key}.{name}.urls to servers of its own"
            )


def _check_adapters(config: Config) -> None:
    if config.rollout.lora == "merged":
        return
    if config.lora.rank == 0:
        raise ValueError(
            "rollout.lora=adapter sends adapters, but lora.rank=0 trains none: "
            "set lora.rank, or rollout.lora=merged"
        )
    others = [target for target in config.lora.targets if target not in SERVED_TARGETS]
    if others:
        raise ValueError(
            f"rollout.lora=adapter cannot serve lora.targets={others[0]}: SGLang takes adapters on "
            f"{', '.join(SERVED_TARGETS)} from a trainer; set rollout.lora=merged"
        )


def _check_warmup(config: Config) -> None:
    optimizer, algorithm = config.optimizer, config.algorithm
    if optimizer.warmup_steps > algorithm.policy_steps:
        critic = algorithm.steps - algorithm.policy_steps
        less = f" less algorithm.critic_warmup_steps={critic}" if critic else ""
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is above "
            f"algorithm.steps={algorithm.steps}{less}: the rate would never be reached; lower it "
            "or raise the number of steps"
        )


def _check_optimizer(config: Config) -> None:
    if config.optimizer.offload and config.rollout.colocate:
        raise ValueError(
            "optimizer.offload=true moves the optimizer's state at each update, and "
            "rollout.colocate=true whenever the GPUs change hands: set one of them to false"
        )
    is_aware = config.optimizer.megatron_options["use_precision_aware_optimizer"]
    if is_aware and config.model.dtype != "bfloat16":
        raise ValueError(
            "optimizer.megatron.use_precision_aware_optimizer=true keeps what weights in bfloat16 "
            f"lack, but model.dtype={config.model.dtype}: set the first to false or the second to "
            "bfloat16"
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    wanted = [name for name in ("every", "before", "after") if getattr(evaluation, name)]
    if wanted and not config.data.test_files:
        key = f"evaluation.{wanted[0]}"
        raise ValueError(
            f"{key}={str(getattr(evaluation, wanted[0])).lower()} needs questions to evaluate on: "
            f"set data.test_files=[FILE.parquet] or turn {key} off"
        )


def _check_profile(config: Config) -> None:
    steps, last = config.run.profile, config.algorithm.steps
    if steps and max(steps) > last:
        raise ValueError(
            f"run.profile={list(steps)} has a step that never comes, as algorithm.steps={last}: "
            f"choose steps from 1 to {last}"
        )


def _check_checkpoint(config: Config) -> None:
    checkpoint, evaluation = config.checkpoint, config.evaluation
    if checkpoint.step is not None and config.run.resume == "never":
        raise ValueError(
            f"checkpoint.step={checkpoint.step} is a step to resume from, but run.resume=never "
            "resumes from none: remove one of them"
        )
    metric = checkpoint.best_metric
    if metric is None:
        return
    if not metric.startswith(EVALUATION):
        if near := nearest_metrics(metric):
            raise ValueError(
                f"checkpoint.best_metric={metric} is not a metric of training steps: choose one of "
                f"metrics.jsonl, such as {', '.join(near)}, or {EVALUATION}greedy"
            )
        return
    measure = metric.split("/")[1]
    if measure not in MEASURES:
        raise ValueError(
            f"checkpoint.best_metric={metric} is not measured by evaluations: choose one "
            f"of {', '.join(EVALUATION + name for name in MEASURES)}"
        )
    if getattr(evaluation, measure, True) is False:
        raise ValueError(
            f"checkpoint.best_metric={metric} is not measured with evaluation.{measure}=false: "
            "turn it on or choose another metric"
        )
    if not evaluation.every and not evaluation.after:
        raise ValueError(
            f"checkpoint.best_metric={metric} needs evaluations of saved steps: set "
            "evaluation.every to checkpoint.every, or choose a metric of the training steps"
        )


def derive(config: Config, following: Collection[str]) -> Config:
    """Return the configuration with derived values for the keys in `following` ("section.key").

    A key that is declared with `follows` and is null in a recipe gets its value here. A value that
    a recipe sets is kept, and `check` refuses it if it breaks a rule.
    """
    for name, value in _RULES.items():
        if name in following:
            section, _, key = name.partition(".")
            changed = replace(getattr(config, section), **{key: value(config)})
            config = replace(config, **{section: changed})
    return config


def longest_session(config: Config) -> int | None:
    """Return the maximum number of tokens that an episode adds to its first prompt, None if it has
    one turn. Of an agent's episode it is the length of all calls.
    """
    environment, new = config.environment, config.rollout.max_new_tokens
    if environment.max_turns == 1:
        return None
    if environment.name == "gateway":
        return environment.max_tokens
    turns, observed = environment.max_turns, environment.max_observation_tokens
    return min(turns * new + (turns - 1) * observed, environment.max_tokens or sys.maxsize)


def longest_tree(config: Config, *, episodes: int) -> int:
    """Return the maximum number of tokens of a prompt with `episodes` of its episodes."""
    environment, new = config.environment, config.rollout.max_new_tokens
    if environment.name == "gateway":
        assert environment.max_tokens is not None
        return episodes * environment.max_tokens
    most, observed = environment.max_tokens or sys.maxsize, environment.max_observation_tokens
    lengths = [
        min(turns * new + (turns - 1) * observed, most)
        for turns in range(1, environment.max_turns + 1)
    ]
    # Where an image is replaced, a turn repeats what follows it, in a branch of its own.
    has_branches = environment.over_budget == "replace" and environment.max_images is not None
    episode = sum(lengths) if has_branches else lengths[-1]
    return config.data.max_prompt_tokens + episodes * episode


def _pack_tokens(config: Config) -> int:
    if isinstance(config.algorithm, PolicyOptimization):
        episodes = config.algorithm.responses_per_prompt
        return max(longest_tree(config, episodes=episodes), LEAST_PACK_TOKENS)
    parts = 3 if isinstance(config.algorithm, DPO) else 2  # the prompt and its responses
    return max(parts * config.data.max_prompt_tokens, LEAST_PACK_TOKENS)


# The order matters: optimizer.warmup_steps depends on the steps that the critic's warmup leaves.
_RULES: dict[str, Callable[[Config], Any]] = {
    "algorithm.critic_warmup_steps": lambda config: min(config.algorithm.steps // 12, 5),
    "optimizer.warmup_steps": lambda config: min(config.algorithm.policy_steps // 8, 20),
    "data.pack_tokens": _pack_tokens,
    "environment.tool_timeout": lambda config: config.environment.timeout / 2,
    "rollout.pause_mode": lambda config: "in_place" if config.rollout.is_stale else "abort",
    "rollout.sync": lambda config: "distributed" if config.rollout.mode == "external" else "tensor",
}
