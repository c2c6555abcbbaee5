"""Evaluation during a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megavlm.config.schema import Config
from megavlm.data.processor import Processor
from megavlm.data.rows import Row, Rows
from megavlm.evaluation.attempts import SkippedRows
from megavlm.evaluation.baselines import Known
from megavlm.evaluation.questions import usable
from megavlm.evaluation.result import EvaluationResult
from megavlm.evaluation.runner import Answer
from megavlm.evaluation.runner import evaluate as run_evaluation
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import Sampling
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.trajectory import Episode, Group
from megavlm.weight_sync.lora import adapter_name


@dataclass(frozen=True)
class EvaluationSet:
    """The rows of a run's evaluations, and their baselines from the training rows."""

    rows: Sequence[Row]
    known: Known
    skipped: SkippedRows = field(default_factory=SkippedRows)

    @classmethod
    def of(
        cls,
        config: Config,
        processor: Processor,
        episode_runner: EpisodeRunner,
        test: Rows,
        train: Rows,
    ) -> "EvaluationSet":
        """Read the rows once. Raises ValueError as `usable` does, or if no row's episode can
        start.
        """

        def start(row: Row) -> None:
            episode_runner.check_start(processor.prompt(row))

        rows, skipped = usable(test, start, config.data, config.evaluation.limit)
        return cls(rows, Known.of(train.texts(), rows), skipped)


def evaluate(
    config: Config,
    client: RolloutClient,
    processor: Processor,
    episode_runner: EpisodeRunner,
    evaluation_set: EvaluationSet,
    version: int | None,
    refit: Callable[[], None] | None = None,
) -> EvaluationResult:
    """Play one episode for each row and return the result.

    version: Weight version that must generate the responses; None accepts any. refit: Function that
    pushes the weights to servers that restarted.
    """

    def play(questions: Sequence[Row], how: Sampling) -> list[Answer]:
        generate = partial(
            client.generate,
            sampling=at_version(config, how, version),
            weight_version=version,
            refit=refit,
        )
        groups = [Group(processor.prompt(row)) for row in questions]
        episode_runner.start(groups, 1)
        episode_runner.play(groups, generate)
        # An episode may fail to start, for example with shuffled images; it counts as incorrect.
        return [
            _answer(group.episodes[0]) if group.episodes else Answer("", False) for group in groups
        ]

    return run_evaluation(
        play,
        evaluation_set.rows,
        known=evaluation_set.known,
        num_tokens=processor.num_tokens,
        sampling=sampling(config, processor),
        settings=config.evaluation,
        seed=config.run.seed,
    )


def _answer(episode: Episode) -> Answer:
    return Answer(episode.text, episode.score.correct, episode.score.failure)


def at_version(config: Config, sampling: Sampling, version: int | None) -> Sampling:
    """Return `sampling` for one weight version. If servers hold LoRA adapters, it names the
    version's adapter; if a push does not empty the prefix cache, it gets a cache key of its own.
    """
    if version is None:
        return sampling
    adapter = None if config.rollout.lora == "merged" else adapter_name(version)
    key = str(version) if config.rollout.pause == "in_place" else None
    return replace(sampling, adapter=adapter, cache_key=key)


def sampling(config: Config, processor: Processor) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=rollout.max_new_tokens,
        vocab_size=processor.vocab_size,
        suppressed_ids=processor.suppressed_ids if rollout.suppress_special_tokens else (),
        stop_ids=processor.stop_ids,
    )
