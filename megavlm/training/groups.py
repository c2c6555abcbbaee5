"""Groups: a prompt, its n responses and their scores; how they are made, and the trees and measures
made of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megavlm.algorithms.aggregation import token_weights
from megavlm.algorithms.filters import has_signal
from megavlm.algorithms.shaping import overlong_penalty
from megavlm.config.algorithms import PolicyOptimization
from megavlm.data.packing import Tree, prompt_tree
from megavlm.data.processor import Processor, Prompt
from megavlm.observability.samples import SampledGroup, SampledResponse
from megavlm.rewards.base import Score
from megavlm.rollout.messages import Response

Reward = Callable[[str, str], Score]  # (response, answer)


@dataclass(frozen=True)
class Group:
    prompt: Prompt
    responses: Sequence[Response]
    texts: Sequence[str]
    scores: Sequence[Score]


def judge(
    processor: Processor,
    reward: Reward,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Response]],
) -> list[Group]:
    groups = []
    for prompt, responses in zip(prompts, answers, strict=True):
        texts = [processor.decode(response.token_ids) for response in responses]
        scores = [reward(text, prompt.row.answer) for text in texts]
        groups.append(Group(prompt, responses, texts, scores))
    return groups


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
    groups: Sequence[Group], settings: PolicyOptimization, *, max_new_tokens: int
) -> list[Tree]:
    """The trees of one update: a group's prompt once, and its responses. Their tokens' values are
    those that training/advantages.py and policy_loss.py ask for.
    """
    lengths, counted, sequences = [], [], []
    for number, group in enumerate(groups):
        for response, score in zip(group.responses, group.scores, strict=True):
            lengths.append(len(response.token_ids))
            counted.append(not (settings.mask_truncated and response.finish == "length"))
            reward = score.reward + shaped(len(response.token_ids), settings, max_new_tokens)
            sequences.append((number, reward))
    weights = token_weights(lengths, counted, settings.loss_aggregation, max_new_tokens)
    columns = iter(
        [
            _columns(length, weight, index, number, reward)
            for index, (length, weight, (number, reward)) in enumerate(
                zip(lengths, weights, sequences, strict=True)
            )
        ]
    )
    return [_tree(group, columns) for group in groups]


def shaped(length: int, settings: PolicyOptimization, max_new_tokens: int) -> float:
    """What is added to the reward of a response of that length."""
    if not settings.overlong_buffer:
        return 0.0
    return settings.overlong_penalty * overlong_penalty(
        length, max_length=max_new_tokens, buffer=settings.overlong_buffer
    )


def metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the rollout itself tells, by the names of observability/metrics.py."""
    rewards = _rewards(groups)
    responses = [response for group in groups for response in group.responses]
    scores = [score for group in groups for score in group.scores]
    measures = {
        "reward": rewards.mean().item(),
        "accuracy": sum(score.correct for score in scores) / len(scores),
        "response_length": sum(len(r.token_ids) for r in responses) / len(responses),
        "truncated_share": sum(r.finish == "length" for r in responses) / len(responses),
        "groups_without_signal": 1 - has_signal(rewards).float().mean().item(),
    }
    by_category: dict[str, list[float]] = {}
    for group in groups:
        by_category.setdefault(group.prompt.row.category, []).extend(s.reward for s in group.scores)
    named = {name: rewards for name, rewards in sorted(by_category.items()) if name}
    return measures | {f"reward/{name}": sum(x) / len(x) for name, x in named.items()}


def samples(groups: Sequence[Group]) -> list[SampledGroup]:
    return [
        SampledGroup(
            prompt=group.prompt.row.problem,
            answer=group.prompt.row.answer,
            category=group.prompt.row.category,
            source=group.prompt.row.source,
            pictures=[(picture.key, picture.png) for picture in group.prompt.pictures],
            responses=[
                SampledResponse(text, score.reward, score.correct, response.finish)
                for text, score, response in zip(
                    group.texts, group.scores, group.responses, strict=True
                )
            ],
        )
        for group in groups
    ]


def _rewards(groups: Sequence[Group]) -> Tensor:
    return torch.tensor([[score.reward for score in group.scores] for group in groups])


def _teaches(group: Group) -> bool:
    return bool(has_signal(_rewards([group])))


def _columns(
    length: int, weight: float, sequence: int, group: int, reward: float
) -> dict[str, Tensor]:
    """Of a response that is one turn: the reward comes at its end."""
    rewards = torch.zeros(length)
    rewards[-1] = reward
    numbers = {"weights": weight, "sequence": sequence, "group": group, "turn": 0.0}
    return {"rewards": rewards} | {
        name: torch.full((length,), float(number)) for name, number in numbers.items()
    }


def _tree(group: Group, columns: Iterator[dict[str, Tensor]]) -> Tree:
    values = [
        next(columns) | {"rollout_logprobs": torch.tensor(response.logprobs)}
        for response in group.responses
    ]
    return prompt_tree(group.prompt, [response.token_ids for response in group.responses], values)
