"""Gradients of a policy update do not depend on how its batch is cut into packs, data ranks and
context ranks; an update that has no signal moves nothing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megavlm.algorithms.aggregation import token_weights
from megavlm.config.algorithm import GRPO, PPO
from megavlm.config.distillation import Distillation, TeacherConfig
from megavlm.config.optimizer import Optimizer
from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.token_sets import TokenSets
from megavlm.data.packs.trees import Tree, prompt_tree
from megavlm.families import family
from megavlm.models.build import build_model
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.hf_source import HFFolder
from megavlm.models.common.loading import load_hf
from megavlm.models.common.logprobs import Scoring, TokenScores
from megavlm.parallel.collectives import reduce_measures, summing
from megavlm.parallel.mesh import Mesh, build_mesh
from megavlm.training.advantages import (
    add_kl_advantages,
    add_value_advantages,
    whiten_advantages,
    with_advantages,
)
from megavlm.training.forward_backward import (
    LossFunction,
    Measures,
    compute_logprobs,
    forward_backward,
)
from megavlm.training.gradient_buffers import wrap
from megavlm.training.losses import Update, policy_loss, with_value_loss
from megavlm.training.optimizer import build_updater
from megavlm.training.step.pack_plan import assign
from megavlm.training.step.vision_features import VisionFeatures
from tests.parity.cases import gradient_norm
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import Sequences, distinct_images
from tests.parity.table import LAYOUTS, Ranks
from tests.support.columns import columns
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.levels import slow

pytestmark = pytest.mark.distributed

LONGEST, NAN = 7, float("nan")
EVERYTHING = 9999  # tokens of a pack
PLAIN = GRPO(kl_coefficient=0.1)
SETTINGS: dict[str, GRPO | PPO] = {
    "token level": replace(
        PLAIN, clip_low=0.1, clip_high=0.15, dual_clip=1.2, entropy_coefficient=0.01
    ),
    "token means by sequence": replace(
        PLAIN, loss_aggregation="sequence_mean", policy_loss="cispo"
    ),
    "gspo": replace(
        PLAIN,
        policy_loss="gspo",
        loss_aggregation="sequence_mean",
        clip_low=0.05,
        clip_high=0.05,
        importance="sequence",
        importance_cap=1.1,
        reject_below=0.9,
        reject_above=1.1,
    ),
    "KL in the reward": replace(
        PLAIN, kl_in="reward", kl_estimator="k1", advantage_estimator="rloo"
    ),
    "reinforce++": replace(
        PLAIN, kl_in="reward", kl_estimator="k1", advantage_estimator="reinforce_plus_plus"
    ),
    "the user's own": replace(
        PLAIN,
        advantage_estimator="tests.unit.algorithms.own:baseline",
        policy_loss="tests.unit.algorithms.own:plain",
    ),
    "teachers": replace(PLAIN, importance="sequence", importance_cap=1.1),
    "teachers' tokens": replace(PLAIN, entropy_coefficient=0.02),
    "kept tokens": replace(PLAIN, entropy_coefficient=0.01, importance="token"),
    "reinforce++ baseline": replace(PLAIN, advantage_estimator="reinforce_plus_plus_baseline"),
    "ppo": PPO(kl_coefficient=0.1, kl_in="reward", critic="shared", lam=0.9, gamma=0.95),
    "ppo by turn": PPO(critic="shared", gae_level="turn", mask_truncated=True),
}

TEACHERS = {
    "first": TeacherConfig(urls=("http://a",), rows=("a",)),
    "second": TeacherConfig(urls=("http://b",), weight=2.0),
}


SAMPLED = Distillation(teachers=TEACHERS, coefficient=0.5)
FORWARD = replace(SAMPLED, divergence="forward_topk", top_k=4)
TAUGHT = SETTINGS["teachers"], SETTINGS["teachers' tokens"]


def trees_of(cases: list[Sequences], settings: GRPO | PPO) -> list[Tree]:
    """Rewards, two turns a response, and numbers in place of the rollout's log-probs from which
    others are made.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [len(response) for case in cases for response in case.responses]
    counted = [not settings.mask_truncated or length < 5 for length in lengths]
    weights = iter(token_weights(lengths, counted, settings.loss_aggregation, LONGEST))
    trees, sequence = [], 0
    for group, case in enumerate(cases):
        values = []
        for response in case.responses:
            length = len(response)
            rewards = torch.zeros(length)
            rewards[-1] = torch.randint(0, 3, (), generator=generator) / 2
            values.append(
                columns(
                    length,
                    rewards=rewards,
                    rollout_logprobs=torch.randn(length, generator=generator),
                    loss_weights=torch.full((length,), next(weights)),
                    sequence_ids=torch.full((length,), sequence),
                    group_ids=torch.full((length,), group),
                    turn_ids=(torch.arange(length) > 1).long(),
                )
            )
            sequence += 1
        trees.append(prompt_tree(case.prompt, case.responses, values))
    if settings is SETTINGS["kept tokens"]:
        return [with_sets(tree, "kept") for tree in trees]
    if settings is SETTINGS["teachers' tokens"]:
        return [with_sets(tree, "teacher") for tree in trees]
    return trees


