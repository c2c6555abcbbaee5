"""The producer of rollouts over fake servers: what it starts and when, the order of its groups,
versions, checkpoints, and what happens when something dies.

The producer runs in a thread, except where a process is killed.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megavlm.arrays import from_bytes
from megavlm.config.load import load
from megavlm.config.schema import Config
from megavlm.data.loader import PromptStream
from megavlm.data.processor import Processor
from megavlm.data.rows import Rows
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.environments.curriculum import Curriculum
from megavlm.families import family_of
from megavlm.inference.client import RolloutClient
from megavlm.inference.connect import Connection
from megavlm.inference.errors import RolloutRequestError, RolloutServerError
from megavlm.inference.requests import RequestLimits
from megavlm.inference.server_pool.state import State
from megavlm.observability.phases import Phases
from megavlm.rollout.ahead import handle
from megavlm.rollout.ahead.handle import AsyncRolloutSource
from megavlm.rollout.ahead.producer import serve
from megavlm.rollout.sampler import Refit
from megavlm.rollout.trajectory import Group
from tests.conftest import row, write_rows
from tests.fakes.server import PROMPT_IDS, FakeServer
from tests.support.server_pools import external, push, state, wait_for
from tests.support.timeouts import scaled

SIZE, N = 2, 2  # prompts of a step, responses to each


def no_refit() -> None:
    raise AssertionError("the servers have weights")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_tiny_model(folder / "model", ["What colour? 1 2 3 4 5 6 7 8 9"] * 20, seed=0)
    rows = [row(problem=f"<image>What colour? {i}", answer=str(i)) for i in range(16)]
    write_rows(folder / "rows.parquet", rows)
    return folder


@pytest.fixture
def config(files: Path, tmp_path: Path) -> Config:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
run: {{dir: {tmp_path / "run"}}}
model: {{folder: {files / "model"}}}
data: {{train_files: [{files / "rows.parquet"}], max_prompt_tokens: 64}}
algorithm: {{name: grpo, prompts_per_step: {SIZE}, responses_per_prompt: {N}, steps: 9}}
rollout: {{mode: external, urls: ["http://127.0.0.1:1"], max_staleness: 1, max_new_tokens: 256}}
reward: {{workers: 1, timeout: {scaled(60)}, on_failure: stop}}
"""
    )
    return load(path, [])


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(threading.Thread):
        def wait(self, timeout: float | None = None) -> int:
            self.join(timeout)
            return 0

    def start(descriptor: int) -> Thread:
        connection = Pipe(os.dup(descriptor))
        thread = Thread(target=lambda: serve(connection, connection.recv()))
        thread.start()
        return thread

    monkeypatch.setattr(handle, "start_process", start)


@pytest.fixture
def fake(files: Path, config: Config) -> Iterator[Any]:
    with FakeServer() as fake:
        server: Any = fake
        prompt = Processor(files / "model", config.data, family_of(files / "model")).prompt(
            Rows(config.data.train_files, config.data)[0]
        )
        server.first_id = prompt.short_ids[0]  # of all prompts
        server.prompt_tokens = PROMPT_IDS + len(prompt.token_ids) - len(prompt.short_ids)
        yield server


def order(config: Config, count: int) -> list[int]:
    """Return the rows of the first prompts of the stream."""
    processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
    rows = Rows(config.data.train_files, config.data)
    stream = PromptStream(rows, processor.prompt, config.data, seed=0, batch_size=SIZE)
    return [prompt.row.index for prompt in stream.take(count)]


def started(
    config: Config, pool: Any, state: Any = None, timeout: float = 300.0
) -> AsyncRolloutSource:
    client = RolloutClient(pool, RequestLimits(total=timeout, retry_delay=0.0))
    curriculum = Curriculum(config.curriculum)
    source = AsyncRolloutSource(config, Connection(client, pool), curriculum, Phases())
    if state is not None:
        source.load_state_dict(state)
    return source


def take(source: AsyncRolloutSource, version: int, refit: Refit = no_refit) -> list[Group]:
    """Return the groups of a step, which come at once."""
    (streamed,) = source.stream(version, refit)
    return list(streamed.groups)


def rows_of(groups: list[Group]) -> list[int]:
    return [group.prompt.row.index for group in groups]


def backlog(state: Any) -> Any:
    """Return the records of the groups in a source's state."""
    return from_bytes(state["backlog"])[1]["groups"]


def num_asked(fake: Any) -> int:
    return len(fake.bodies("/generate"))


