"""A step's advantages by each estimator, of whole packs and of parts of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.algorithms.segments import alone
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.targets import TargetColumns
from megavlm.training.advantages import add_advantages


class Targets:
    """What advantages read of a pack, or of one context rank's part of it."""

    def __init__(self, values: dict[str, Tensor], index: Tensor, context_size: int) -> None:
        self.columns: Any = TargetColumns(**values).select(index)
        self.target_index, self.context_size = index, context_size
        self.num_targets = len(index)


def columns() -> dict[str, Tensor]:
    """Two groups, of two responses and of three; numbers of sequences go on from another pack."""
    lengths, groups, rewards = [3, 2, 1, 2, 4], [5, 5, 6, 6, 6], [1.0, 0.0, 0.5, 0.5, 0.2]
    names = ("rewards", "sequence_ids", "group_ids", "turn_ids")
    made: dict[str, list[float]] = {name: [] for name in names}
    for number, (length, group, reward) in enumerate(zip(lengths, groups, rewards, strict=True)):
        made["rewards"] += [0.0] * (length - 1) + [reward]
        made["sequence_ids"] += [20 + number] * length
        made["group_ids"] += [group] * length
        made["turn_ids"] += [int(place > 1) for place in range(length)]
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    return {name: torch.tensor(values) for name, values in made.items()} | {
        "loss_weights": torch.full((total,), 1 / total),
        "has_reward": torch.ones(total, dtype=torch.bool),
        "is_stale": torch.zeros(total, dtype=torch.bool),
        "values": torch.randn(total, generator=generator),
        "old_logprobs": torch.randn(total, generator=generator) - 2,
        "rollout_logprobs": torch.randn(total, generator=generator) - 2,
        "reference_logprobs": torch.randn(total, generator=generator) - 2,
    }


def whole(settings: Any, kl_coefficient: float = 0.0, **changed: Tensor) -> dict[str, Tensor]:
    pack: Any = Targets(columns() | changed, torch.arange(12), 1)
    add_advantages(
        [pack], settings, kl_coefficient=kl_coefficient, over_context=alone, over_all=alone
    )
    return dict(pack.columns.present())


def test_groups_and_sequences_are_numbered_anew() -> None:
    values = whole(GRPO(normalize_by_std=False))
    assert values["sequence_ids"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4, 4]
    expected = [0.5] * 3 + [-0.5] * 2 + [0.1] * 3 + [-0.2] * 4
    torch.testing.assert_close(values["advantages"], torch.tensor(expected))


def test_the_kl_in_the_reward_is_that_of_the_whole_response() -> None:
    settings = GRPO(normalize_by_std=False, kl_in="reward", kl_estimator="k1")
    values, c = whole(settings, kl_coefficient=0.1), columns()
    gap = c["old_logprobs"] - c["reference_logprobs"]
    first, second = 1.0 - 0.1 * gap[:3].sum(), 0.0 - 0.1 * gap[3:5].sum()
    torch.testing.assert_close(values["advantages"][0], (first - second) / 2)
    sampled = replace(settings, old_logprobs="rollout", importance="none")
    other = whole(sampled, kl_coefficient=0.1)["advantages"]
    same = whole(sampled, kl_coefficient=0.1, rollout_logprobs=c["old_logprobs"])["advantages"]
    assert not torch.equal(other, values["advantages"])
    assert torch.equal(same, values["advantages"])


def test_whitened_over_what_is_trained_on() -> None:
    weights = torch.full((12,), 1.0)
    weights[:3] = 0.0  # the first response is masked
    made = whole(GRPO(advantage_estimator="reinforce_plus_plus"), loss_weights=weights)[
        "advantages"
    ]
    assert made[3:].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert made[3:].std().item() == pytest.approx(1.0, rel=1e-5)


