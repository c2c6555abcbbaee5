"""Groups: a prompt, its n episodes and their scores; the trees and measures made of them."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megavlm.algorithms.aggregation import token_weights
from megavlm.algorithms.dapo import has_signal, overlong_penalty
from megavlm.config.algorithm import PolicyOptimization
from megavlm.data.packing import Tree
from megavlm.data.processor import Prompt
from megavlm.data.targets import TargetColumns
from megavlm.inference.protocol import Response
from megavlm.observability.samples import SampledGroup, SampledResponse
from megavlm.rewards.base import Score
from megavlm.rollout.partial_rollouts import older, staleness
from megavlm.rollout.trajectory import Episode, episode_tree


@dataclass(frozen=True)
class Group:
    """`prompt`: the first turns'; `responses`: an episode's sampled tokens, of all its turns."""

    episodes: Sequence[Episode]

    @property
    def prompt(self) -> Prompt:
        return self.episodes[0].turns[0].prompt

    @property
    def prompts(self) -> list[Prompt]:
        """Of all turns: among them they show every image of the group."""
        return [turn.prompt for episode in self.episodes for turn in episode.turns]

    @cached_property
    def responses(self) -> Sequence[Response]:
        return [episode.response for episode in self.episodes]

    @property
    def texts(self) -> Sequence[str]:
        return [episode.text for episode in self.episodes]

    @property
    def scores(self) -> Sequence[Score]:
        return [episode.score for episode in self.episodes]


@dataclass(frozen=True)
class Sampled:
    """A step's groups: all that were sampled, and those that are trained on."""

    everything: Sequence[Group]
    kept: Sequence[Group]


def sample(roll_out: Callable[[int], list[Group]], wanted: int, *, further_rounds: int) -> Sampled:
    """`wanted` groups. DAPO's dynamic sampling (arXiv 2503.14476): groups whose rewards are all
    equal are replaced by other prompts', in at most `further_rounds`. What is missing then is
    filled up with groups without signal, so that a step never has fewer.
    """
    groups = roll_out(wanted)
    for _ in range(further_rounds):
        missing = wanted - sum(map(_teaches, groups))
        if missing <= 0:
            break
        groups = [*groups, *roll_out(missing)]
    if further_rounds:
        return Sampled(groups, sorted(groups, key=_teaches, reverse=True)[:wanted])
    return Sampled(groups, groups)


def policy_trees(
    groups: Sequence[Group],
    settings: PolicyOptimization,
    *,
    max_new_tokens: int,
    max_turns: int = 1,
    version: int = 0,
) -> list[Tree]:
    """Return the trees of one update: each group's prompt once, with its responses and their
    columns.

    max_new_tokens: limit of a turn. version: that of the present weights. A skipped episode has
    zero loss weights, and no part in the advantages of others.
    """
    lengths, counted = [], []
    for group in groups:
        for episode, response in zip(group.episodes, group.responses, strict=True):
            masked = settings.mask_truncated and response.finish == "length"
            lengths.append(len(response.token_ids))
            counted.append(not masked and not episode.score.skipped)
    longest = max_new_tokens * max_turns
    weights = iter(token_weights(lengths, counted, settings.loss_aggregation, longest))
    sequence_ids = itertools.count()
    trees = []
    for group_id, group in enumerate(groups):
        columns = []
        for episode, response in zip(group.episodes, group.responses, strict=True):
            size = (len(response.token_ids),)
            # Only an episode's last turn can have run into the limit.
            last = len(episode.turns[-1].response.token_ids)
            rewards, turn_ids = _turn_columns(episode, shaped(last, settings, max_new_tokens))
            columns.append(
                TargetColumns(
                    rewards=rewards,
                    rollout_logprobs=torch.tensor(response.logprobs),
                    loss_weights=torch.full(size, next(weights)),
                    sequence_ids=torch.full(size, next(sequence_ids)),
                    group_ids=torch.full(size, group_id),
                    turn_ids=turn_ids,
                    has_reward=torch.full(size, not episode.score.skipped),
                    is_stale=torch.cat([older(turn.response, version) for turn in episode.turns]),
                )
            )
        trees.append(episode_tree(group.prompt, group.episodes, columns))
    return trees


def shaped(length: int, settings: PolicyOptimization, max_new_tokens: int) -> float:
    """What is added to the reward of an episode whose last turn has that length."""
    if not settings.overlong_buffer:
        return 0.0
    return settings.overlong_penalty * overlong_penalty(
        length, max_length=max_new_tokens, buffer=settings.overlong_buffer
    )


def metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the rollout itself tells, by the names of observability/metrics.py."""
    responses = [response for group in groups for response in group.responses]
    scores = [score for group in groups for score in group.scores if not score.skipped]
    measures = {
        "episodes": float(len(responses)),
        "reward": sum(score.reward for score in scores) / max(len(scores), 1),
        "accuracy": sum(score.correct for score in scores) / max(len(scores), 1),
        "response_length": sum(len(r.token_ids) for r in responses) / len(responses),
        "truncated_share": sum(r.finish == "length" for r in responses) / len(responses),
        "groups_without_signal": 1 - sum(map(_teaches, groups)) / len(groups),
    }
    turns = [len(episode.turns) for group in groups for episode in group.episodes]
    if max(turns) > 1:
        measures["turns"] = sum(turns) / len(turns)
    return measures | staleness(responses) | _by_name(groups)


def _by_name(groups: Sequence[Group]) -> dict[str, float]:
    """Reward and accuracy of each category, the parts of rewards, and how often one failed."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    failed = 0
    for group in groups:
        category = group.prompt.row.category
        for score in group.scores:
            failed += score.failure is not None
            if score.skipped:
                continue
            if category:
                values[f"reward/{category}"].append(score.reward)
                values[f"accuracy/{category}"].append(score.correct)
            for name, value in score.parts.items():
                values[f"reward/part/{name}"].append(value)
    means = {name: sum(x) / len(x) for name, x in sorted(values.items())}
    return means | {"reward_failures": float(failed)}


def samples(groups: Sequence[Group]) -> list[SampledGroup]:
    return [
        SampledGroup(
            prompt=group.prompt.row.problem,
            answer=group.prompt.row.answer,
            category=group.prompt.row.category,
            source=group.prompt.row.source,
            images=[(image.key, image.png) for image in group.prompt.images],
            responses=[
                SampledResponse(text, score.reward, score.correct, response.finish)
                for text, score, response in zip(
                    group.texts, group.scores, group.responses, strict=True
                )
            ],
        )
        for group in groups
    ]


def _rewards(group: Group) -> list[float]:
    """Those that are known."""
    return [score.reward for score in group.scores if not score.skipped]


def _teaches(group: Group) -> bool:
    rewards = torch.tensor([_rewards(group)])
    return bool(rewards.numel() and has_signal(rewards))


def _turn_columns(episode: Episode, extra: float) -> tuple[Tensor, Tensor]:
    """Return rewards and turn numbers of an episode's tokens. The reward of a turn is at its last
    token; `extra` is added at the last of all.
    """
    lengths = [len(turn.response.token_ids) for turn in episode.turns]
    rewards: list[float] = []
    for turn, length in zip(episode.turns, lengths, strict=True):
        rewards += [0.0] * (length - 1) + [turn.reward]
    rewards[-1] += extra
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.tensor(rewards), numbers
