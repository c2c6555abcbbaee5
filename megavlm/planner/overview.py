"""`megavlm plan`: shows the ranks, batches, memory and modelled step of a recipe, and changes that
would make a recipe fit.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.recompute import Recompute
from megavlm.config.schema import Config
from megavlm.families import family
from megavlm.model_config import model_config
from megavlm.models.cost import LANGUAGE_SHARE
from megavlm.models.sizes import EqualRanks
from megavlm.planner.memory import GB, GPU, OVERHEAD, RunMemory, trainer_ranks
from megavlm.planner.rates import (
    LOW_RATES,
    LOW_SHARE,
    MEASURED_CARD,
    NODE,
    PUBLISHED_MFU,
    Rates,
)
from megavlm.planner.time import StepModel
from megavlm.planner.weight_updates import num_servers

COLUMNS = (
    "weights", "gradients", "optimizer", "step", "activations", "logits", "features", "encoding",
    "servers", "total",
)  # fmt: skip
Load = Callable[..., Config]  # function that loads the recipe with more overrides


def run_plan(load: Load, world_size: int | None, gpu: float = GPU) -> str:
    """Return the plan of a recipe as text. world_size: Number of trainer GPUs; None takes the
    recipe's. gpu: Bytes of each GPU.

    Raises ValueError if the layout does not fit the model or the world size.
    """
    config = load()
    hf_config = model_config(config.model.folder)
    num_ranks = world_size or config.parallel.num_ranks
    ranks = [*trainer_ranks(config, hf_config, num_ranks)]
    memory = RunMemory.of(config, hf_config, num_ranks, gpu, ranks)
    lines = [*_ranks(config, num_ranks), *_memory(memory)]
    if isinstance(config.algorithm, PolicyOptimization):
        models = [step_model(config, hf_config, num_ranks, memory, x) for x in (None, LOW_RATES)]
        lines += ["", *_step(*models)]
    problems = [*memory.problems()]
    lines += [f"Does not fit: {sentence}." for sentence in problems]
    if not problems:
        lines += larger_packs(config, hf_config, num_ranks, gpu, ranks)
    else:
        found = [*remedies(load, hf_config, num_ranks, gpu)]
        lines.append(
            "Would fit: " + "; ".join(found) + "."
            if found
            else "No single key makes it fit: see --search, or take more GPUs (--gpus)."
        )
    return "\n".join(lines)


def fits(config: Config, world_size: int) -> str:
    """Return a sentence with the modelled memory of the fullest GPU. Raises ValueError if the run
    does not fit.
    """
    hf_config = model_config(config.model.folder)
    memory = RunMemory.of(config, hf_config, world_size)
    if found := [*memory.problems()]:
        raise ValueError(
            f"modelled memory does not fit: {'; '.join(found)}: megavlm plan names the keys that "
            "would make it fit"
        )
    return f"{memory.fullest / GB:.0f} of {memory.gpu / GB:.0f} GB on the fullest GPU, modelled"


def step_model(
    config: Config, hf_config: Any, world_size: int, memory: RunMemory, rates: Rates | None = None
) -> StepModel:
    """Return the model of a step with the recipe's servers."""
    servers = num_servers(config, world_size)
    return StepModel(config, hf_config, world_size, servers, rates, memory)


