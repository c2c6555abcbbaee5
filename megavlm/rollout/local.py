"""Groups of an engine in the trainer's process: trainer and servers take turns."""

from collections.abc import Iterator, Mapping
from typing import Any

from megavlm.environments.curriculum import Curriculum
from megavlm.observability.phases import Phases
from megavlm.rollout.buffer import Wave
from megavlm.rollout.engine import Engine
from megavlm.rollout.sampler import Refit, Sampler
from megavlm.rollout.trajectory import Group


class LocalSource:
    """Implements GroupSource. Between steps the servers are idle."""

    def __init__(self, sampler: Sampler, curriculum: Curriculum, phases: Phases) -> None:
        """phases: Clock for the phases `data`, `reward` and `rollout`."""
        self._client, self._curriculum, self._phases = sampler.client, curriculum, phases
        self._refit: Refit | None = None
        self._engine = Engine(sampler, self._push)

    @property
    def measures(self) -> dict[str, float]:
        return self._engine.measures

    def waves(
        self, version: int, refit: Refit | None, least_tokens: int | None = None
    ) -> Iterator[Wave[Group]]:
        engine, run = self._engine, self._client.runner.run
        self._refit, is_last = refit, False
        with self._phases("data"):
            stage = self._curriculum.stage(version)
            drawn = engine.begin(version, stage, pushes=refit is not None)
        with self._phases("reward"):
            run(engine.start(drawn))
        while not is_last:
            with self._phases("rollout"):
                wave = run(engine.take(least_tokens))
                if is_last := wave.is_last:
                    run(engine.pause())
            yield wave

    async def _push(self) -> None:
        assert self._refit is not None
        self._refit()

    def state_dict(self) -> dict[str, Any]:
        return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.load_state_dict(state)

    def close(self) -> None:
        self._client.run(self._engine.close())
