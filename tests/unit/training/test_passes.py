"""Which passes without a graph a step makes."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megavlm.config.algorithm import GRPO
from megavlm.training.policy_trainer import PolicyTrainer

BATCH: Any = SimpleNamespace(minibatches=[["a"], ["b"]])


def passes(*, moved: bool, **settings: Any) -> list[str]:
    """The names of log-probs and the packs they are computed for; `*`: by the reference."""
    made: list[str] = []
    place = [""]

    @contextmanager
    def in_place() -> Any:
        place[0] = "*"
        yield
        place[0] = ""

    def add(name: str, batch: Any, features: Any, *, first: int, replays: bool = True) -> None:
        assert replays == (place[0] == ""), "the reference's routers choose for themselves"
        packs = "".join(pack for packs in batch.minibatches[first:] for pack in packs)
        made.append(f"{name.split('_')[0]}{place[0]}: {packs}")

    trainer: Any = PolicyTrainer.__new__(PolicyTrainer)
    trainer.settings = GRPO(**{"kl_coefficient": 0.1, "minibatches": 2, **settings})
    trainer.train_state = SimpleNamespace(updater=SimpleNamespace(has_moved=moved))
    wanted = trainer.settings.kl_coefficient
    reference = SimpleNamespace(in_place=in_place)
    trainer.reference = reference if wanted else None
    trainer.add_logprobs = add
    trainer.add_reference_logprobs(BATCH, {})
    trainer.add_old_logprobs(BATCH, {})
    return made


REWARD = {"kl_in": "reward", "kl_estimator": "k1"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"moved": True}, ["reference*: ab", "old: b"]),
        ({"moved": False}, ["old: b"]),
        ({"moved": False, "old_logprobs": "rollout"}, ["reference: b"]),
        ({"moved": False, "kl_coefficient": 0.0}, ["old: b"]),
        ({"moved": True, **REWARD}, ["reference*: ab", "old: ab"]),
        ({"moved": False, **REWARD}, ["old: b"]),
    ],
)
def test_the_reference_is_computed_once_the_policy_has_left_it(
    options: Any, expected: list[str]
) -> None:
    assert passes(**options) == expected