def remedies(load: Load, hf_config: Any, world_size: int, gpu: float) -> Iterator[str]:
    """Yield overrides that would make a recipe fit: each changes one key, and keys that depend on
    it.
    """
    config = load()
    parallel, data = config.parallel, config.data
    changes: tuple[dict[str, Any], ...] = (
        *map(recompute_keys, recomputations(hf_config)[1:]),
        {"optimizer.megatron.use_precision_aware_optimizer": "true"},
        {"parallel.tensor": 2 * parallel.tensor, "parallel.sequence": "true"},
        {"parallel.pipeline": 2 * parallel.pipeline},
        {"parallel.context": 2 * parallel.context},
        {"parallel.expert": 2 * parallel.expert},
        {"data.pack_tokens": data.pack_tokens // 2},
        {"rollout.tensor_parallel": 2 * config.rollout.tensor_parallel},
        {"rollout.server_args.mem_fraction_static": 0.75},
    )
    for changed in changes:
        overrides = [f"{key}={value}" for key, value in changed.items()]
        if parallel.data is not None and any(key.startswith("parallel.") for key in changed):
            overrides.append("parallel.data=null")
        try:
            other = load(*overrides)
            memory = RunMemory.of(other, hf_config, world_size, gpu)
        except ValueError:
            continue  # a layout that the model or the recipe does not support
        if not [*memory.problems()]:
            yield f"{' '.join(overrides)} ({memory.fullest / GB:.0f} GB)"


def recompute_keys(kind: Recompute) -> dict[str, str]:
    """Return the keys that choose a kind of recomputation."""
    keys: dict[str, str] = {"recompute.language": kind.language}
    if kind.language == "selective":
        keys["recompute.modules"] = f"[{','.join(kind.modules)}]"
    return keys


def larger_packs(
    config: Config, hf_config: Any, world_size: int, gpu: float, ranks: Iterable[EqualRanks]
) -> list[str]:
    """Return a sentence with the packs of twice, four times, ... the tokens that fit too; none if
    twice the tokens do not fit, or if a pack would be more than a data rank's minibatch.
    """
    data_ranks = world_size // config.parallel.model_size
    found, tokens = None, 2 * config.data.pack_tokens
    while tokens <= _minibatch_tokens(config, data_ranks):
        other = replace(config, data=replace(config.data, pack_tokens=tokens))
        memory = RunMemory.of(other, hf_config, world_size, gpu, ranks)
        if any(memory.problems()):
            break
        found = f"data.pack_tokens={tokens} would fit too ({memory.fullest / GB:.0f} GB)"
        tokens *= 2
    if found is None:
        return []
    return [f"{found}: fewer launches, and fewer prompts that are computed in several packs."]


def _minibatch_tokens(config: Config, data_ranks: int) -> float:
    """Return the tokens of a data rank's minibatch if all prompts and responses are the longest."""
    algorithm, prompt = config.algorithm, config.data.max_prompt_tokens
    if not isinstance(algorithm, PolicyOptimization):
        return algorithm.batch_size / data_ranks * 2 * prompt
    group = prompt + algorithm.responses_per_prompt * config.rollout.max_new_tokens
    return algorithm.prompts_per_step / algorithm.minibatches / data_ranks * group


def recomputations(hf_config: Any) -> list[Recompute]:
    """Return the kinds of recomputation that are worth trying, those that take the least time
    first. Core attention keeps little except in linear attention, where it keeps most.
    """
    architecture = family(hf_config.model_type).architecture(hf_config)
    large = "moe" if "num_moe_experts" in architecture else "mlp"
    modules: list[tuple[str, ...]] = [(large,)]
    if any(architecture.get("linear_attention_freq", ())):
        modules = [("core_attn",), (large,), ("core_attn", large)]
    selective = [Recompute(language="selective", modules=names) for names in modules]
    return [Recompute(), *selective, Recompute(language="full")]


def _ranks(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    data = world_size // parallel.model_size
    axes = {
        "pipeline": parallel.pipeline, "data": data, "context": parallel.context,
        "tensor": parallel.tensor,
    }  # fmt: skip
    yield f"{world_size} trainer GPUs: " + " x ".join(f"{name} {n}" for name, n in axes.items())
    stride = world_size
    for name, size in axes.items():  # in megatron-core's order, the slowest axis first
        stride //= size
        if size > 1:
            yield f"  {name:9} ranks {_few([i * stride for i in range(size)])} are one group"
    if parallel.expert > 1:
        experts = f"{parallel.expert} groups of ranks of a stage hold different experts"
        yield f"  {'experts':9} {experts}, each cut over {parallel.expert_tensor}"
    rollout = config.rollout
    if isinstance(config.algorithm, PolicyOptimization):
        count = num_servers(config, world_size)
        shared = " that the trainer uses" if rollout.colocate else ""
        yield f"Servers: {count}, each of {rollout.tensor_parallel} GPUs{shared}"
    yield ""


def _few(numbers: list[int]) -> str:
    shown = numbers if len(numbers) <= 8 else [*numbers[:4], "...", numbers[-1]]
    return ", ".join(map(str, shown))


def _memory(memory: RunMemory) -> Iterator[str]:
    yield "GB on each GPU, modelled"
    yield f"{'':14}" + "".join(f"{name:>12}" for name in COLUMNS)
    for stage in memory.stages:
        cells = "".join(f"{getattr(stage, name) / GB:12.1f}" for name in COLUMNS)
        yield f"{f'ranks {stage.ranks.start}-{stage.ranks.stop - 1}':14}{cells}"
    yield (
        f"total: with {OVERHEAD / GB:.0f} GB of context and buffers; the tower encodes before the "
        "activations of the update exist, and the optimizer steps after them."
    )
    if memory.server is not None:
        yield (
            f"A server's rank stores {memory.server.weights / GB:.1f} GB of weights and has "
            f"{memory.server.cache / GB:.1f} GB for its cache."
        )
    if memory.colocate:
        yield (
            f"While servers work, the trainer's weights and optimizer state take up to "
            f"{NODE * memory.away / GB:.0f} GB of pinned memory on the host of {NODE} GPUs."
        )


def _step(model: StepModel, slow: StepModel) -> Iterator[str]:
    """Yield the modelled step. slow: The same at the rate of published runs."""
    step, seconds, packs = model.step, model.seconds(), [len(packs) for packs in model.packs]
    moved = {name: f"{num / GB:.1f}" for name, num in model.exchanged().items()}
    yield (
        f"A step: {step.prompts} prompts of {step.prompt} tokens, {step.responses} responses of "
        f"{step.response} on average and {step.longest} at most, modelled with rates of "
        f"{MEASURED_CARD}"
    )
    few = f"{min(packs)}" if min(packs) == max(packs) else f"{min(packs)} to {max(packs)}"
    yield (
        f"A minibatch: {few} packs on a data rank, {model.over_ideal:.2f} x the ideal time, of "
        f"which the pipeline's bubble is {model.bubble:.0%}"
    )
    yield (
        f"A GPU sends: in a forward pass {moved['tensor']} GB over the tensor, {moved['context']} "
        f"over the context and {moved['expert']} over the expert axis; in an update "
        f"{moved['gradients']} GB of gradients and weights"
    )
    running = min(model.server.max_running(step), step.responses * model.prompts_per_server)
    yield (
        f"A server runs {running} of its {step.responses * model.prompts_per_server} responses at "
        f"once; its rank receives {model.received / GB:.1f} GB in {model.sync_rounds} rounds of a "
        "weight sync"
    )
    if model.server.drafts:
        context = step.prompt + step.resident
        one, many = (model.server.least_accepted(count, context) for count in (1, running))
        yield (
            f"Its passes draft {model.server.drafts} tokens, which pays if they add more than "
            f"{one:.2f} tokens to a single response, and {many:.2f} to each of {running} "
            f"(accept_length); {model.server.accepted:.1f} are assumed"
        )
    for name, value in seconds.items():
        yield f"{name:14}{value:8.1f} s{value / seconds['total']:7.0%}"
    published = ", ".join(f"{size} {mfu:.1%}" for size, mfu in PUBLISHED_MFU.items())
    yield (
        f"{step.tokens / seconds['total']:,.0f} tokens/s are trained on; update MFU "
        f"{model.update_mfu:.0%}. At {LOW_SHARE:.0%} of the GPUs' peak in place of "
        f"{LANGUAGE_SHARE:.0%}, as EasyR1's published MFUs ({published}) suggest: "
        f"{slow.seconds()['total']:.1f} s, MFU {slow.update_mfu:.0%}"
    )
