"""`make bench`: processor time of the driver for each token of a step, on one core. Hidden is its
work while other responses are generated: a server's JSON, its responses, the parts of a group's
tree. Serial is its work while every GPU waits: trees, advantages, the plan, the arrays for all
ranks, metrics. The form before is at the end of this file and runs beside it: responses were tuples
of Python numbers, and columns had a value for each token.

A step of GROUPS x RESPONSES responses of LENGTH tokens on average for RANKS data ranks; the seconds
of a large step are extrapolated in proportion to the tokens. Not covered: sending, and the packs
that each rank makes of its arrays, as before.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from megavlm.algorithms.advantages import AdvantageInputs
from megavlm.algorithms.aggregation import token_weights
from megavlm.algorithms.registry import load_advantage_estimator
from megavlm.config.algorithm import GRPO
from megavlm.data.packs.packing import Segment, Tree
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.target_tokens import TargetColumns, concatenate
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.inference.protocol import Response, Sampling, parse_generate
from megavlm.models.cost import ModelCost
from megavlm.numbers import is_float32
from megavlm.rewards.base import Score
from megavlm.rollout.group_tree import tree_parts
from megavlm.rollout.groups import policy_trees, rollout_metrics
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training.advantages import with_advantages
from megavlm.training.step.image_plan import plan_images
from megavlm.training.step.pack_plan import Schedule
from megavlm.training.step.step_plan import PackShape, StepPlan, plan_step

GROUPS, RESPONSES, LENGTH, PROMPT, RANKS = 16, 16, 4096, 400, 8
LARGE = 512 * 16 * 4096  # tokens of a large step
HIDDEN = ("JSON", "responses", "parts of trees")
SERIAL = ("trees", "advantages", "plan", "arrays", "metrics")
SETTINGS, COST = GRPO(), ModelCost(1.3e10, 4.0e5, 0.0, 0.0)  # a 7B model's
SAMPLING = Sampling(1.0, 2 * LENGTH)
VERSION = 3


def bench_driver() -> None:
    prompts, answers = drawn()
    tokens = GROUPS * RESPONSES * LENGTH
    now = min((after(prompts, answers) for _ in range(3)), key=serial)
    then = min((before(prompts, answers) for _ in range(3)), key=serial)
    print(f"\nus a token of {tokens:,} tokens{'before':>12}{'now':>9}")
    for name in (*HIDDEN, *SERIAL):
        print(f"  {name:26}{1e6 * then[name] / tokens:12.4f}{1e6 * now[name] / tokens:9.4f}")
    for title, count in (("hidden", hidden), ("serial", serial)):
        large = [found * LARGE / tokens for found in (count(then), count(now))]
        print(
            f"{title}: {large[0]:.1f} s and {large[1]:.2f} s for {LARGE:,} tokens "
            f"({large[0] / large[1]:.1f} x)"
        )


Seconds = dict[str, float]


def serial(seconds: Seconds) -> float:
    return sum(seconds[name] for name in SERIAL)


def hidden(seconds: Seconds) -> float:
    return sum(seconds[name] for name in HIDDEN)


def timed(seconds: Seconds, name: str, work: Callable[[], Any]) -> Any:
    start = time.process_time()
    result = work()
    seconds[name] = time.process_time() - start
    return result


def drawn() -> tuple[list[Prompt], list[bytes]]:
    """Return prompts and a server's answer to each, as JSON."""
    ids = torch.arange(PROMPT)
    prompts = [
        Prompt(Row(i, "", "", (), "", f"row {i}"), ids, (), ids.expand(3, -1), PROMPT, ())
        for i in range(GROUPS)
    ]
    return prompts, [answer(random.Random(i)) for i in range(GROUPS)]


