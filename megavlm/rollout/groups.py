"""Groups: a prompt, its n episodes and their scores; the trees and measures made of them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megavlm.algorithms.aggregation import token_weights
from megavlm.algorithms.filters import has_signal
from megavlm.algorithms.shaping import overlong_penalty
from megavlm.config.algorithms import PolicyOptimization
from megavlm.data.packing import Tree
from megavlm.data.processor import Prompt
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
    """The trees of one update: a group's prompt once, and its responses. Their tokens' values are
    those that training/advantages.py and policy_loss.py ask for. max_new_tokens: of a turn.
    version: of the present weights.

    A skipped episode has no weight, and no part in the advantages of others.
    """
    lengths, counted, sequences = [], [], []
    for number, group in enumerate(groups):
        for episode, response in zip(group.episodes, group.responses, strict=True):
            masked = settings.mask_truncated and response.finish == "length"
            lengths.append(len(response.token_ids))
            counted.append(not masked and not episode.score.skipped)
            # Only an episode's last turn can have run into the limit.
            last = len(episode.turns[-1].response.token_ids)
            extra = shaped(last, settings, max_new_tokens)
            stale = torch.cat([older(turn.response, version) for turn in episode.turns])
            known = float(not episode.score.skipped)
            sequences.append((number, known, _turn_columns(episode, extra) | {"stale": stale}))
    longest = max_new_tokens * max_turns
    weights = token_weights(lengths, counted, settings.loss_aggregation, longest)
    columns = iter(
        [
            turns
            | _constant(
                length, {"weights": weight, "sequence": index, "group": number, "counted": known}
            )
            for index, (length, weight, (number, known, turns)) in enumerate(
                zip(lengths, weights, sequences, strict=True)
            )
        ]
    )
    return [_tree(group, columns) for group in groups]


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


def _turn_columns(episode: Episode, extra: float) -> dict[str, Tensor]:
    """A turn's reward comes at its end; `extra` at the end of the episode."""
    numbers, rewards = [], []
    for number, turn in enumerate(episode.turns):
        length = len(turn.response.token_ids)
        numbers += [float(number)] * length
        rewards += [0.0] * (length - 1) + [turn.reward]
    rewards[-1] += extra
    return {"rewards": torch.tensor(rewards), "turn": torch.tensor(numbers)}


def _constant(length: int, values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.full((length,), float(value)) for name, value in values.items()}


def _tree(group: Group, columns: Iterator[dict[str, Tensor]]) -> Tree:
    values = [
        next(columns) | {"rollout_logprobs": torch.tensor(response.logprobs)}
        for response in group.responses
    ]
    return episode_tree(group.prompt, group.episodes, values)
