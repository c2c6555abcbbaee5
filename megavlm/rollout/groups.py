"""Trees, metrics and sample records, computed from a step's groups."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavlm.algorithms.aggregation import loss_denominator, token_weights
from megavlm.algorithms.dapo import overlong_penalty
from megavlm.algorithms.grpo import differs
from megavlm.config.algorithm import PolicyOptimization
from megavlm.config.distillation import Distillation
from megavlm.data.media.image_processing import ProcessedImage
from megavlm.data.packs.target_tokens import TargetColumns
from megavlm.data.packs.trees import Tree
from megavlm.inference.protocol import Response
from megavlm.rollout.group_tree import group_tree, tree_parts
from megavlm.rollout.staleness import stale_tokens, staleness_metrics
from megavlm.rollout.trajectory import Episode, Group

SAMPLED_TOKENS = 200  # tokens of a turn whose log-probs are kept for the report


def has_signal(group: Group) -> bool:
    """Return True if the group's rewards, without skipped ones, are not all equal, as the
    advantages see it. The penalty for long responses is no reward.
    """
    known = [score.reward for score in group.scores if not score.skipped]
    rewards = torch.tensor(known, dtype=torch.float64)
    return bool(differs(rewards, torch.zeros(len(known), dtype=torch.int64)).any())


def policy_trees(
    groups: Sequence[Group],
    settings: PolicyOptimization,
    *,
    max_new_tokens: int,
    max_turns: int = 1,
    version: int = 0,
    denominator: float | None = None,
    distillation: Distillation | None = None,
) -> list[Tree]:
    """Return the trees of one update: one tree per group, with the prompt once and all responses
    with their columns.

    max_new_tokens: Token limit of one turn. max_turns: Maximum turns of an episode. version:
    Version of the current weights. denominator: Denominator of the loss, if the update has more
    groups; see `denominator_of`. distillation: With teachers, the columns have the teachers'
    log-probs and numbers, and the targets their likeliest tokens if there are any. A skipped
    episode has zero loss weights, and does not affect the advantages of others.
    """
    if not groups:  # a streamed batch may have none of a minibatch
        return []
    episodes = [episode for group in groups for episode in group.episodes]
    lengths, counted = _counted(groups, settings)
    longest = max_new_tokens * max_turns
    weights = token_weights(lengths, counted, settings.loss_aggregation, longest, denominator)
    group_ids = [number for number, group in enumerate(groups) for _ in group.episodes]
    # Tokens of an episode, and of a turn, share one value in memory.
    shared = {
        "loss_weights": torch.tensor(weights, dtype=torch.float32),
        "sequence_ids": torch.arange(len(episodes)),
        "group_ids": torch.tensor(group_ids),
        "has_reward": torch.tensor([not episode.score.skipped for episode in episodes]),
    }
    has_teacher = distillation is not None and bool(distillation.teachers)
    if distillation is not None and has_teacher:
        numbers = {name: number for number, name in enumerate(distillation.teachers)}
        named = [distillation.teacher_of(group.prompt.row.category) for group in groups]
        teacher_ids = [-1 if name is None else numbers[name] for name in named]
        shared["teacher_ids"] = torch.tensor(teacher_ids)[shared["group_ids"]]
    of_episodes = zip(*(values.unbind() for values in shared.values()), strict=True)
    turn_ids = torch.arange(max(len(episode.responses) for episode in episodes)).unbind()
    rewards = iter(_rewards(episodes, settings, max_new_tokens))
    columns = [
        TargetColumns(
            rewards=next(rewards),
            rollout_logprobs=torch.from_numpy(response.logprobs),
            turn_ids=turn_id.expand(len(response.token_ids)),
            is_stale=stale_tokens(response, version),
            teacher_logprobs=_teacher_logprobs(response) if has_teacher else None,
            **{
                name: value.expand(len(response.token_ids))
                for name, value in zip(shared, values, strict=True)
            },
        )
        for episode, values in zip(episodes, of_episodes, strict=True)
        for response, turn_id in zip(episode.responses, turn_ids, strict=False)
    ]
    trees, start = [], 0
    for group in groups:
        end = start + len(group.prompts)
        its_columns = columns[start:end]
        trees.append(group_tree(group, its_columns, replays_routing=settings.routing_replay))
        start = end
    return trees


def _teacher_logprobs(response: Response) -> Tensor:
    """Return a teacher's log-probs [T], NaN if it gave none."""
    if response.teacher_logprobs is None:
        return torch.full((len(response.token_ids),), torch.nan)
    return torch.from_numpy(response.teacher_logprobs)