def with_sets(tree: Tree, name: str) -> Tree:
    """Return a tree whose targets have sets of one to four tokens, or none. name: kept or
    teacher.
    """
    segments = []
    for segment in tree.segments:
        if segment.is_target:
            sizes = torch.arange(len(segment.token_ids)).remainder(5).int()
            further = segment.token_ids[:, None] + torch.arange(0, 40, 10)
            parts = [row[:size] for row, size in zip(further % 250, sizes, strict=True)]
            ids = torch.cat(parts).int()
            logprobs = None if name == "kept" else -1.5 - (ids % 7) / 2
            segment = replace(segment, **{name: TokenSets.of(sizes, ids, logprobs)})
        segments.append(segment)
    return Tree(tuple(segments))


def lengths(tree: Tree) -> list[float]:
    return [float(len(segment.token_ids)) for segment in tree.segments]


class Model:
    """A policy with a shared critic, its tower frozen."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.config = inputs_of(folder).config
        self.mesh: Mesh = build_mesh(ranks.mesh)
        self.model = build_model(self.config, self.mesh, ModelOptions(head="both"))
        entries = family(self.config.model_type).mapping(self.config)
        for chunk in self.model:
            load_hf(chunk, entries, HFFolder(folder), self.mesh)
            if chunk.value_head is not None:
                hidden = chunk.value_head.weight.shape[1]
                chunk.value_head.weight.data.copy_(torch.linspace(-1, 1, hidden)[None])
        self.cases = inputs_of(folder).sequences("mixed")
        self.chunks = wrap(self.model, shard_optimizer=False)

    def features(self) -> VisionFeatures:
        return VisionFeatures.everywhere(self.chunks, distinct_images(self.cases))

    def packs(self, settings: GRPO | PPO, pack_tokens: int) -> list[Pack]:
        """This rank's, with all that a loss needs: log-probs that differ from the present ones."""
        trees = trees_of(self.cases, settings)
        num_targets = sum(len(response) for case in self.cases for response in case.responses)
        if isinstance(settings, GRPO):
            (trees,) = with_advantages([trees], settings)
        if pack_tokens != EVERYTHING:  # each response with a prompt of its own
            trees = [tree.part([i]) for tree in trees for i in range(len(tree.branches()))]
        mesh, vision = self.mesh, vision_tokens(self.config)
        packs = [
            make_pack(part, vision_token_ids=vision, context_size=mesh.layout.context).part(
                mesh.context_rank
            )
            for part in assign(trees, mesh.data_size, pack_tokens, lengths)[mesh.data_rank]
        ]
        scores = compute_logprobs(self.chunks, packs, self.features(), Scoring())
        for pack, given in zip(packs, scores, strict=True):
            assert pack.columns is not None
            drawn = pack.columns.rollout_logprobs
            old = given.logprobs + 0.2 * (7 * drawn).sin()
            pack.columns = replace(
                pack.columns,
                old_logprobs=old,
                rollout_logprobs=old + 0.1 * (5 * drawn).cos(),
                reference_logprobs=given.logprobs + 0.3 * (3 * drawn).sin(),
                values=given.values + 0.6 * (2 * drawn).cos(),
                teacher_logprobs=(given.logprobs + 0.4 * (4 * drawn).sin()).where(drawn < 1, NAN)
                if settings in TAUGHT
                else None,
                teacher_ids=(drawn < 0).long() if settings in TAUGHT else None,
            )
        in_reward, over_all = settings.kl_in == "reward", summing(mesh.groups.dp_cp)
        coefficient = settings.kl_coefficient if in_reward else 0.0
        if isinstance(settings, PPO):
            over_context = summing(mesh.groups.cp)
            add_value_advantages(
                packs, settings, kl_coefficient=coefficient, over_context=over_context
            )
            whiten_advantages(packs, over_all=over_all)
        elif in_reward:
            add_kl_advantages(
                [packs], [num_targets], settings, kl_coefficient=coefficient, over_all=over_all
            )
        return packs

    def loss(self, settings: GRPO | PPO) -> LossFunction:
        given = Update(
            kl_coefficient=settings.kl_coefficient,
            reduce=summing(self.mesh.groups.cp),
            distillation=FORWARD if settings is SETTINGS["teachers' tokens"] else SAMPLED,
        )
        policy = policy_loss(settings, given)
        if isinstance(settings, PPO):
            return with_value_loss(settings, policy, critic_alone=False)
        return policy


