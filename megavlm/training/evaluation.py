"""Evaluation during a run, as the configuration asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megavlm.config.schema import Config
from megavlm.data.processor import Processor, Prompt
from megavlm.data.rows import Row, Rows
from megavlm.evaluation.result import EvaluationResult
from megavlm.evaluation.runner import Answer
from megavlm.evaluation.runner import evaluate as run_evaluation
from megavlm.rollout.client import RolloutClient
from megavlm.rollout.messages import Response, Sampling
from megavlm.rollout.weights.adapters import adapter_name
from megavlm.training.episodes import Arena
from megavlm.training.questions import usable


def evaluate(
    config: Config,
    client: RolloutClient,
    processor: Processor,
    arena: Arena,
    rows: Rows,
    train_rows: Rows,
    version: int | None,
    refit: Callable[[], None] | None = None,
) -> EvaluationResult:
    """`version`: of the weights that must answer; None: of any. `refit` gives them to servers that
    have lost them.
    """

    def play(questions: Sequence[Row], how: Sampling) -> list[Answer]:
        def generate(prompts: Sequence[Prompt], n: int) -> list[list[Response]]:
            return client.generate(
                prompts,
                n=n,
                sampling=asking(config, how, version),
                weight_version=version,
                refit=refit,
            )

        groups = arena.play([processor.prompt(row) for row in questions], 1, generate)
        return [Answer(episode.text, episode.score.correct) for (episode,) in groups]

    return run_evaluation(
        play,
        usable(rows, processor, config.data, config.evaluation.limit)[0],
        train_rows=list(train_rows.texts()),
        num_tokens=processor.num_tokens,
        sampling=sampling(config, processor),
        sampled=config.evaluation.sampled,
        shuffled=config.evaluation.shuffled,
        seed=config.run.seed,
    )


def asking(config: Config, how: Sampling, version: int | None) -> Sampling:
    """With the adapters of a weight version, where servers have them beside the weights."""
    if config.rollout.lora == "merged" or version is None:
        return how
    return replace(how, adapter=adapter_name(version))


def sampling(config: Config, processor: Processor) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=rollout.max_new_tokens,
        suppressed_ids=processor.suppressed_ids if rollout.suppress_special_tokens else (),
        end_id=processor.eos_id,
    )
