"""Waves: a step's groups, worked on as they arrive (rollout.overlap). Without it, a step is one
wave.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from megavlm.algorithms.registry import load_advantage_estimator
from megavlm.config.algorithm import GRPO, PolicyOptimization
from megavlm.config.schema import Config
from megavlm.rollout.groups import select_groups, units_of
from megavlm.rollout.sampler import Refit
from megavlm.rollout.source import GroupSource, WaveSource
from megavlm.rollout.trajectory import Group
from megavlm.rollout.wave import Wave
from megavlm.training.forward_backward import Measures
from megavlm.training.step.rank_batch import RankBatch
from megavlm.training.step.rank_images import RankImages
from megavlm.training.step.vision_features import VisionFeatures

Early = Literal["nothing", "passes", "gradients"]


def done_early(config: Config) -> Early:
    """Return the work of a step that is done before its last group has arrived. This is the only
    place that decides it.

    nothing: The step is one wave. So it is without rollout.overlap, in a replay, whose groups are
    all there, and with an advantage estimator that may look at all groups of a minibatch: one of
    the user's own that does not declare `within_groups`.

    passes: Images are encoded, and log-probs and values computed. So it is where the loss needs the
    whole step: with advantages that are normalised over it (REINFORCE++), and in PPO, which also
    computes its returns then.

    gradients: In addition, the gradient of the step's first update accumulates. So it is in GRPO
    and its relatives. With `minibatches` above 1, groups of later minibatches have their passes
    done early; updates after the first wait for all groups, since old log-probs belong to the
    weights before the step.

    What only reports or changes the next step (KL control, curriculum, metrics) needs no rule. With
    dynamic sampling, groups without signal are held back until the last wave (AheadSource.waves).
    """
    algorithm = config.algorithm
    if not config.rollout.overlap or config.rollout.replay is not None:
        return "nothing"
    if not isinstance(algorithm, GRPO):
        return "passes"
    estimator = load_advantage_estimator(algorithm)
    if not estimator.within_groups:
        return "nothing"
    return "passes" if estimator.whiten else "gradients"


def wave_tokens(config: Config, data_size: int) -> int:
    """Return the least tokens of a wave: a round of packs on every data rank, as many as fill a
    pipeline.
    """
    return data_size * config.parallel.pipeline * config.data.pack_tokens


class StepGroups:
    """The groups of a step on the driver, as they arrive.

    The denominator of a minibatch's loss is known when its last group has arrived. Until then one
    is assumed from the groups of the first wave; `loss_scales` correct it.

    loss_scales: After the last wave, see StepPlan; before it None.
    """

    loss_scales: list[float] | None = None

    def __init__(self, waves: Iterator[Wave], settings: PolicyOptimization) -> None:
        self._waves, self._settings = waves, settings
        self._size = settings.prompts_per_step // settings.minibatches
        self._by_place: dict[int, Group] = {}
        self._left_out: Sequence[Group] = ()
        self.num_waves = 0
        self.units: float | None = None  # assumed denominator; None if the step is one wave

    def take(self) -> Wave:
        """Wait for the next wave."""
        wave = next(self._waves)
        self.num_waves += 1
        self._by_place |= zip(wave.places, wave.groups, strict=True)
        self._left_out = wave.left_out
        if wave.is_last:
            self.loss_scales = [*map(self._scale, self._split(self._by_place))]
        elif self.num_waves == 1:
            of_group = units_of(wave.groups, self._settings) / len(wave.groups)
            self.units = max(of_group * self._size, 1.0)
        return wave

    def minibatches(self, wave: Wave) -> list[list[Group]]:
        """Return the groups of a wave by minibatch. A minibatch may have none of them."""
        return self._split(dict(zip(wave.places, wave.groups, strict=True)))

    @property
    def trained(self) -> list[Group]:
        """The groups to train on, in the order in which their prompts were drawn."""
        return [self._by_place[place] for place in sorted(self._by_place)]

    @property
    def sampled(self) -> list[Group]:
        """All groups of the step, first the ones to train on."""
        return [*self.trained, *self._left_out]

    def _split(self, by_place: Mapping[int, Group]) -> list[list[Group]]:
        minibatches: list[list[Group]] = [[] for _ in range(self._settings.minibatches)]
        for place in sorted(by_place):
            minibatches[place // self._size].append(by_place[place])
        return minibatches

    def _scale(self, minibatch: Sequence[Group]) -> float:
        known = max(units_of(minibatch, self._settings), 1)
        return 1.0 if self.units is None else self.units / known


def waves_of_step(
    source: GroupSource, count: int, version: int, refit: Refit, *, least_tokens: int | None
) -> Iterator[Wave]:
    """Yield the groups of a step. least_tokens: Tokens of a wave; None yields all groups at once.
    The other arguments are as in GroupSource.take.
    """
    if least_tokens is not None:
        assert isinstance(source, WaveSource)
        yield from source.waves(count, version, refit, least_tokens)
        return
    sampled = source.take(count, version, refit)
    groups = select_groups(sampled, count)
    left_out = [group for group in sampled if group not in groups]
    yield Wave(groups, range(count), left_out=left_out)


class ArrivedWaves:
    """The waves of a step on one rank, as they arrive.

    reports: Measures of the packs whose gradients the step's first update has accumulated; None if
    it has not begun.
    """

    reports: list[Measures] | None = None

    def __init__(self) -> None:
        self._waves: list[tuple[RankBatch, VisionFeatures]] = []

    def add(self, batch: RankBatch, features: VisionFeatures) -> None:
        self._waves.append((batch, features))

    @property
    def is_complete(self) -> bool:
        """True if the last wave has arrived."""
        return bool(self._waves) and self._waves[-1][0].loss_scales is not None

    @property
    def is_single(self) -> bool:
        """True if the step is one wave."""
        return self.is_complete and len(self._waves) == 1

    def joined(self) -> tuple[RankBatch, VisionFeatures]:
        """Return all waves as one, with the denominators of their losses corrected."""
        if self.is_single:
            return self._waves[0]
        batches, features = zip(*self._waves, strict=True)
        scales = batches[-1].loss_scales
        assert scales is not None
        minibatches = [
            [pack for part in parts for pack in part]
            for parts in zip(*(batch.minibatches for batch in batches), strict=True)
        ]
        for packs, scale in zip(minibatches, scales, strict=True):
            for pack in packs:
                if pack.columns is not None:
                    weights = scale * pack.columns.loss_weights
                    pack.columns = replace(pack.columns, loss_weights=weights)
        batch = RankBatch(
            minibatches,
            RankImages.joined([batch.images for batch in batches]),
            [sum(counts) for counts in zip(*(batch.num_targets for batch in batches), strict=True)],
            sum(batch.num_tokens for batch in batches),
            scales,
        )
        return batch, VisionFeatures.joined(features)