def gradients(folder: Path, ranks: Ranks, pack_tokens: int) -> dict[str, Any] | None:
    """Per setting: measures and every gradient, on the first rank."""
    run = Model(folder, ranks)
    made = {}
    for name, settings in SETTINGS.items():
        packs = run.packs(settings, pack_tokens)
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        reports = forward_backward(run.chunks, packs, run.features(), Scoring(), run.loss(settings))
        measures = reduce_measures(reports, run.mesh)
        found: dict[str, Tensor] = {
            parameter: getattr(p, "main_grad").clone()  # noqa: B009
            for chunk in run.chunks
            for parameter, p in chunk.module.named_parameters()
            if p.requires_grad
        }
        made[name] = (measures, found)
    return made if run.mesh.rank == 0 else None


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("qwen2_5_vl")


@pytest.fixture(scope="module")
def one_pack(folder: Path) -> dict[str, Any]:
    (made,) = launch(1, gradients, folder, LAYOUTS["one rank"], EVERYTHING)
    return dict(made)


@pytest.mark.parametrize(
    ("layout", "pack_tokens"),
    [("CP2", 300), *slow(("one rank", 99), ("CP2xDP2", 99), ("DP2", 99))],
)
def test_a_batch_may_be_cut_in_any_way(
    folder: Path, one_pack: dict[str, Any], layout: str, pack_tokens: int
) -> None:
    """With the groups cut: the responses to a prompt are on several ranks."""
    ranks = LAYOUTS[layout]
    made, *_ = launch(ranks.world_size, gradients, folder, ranks, pack_tokens)
    for name, (measures, found) in made.items():
        expected_measures, expected = one_pack[name]
        for measure, value in expected_measures.items():
            assert measures[measure] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, measure)
        norm, expected_norm = (
            np.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in grads.values()))
            for grads in (found, expected)
        )
        assert expected_norm > 0.01
        assert norm == pytest.approx(expected_norm, rel=1e-5), name  # as its entries
        for parameter, gradient in expected.items():
            difference = np.abs(found[parameter] - gradient).max()
            assert difference <= 1e-5 * max(np.abs(gradient).max(), 1e-3), (name, parameter)


def with_token_sets(folder: Path, ranks: Ranks, name: str) -> tuple[list[Tensor], float]:
    """Return the place of each target that this rank scores, with its log-prob and its divergence
    from a teacher, and the norm of the gradient of log-probs, entropies and divergences.
    """
    run = Model(folder, ranks)
    trees = trees_of(run.cases, SETTINGS[name])
    vision = vision_tokens(run.config)
    whole = make_pack(trees, vision_token_ids=vision, context_size=run.mesh.layout.context)
    pack = whole.part(run.mesh.context_rank)
    scores = compute_logprobs(run.chunks, [pack], run.features(), Scoring(temperature=0.7))
    assert all(x.divergence is None for x in scores)
    weights = torch.linspace(-1, 1, len(whole.target_ids))[pack.target_index]
    divergences = []

    def loss(pack: Pack, scores: TokenScores) -> tuple[Tensor, Measures]:
        total = (scores.logprobs * weights).sum() + (scores.entropy * weights.square()).sum()
        if scores.divergence is not None:
            total = total + (scores.divergence * weights.exp()).sum()
            divergences.append(scores.divergence.detach())
        return total, {"tokens": total.detach()}

    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    forward_backward(run.chunks, [pack], run.features(), Scoring(temperature=0.7), loss)
    found = [pack.target_index, *(x.logprobs for x in scores), *divergences]
    return found, gradient_norm(run.chunks)


