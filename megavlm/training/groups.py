"""Groups: a prompt, its n responses and their scores; how they are made, and the trees and measures
made of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megavlm.algorithms.advantages import group_advantages
from megavlm.algorithms.filters import has_signal
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


def policy_trees(groups: Sequence[Group], *, normalize_by_std: bool) -> list[Tree]:
    """A group's prompt once, and its responses with advantages and rollout log-probs per token."""
    advantages = group_advantages(_rewards(groups), normalize_by_std)
    return [_tree(group, row) for group, row in zip(groups, advantages, strict=True)]


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


def _tree(group: Group, advantages: Tensor) -> Tree:
    values = [
        {
            "advantages": advantage.expand(len(response.token_ids)),
            "rollout_logprobs": torch.tensor(response.logprobs),
        }
        for advantage, response in zip(advantages, group.responses, strict=True)
    ]
    return prompt_tree(group.prompt, [response.token_ids for response in group.responses], values)