def answer(chance: random.Random) -> bytes:
    items = []
    for number in range(RESPONSES):
        size = LENGTH + (number - RESPONSES // 2) * 128 + 64
        # Log-probs of servers are float32.
        logprobs = np.log(np.random.default_rng(number).uniform(0.1, 1, size).astype(np.float32))
        meta = {
            "output_token_logprobs": [
                [value, chance.randrange(150_000), None] for value in logprobs.tolist()
            ],
            "finish_reason": {"type": "stop"},
            "completion_tokens": size,
            "prompt_tokens": PROMPT,
            "weight_version": str(VERSION),
        }
        items.append({"text": "", "meta_info": meta})
    return orjson.dumps(items)


def played(prompts: Sequence[Prompt], responses: Sequence[Sequence[Any]]) -> list[Group]:
    groups = [Group(p, episodes=[Episode(p) for _ in range(RESPONSES)]) for p in prompts]
    for group, said in zip(groups, responses, strict=True):
        for number, (episode, response) in enumerate(zip(group.episodes, said, strict=True)):
            reward = float(number % 2)
            episode.add_turn(response, "", reward, Score(reward, number % 2 == 1), None)
    return groups


def after(prompts: Sequence[Prompt], answers: Sequence[bytes]) -> Seconds:
    seconds = Seconds()
    found = timed(seconds, "JSON", lambda: [orjson.loads(text) for text in answers])
    responses = timed(
        seconds,
        "responses",
        lambda: [
            parse_generate(items, [prompt], RESPONSES, SAMPLING)[0]
            for items, prompt in zip(found, prompts, strict=True)
        ],
    )
    found.clear()  # lists that the garbage collector would go through
    groups = played(prompts, responses)
    timed(seconds, "parts of trees", lambda: [tree_parts(group) for group in groups])
    options = {"max_new_tokens": 2 * LENGTH, "version": VERSION}
    trees = timed(seconds, "trees", lambda: policy_trees(groups, SETTINGS, **options))
    (trees,) = timed(seconds, "advantages", lambda: with_advantages([trees], SETTINGS))
    plan = timed(seconds, "plan", lambda: planned(trees))
    timed(seconds, "arrays", lambda: [plan.part(rank) for rank in range(RANKS)])
    timed(seconds, "metrics", lambda: rollout_metrics(groups, VERSION))
    return seconds


def planned(trees: list[Tree]) -> StepPlan:
    ranks = plan_step(
        [trees],
        num_ranks=RANKS,
        max_tokens=2**17,
        schedule=Schedule(least_cost=COST.least_pack),
        cost=lambda tree: COST.segments(tree, {}),
    )
    return StepPlan(
        minibatches=ranks,
        images=plan_images([[] for _ in ranks], {}, {}, slots=1),
        num_tokens=sum(tree.num_tokens for tree in trees),
        sources={},
        tower_trained=False,
        shape=PackShape(vision_token_ids=(150_001,)),
    )


# The form before.


def before(prompts: Sequence[Prompt], answers: Sequence[bytes]) -> Seconds:
    seconds = Seconds()
    found = timed(seconds, "JSON", lambda: [json.loads(text) for text in answers])
    responses = timed(
        seconds,
        "responses",
        lambda: [[response_before(item["meta_info"]) for item in items] for items in found],
    )
    found.clear()
    groups = played(prompts, responses)
    seconds["parts of trees"] = 0.0
    trees = timed(seconds, "trees", lambda: trees_before(groups))
    trees = timed(seconds, "advantages", lambda: advantages_before(trees))
    plan = timed(seconds, "plan", lambda: planned(trees))
    timed(
        seconds,
        "arrays",
        lambda: [
            arrays_before([tree for packs in minibatches for pack in packs for tree in pack])
            for minibatches in plan.minibatches
        ],
    )
    timed(seconds, "metrics", lambda: metrics_before(groups))
    return seconds


def response_before(meta: dict[str, Any]) -> Any:
    tokens = tuple(int(token) for _, token, *_ in meta["output_token_logprobs"])
    logprobs = tuple(float(logprob) for logprob, *_ in meta["output_token_logprobs"])
    assert all(map(is_float32, logprobs)) and all(0 <= token < 2**31 for token in tokens)
    values: Any = (tokens, logprobs, "stop", str(VERSION))
    return Response(*values)


def trees_before(groups: Sequence[Group]) -> list[Tree]:
    episodes = [(number, episode) for number, g in enumerate(groups) for episode in g.episodes]
    joined = [joined_before(episode) for _, episode in episodes]
    lengths = [len(tokens) for tokens, _ in joined]
    weights = token_weights(lengths, [True] * len(lengths), SETTINGS.loss_aggregation, 2 * LENGTH)
    segments: list[list[Segment]] = [
        [Segment(group.prompt.token_ids, group.prompt.positions, -1, False)] for group in groups
    ]
    for number, ((group, episode), (tokens, logprobs)) in enumerate(
        zip(episodes, joined, strict=True)
    ):
        size = len(tokens)
        rewards = torch.zeros(size)
        rewards[-1] = episode.score.reward
        columns = TargetColumns(
            rewards=rewards,
            rollout_logprobs=torch.from_numpy(np.fromiter(logprobs, np.float32, size)),
            loss_weights=torch.full((size,), weights[number]),
            sequence_ids=torch.full((size,), number),
            group_ids=torch.full((size,), group),
            turn_ids=torch.arange(1).repeat_interleave(torch.tensor([size])),
            has_reward=torch.full((size,), True),
            is_stale=torch.cat([torch.zeros(size, dtype=torch.bool)]),
        )
        ids = torch.from_numpy(np.fromiter(tokens, np.int64, size))
        positions = text_positions(size, PROMPT)
        segments[group].append(Segment(ids, positions, 0, True, columns.select(slice(0, size))))
    return [Tree(tuple(each)) for each in segments]


def joined_before(episode: Episode) -> tuple[tuple[int, ...], tuple[float, ...]]:
    responses: Any = episode.responses
    return (
        tuple(chain.from_iterable(response.token_ids for response in responses)),
        tuple(chain.from_iterable(response.logprobs for response in responses)),
    )


def advantages_before(trees: Sequence[Tree]) -> list[Tree]:
    table = concatenate([s.columns for tree in trees for s in tree.segments if s.columns])
    ids, groups = table.sequence_ids, table.group_ids
    num = int(ids.max()) + 1
    inputs = AdvantageInputs(
        rewards=table.rewards,
        sequence_ids=ids,
        group_ids=groups.new_zeros(num).index_put((ids,), groups),
        has_reward=table.has_reward.new_zeros(num).index_put((ids,), table.has_reward),
    )
    advantages = load_advantage_estimator(SETTINGS)(inputs, SETTINGS)
    result, start = [], 0
    for tree in trees:
        segments = []
        for segment in tree.segments:
            if segment.columns is not None:
                end = start + len(segment.token_ids)
                columns = replace(segment.columns, advantages=advantages[start:end])
                segment, start = replace(segment, columns=columns), end
            segments.append(segment)
        result.append(Tree(tuple(segments)))
    return result


def arrays_before(trees: Sequence[Tree]) -> dict[str, Tensor]:
    segments = [segment for tree in trees for segment in tree.segments]
    parts = [segment.columns for segment in segments if segment.columns]
    arrays = {
        "token_ids": torch.cat([segment.token_ids for segment in segments]).int(),
        "positions": torch.cat([segment.positions for segment in segments], 1).int(),
    }
    sizes = torch.tensor([len(part.rewards) for part in parts])
    starts = sizes.cumsum(0) - sizes
    for name, column in concatenate(parts).present().items():
        first = column[starts]
        is_constant = torch.equal(first.repeat_interleave(sizes), column)
        arrays[name] = first if is_constant else column
    return arrays


def metrics_before(groups: Sequence[Group]) -> dict[str, float]:
    joined = [joined_before(episode) for group in groups for episode in group.episodes]
    assert sum(len(tokens) for tokens, _ in joined)
    return rollout_metrics(groups, VERSION)