def denominator_of(groups: Sequence[Group], settings: PolicyOptimization) -> int:
    """Return the tokens or sequences of groups over which an update averages its loss."""
    return loss_denominator(*_counted(groups, settings), settings.loss_aggregation)


def _counted(groups: Sequence[Group], settings: PolicyOptimization) -> tuple[list[int], list[bool]]:
    """Return the length of each episode, and whether it is trained on."""
    episodes = [episode for group in groups for episode in group.episodes]
    lengths = [episode.num_tokens for episode in episodes]
    counted = [
        not episode.score.skipped
        and not (settings.mask_truncated and episode.responses[-1].finish == "length")
        for episode in episodes
    ]
    return lengths, counted


def rollout_metrics(groups: Sequence[Group], version: int | None = None) -> dict[str, float]:
    """Return the metrics of the rollout, under their names in observability/metrics.py. version:
    Version of the weights that were trained on the groups; None takes the newest version that
    sampled.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    last = [episode.responses[-1] for episode in episodes]
    scores = [episode.score for episode in episodes if not episode.score.skipped]
    metrics = {
        "episodes": float(len(episodes)),
        "reward": sum(score.reward for score in scores) / max(len(scores), 1),
        "accuracy": sum(score.correct for score in scores) / max(len(scores), 1),
        "response_length": sum(e.num_tokens for e in episodes) / len(episodes),
        "truncated_share": sum(r.finish == "length" for r in last) / len(last),
        "groups_without_signal": 1 - sum(map(has_signal, groups)) / len(groups),
    }
    turns = [len(episode.responses) for episode in episodes]
    if max(turns) > 1:
        metrics["turns"] = sum(turns) / len(turns)
    for name in sorted({name for episode in episodes for name in episode.counts}):
        total = sum(episode.counts[name] for episode in episodes)
        metrics[f"episode/{name}"] = total / len(episodes)
    sampled = [response for episode in episodes for response in episode.responses]
    metrics |= staleness_metrics(sampled, version) | draft_metrics(sampled)
    metrics |= kept_metrics(sampled) | teacher_metrics(sampled)
    return metrics | _reward_metrics(groups)


def draft_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Return the mean number of tokens that a pass of a server added to a response, one more than
    the accepted drafts. The result is empty without speculative decoding.
    """
    accepted, passes = (sum(counts) for counts in zip(*(r.drafts for r in responses), strict=True))
    return {"accept_length": 1 + accepted / passes} if passes else {}


def kept_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Return the mean and largest number of tokens that top-p and top-k kept, and the bytes of all
    of them. The result is empty if nothing was left out.
    """
    sizes = [response.kept.sizes for response in responses if response.kept is not None]
    if not sizes:
        return {}
    joined = np.concatenate(sizes)
    return {
        "kept_tokens": float(joined.mean()),
        "kept_tokens_max": float(joined.max()),
        "kept_bytes": float(joined.nbytes + joined.sum() * joined.itemsize),
    }


def teacher_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Return the bytes of a teacher's log-probs, and the mean probability that it gives to all but
    its likeliest tokens. The result is empty without a teacher's likeliest tokens.
    """
    known = [r.teacher_top for r in responses if r.teacher_top is not None]
    if not known:
        return {}
    logprobs = np.concatenate([top.logprobs for top in known])
    rest = 1 - np.exp(logprobs, dtype=np.float64).sum(1)
    ids_and_logprobs, own = 2 * logprobs.nbytes, 4 * len(logprobs)
    return {
        "teacher_bytes": float(ids_and_logprobs + own),
        "teacher_rest": float(rest.clip(min=0).mean()),
    }