@pytest.mark.usefixtures("in_thread")
def test_a_step_ahead_and_no_further(config: Config, fake: Any) -> None:
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer, seen = started(config, pool), []
        try:
            for version in range(3):
                groups = take(producer, version)
                seen += rows_of(groups)
                wait_for(lambda most=SIZE * (version + 2): num_asked(fake) == most)
                assert producer.measures["dropped_groups"] == 0
                sampled = {int(e.responses[0].weight_version) for g in groups for e in g.episodes}
                assert sampled == {max(version - 1, 0)}, "a step's weights are a step old"
                push(pool, version + 1, (fake,))
            assert num_asked(fake) == SIZE * 4, "no prompt starts until the next step takes groups"
        finally:
            producer.close()
    assert seen == order(config, 3 * SIZE)


@pytest.mark.usefixtures("in_thread")
def test_groups_arrive_as_they_were(config: Config, fake: Any) -> None:
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool)
        (group, _) = take(producer, 0)
        producer.close()
    processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
    prompt = processor.prompt(Rows(config.data.train_files, config.data)[group.prompt.row.index])
    assert group.is_played and len(group.episodes) == N and not group.start.row.images
    assert group.start.token_ids.equal(prompt.token_ids)
    assert group.start.positions.equal(prompt.positions)
    (image,), (own,) = group.start.images, prompt.images
    assert image.key == own.key and image.contents[0].equal(own.pixels)
    assert image.patches().equal(own.patches())
    ids = prompt.short_ids  # of which the fake's answers tell
    said = [episode.responses[0].token_ids.tolist() for episode in group.episodes]
    assert said == [[ids[0], len(ids) - PROMPT_IDS]] * N
    assert group.episodes[0].responses[0].logprobs.tolist() == [-0.5, -1.5]
    assert torch.tensor([s.reward for s in group.scores]).isfinite().all()


@pytest.mark.usefixtures("in_thread")
def test_groups_arrive_with_the_rewards_of_their_group(config: Config, fake: Any) -> None:
    config = replace(config, reward=replace(config.reward, name="group_rewards:place"))
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool)
        groups = take(producer, 0)
        producer.close()
    assert [[score.reward for score in group.scores] for group in groups] == [[0.0, 1.0]] * SIZE


@pytest.mark.usefixtures("in_thread")
def test_a_response_that_a_push_aborts_is_continued_and_waited_for(
    config: Config, fake: Any
) -> None:
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool)
        fake.held, fake.held_once = {fake.first_id}, True
        try:
            first = order(config, 1)[0]
            taken: list[list[Group]] = []
            thread = threading.Thread(target=lambda: taken.append(take(producer, 0)))
            thread.start()
            wait_for(lambda: num_asked(fake) == 2 * SIZE)
            assert not taken
            push(pool, 1, (fake,))
            fake.aborted.set()  # as a push does with rollout.pause_mode=abort
            thread.join()
        finally:
            producer.close()
    ((group, _),) = taken
    assert group.prompt.row.index == first
    versions = [[span.version for span in e.responses[0].spans] for e in group.episodes]
    assert versions == [["0", "1"]] * N


@pytest.mark.usefixtures("in_thread")
def test_a_run_that_is_killed_trains_on_every_prompt_once(config: Config, fake: Any) -> None:
    """Groups that are ready or under way at a checkpoint come first after it, without being
    generated again where they were complete.
    """
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool)
        trained = rows_of(take(producer, 0))
        push(pool, 1, (fake,))
        wait_for(lambda: all(item["responses"] for item in backlog(producer.state_dict())))
        state = producer.state_dict()
        lost = rows_of(take(producer, 1))  # after the checkpoint
        producer.close()  # killed
        assert [item["row"] for item in backlog(state)] == lost
        assert [item["step"] for item in backlog(state)] == [0] * SIZE

        before = num_asked(fake)
        producer = started(config, pool, state)
        trained += rows_of(take(producer, 1))
        wait_for(lambda: num_asked(fake) == before + SIZE)
        push(pool, 2, (fake,))
        trained += rows_of(take(producer, 2))
        producer.close()
    assert trained == order(config, 3 * SIZE)


@pytest.mark.usefixtures("in_thread")
def test_requests_name_their_version_where_a_push_keeps_prefixes(config: Config, fake: Any) -> None:
    config = replace(config, rollout=replace(config.rollout, pause_mode="in_place"))
    with external(fake) as pool:
        producer = started(config, pool)
        for version in range(2):
            push(pool, version, (fake,))
            take(producer, version)
        wait_for(lambda: num_asked(fake) == 3 * SIZE)
        producer.close()
    keys = [body["extra_key"] for body in fake.bodies("/generate")]
    runs, versions = zip(*(key.split("-") for key in keys), strict=True)
    assert versions == ("0",) * 2 * SIZE + ("1",) * SIZE
    assert len({*runs}) == 1


