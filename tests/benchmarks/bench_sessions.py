"""`make bench`: tokens that a real server computes twice, for sessions with a screenshot at each
turn of which its prefix cache holds a quarter: all at once (before), and no more than the cache
holds (`megavlm/inference/live_sessions.py`). A tool takes a fifth of a second.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from megavlm.data.processor import Processor
from megavlm.families import family_of
from megavlm.inference import requests
from megavlm.inference.client import RolloutClient
from megavlm.inference.generation import GenerateFn
from megavlm.inference.protocol import Response, SamplingParams
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server import ManagedServer
from megavlm.inference.server_args import ServerOptions
from tests.conftest import DATA
from tests.fakes.fixed_servers import FixedServers
from tests.sglang.conftest import model_folder
from tests.sglang.questions import prompts
from tests.support.random_images import image
from tests.support.servers import run_server

SESSIONS, TURNS, SIDE = 16, 6, 280  # a screenshot of 280 x 280 pixels has 100 tokens
LENGTH, TOOL_SECONDS = 8, 0.2  # tokens of a response
LONGEST = 750  # tokens of a session


def bench_sessions(tmp_path: Path) -> None:
    folder = model_folder("qwen2_5_vl")
    size = {"max_total_tokens": SESSIONS // 4 * LONGEST}
    options = ServerOptions(folder, "float32", "cpu", server_args=size)
    processor = Processor(folder, DATA, family_of(folder))
    print(f"\n{SESSIONS} sessions of {TURNS} turns")
    with run_server(ManagedServer(options, log_path=tmp_path / "log")) as server:
        for name, most in (("before", None), ("now", TURNS * 130)):
            _measure(name, server, processor, RequestLimits(session_tokens=most))


def _measure(name: str, server: ManagedServer, processor: Processor, limits: RequestLimits) -> None:
    keys = {"Authorization": f"Bearer {server.api_key}"}
    info = httpx.get(f"{server.url}/server_info", headers=keys).json()
    cache_tokens = info["max_total_num_tokens"]
    suppressed = (*processor.suppressed_ids, processor.eos_id)
    how = SamplingParams(
        0.0, LENGTH, suppressed_ids=suppressed, stop_ids=processor.stop_ids, cache_key=name
    )
    base = prompts(processor)["text"].row

    def row(session: int, turn: int) -> Any:
        shown = image(SIDE, SIDE, 100 * session + turn)
        return replace(base, problem=f"{session} <image>", images=(shown,), messages=())

    parse, counts, lengths = requests.parse_generate, [0], [0] * SESSIONS
    live, most_live = 0, 0

    def count(answer: Any, *arguments: Any) -> list[list[Response]]:
        for item in answer if isinstance(answer, list) else [answer]:
            found = item["meta_info"]
            counts[0] += (
                found["prompt_tokens"] - found["cached_tokens"] + found["completion_tokens"]
            )
        return parse(answer, *arguments)

    async def play(index: int, responses: Sequence[Response], ask: GenerateFn) -> None:
        nonlocal live, most_live
        live, (said,), prompt = live + 1, responses, first[index]
        most_live = max(live, most_live)
        for turn in range(1, TURNS):
            await asyncio.sleep(TOOL_SECONDS)
            ids = [*said.token_ids.tolist(), processor.eos_id]
            prompt = processor.next_turn(prompt, ids, row(index, turn))
            said = await ask(prompt)
        live -= 1
        lengths[index] = len(prompt.token_ids) + len(said.token_ids)

    first = [processor.prompt(row(session, 0)) for session in range(SESSIONS)]
    routing = FixedServers(
        server.url, api_key=server.api_key, is_local=True, cache_tokens=cache_tokens
    )
    with RolloutClient(routing, limits) as client, patch.object(requests, "parse_generate", count):
        start = time.monotonic()
        client.run(client.generate(first, n=1, sampling_params=how, on_complete=play))
        seconds = time.monotonic() - start
    assert max(lengths) <= LONGEST
    twice = counts[0] - sum(lengths)
    print(
        f"{name:>6}: cache {cache_tokens}, at most {most_live} at a time, computed {counts[0]} for "
        f"{sum(lengths)} tokens, twice {twice} ({twice / sum(lengths):.1%}), {seconds:.1f} s"
    )
