"""A tiny model's processor, a reward manager, and a user's modules."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megavlm.config.data import Data
from megavlm.config.reward import Reward
from megavlm.data.processor import Processor
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.rewards.manager import Part, RewardManager
from tests.support.timeouts import scaled


@pytest.fixture(scope="module", autouse=True)
def user_modules() -> Iterator[None]:
    """A user's modules on the path of environments' processes, which inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "user"), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, ["How many? 1 2 3 4 5", "No. Look again."] * 20, seed=0)
    return Processor(folder, Data(max_prompt_tokens=64), family_of(folder))


@pytest.fixture(scope="module")
def manager() -> Iterator[RewardManager]:
    manager = RewardManager(
        [Part("r", "vqa")], Reward(on_failure="zero", workers=1, timeout=scaled(30), memory_mb=1024)
    )
    yield manager
    asyncio.run(manager.close())
