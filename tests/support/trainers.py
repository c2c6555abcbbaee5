"""Real trainers of tiny models without servers: their groups are always the same."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megavlm.config.algorithm import PPO
from megavlm.config.schema import Config
from megavlm.data.processor import Prompt
from megavlm.observability.phases import Phases
from megavlm.observability.progress import Progress
from megavlm.parallel.mesh import Layout, build_mesh
from megavlm.rewards.base import Score
from megavlm.rollout.buffer import StreamBatch
from megavlm.rollout.sampler import Sampler
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training import policy_trainer
from megavlm.training.driver import Driver
from megavlm.training.policy_trainer import PolicyTrainer
from megavlm.training.ppo_trainer import PPOTrainer
from megavlm.training.train_state import TrainState
from megavlm.training.weight_push import WeightPusher
from tests.conftest import row, write_rows
from tests.parity.models import model_folder
from tests.parity.table import Ranks
from tests.support.random_images import image
from tests.support.responses import make_response

PROMPTS, RESPONSES = 6, 3
ARRIVAL = ((4, 1), (0, 5), (3,), (2,))  # places of the groups of each streamed batch
GROUP = {"name": "grpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.01}


def write_files(folder: Path) -> Path:
    """Write the rows of a step: one without an image, the others of several sizes."""
    sizes = [(64, 64), (96, 64), (64, 128), (64, 64), (128, 96), (96, 96)]
    rows = [
        row(
            problem="<image>" * (index != 3) + f"How many? {index}",
            images=[{"bytes": image(*size, index), "path": None}][: index != 3],
        )
        for index, size in enumerate(sizes)
    ]
    write_rows(folder / "rows.parquet", rows)
    return folder


def recipe(files: Path, folder: Path, family: str, ranks: Ranks, **sections: Any) -> Path:
    """Write a recipe of a step that several packs hold on each rank."""
    layout = ranks.mesh
    parallel = {
        key: getattr(layout, key) for key in ("tensor", "pipeline", "virtual", "context", "expert")
    }
    made: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "resume": "never"},
        "model": {"folder": str(model_folder(family)), "dtype": "float32"},
        "data": {"train_files": [str(files / "rows.parquet")], "pack_tokens": 256},
        "algorithm": {**GROUP},
        "parallel": parallel | {"data": ranks.data, "sequence": ranks.sequence},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0, "clip_grad": 0.0},
        "rollout": {"max_new_tokens": 32, "mode": "external", "urls": ["http://127.0.0.1:1"]},
        "checkpoint": {"every": 0},
    }
    for name, values in sections.items():
        made[name] = made.get(name, {}) | values
    made["algorithm"] |= {
        "steps": 9, "prompts_per_step": PROMPTS, "responses_per_prompt": RESPONSES,
    }  # fmt: skip
    made["data"]["max_prompt_tokens"] = 128
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(made))  # JSON is YAML
    return path


class Source:
    """A step's groups: all at once, or in a stream of batches whose order the test decides.
    Implements GroupSource.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.measures: dict[str, float] = {}
        self._config = sampler.config
        self._prompts = [sampler.processor.prompt(row) for row in sampler.rows]

    def stream(
        self, version: int, refit: Any, least_tokens: int | None = None
    ) -> Iterator[StreamBatch[Group]]:
        assert self._config.rollout.streaming == bool(least_tokens)
        # The second step then starts from the same weights, and those differ from the reference.
        arrival = ARRIVAL if version and least_tokens else (range(PROMPTS),)
        for places in arrival:
            made = [group(self._prompts[place], version, place) for place in places]
            yield StreamBatch(made, places, is_last=places == arrival[-1])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def group(prompt: Prompt, version: int, index: int) -> Group:
    """Return a played group, always the same. Its lengths and rewards differ much from others'; one
    response is cut, and one is skipped.
    """
    generator = np.random.default_rng(100 * version + index)
    episodes = []
    for number in range(RESPONSES):
        length = int(generator.integers(1, 4 + 4 * index))
        tokens = tuple(generator.integers(0, 250, length).tolist())
        logprobs = tuple(generator.normal(-5.5, 0.5, length).tolist())
        is_cut, is_skipped = (index, number) == (4, 1), (index, number) == (0, 2)
        finish = "length" if is_cut else "stop"
        reward = float(generator.integers(0, 3)) / 2
        score = Score(reward, False, failure="timeout" if is_skipped else None, skipped=is_skipped)
        episode = Episode(prompt)
        response = make_response(tokens, logprobs, finish, str(version))
        episode.add_turn(response, "", reward, score, None)
        episodes.append(episode)
    return Group(prompt, episodes=episodes)


class NoServers(WeightPusher):
    def push(self) -> None:
        pass


def trainer_of(config: Config, source: Callable[[Sampler], Any] = Source) -> Any:
    mesh = build_mesh(Layout.from_config(config.parallel), seed=0)
    phases = Phases()
    train_state = TrainState.build(config, mesh, Progress(is_quiet=True), phases)
    driver = None
    if mesh.is_driver:
        driver = Driver(config, train_state.hf_config, mesh, None, train_state.progress)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_trainer, "make_source", lambda sampler, *_: source(sampler))
        made = (PPOTrainer if isinstance(config.algorithm, PPO) else PolicyTrainer)(
            train_state, driver, None
        )
    made.setup()
    made.weights = NoServers(train_state, None, None, None)
    return made