def test_whitening_spans_minibatches_of_which_the_first_has_no_old_logprobs() -> None:
    """The first update is on its own rollout: its packs get old log-probs in it."""
    settings = GRPO(advantage_estimator="reinforce_plus_plus")
    first = {name: column for name, column in columns().items() if name != "old_logprobs"}
    packs: Any = [Targets(values, torch.arange(12), 1) for values in (first, columns())]
    add_advantages(packs, settings, kl_coefficient=0.0, over_context=alone, over_all=alone)
    made = torch.cat([pack.columns.advantages for pack in packs])
    assert made.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert packs[0].columns.old_logprobs is None and packs[1].columns.old_logprobs is not None


SETTINGS = [
    GRPO(),
    GRPO(advantage_estimator="rloo"),
    GRPO(advantage_estimator="reinforce_plus_plus"),
    GRPO(advantage_estimator="reinforce_plus_plus_baseline"),
    PPO(gamma=0.9, lam=0.8),
    PPO(gamma=0.9, lam=0.8, gae_level="turn", normalize_advantages=False),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_parts_of_a_pack_are_cut_from_the_whole(settings: GRPO | PPO) -> None:
    """Two context ranks, one after the other: each is given what the all-reduce would give."""
    expected = whole(settings, kl_coefficient=0.1)
    held = torch.tensor([0, 3, 4, 7, 10]), torch.tensor([1, 2, 5, 6, 8, 9, 11])
    given: list[list[Tensor]] = []
    for index in held:  # what each rank hands over
        handed: list[Tensor] = []

        def note(tensor: Tensor, handed: list[Tensor] = handed) -> Tensor:
            handed.append(tensor.clone())
            # the number of targets, which is then the size of the second
            return torch.tensor(12.0) if tensor.dim() == 0 else tensor

        pack: Any = Targets(columns(), index, 2)
        add_advantages([pack], GRPO(), kl_coefficient=0.1, over_context=note, over_all=alone)
        given.append(handed)
    sums = [first + second for first, second in zip(*given, strict=True)]
    for index in held:
        answers = iter([total.clone() for total in sums])
        part: Any = Targets(columns(), index, 2)
        # Whitening over all ranks has tests of its own; here one rank's part is all there is.
        plain = (
            replace(settings, normalize_advantages=False) if isinstance(settings, PPO) else settings
        )
        add_advantages(
            [part],
            plain,
            kl_coefficient=0.1,
            over_context=lambda _, answers=answers: next(answers),
            over_all=alone,
        )
        names = ["sequence_ids"] + (["returns"] if isinstance(settings, PPO) else [])
        if not isinstance(settings, PPO) and not settings.advantage_estimator.startswith("rein"):
            names.append("advantages")
        for name in names:
            torch.testing.assert_close(getattr(part.columns, name), expected[name][index])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_pack_without_targets(settings: GRPO | PPO) -> None:
    pack: Any = Targets(columns(), torch.arange(0), 1)
    add_advantages([pack], settings, kl_coefficient=0.1, over_context=alone, over_all=alone)
    assert pack.columns.advantages.shape == (0,)


OWN = "tests.unit.algorithms.own"


@pytest.mark.parametrize(
    ("own", "built_in"),
    [("grpo", "grpo"), ("baseline", "reinforce_plus_plus_baseline")],
)
def test_a_user_s_estimator_is_as_good_as_a_built_in_one(own: str, built_in: str) -> None:
    has_reward = torch.ones(12, dtype=torch.bool)
    has_reward[3:5] = False
    for changed in ({}, {"has_reward": has_reward}):
        made = whole(GRPO(advantage_estimator=f"{OWN}:{own}"), **changed)
        expected = whole(GRPO(advantage_estimator=built_in), **changed)
        assert torch.equal(made["advantages"], expected["advantages"])


def test_a_user_s_estimator_returns_one_number_for_each_token() -> None:
    with pytest.raises(ValueError, match=r"own:of_sequences returned .*\[5\] for \[12\] tok"):
        whole(GRPO(advantage_estimator=f"{OWN}:of_sequences"))
