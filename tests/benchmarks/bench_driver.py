"""`make bench`: processor time of the driver for each token of a step, on one core. Hidden is its
work while other responses are generated: a server's JSON, its responses, the parts of a group's
tree. Serial is its work while every GPU waits: trees, advantages, the plan, the bytes for all
ranks, its own packs, metrics.

A step of GROUPS x RESPONSES responses of LENGTH tokens on average for RANKS data ranks; the seconds
of a large step are extrapolated in proportion to the tokens. Not covered: sending.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import torch

from megavlm.config.algorithm import GRPO
from megavlm.data.packs.trees import Tree
from megavlm.data.processor import Prompt
from megavlm.data.rows import Row
from megavlm.inference.answers import parse_generate
from megavlm.inference.protocol import SamplingParams
from megavlm.models.cost import ModelCost
from megavlm.rewards.base import Score
from megavlm.rollout.group_tree import tree_parts
from megavlm.rollout.groups import policy_trees, rollout_metrics
from megavlm.rollout.trajectory import Episode, Group
from megavlm.training.advantages import with_advantages
from megavlm.training.step.image_plan import plan_images
from megavlm.training.step.pack_plan import Schedule
from megavlm.training.step.rank_batch import unpack_part
from megavlm.training.step.step_plan import PackShape, StepPlan, plan_step

GROUPS, RESPONSES, LENGTH, PROMPT, RANKS = 16, 16, 4096, 400, 8
LARGE = 512 * 16 * 4096  # tokens of a large step
HIDDEN = ("JSON", "responses", "parts of trees")
SERIAL = ("trees", "advantages", "plan", "bytes", "packs", "metrics")
SETTINGS, COST = GRPO(), ModelCost(1.3e10, 4.0e5, 0.0, 0.0)  # a 7B model's
SAMPLING = SamplingParams(1.0, 2 * LENGTH)
VERSION = 3


def bench_driver() -> None:
    prompts, answers = drawn()
    tokens = GROUPS * RESPONSES * LENGTH
    found = min((measured(prompts, answers) for _ in range(3)), key=serial)
    print(f"\nus a token of {tokens:,} tokens")
    for name in (*HIDDEN, *SERIAL):
        print(f"  {name:26}{1e6 * found[name] / tokens:9.4f}")
    for title, count in (("hidden", hidden), ("serial", serial)):
        print(f"{title}: {count(found) * LARGE / tokens:.2f} s for {LARGE:,} tokens")


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


def measured(prompts: Sequence[Prompt], answers: Sequence[bytes]) -> Seconds:
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
    parts = timed(seconds, "bytes", lambda: [plan.part(rank) for rank in range(RANKS)])
    timed(seconds, "packs", lambda: unpack_part(parts[0], 0, torch.device("cpu")))
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
