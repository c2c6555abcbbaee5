"""The names by which a recipe asks for a reward."""

from collections.abc import Callable

from megavlm.rewards import boxed, exact_match
from megavlm.rewards.base import Score

_REWARDS: dict[str, Callable[[str, str], Score]] = {
    "boxed": boxed.score,
    "exact_match": exact_match.score,
}


def get(name: str) -> Callable[[str, str], Score]:
    """The function (response, answer) -> Score; ValueError for a name that is not known."""
    if name not in _REWARDS:
        raise ValueError(
            f"reward.name={name!r} is unknown: choose one of {', '.join(sorted(_REWARDS))}."
        )
    return _REWARDS[name]
