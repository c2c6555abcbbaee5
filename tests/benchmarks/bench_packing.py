"""`make bench`: the modelled time of a step's slowest rank over the ideal, by how groups are
distributed over data ranks and packs, and what the driver spends on it.

Ideal: all trees uncut, their cost divided by the ranks, without bubbles. Best fit and Karmarkar and
Karp's largest differencing method keep trees whole: best fit fills packs and gives each to the rank
with the least so far; differencing balances the ranks, whose packs are filled by best fit. With a
pipeline both have the size of packs that is best for them. Costs are those of a Qwen2.5-VL-7B. A
test holds the goals; the seconds pass or fail nothing.
"""

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megavlm.data.packs.packing import make_pack
from megavlm.data.packs.positions import text_positions
from megavlm.data.packs.trees import Segment, Tree
from megavlm.training.step.balance import Item, TreeSize, best_fit
from megavlm.training.step.pack_plan import Schedule, costs_of, plan_packs
from tests.support.columns import columns

# FLOPs of a 7B model: a token's matrices, and a pair that attends.
PER_TOKEN, PER_PAIR = 1.3e10, 4.0e5
LEAST = 295 * PER_TOKEN
Plan = list[list[list[Item]]]


@dataclass(frozen=True)
class Step:
    """A minibatch of `prompts` prompts of 300 to 1,400 tokens with n responses, log-normal around
    500 tokens and at most 2,048, on `ranks` data ranks.
    """

    name: str
    prompts: int
    ranks: int
    pack_tokens: int
    schedule: Schedule
    responses: int = 8

    def sizes(self, seed: int = 0) -> list[TreeSize]:
        rng = random.Random(seed)
        return [tree_size(rng, self.responses) for _ in range(self.prompts)]


PLAIN = Schedule(least_cost=LEAST)
STEPS = (
    Step("DP8", 64, 8, 18432, PLAIN),
    Step("DP8, packs of 4,096", 64, 8, 4096, PLAIN),
    Step("DP64", 256, 64, 18432, PLAIN),
    Step("DP64, half", 128, 64, 18432, PLAIN),
    Step("DP64, packs of 4,096", 256, 64, 4096, PLAIN),
    Step("DP64, n=16", 256, 64, 18432, PLAIN, responses=16),
    Step("DP16 x EP16", 128, 16, 18432, Schedule(lockstep=True, least_cost=LEAST)),
    Step("PP4 x DP16", 512, 16, 18432, Schedule(bubble=3.0, least_cost=LEAST)),
    Step("PP4 x DP16, half", 256, 16, 18432, Schedule(bubble=3.0, least_cost=LEAST)),
    Step(
        "PP4 virtual 2 x DP16, half",
        256,
        16,
        18432,
        Schedule(bubble=1.5, count=4, least_cost=LEAST),
    ),
    Step(
        "PP4 x DP16 x EP16",
        512,
        16,
        18432,
        Schedule(bubble=3.0, lockstep=True, least_cost=LEAST),
    ),
)


def tree_size(rng: random.Random, responses: int) -> TreeSize:
    prompt = rng.randint(300, 1400)
    lengths = [max(16, min(2048, int(rng.lognormvariate(6.2, 0.7)))) for _ in range(responses)]
    return TreeSize(
        prompt, _cost(prompt, 0), tuple(lengths), tuple(_cost(x, prompt) for x in lengths)
    )


def _cost(length: int, context: int) -> float:
    return PER_TOKEN * length + PER_PAIR * length * (context + length / 2)


