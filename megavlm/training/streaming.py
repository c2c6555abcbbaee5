"""Streaming: the groups of a step, worked on as they arrive. Without rollout.streaming, a step is
one streamed batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from megavlm.algorithms.registry import load_advantage_estimator
from megavlm.config.algorithm import GRPO, PolicyOptimization
from megavlm.config.schema import Config
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.groups import denominator_of
from megavlm.rollout.trajectory import Group
from megavlm.training.forward_backward import Measures
from megavlm.training.step.rank_batch import RankBatch
from megavlm.training.step.rank_images import RankImages
from megavlm.training.step.vision_features import VisionFeatures


def streaming_mode(config: Config) -> Literal["nothing", "passes", "gradients"]:
    """Return the work of a step that is done before its last group has arrived.

    "nothing": The whole step is one batch. This is the case without rollout.streaming, in a replay,
    and with an advantage estimator that may look at all groups of a minibatch (an estimator of the
    user's own that does not declare `within_groups`).

    "passes": Images are encoded, and log-probs and values computed. Used when the loss needs the
    whole step (`needs_whole_step`).

    "gradients": In addition, the gradient of the step's first update accumulates. Used for GRPO and
    its relatives. With `minibatches` above 1, groups of later minibatches have their passes done
    early; updates after the first wait for all groups, because old log-probs belong to the weights
    before the step.

    What only reports or changes the next step (KL control, curriculum, metrics) needs no rule. With
    dynamic sampling, groups without signal are held back until the last streamed batch
    (GroupBuffer.take).
    """
    algorithm = config.algorithm
    if not config.rollout.streaming or config.rollout.replay is not None:
        return "nothing"
    if isinstance(algorithm, GRPO) and not load_advantage_estimator(algorithm).within_groups:
        return "nothing"
    assert isinstance(algorithm, PolicyOptimization)
    return "passes" if needs_whole_step(algorithm) else "gradients"


def needs_whole_step(algorithm: PolicyOptimization) -> bool:
    """Return True if the loss of a group depends on all groups of the step: with advantages that
    are normalised over it (REINFORCE++), and in PPO.
    """
    return not isinstance(algorithm, GRPO) or load_advantage_estimator(algorithm).whiten


def stream_batch_tokens(config: Config, data_size: int) -> int:
    """Return the least tokens of a streamed batch: a round of packs on every data rank, as many as
    fill a pipeline.
    """
    return data_size * config.parallel.pipeline * config.data.pack_tokens


class StepGroups:
    """The groups of a step on the driver, as they arrive.

    The denominator of a minibatch's loss is known when its last group has arrived. Until then one
    is assumed from the groups of the first streamed batch; `loss_scales` correct it.

    loss_scales: After the last streamed batch, see StepPlan; before it None.
    """

    loss_scales: list[float] | None = None

    def __init__(self, settings: PolicyOptimization) -> None:
        self._settings = settings
        self._size = settings.prompts_per_step // settings.minibatches
        self._by_index: dict[int, Group] = {}
        self._left_out: Sequence[Group] = ()
        self.num_stream_batches = 0
        self.denominator: float | None = None  # assumed denominator; None if the step is one batch

    def add(self, streamed: StreamBatch[Group]) -> list[list[Group]]:
        """Add a streamed batch. Returns its groups by minibatch; a minibatch may have none of
        them.
        """
        self.num_stream_batches += 1
        by_index = dict(zip(streamed.indices, streamed.groups, strict=True))
        self._by_index |= by_index
        self._left_out = streamed.left_out
        if streamed.is_last:
            self.loss_scales = [*map(self._scale, self._split(self._by_index))]
        elif self.num_stream_batches == 1:
            of_group = denominator_of(streamed.groups, self._settings) / len(streamed.groups)
            self.denominator = max(of_group * self._size, 1.0)
        return self._split(by_index)

    @property
    def trained(self) -> list[Group]:
        """The groups to train on, in the order in which their prompts were drawn."""
        return [self._by_index[index] for index in sorted(self._by_index)]

    @property
    def sampled(self) -> list[Group]:
        """All groups of the step, first the ones to train on."""
        return [*self.trained, *self._left_out]

    def _split(self, by_index: Mapping[int, Group]) -> list[list[Group]]:
        minibatches: list[list[Group]] = [[] for _ in range(self._settings.minibatches)]
        for index in sorted(by_index):
            minibatches[index // self._size].append(by_index[index])
        return minibatches

    def _scale(self, minibatch: Sequence[Group]) -> float:
        known = max(denominator_of(minibatch, self._settings), 1)
        return 1.0 if self.denominator is None else self.denominator / known


class ArrivedBatches:
    """The streamed batches of a step on one rank, as they arrive.

    reports: Measures of the packs whose gradients the step's first update has accumulated.
    """

    def __init__(self) -> None:
        self.reports: list[Measures] = []
        self._batches: list[tuple[RankBatch, VisionFeatures]] = []

    def add(self, batch: RankBatch, features: VisionFeatures) -> None:
        self._batches.append((batch, features))

    @property
    def num_stream_batches(self) -> int:
        return len(self._batches)

    @property
    def is_complete(self) -> bool:
        """True if the last streamed batch has arrived."""
        return bool(self._batches) and self._batches[-1][0].loss_scales is not None

    def joined(self) -> tuple[RankBatch, VisionFeatures]:
        """Return all streamed batches as one, with the denominators of their losses corrected."""
        if len(self._batches) == 1:
            return self._batches[0]
        batches, features = zip(*self._batches, strict=True)
        scales = batches[-1].loss_scales
        assert scales is not None
        minibatches = [
            [pack for part in parts for pack in part]
            for parts in zip(*(batch.minibatches for batch in batches), strict=True)
        ]
        # The losses were divided by an assumed denominator; scale = assumed / true, for example
        # 1000 / 1250 = 0.8. This does not scale the first update twice: `begin_update` has
        # accumulated its gradient from the old weights, and Updater.apply scales that gradient as
        # a whole. The weights set here are read by the later minibatches, which have had no
        # gradient yet, and by every minibatch in later epochs.
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
