"""A step's advantages by each estimator, of whole packs and of parts of them."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.algorithms.registry import ADVANTAGE_ESTIMATORS, load_advantage_estimator
from megavlm.algorithms.segments import identity
from megavlm.config.algorithm import GRPO, PPO
from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.target_tokens import TargetColumns, concatenate
from megavlm.data.packs.trees import Segment, Tree
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.rollout.groups import policy_trees
from megavlm.rollout.trajectory import Group
from megavlm.training.advantages import (
    add_kl_advantages,
    add_value_advantages,
    whiten_advantages,
    with_advantages,
)
from tests.support.calls import episode, respond
from tests.support.trees import empty_pack


def columns() -> dict[str, Tensor]:
    """Two groups, of two responses and of three."""
    lengths, groups, rewards = [3, 2, 1, 2, 4], [0, 0, 1, 1, 1], [1.0, 0.0, 0.5, 0.5, 0.2]
    names = ("rewards", "sequence_ids", "group_ids", "turn_ids")
    made: dict[str, list[float]] = {name: [] for name in names}
    for number, (length, group, reward) in enumerate(zip(lengths, groups, rewards, strict=True)):
        made["rewards"] += [0.0] * (length - 1) + [reward]
        made["sequence_ids"] += [number] * length
        made["group_ids"] += [group] * length
        made["turn_ids"] += [int(index > 1) for index in range(length)]
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


def trees(values: dict[str, Tensor], *, cut: bool = False) -> list[Tree]:
    """The groups as trees; cut: each response as a tree of its own."""
    table = TargetColumns(**values)
    prompt = Segment(torch.ones(1, dtype=torch.long), torch.zeros(3, 1), -1, False)
    groups: dict[int, list[Segment]] = {}
    for number in values["sequence_ids"].unique().tolist():
        rows = (values["sequence_ids"] == number).nonzero().flatten()
        own, positions = torch.ones_like(rows), torch.zeros(3, len(rows))
        response = Segment(own, positions, 0, True, table.select(rows))
        groups.setdefault(int(values["group_ids"][rows[0]]), []).append(response)
    made = [Tree((prompt, *responses)) for responses in groups.values()]
    return [tree.part([i]) for tree in made for i in range(len(tree.branches()))] if cut else made


def packs(made: list[Tree], per_pack: int = 99) -> list[Pack]:
    starts = range(0, len(made), per_pack)
    return [make_pack(made[start : start + per_pack], vision_token_ids=()) for start in starts]


def joined(made: list[Pack]) -> dict[str, Tensor]:
    """All columns, in the order of sequences."""
    table = concatenate([pack.columns for pack in made if pack.columns is not None]).present()
    order = table["sequence_ids"].argsort(stable=True)
    return {name: column[order] for name, column in table.items()}


def whole(
    settings: Any,
    kl_coefficient: float = 0.0,
    *,
    cut: bool = False,
    whitens: bool = True,
    **changed: Tensor,
) -> dict[str, Tensor]:
    """Columns of one pack, or of a pack for each response."""
    made = trees(columns() | changed)
    if isinstance(settings, PPO):
        of_rank = packs(made)
        add_value_advantages(
            of_rank, settings, kl_coefficient=kl_coefficient, over_context=identity
        )
        return joined(of_rank)
    (made,) = with_advantages([made], settings)
    of_rank = (
        packs([tree.part([i]) for tree in made for i in range(len(tree.branches()))], 1)
        if cut
        else packs(made)
    )
    if kl_coefficient and settings.kl_in == "reward":
        add_kl_advantages(
            [of_rank], [12], settings, kl_coefficient=kl_coefficient, over_all=identity
        )
    if whitens and load_advantage_estimator(settings).whiten:
        whiten_advantages(of_rank, over_all=identity)
    return joined(of_rank)


def test_advantages_are_those_of_groups() -> None:
    values = whole(GRPO(normalize_by_std=False))
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
    first = {name: column for name, column in columns().items() if name != "old_logprobs"}
    other = columns() | {"rewards": columns()["rewards"] + 1}
    made = [pack for values in (first, other) for pack in packs(trees(values))]
    add_value_advantages(made, PPO(), kl_coefficient=0.0, over_context=identity)
    whiten_advantages(made, over_all=identity)
    (one, two), names = [pack.columns for pack in made], "old_logprobs"
    assert one is not None and one.advantages is not None and getattr(one, names) is None
    assert two is not None and two.advantages is not None and getattr(two, names) is not None
    advantages = torch.cat([one.advantages, two.advantages])
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-6)
    settings = GRPO(advantage_estimator="reinforce_plus_plus")
    both = with_advantages([trees(first), trees(first | {"rewards": other["rewards"]})], settings)
    of_both = [pack for made in both for pack in packs(made)]
    whiten_advantages(of_both, over_all=identity)
    whitened = torch.cat([pack.columns.advantages for pack in of_both])  # type: ignore[misc,union-attr]
    assert whitened.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert whitened[:12].mean() < -0.5


ESTIMATORS = [GRPO(advantage_estimator=name) for name in ADVANTAGE_ESTIMATORS]
SETTINGS = [*ESTIMATORS, PPO(gamma=0.9, lam=0.8), PPO(gamma=0.9, lam=0.8, gae_level="turn")]


@pytest.mark.parametrize("settings", ESTIMATORS)
def test_groups_in_several_packs(settings: GRPO) -> None:
    """Each response in a pack of its own: the group's advantages, with the KL in the reward too."""
    for given in (settings, replace(settings, kl_in="reward", kl_estimator="k1")):
        expected, made = whole(given, 0.1), whole(given, 0.1, cut=True)
        assert torch.equal(made["advantages"], expected["advantages"])