@pytest.mark.usefixtures("in_thread")
def test_groups_that_are_too_old_are_dropped_and_counted(config: Config, fake: Any) -> None:
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool)
        take(producer, 0)
        wait_for(lambda: all(item["responses"] for item in backlog(producer.state_dict())))
        state = producer.state_dict()
        producer.close()
        push(pool, 5, (fake,))
        producer = started(config, pool, state)
        groups = take(producer, 5)
        producer.close()
    assert producer.measures["dropped_groups"] == SIZE
    assert rows_of(groups) == order(config, 3 * SIZE)[2 * SIZE :]


@pytest.mark.usefixtures("in_thread")
def test_a_group_whose_requests_time_out_is_asked_again(config: Config, fake: Any) -> None:
    config = replace(config, rollout=replace(config.rollout, on_timeout="requeue"))
    rows = order(config, 4 * SIZE)
    lost, hung, answer = rows[1], [], fake.answer
    problems = Rows(config.data.train_files, config.data)
    processor = Processor(config.model.folder, config.data, family_of(config.model.folder))
    ids = processor.prompt(problems[lost]).short_ids

    def answer_others(path: str, body: Any) -> Any:
        if path == "/generate" and tuple(body["input_ids"][0]) == ids and len(hung) < 4:
            hung.append(1)
            fake.closed.wait()
        return answer(path, body)

    fake.answer = answer_others
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool, timeout=scaled(1))
        taken, counted = [], []
        for version in range(3):
            taken += rows_of(take(producer, version))
            counted.append(producer.measures["timed_out_groups"])
            wait_for(lambda: state(pool, fake.url) is State.HEALTHY)  # a time-out is suspicious
            push(pool, version + 1, (fake,))
        producer.close()
    left = [row for row in rows if row != lost]
    assert counted == [1, 0, 0] and len(hung) == 4
    assert taken == [*left[: 2 * SIZE], lost, *left[2 * SIZE :]][: 3 * SIZE]


@pytest.mark.usefixtures("in_thread")
def test_a_step_in_which_everything_times_out_ends_the_run(config: Config, fake: Any) -> None:
    config = replace(config, rollout=replace(config.rollout, on_timeout="requeue"))
    fake.held = {fake.first_id}
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool, timeout=0.1)
        with pytest.raises(RolloutServerError, match=f"algorithm.prompts_per_step={SIZE} "):
            take(producer, 0)
        producer.close()


@pytest.mark.usefixtures("in_thread")
def test_servers_without_weights_are_refitted(config: Config, fake: Any) -> None:
    with external(fake) as pool:
        producer, refits = started(config, pool), []

        def refit() -> None:
            refits.append(push(pool, 0, (fake,)))

        assert len(take(producer, 0, refit)) == SIZE
        producer.close()
    assert refits == [[fake.url]]


@pytest.mark.usefixtures("in_thread")
def test_errors_of_the_producer_are_raised_by_the_trainer(config: Config, fake: Any) -> None:
    with external(fake) as pool:
        push(pool, 0, (fake,))
        fake.refused["/generate"] = {1}
        producer = started(config, pool)
        with pytest.raises(RolloutRequestError, match="refused as scripted"):
            take(producer, 0)
        producer.close()


@pytest.mark.slow
def test_the_process_does_without_megatron_core() -> None:
    """Its import takes seconds and memory, and must come after the platform's."""
    code = "import sys, megavlm.rollout.ahead.producer; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_process_ends_with_the_trainer_and_its_death_is_one_sentence(
    config: Config, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with external(fake) as pool:
        push(pool, 0, (fake,))
        producer = started(config, pool)
        assert len(take(producer, 0)) == SIZE
        process = psutil.Process(producer._process.pid)
        children = process.children(recursive=True)
        assert children, "its rewards"
        process.kill()
        with pytest.raises(RolloutServerError, match=r"ended with SIGKILL; .*checkpoint"):
            take(producer, 1)
        psutil.wait_procs(children, 30)
        assert not any(child.is_running() for child in children)

        producer = started(config, pool)
        take(producer, 0)
        producer.close()
        assert isinstance(producer._process, subprocess.Popen)
        assert producer._process.returncode == 0
