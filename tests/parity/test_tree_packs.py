"""A tree equals the sequences from its root to its leaves, each computed by itself: in our own
model, and in transformers. The tree of a group equals its calls.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.data.packs.packing import Pack, make_pack
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.trees import Tree, prompt_tree
from megavlm.models.common.config import ModelOptions
from megavlm.models.common.loading import MEMORY
from megavlm.rollout.group_tree import group_tree
from megavlm.rollout.trajectory import Group
from tests.parity.conversations import Conversation, expect, two_conversations
from tests.parity.inputs import inputs_of
from tests.parity.models import model_folder
from tests.parity.reference import token_weights
from tests.parity.runs import Run, difference
from tests.parity.table import LAYOUTS, Ranks
from tests.support.cache import cached_value
from tests.support.calls import branching_group, windowed_group
from tests.support.columns import columns
from tests.support.families import vision_tokens
from tests.support.fork import launch
from tests.support.levels import slow
from tests.support.random_images import image

pytestmark = pytest.mark.parity
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5", *slow("qwen3_vl", "qwen3_5_moe")])
def arguments(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """A model folder, its configuration, conversations, and what transformers computes."""
    inputs = inputs_of(model_folder(request.param))
    folder, conversations = inputs.folder, two_conversations(inputs)
    (expected,) = cached_value(
        f"trees-{folder.name}", "", lambda: launch(1, expect, folder, conversations)
    )
    return folder, inputs.config, conversations, expected


@pytest.mark.parametrize("layout", ["CP2", *slow("TP2+SP", "one rank", "PP2")])
def test_a_tree_equals_its_sequences(arguments: tuple[Any, ...], layout: str) -> None:
    ranks = LAYOUTS[layout]
    for results in launch(ranks.world_size, compare, *arguments, ranks):
        for name, value in results.items():
            assert value < TOLERANCE, name


@pytest.mark.parametrize("layout", ["CP2", *slow("TP2+SP", "PP2")])
def test_a_group_whose_calls_branch_equals_its_calls(
    arguments: tuple[Any, ...], layout: str
) -> None:
    folder, ranks = arguments[0], LAYOUTS[layout]
    for results in launch(ranks.world_size, compare_calls, folder, ranks):
        for name, value in results.items():
            assert value < TOLERANCE, name


def compare_calls(folder: Path, ranks: Ranks) -> dict[str, float]:
    """The largest relative differences on this rank, of calls that branch in every way and of
    sessions that keep the last one or two of four screenshots.
    """
    inputs = inputs_of(folder)
    sizes = (64, 64), (96, 64), (64, 128), (64, 64)
    images = [image(*x, i) for i, x in enumerate(sizes)]
    groups = {"branches": branching_group(inputs.processor, images)}
    for most in (1, 2):
        groups[f"window of {most}"] = group = windowed_group(inputs.processor, images, most)
        for episode in group.episodes:
            assert [len(p.images) for p in episode.prompts] == [
                0,
                *range(1, most),
                *[most] * (5 - most),
            ]
    shown = {x.key: x for group in groups.values() for p in group.prompts for x in p.images}
    options = ModelOptions(freeze_tower=False, freeze_merger=False)
    run = Run.start(folder, inputs.config, ranks, options, shown)
    return {
        f"{name}: {measure}": value
        for name, group in groups.items()
        for measure, value in compare_group(run, group, inputs.config, ranks).items()
    }


def compare_group(run: Run, group: Group, config: Any, ranks: Ranks) -> dict[str, float]:
    weights = [
        [token_weights(len(r.token_ids), i) for i, r in enumerate(episode.responses)]
        for episode in group.episodes
    ]
    tree = group_tree(group, [of_weights(its, i) for i, each in enumerate(weights) for its in each])
    calls = [
        prompt_tree(prompt, [response.token_ids.tolist()], [of_weights(its, 0)])
        for episode, each in zip(group.episodes, weights, strict=True)
        for prompt, response, its in zip(episode.prompts, episode.responses, each, strict=True)
    ]
    trained = sum(len(s.token_ids) for s in tree.segments if s.is_target)
    assert trained == sum(episode.num_tokens for episode in group.episodes), "each token once"
    together = packs([[tree]], config, ranks)
    apart = packs([[call] for call in calls], config, ranks)
    cut = packs([[tree.part([i])] for i in range(2)], config, ranks)
    (logits,) = run.logits(together)
    results = {
        "logits": difference(logits, torch.cat(run.logits(apart))),
        "logits of a cut tree": difference(logits, torch.cat(run.logits(cut))),
    }
    gradients, others = run.backward(together), run.backward(apart)
    for name, gradient in others.items():
        results[f"gradient of {name}"] = difference(gradients[name], gradient)
    return results


def of_weights(weights: torch.Tensor, sequence: int) -> TargetColumns:
    ids = torch.full((len(weights),), sequence)
    return columns(len(weights), loss_weights=weights, sequence_ids=ids)


def compare(
    folder: Path, config: Any, conversations: Sequence[Conversation], expected: Any, ranks: Ranks
) -> dict[str, float]:
    """The largest relative differences on this rank."""
    options = ModelOptions(freeze_tower=False, freeze_merger=False)
    images = {key: x for conversation in conversations for key, x in conversation.images.items()}
    run = Run.start(folder, config, ranks, options, images)
    trees = packs([[conversation.tree() for conversation in conversations]], config, ranks)
    sequences = packs([[t] for c in conversations for t in c.sequences()], config, ranks)

    # Each branch below the root with the root, of all turns and images that are in it.
    parts = [c.tree().part([i]) for c in conversations for i in range(len(c.tree().branches()))]
    cut = packs([[part] for part in parts], config, ranks)

    (together,), apart = run.logits(trees), run.logits(sequences)
    results = {"logits": 0.0, "transformers' logits": 0.0}
    results["logits of a cut tree"] = difference(torch.cat(run.logits(cut)), together)
    for index, sequence, hf in zip(targets(conversations), apart, expected["logits"], strict=True):
        for name, other in ("logits", sequence), ("transformers' logits", torch.from_numpy(hf)):
            results[name] = max(results[name], difference(together[index], other))

    gradients, others, of_cut = (run.backward(x) for x in (trees, sequences, cut))
    hf = {name: torch.from_numpy(gradient) for name, gradient in expected["gradients"].items()}
    for name, (theirs, scale) in run.shards(hf, MEMORY).items():
        results[f"gradient of {name}"] = difference(gradients[name], others[name], scale)
        results[f"gradient of {name}, cut"] = difference(of_cut[name], gradients[name], scale)
        results[f"transformers' gradient of {name}"] = difference(gradients[name], theirs, scale)
    return results


def packs(groups: Sequence[Sequence[Tree]], config: Any, ranks: Ranks) -> list[Pack]:
    return [
        make_pack(
            trees,
            vision_token_ids=vision_tokens(config),
            multiple=ranks.mesh.tensor if ranks.sequence else 1,
            context_size=ranks.mesh.context,
        )
        for trees in groups
    ]


def targets(conversations: Sequence[Conversation]) -> list[torch.Tensor]:
    """Of each path, which of all targets of one pack are its own."""
    indices, start = [], 0
    for conversation in conversations:
        of_paths = [conversation.targets(path) for path in conversation.paths()]
        indices += [start + index for index in of_paths]
        start += 1 + max(int(index.max()) for index in of_paths)
    return indices