def _reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return reward and accuracy by category, the mean of each part of the reward, and the number
    of failures.
    """
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


Pieces = Callable[[Sequence[int]], list[tuple[str, int]]]  # Processor.pieces


def sample_records(groups: Sequence[Group], pieces: Pieces) -> list[dict[str, Any]]:
    """Return the groups as records for SampleWriter."""
    return [
        {
            "prompt": group.start.row.problem,
            "answer": group.start.row.answer,
            "category": group.start.row.category,
            "source": group.start.row.source,
            "images": _files(group.start.images),
            "responses": [
                _turn(episode, 0, pieces)
                | {
                    "reward": episode.score.reward,
                    "correct": episode.score.correct,
                    "parts": dict(episode.score.parts),
                    "finish": episode.responses[-1].finish,
                    "rewards": episode.rewards,
                    "turns": _later_turns(episode, continued, pieces),
                }
                for episode, continued in zip(group.episodes, _continued(group), strict=True)
            ],
        }
        for group in groups
    ]


def _tokens(response: Response, pieces: Pieces) -> list[tuple[str, float]]:
    """Return the first SAMPLED_TOKENS tokens as text, each with its log-prob."""
    found, place, logprobs = [], 0, response.logprobs[:SAMPLED_TOKENS].tolist()
    for text, count in pieces(response.token_ids[:SAMPLED_TOKENS].tolist()):
        found.append((text, round(sum(logprobs[place : place + count]), 3)))
        place += count
    return found


def _turn(episode: Episode, number: int, pieces: Pieces) -> dict[str, Any]:
    """Return what the policy wrote and did in a turn."""
    return {
        "text": episode.texts[number],
        "tokens": partial(_tokens, episode.responses[number], pieces),
        "actions": [action.values() for action in episode.actions[number]],
    }


def _later_turns(
    episode: Episode, continued: Sequence[int | None], pieces: Pieces
) -> list[dict[str, Any]]:
    """Return the turns after the first, each with the environment's observation and the response.
    continued: See `_continued`.
    """
    found = []
    for number, prompt in enumerate(episode.prompts[1:], 1):
        known = continued[number]
        before = () if known is None else episode.prompts[known].images
        shown = {
            "message": prompt.row.problem,
            "images": _files(_further_images(before, prompt.images)),
            "continues": known,
        }
        found.append(shown | _turn(episode, number, pieces))
    return found


def _continued(group: Group) -> list[list[int | None]]:
    """Return the turn that each turn of each episode continues; None if its prompt contains no
    response. A turn that does not continue the one before it begins a branch.
    """
    parts, continued = tree_parts(group), dict[int, int | None]()
    for part in parts:
        if part.is_response and not part.start:
            above = part.parent
            while above >= 0 and not parts[above].is_response:
                above = parts[above].parent
            continued[part.call] = parts[above].call if above >= 0 else None
    found, first = [], 0
    for episode in group.episodes:
        calls = [continued[first + number] for number in range(len(episode.prompts))]
        turns = [None if call is None else call - first for call in calls]
        if episode.counts["images_replaced"]:  # it changes a prompt, not which turn it follows
            turns = [None, *range(len(turns) - 1)]
        found.append(turns)
        first += len(turns)
    return found


def _further_images(
    before: Sequence[ProcessedImage], images: Sequence[ProcessedImage]
) -> Sequence[ProcessedImage]:
    """Return the images of a prompt that are not in the prompt before it, some of whose images may
    have been replaced by text.
    """
    old, new = [image.key for image in before], [image.key for image in images]
    pairs = enumerate(zip(old, new, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(old), len(new)))
    # The last images of the prompt before, without the replaced ones.
    kept = next(k for k in range(len(old) - same, -1, -1) if old[len(old) - k :] == new[same:][:k])
    return images[same + kept :]


def _files(images: Sequence[ProcessedImage]) -> list[tuple[str, Callable[[], bytes]]]:
    """Return the key of each image, and a function that makes its PNG."""
    return [(image.key, image.png) for image in images]


def _rewards(
    episodes: Sequence[Episode], settings: PolicyOptimization, max_new_tokens: int
) -> tuple[Tensor, ...]:
    """Return the rewards [L] of each turn's tokens. A turn's reward is at its last token; the
    penalty for an overlong last turn is added to it.
    """
    lengths = [len(response.token_ids) for e in episodes for response in e.responses]
    assert all(lengths), "a turn has tokens, and its reward a place"
    of_turns = list[float]()
    for episode in episodes:
        of_turns += episode.rewards
        if settings.overlong_buffer:
            # Only an episode's last turn can have reached the limit.
            of_turns[-1] += settings.overlong_penalty * overlong_penalty(
                len(episode.responses[-1].token_ids),
                max_length=max_new_tokens,
                buffer=settings.overlong_buffer,
            )
    rewards = torch.zeros(sum(lengths))
    rewards[torch.tensor(lengths).cumsum(0) - 1] = torch.tensor(of_turns)
    return rewards.split(lengths)