@pytest.mark.parametrize("name", ["kept tokens", "teachers' tokens"])
@pytest.mark.parametrize("layout", ["TP2", *slow("TP2xPP2", "PP2xCP2", "TP2xCP2")])
def test_scores_with_token_sets_are_those_of_one_rank(folder: Path, layout: str, name: str) -> None:
    (((_, *expected), norm),) = launch(1, with_token_sets, folder, LAYOUTS["one rank"], name)
    assert len(expected) == 1 + (name != "kept tokens")
    seen = np.zeros(len(expected[0]), bool)
    for (index, *scores), found in launch(
        LAYOUTS[layout].world_size, with_token_sets, folder, LAYOUTS[layout], name
    ):
        assert found == pytest.approx(norm, rel=1e-5)
        if scores:  # none on early stages
            seen[index] = True
            for values, wanted in zip(scores, expected, strict=True):
                np.testing.assert_allclose(values, wanted[index], rtol=0, atol=1e-5)
    assert seen.all()
    if name == "kept tokens":
        assert 0.05 < (expected[0] == 0).mean() < 0.5  # of sets of one token
    else:
        assert 0.1 < (expected[1] == 0).mean() < 0.5  # that the teacher gave no tokens for
        assert expected[1].max() > 1


def test_the_settings_use_what_they_are_there_for(one_pack: dict[str, Any]) -> None:
    """Every bound is active at some tokens and not at others."""
    for name, measures in {
        "token level": ("clipped_low", "clipped_high", "clipped_dual"),
        "gspo": ("clipped_low", "clipped_high", "corrected", "rejected"),
        "ppo": ("value_clipped",),
    }.items():
        given = one_pack[name][0]
        for measure in measures:
            assert 0 < given[measure] < given["tokens"], (name, measure)


def idle(folder: Path, ranks: Ranks, advantage_on: int | None) -> list[Any]:
    """Updates whose advantages are all zero but on one data rank, or on none: what they tell, and
    whether parameters moved.
    """
    run = Model(folder, ranks)
    updater = build_updater(run.model, Optimizer(lr=1e-2, weight_decay=0.1), run.mesh, num_steps=9)
    packs = run.packs(PLAIN, EVERYTHING)
    for pack in packs:
        (now,) = compute_logprobs(run.chunks, [pack], run.features(), Scoring())
        assert pack.columns is not None
        pack.columns = replace(
            pack.columns, reference_logprobs=now.logprobs, old_logprobs=now.logprobs
        )
        if run.mesh.data_rank != advantage_on and pack.columns.advantages is not None:
            pack.columns.advantages.zero_()
    before = [p.detach().clone() for p in run.model[0].parameters()]
    given = Update(kl_coefficient=0.1, has_moved=updater.has_moved)
    measures = updater.update(packs, run.features(), policy_loss(PLAIN, given), step=1)
    after = list(run.model[0].parameters())
    moved = any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
    return [measures["updates_without_signal"], moved, updater.has_moved]


@pytest.mark.parametrize("advantage_on", [None, 1])
def test_an_update_without_signal_moves_nothing(folder: Path, advantage_on: int | None) -> None:
    """The KL's gradient is rounding there, of which Adam would make a step of the whole rate."""
    results = launch(2, idle, folder, LAYOUTS["DP2"], advantage_on)
    expected = [1.0, False, False] if advantage_on is None else [0.0, True, True]
    assert results == [expected, expected]


def critic_alone(folder: Path, ranks: Ranks) -> list[list[str]]:
    """What a warm-up update moves, and what the next update does."""
    run = Model(folder, ranks)
    options = {"num_steps": 9, "value_head_lr": 1e-2}
    updater = build_updater(run.model, Optimizer(lr=1e-3, weight_decay=0.1), run.mesh, **options)
    settings = PPO(critic="shared")
    packs = run.packs(settings, EVERYTHING)
    moved = []
    for alone in (True, False):
        before = {name: p.detach().clone() for name, p in run.model[0].named_parameters()}
        for chunk in run.model:
            if chunk.value_head is not None:
                chunk.value_head.learns_alone = alone
        policy = policy_loss(settings, Update(kl_coefficient=0.1))
        loss = with_value_loss(settings, policy, critic_alone=alone)
        updater.update(packs, run.features(), loss, step=1, value_head_alone=alone)
        now = dict(run.model[0].named_parameters())
        moved.append([name for name, p in now.items() if not torch.equal(before[name], p)])
    return moved


def test_the_warm_up_of_a_shared_critic_leaves_the_policy_alone(folder: Path) -> None:
    ((first, then),) = launch(1, critic_alone, folder, LAYOUTS["one rank"])
    assert first == ["value_head.weight", "value_head.bias"]
    assert len(then) > 20