def best_size(step: Step, plan: Callable[[int], Plan]) -> Plan:
    """Of the plans with packs of several sizes the quickest."""
    sizes = range(step.pack_tokens // 2, step.pack_tokens + 1, step.pack_tokens // 16)
    tried = map(plan, sizes if step.schedule.bubble else [step.pack_tokens])
    return min(tried, key=lambda plan: step.schedule.time(costs_of(plan)))


def by_best_fit(step: Step, sizes: Sequence[TreeSize], pack_tokens: int) -> Plan:
    whole = [size.item(i, range(len(size.tokens))) for i, size in enumerate(sizes)]
    ranks: Plan = [[] for _ in range(step.ranks)]
    for pack in best_fit(whole, sizes, pack_tokens):
        least = min(range(step.ranks), key=lambda r: sum(map(sum, costs_of([ranks[r]]))))
        ranks[least].append(pack)
    return ranks


def by_differencing(step: Step, sizes: Sequence[TreeSize], pack_tokens: int) -> Plan:
    whole = [size.item(i, range(len(size.tokens))) for i, size in enumerate(sizes)]
    shares = differencing([size.cost for size in sizes], step.ranks)
    return [best_fit([whole[i] for i in share], sizes, pack_tokens) for share in shares]


def ours(step: Step, sizes: Sequence[TreeSize]) -> Plan:
    return plan_packs(sizes, step.ranks, step.pack_tokens, step.schedule)


WHOLE = {"best fit": by_best_fit, "Karmarkar-Karp": by_differencing}


def over_ideal(step: Step, sizes: Sequence[TreeSize], plan: Plan) -> float:
    ideal = sum(size.cost for size in sizes) / step.ranks
    return step.schedule.time(costs_of(plan)) / ideal


def differencing(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """The two partitions whose parts differ most are merged, the heaviest part of each with the
    lightest of the other.
    """
    # (-difference, first index to break ties, parts as (sum, indices), heaviest first)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-cost, index, [(cost, [index]), *((0.0, []) for _ in range(num_parts - 1))])
        for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, heavy), (_, second, light) = heapq.heappop(heap), heapq.heappop(heap)
        parts = sorted(
            (
                (a + b, indices + others)
                for (a, indices), (b, others) in zip(heavy, reversed(light), strict=True)
            ),
            key=lambda part: -part[0],
        )
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], min(first, second), parts))
    return [indices for _, indices in heap[0][2]]


def bench_packing() -> None:
    names = "".join(f"{name:>16}" for name in (*WHOLE, "megavlm"))
    print(f"\n{'':28}{'pack':>8}{names}   prompts    plan")
    for step in STEPS:
        sizes, cells = step.sizes(), []
        too_long = max(s.root_tokens + sum(s.tokens) for s in sizes) > step.pack_tokens
        for method in WHOLE.values():
            if too_long:
                cells.append(f"{'trees too long':>16}")
            else:
                plan = best_size(step, partial(method, step, sizes))
                cells.append(f"{over_ideal(step, sizes, plan):16.3f}")
        start = time.perf_counter()
        plan = ours(step, sizes)
        seconds = time.perf_counter() - start
        cells.append(f"{over_ideal(step, sizes, plan):16.3f}")
        again = sum(len(pack) for packs in plan for pack in packs) / len(sizes)
        print(f"{step.name:28}{step.pack_tokens:8}{''.join(cells)}{again:10.2f}{seconds:6.2f} s")


def bench_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [_tree(generator) for _ in range(128)]
    start = time.perf_counter()
    for tree in trees:
        make_pack([tree], vision_token_ids={1}, multiple=8)
    seconds = time.perf_counter() - start
    print(f"\nlay out 128 packs of a tree: {1e3 * seconds:.0f} ms")


def _tree(generator: torch.Generator) -> Tree:
    """A prompt of 300 to 1,400 tokens with 8 answers of 50 to 800."""
    length = int(torch.randint(300, 1400, (), generator=generator))
    ids = torch.ones(length, dtype=torch.long)
    segments = [Segment(ids, text_positions(length, 0), parent=-1, is_target=False)]
    for size in torch.randint(50, 800, (8,), generator=generator).tolist():
        ids, positions = torch.full((size,), 2), text_positions(size, length)
        segments.append(Segment(ids, positions, parent=0, is_target=True, columns=columns(size)))
    return Tree(tuple(segments))
