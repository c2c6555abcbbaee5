"""Groups of an engine in the trainer's process: trainer and servers take turns."""

from collections.abc import Iterator

from megavlm.environments.curriculum import Curriculum
from megavlm.observability.phases import Phases
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.engine import Engine
from megavlm.rollout.sampler import Refit, Sampler
from megavlm.rollout.trajectory import Group


class LocalSource(Engine):
    """Implements GroupSource. Between steps the servers are idle."""

    def __init__(self, sampler: Sampler, curriculum: Curriculum, phases: Phases) -> None:
        """phases: Clock for the phases `data`, `reward` and `rollout`."""
        super().__init__(sampler, self._push)
        self._curriculum, self._phases = curriculum, phases
        self._push_weights: Refit | None = None  # of the step

    def stream(
        self, version: int, refit: Refit | None, least_tokens: int | None = None
    ) -> Iterator[StreamBatch[Group]]:
        run, self._push_weights, is_last = self._client.runner.run, refit, False
        with self._phases("data"):
            stage = self._curriculum.stage(version)
            drawn = self.begin(version, stage, pushes=refit is not None)
        with self._phases("reward"):
            run(self.start(drawn))
        while not is_last:
            with self._phases("rollout"):
                streamed = run(self.take(least_tokens))
                if is_last := streamed.is_last:
                    run(self.pause())
            yield streamed

    async def _push(self) -> None:
        assert self._push_weights is not None
        self._push_weights()

    def close(self) -> None:
        self._client.run(self.end())
