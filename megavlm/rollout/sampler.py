"""The sampler: all that makes groups from rows. Training, the producer of rollouts, evaluation and
`megavlm rollout` build it alike.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from megavlm.config.algorithm import DPO, DataTraining, replays_routing
from megavlm.config.schema import Config
from megavlm.data.loader import PromptStream, held_for
from megavlm.data.processor import Processor
from megavlm.data.rows import Row, Rows
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.protocol import SamplingParams, adapter_name
from megavlm.inference.routed_experts import routed_experts_shape
from megavlm.rollout.episodes import EpisodeRunner
from megavlm.rollout.rewards import make_reward_manager
from megavlm.rollout.teachers import Teachers
from megavlm.rollout.trajectory import Group

Refit = Callable[[], None]  # pushes the weights to servers that restarted

ROWS_AT_ONCE = 2048  # bounds the images in memory while rows are played


class Sampler:
    """The processor, the training and test rows and, with a client, the episodes with their
    rewards.
    """

    episodes: EpisodeRunner  # with a client

    def __init__(self, config: Config, client: RolloutClient | None) -> None:
        """Load the processor, the rows, the environment and the rewards. client: Client of the
        rollout servers; None in a run that generates nothing. Raises ValueError if one of them
        cannot be loaded.
        """
        self.config, data = config, config.data
        self.processor = Processor(config.model.folder, data, family_of(config.model.folder))
        self.rows, self.test_rows = Rows(data.train_files, data), Rows(data.test_files, data)
        self.sampling_params = make_sampling_params(config, self.processor)
        self._client = client
        if client is not None:
            rewards = make_reward_manager(config)
            given = config.distillation
            teachers = Teachers(given, self.processor) if given.teachers else None
            self.episodes = EpisodeRunner(config, self.processor, rewards, client.runner, teachers)

    @property
    def client(self) -> RolloutClient:
        assert self._client is not None, "this run has no rollout servers"
        return self._client

    def prompt_stream(self) -> PromptStream:
        """Return the stream of the training prompts, at its start. The caller closes it."""
        algorithm, processor = self.config.algorithm, self.processor
        # Prompts are read in batches of one step, so that an image is processed once per step.
        stream = partial(PromptStream, self.rows, data=self.config.data, seed=self.config.run.seed)
        if isinstance(algorithm, DataTraining):
            is_pairs, size = isinstance(algorithm, DPO), algorithm.batch_size
            make = processor.preference_prompt if is_pairs else processor.supervised_prompt
            return stream(make, batch_size=size, held="nothing")
        held, size = held_for(self.config.rollout), algorithm.prompts_per_step
        return stream(processor.prompt, batch_size=size, held=held)

    def play_rows(
        self,
        rows: Sequence[Row],
        n: int,
        how: SamplingParams,
        version: int | None = None,
        refit: Refit | None = None,
    ) -> Iterator[Group]:
        """Play n episodes from each row, and yield the groups in the order of the rows. A group has
        no episodes if they could not start, and responses have tokens and log-probs only.

        version: Weight version that must generate the responses; None accepts any. refit: Pushes
        the weights to servers that restarted.
        """

        async def push() -> None:
            assert refit is not None
            refit()

        how = replace(how, routed_experts=None, returns_kept=False)
        generate = partial(
            self.client.generate,
            sampling_params=at_version(self.config, how, version),
            weight_version=version,
            refit=None if refit is None else push,
        )

        async def play(groups: Sequence[Group]) -> None:
            await self.episodes.start(groups, n)
            self.episodes.take_skipped()  # they are counted for training prompts only
            await self.episodes.play(groups, generate)

        for start in range(0, len(rows), ROWS_AT_ONCE):
            groups = [Group(self.processor.prompt(row)) for row in rows[start:][:ROWS_AT_ONCE]]
            self.client.run(play(groups))
            yield from groups

    def close(self) -> None:
        """End the processes of the environment and the rewards."""
        if self._client is not None:
            self.client.run(self.episodes.close())


def make_sampling_params(config: Config, processor: Processor) -> SamplingParams:
    """Return the sampling parameters of a recipe's rollouts. Their cache key is new each time,
    because servers may outlive a run, and weights of another run have the same versions.
    """
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        vocab_size=processor.vocab_size,
        suppressed_ids=processor.suppressed_ids if rollout.suppress_special_tokens else (),
        stop_ids=processor.stop_ids,
        cache_key=secrets.token_hex(4),
        routed_experts=routed_experts_shape(config.model.folder)
        if replays_routing(config.algorithm)
        else None,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        returns_kept=rollout.samples_likeliest,
    )


def at_version(config: Config, how: SamplingParams, version: int | None) -> SamplingParams:
    """Return sampling parameters for one weight version. They have its cache key, because a push
    does not empty the servers' prefix caches, and name its adapter if servers hold LoRA adapters.
    """
    if version is None:
        return how
    adapter = None if config.rollout.lora == "merged" else adapter_name(version)
    return replace(how, adapter=adapter, cache_key=f"{how.cache_key}-{version}")
