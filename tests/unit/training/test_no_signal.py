"""Groups that teach nothing, and episodes whose reward is not known: advantages of policy trees."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.algorithms.registry import load_advantage_estimator
from megavlm.algorithms.segments import identity
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.positions import text_positions
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.rewards.base import Score
from megavlm.rollout.groups import (
    has_signal,
    policy_trees,
    rollout_metrics,
)
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training.advantages import (
    add_value_advantages,
    whiten_advantages,
    with_advantages,
)
from tests.support.responses import make_response

ESTIMATORS = [
    GRPO(),
    GRPO(normalize_by_std=False),
    GRPO(advantage_estimator="rloo"),
    GRPO(advantage_estimator="reinforce_plus_plus_baseline"),
    GRPO(advantage_estimator="reinforce_plus_plus"),
    PPO(lam=1.0),
]


def prompt(*ids: int) -> Prompt:
    row = Row(0, "?", "", (), "", "")
    return Prompt(row, torch.tensor(ids), ids, text_positions(len(ids), 0), len(ids), ())


def episode(
    *rewards: float, lengths: Sequence[int] = (), skipped: bool = False, cut: bool = False
) -> Episode:
    """A turn for each reward, of two tokens where `lengths` say nothing else."""
    played, known = Episode(None), [0, 1, 2]
    for reward, length in zip(rewards, lengths or [2] * len(rewards), strict=True):
        finish: Any = "length" if cut else "stop"
        played.prompts.append(prompt(*known))
        played.responses.append(make_response((7,) * length, (-0.5,) * length, finish, "0"))
        played.texts.append("")
        played.rewards.append(reward)
        known += [7] * length + [1]
    failure = "timeout" if skipped else None
    played.score = Score(sum(rewards), False, failure=failure, skipped=skipped)
    return played


def columns(groups: Sequence[Group], settings: Any, max_new_tokens: int = 8) -> dict[str, Tensor]:
    """A token of each response: [S] of every value, with the advantages."""
    trees = policy_trees(groups, settings, max_new_tokens=max_new_tokens)
    if isinstance(settings, GRPO):
        (trees,) = with_advantages([trees], settings)
    pack = make_pack(trees, vision_token_ids=(-1, -2))
    assert pack.columns is not None
    if isinstance(settings, GRPO) and load_advantage_estimator(settings).whiten:
        whiten_advantages([pack], over_all=identity)
    if isinstance(settings, PPO):
        pack.columns = replace(pack.columns, values=torch.zeros(pack.num_targets))
        add_value_advantages([pack], settings, kl_coefficient=0.0, over_context=identity)
        whiten_advantages([pack], over_all=identity)
    return {name: values[1::2] for name, values in pack.columns.present().items()}


def group(*rewards: float, skipped: Sequence[int] = (), cut: bool = False) -> Group:
    return group_of([episode(r, skipped=i in skipped, cut=cut) for i, r in enumerate(rewards)])


def group_of(episodes: list[Episode]) -> Group:
    return Group(prompt(0, 1, 2), episodes=episodes)


@pytest.mark.parametrize("settings", ESTIMATORS)
def test_an_episode_that_is_skipped_is_as_if_it_were_not_there(settings: Any) -> None:
    teaching = group(0.0, 0.25, 1.0)
    alone_ = columns([group(1.0, 0.5), teaching], settings)
    found = columns([group(1.0, 7.0, 0.5, skipped=[1]), teaching], settings)
    others = [0, 2, 3, 4, 5]
    assert alone_["advantages"][:2].any()
    torch.testing.assert_close(found["advantages"][others], alone_["advantages"])
    torch.testing.assert_close(found["loss_weights"][others], alone_["loss_weights"])
    assert found["loss_weights"][1] == 0


@pytest.mark.parametrize("settings", ESTIMATORS[:3])
def test_an_episode_that_is_skipped_has_no_advantage_of_its_own(settings: Any) -> None:
    assert columns([group(1.0, 7.0, 0.5, skipped=[1])], settings)["advantages"][1] == 0


@pytest.mark.parametrize("settings", ESTIMATORS)
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([group(0.1, 0.1, 0.1), group(0.1, 0.1, 0.1)], id="all rewards equal"),
        pytest.param([group(0.1, 0.1, 0.1, cut=True)], id="all truncated, and equal"),
        pytest.param([group(0.4, 0.1, 0.2, skipped=[0, 1, 2])], id="all skipped"),
        pytest.param([group(0.4, 0.1, skipped=[0])], id="one left"),
    ],
)
def test_a_group_without_signal_has_advantage_zero(settings: Any, groups: list[Group]) -> None:
    found = columns(groups, settings)
    assert all(values.isfinite().all() for values in found.values())
    # What nothing is subtracted from, REINFORCE++ and PPO whiten: over equal returns that is 0.
    trained_on = found["loss_weights"] > 0
    assert not found["advantages"][trained_on].any()


@pytest.mark.parametrize("settings", ESTIMATORS)
def test_where_all_are_truncated_and_masked_nothing_is_trained_on(settings: Any) -> None:
    found = columns([group(0.4, 0.1, 0.2, cut=True)], replace(settings, mask_truncated=True))
    assert all(values.isfinite().all() for values in found.values())
    assert not found["loss_weights"].any()


@pytest.mark.parametrize("settings", ESTIMATORS[:4])
@pytest.mark.parametrize("turns", [(0.7, 0.1, 0.2), (300.1, 0.2, 0.1), (0.1, 0.2, -0.3)])
def test_turns_that_sum_up_to_equal_rewards_teach_nothing(
    settings: Any, turns: tuple[float, ...]
) -> None:
    """In whichever order they come: to dynamic sampling, metrics and advantages alike."""
    orders = [*permutations(turns), (round(sum(turns), 3),)]
    flat = group_of([episode(*order) for order in orders])
    assert not has_signal(flat) and rollout_metrics([flat])["groups_without_signal"] == 1
    assert not columns([flat], settings)["advantages"].any()
    teaching = group_of([episode(*turns), episode(*turns[:2], turns[2] + 0.01)])
    assert has_signal(teaching) and columns([teaching], settings)["advantages"].all()


def test_metrics_of_groups_without_signal_are_numbers() -> None:
    for skipped in ((), (0,), (0, 1)):
        metrics = rollout_metrics([group(0.5, 0.5, skipped=skipped)])
        assert metrics["groups_without_signal"] == 1 and metrics["reward_failures"] == len(skipped)
        assert metrics["reward"] == (0.0 if len(skipped) == 2 else 0.5)


@pytest.mark.parametrize("rewards", [(0.5, 0.5), ()])
def test_groups_without_signal(
    rewards: tuple[float, ...],
) -> None:
    """Equal rewards, or every reward unknown."""
    flat = group(*rewards) if rewards else group(1.0, 0.0, skipped=[0, 1])
    teaching = group(1.0, 0.0)
    assert not has_signal(flat) and has_signal(teaching)


def test_only_a_last_turn_that_was_long_is_punished() -> None:
    settings = GRPO(overlong_buffer=2, overlong_penalty=0.5)
    episodes = [
        episode(0.0, 1.0, lengths=(8, 2)),
        episode(0.0, 1.0, lengths=(2, 8), cut=True),
        episode(0.0, 1.0, lengths=(2, 7)),
    ]
    (tree,) = policy_trees([group_of(episodes)], settings, max_new_tokens=8, max_turns=2)
    targets = [segment for segment in tree.segments if segment.is_target]
    assert [target.columns.rewards[-1].item() for target in targets[1::2] if target.columns] == [
        1.0,
        0.5,
        0.75,
    ]


def test_the_constant_is_the_longest_episode_that_can_be() -> None:
    settings = GRPO(loss_aggregation="constant")
    groups = [group_of([episode(0.0, 1.0), episode(1.0, 0.0)])]
    (tree,) = policy_trees(groups, settings, max_new_tokens=8, max_turns=3)
    weights = [s.columns.loss_weights for s in tree.segments if s.columns]
    assert torch.cat(weights).tolist() == pytest.approx([1 / (2 * 8 * 3)] * 8)
