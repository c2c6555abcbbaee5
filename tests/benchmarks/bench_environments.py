"""`make bench`: prints the seconds of a step of 128 episodes in an environment of a user's class
with a tool that takes 200 ms a turn, without the time of a policy.
"""

import time
from pathlib import Path

from megavlm.config.data import Data
from megavlm.data.processor import Processor
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from megavlm.rollout.trajectory import Group
from tests.benchmarks.slow_environment import SECONDS
from tests.unit.rollout.scripted import ROW, RUNNER, Policy, episode_runner, graded

PROMPTS, RESPONSES, TURNS, WORKERS = 16, 8, 2, 2


def bench_environments(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, ["How many? 1 2 3 4 5", "No. Look again."] * 20, seed=0)
    processor = Processor(tmp_path, Data(max_prompt_tokens=64), family_of(tmp_path))
    policy = Policy(processor, *["3"] * PROMPTS * RESPONSES * TURNS)
    playing = episode_runner(
        processor,
        graded(),
        "tests.benchmarks.slow_environment:Slow",
        max_turns=TURNS,
        workers=WORKERS,
    )
    groups = [Group(processor.prompt(ROW)) for _ in range(PROMPTS)]
    begun = time.perf_counter()
    started = RUNNER.run(playing.start(groups, RESPONSES))
    ready = time.perf_counter()
    RUNNER.run(playing.play(started, policy))
    ended = time.perf_counter()
    RUNNER.run(playing.close())
    assert all(group.is_played for group in started) and len(started) == PROMPTS
    queued = PROMPTS * RESPONSES * TURNS * SECONDS / WORKERS
    print(f"\n{PROMPTS * RESPONSES} episodes of {TURNS} turns with a tool of {SECONDS} s")
    print(f"started in {ready - begun:.2f} s, played in {ended - ready:.2f} s")
    print(f"the slowest episode waits {TURNS * SECONDS:.1f} s, a queue at {WORKERS} {queued:.1f} s")