HELD = torch.tensor([0, 3, 4, 7, 10]), torch.tensor([1, 2, 5, 6, 8, 9, 11])


def part(values: dict[str, Tensor], index: Tensor) -> Any:
    """What advantages read of one context rank's part of a pack."""
    held = TargetColumns(**values).select(index)
    return SimpleNamespace(columns=held, target_index=index, context_size=2, num_targets=len(index))


@pytest.mark.parametrize("settings", SETTINGS)
def test_parts_of_a_pack_are_cut_from_the_whole(settings: GRPO | PPO) -> None:
    """Two context ranks, one after the other: each is given what the all-reduce would give."""
    if isinstance(settings, GRPO):
        settings = replace(settings, kl_in="reward")
    expected = whole(settings, 0.1, whitens=False)
    values = {k: v for k, v in expected.items() if k not in ("returns", "advantages")}
    if isinstance(settings, GRPO):
        values["advantages"] = torch.zeros(12)

    def run(index: Tensor, reduce: Any) -> TargetColumns:
        made = part(values, index)
        if isinstance(settings, PPO):
            add_value_advantages([made], settings, kl_coefficient=0.1, over_context=reduce)
        else:
            add_kl_advantages([[made]], [12], settings, kl_coefficient=0.1, over_all=reduce)
        columns: TargetColumns = made.columns
        return columns

    given: list[list[Tensor]] = []
    for index in HELD:  # what each rank hands over
        handed: list[Tensor] = []

        def note(tensor: Tensor, handed: list[Tensor] = handed) -> Tensor:
            handed.append(tensor.clone())
            # the number of targets, which is then the size of the second
            return torch.tensor(12.0) if tensor.dim() == 0 else tensor

        run(index, note)
        given.append(handed)
    sums = [first + second for first, second in zip(*given, strict=True)]
    for index in HELD:
        answers = iter([total.clone() for total in sums])
        made = run(index, lambda _, answers=answers: next(answers)).present()
        for name in ("advantages", *(["returns"] if isinstance(settings, PPO) else [])):
            torch.testing.assert_close(made[name], expected[name][index])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_pack_without_targets(settings: GRPO | PPO) -> None:
    (pack,) = packs(trees(columns()))
    assert pack.columns is not None
    if isinstance(settings, PPO):
        empty = empty_pack(pack.columns)
        add_value_advantages([empty], settings, kl_coefficient=0.1, over_context=identity)
        whiten_advantages([empty], over_all=identity)
    else:
        empty = empty_pack(replace(pack.columns, rows=torch.zeros(12, dtype=torch.long)))
        add_kl_advantages([[empty]], [0], settings, kl_coefficient=0.1, over_all=identity)
    assert empty.columns is not None and empty.columns.advantages is not None
    assert empty.columns.advantages.shape == (0,)


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


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_a_row_for_each_part_of_a_turn_gives_what_all_tokens_give(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes of several turns, whose responses are cut where other prompts branch."""
    made = []
    for seed, rewards in enumerate(([[0.25, -1.0], [0.5], [0.0, 0.0, 1.0]], [[1.0], [1.0], [1.0]])):
        episodes = []
        for number, of_turns in enumerate(rewards):
            calls = [
                (prompt_of(k), respond(seed + 7 * number + k, 4)) for k in range(len(of_turns))
            ]
            if len(calls) == 3:  # the second prompt goes on within the first response
                said = calls[0][1].token_ids[:2].tolist()
                calls[1] = (prompt_of(0, said), calls[1][1])
            played = episode(*calls)
            played.rewards = of_turns
            episodes.append(played)
        made.append(Group(prompt_of(0), episodes=episodes))
    settings = GRPO(advantage_estimator=name)
    grown = policy_trees(made, settings, max_new_tokens=9, max_turns=3)
    (tree, _) = grown
    assert any(s.is_target and tree.segments[s.parent].is_target for s in tree.segments), "cut"
    found = with_advantages([grown], settings)
    estimator = load_advantage_estimator(settings)
    assert estimator.of_turns
    monkeypatch.setattr(
        "megavlm.training.advantages.load_advantage_estimator",
        lambda settings: replace(estimator, of_turns=False),
    )
    expected = with_advantages([grown], settings)
    for a, b in zip(segments_of(found), segments_of(expected), strict=True):
        assert a.columns is not None and b.columns is not None
        assert a.columns.advantages is not None and b.columns.advantages is not None
        assert a.columns.advantages.equal(b.columns.advantages) and a.columns.rows is None


def prompt_of(index: int, said: Sequence[int] = ()) -> Prompt:
    ids = torch.tensor([1, 2, 3, 100 + index][: 3 + bool(index)] + [*said, 99] * bool(said))
    row = Row(0, "", "", (), "", "row")
    return Prompt(row, ids, tuple(ids.tolist()), text_positions(len(ids), 0), len(ids), ())


def segments_of(minibatches: list[list[Tree]]) -> list[Segment]:
    return [
        segment
        for trees in minibatches
        for tree in trees
        for segment in tree.segments
        if segment.is_target
    ]
