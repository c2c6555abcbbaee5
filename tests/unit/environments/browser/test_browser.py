"""Episodes in a real Chromium: what the policy does and sees, what pages cannot do, and what is
left of a browser after any end.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megavlm.config.environment import EnvironmentConfig
from megavlm.environments import processes
from megavlm.environments.base import Image
from megavlm.rewards.base import Example
from megavlm.subprocess_pool.failure import CallFailure
from tests.support.browsers import act, needs_chromium, outside
from tests.support.timeouts import scaled
from tests.unit.environments.adapters.played import (
    children,
    ended,
    gone,
    opened,
    parts,
    pixels,
    play,
    pool,
    texts,
)

pytestmark = [needs_chromium, pytest.mark.xdist_group("browser")]
SCRIPTED = "browser_environments:Scripted"
SIZE = (400, 300)
FORM = """<body style="margin:0;font:16px sans-serif" oncontextmenu="return false">
<button style="position:absolute;left:0;top:0;width:100px;height:40px"
  onclick="note('clicked')" ondblclick="note('twice')">Press</button>
<input id="name" style="position:absolute;left:0;top:100px;width:200px;height:30px">
<div id="box"
  style="position:absolute;left:300px;top:0;width:50px;height:50px;background:#00f"></div>
<p id="log" style="position:fixed;bottom:0"></p><div style="height:20000px"></div>
<script>
const seen = [], note = what => { seen.push(what); log.textContent = seen.join(', ') };
let held = false;
box.onmousedown = () => held = true;
document.onmouseup = e => { if (held) note(`dropped at ${e.clientX},${e.clientY}`); held = false };
document.onscroll = () => note(`scrolled to ${scrollY}`);
document.getElementById('name').onkeydown = e => {
  if (e.key == 'Enter') window.result = e.target.value == 'Ada 7' ? 1 : 0.25 };
</script>"""


def page(name: str) -> Example:
    return Example("Look.", "", extra={"page": name})


def options(folder: Path, **others: Any) -> dict[str, Any]:
    return {"pages": str(folder), "size": list(SIZE), **others}


def write(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


def test_a_policy_acts_on_a_page(tmp_path: Path) -> None:
    write(tmp_path, form=FORM)

    async def steps(session: Any, shown: Any) -> None:
        (first,) = pixels(shown)
        assert first.shape == (600, 800, 3)
        assert first[20, 620].tolist() == [0, 0, 255]  # the box, at a scale of 2
        assert '- button "Press"' in "\n".join(texts(shown))
        for call in (
            act(action="click", coordinate=[125, 60]),
            act(action="double_click", coordinate=[125, 60]),
            act(action="drag", coordinate=[800, 80], to=[500, 500]),
            act(action="scroll", coordinate=[500, 500], amount=2),
            act(action="scroll", coordinate=[500, 500], amount=-9),
            act(action="click", coordinate=[250, 380]),
            act(action="type", text="Adam"),
            act(action="key", text="shift+left"),
            act(action="type", text=" 7"),
        ):
            step = await session.step(call)
            assert not step.done and step.info["counts"]["tool_errors"] == 0
        said = "\n".join(texts(step.observation))
        assert "clicked, clicked, clicked, twice, dropped at 200,150, scrolled to 200" in said
        assert "- textbox: Ada 7" in said
        step = await session.step(act(action="key", text="hyper+q"))
        assert "Unknown key" in texts(step.observation)[0]
        step = await session.step(act(action="key", text="Enter"))
        assert (step.done, step.reward, step.info["correct"]) == (True, 1.0, True)

    play(
        SCRIPTED,
        steps,
        page("form.html"),
        options=options(tmp_path, scale=2, accessibility=True),
        max_turns=20,
        memory_mb=1024,  # Chromium and Playwright's driver reserve more addresses
    )


def test_a_page_reaches_no_other_origin_and_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    folder = tmp_path / "pages"
    folder.mkdir()
    with outside() as (allowed, wanted), outside() as (other, hits):
        write(
            folder,
            index=f"""<body><a href="file://{secret}" style="font-size:90px">link</a>
<img src="http://{other}/image"><link rel=prefetch href="http://{other}/prefetch">
<iframe src="http://{other}/frame"></iframe><iframe src="file://{secret}"></iframe>
<script>
const tries = {{
  fetch: () => fetch('http://{other}/fetch', {{mode: 'no-cors'}}),
  https: () => fetch('https://{other}/tls'),
  file: () => fetch('file://{secret}').then(r => r.text()),
  up: () => fetch('/../secret.txt').then(r => r.status),
  allowed: () => fetch('http://{allowed}/allowed', {{mode: 'no-cors'}}).then(r => r.type),
  socket: () => new Promise((yes, no) => {{
    const s = new WebSocket('ws://{other}/ws'); s.onopen = yes; s.onerror = no }}),
}};
navigator.sendBeacon('http://{other}/beacon');
(async () => {{
  const found = [];
  for (const [name, go] of Object.entries(tries))
    found.push(name + ': ' + await go().then(v => 'got ' + v, () => 'refused'));
  document.body.append(found.join(', '));
}})();
</script>""",
        )

        async def steps(session: Any, shown: Any) -> None:
            step = await session.step(act(action="wait", amount=2))
            said = "\n".join(texts(step.observation))
            assert "https: refused, file: refused, up: got 404, allowed: got opaque" in said
            assert "socket: refused" in said and "a secret" not in said
            step = await session.step(act(action="click", coordinate=[100, 200]))  # the link
            assert "a secret" not in "\n".join(texts(step.observation))

        settings = options(folder, accessibility=True, origins=[allowed])
        play(SCRIPTED, steps, page("index.html"), options=settings)
        assert hits == []
        assert wanted == ["/allowed"]


@pytest.mark.slow
def test_hostile_pages_cost_their_episodes_or_less(tmp_path: Path) -> None:
    with outside() as (host, _):
        write(
            tmp_path,
            good="<button style='width:100%;height:300px' onclick='window.result=1'>ok</button>",
            dialogs="<script>alert('first'); confirm('second'); prompt('third')</script>read",
            unload="<script>onbeforeunload = () => 'stay'; setTimeout(() => location = 'good.html')"
            "</script>",
            tall="<div style='height:20000px;width:20000px'>tall</div>",
            slow=f"<p>as far as it goes</p><img src='http://{host}/slow'>",
            never=f"<p>waits</p><script src='http://{host}/slow'></script>",
            leaves=f"<body onclick='location = \"http://{host}/slow\"'>leaves",
            redirects=f"<iframe src='http://{host}/loop'></iframe>there",
            again="<p>again</p><script>setTimeout(() => location.reload(), 200)</script>",
            download=f"<p>stays</p><iframe src='http://{host}/file'></iframe>",
            popups="<p>many</p><script>for (let i = 0; i < 30; i++) open('good.html')</script>",
            closes="<body onclick='close()'>closes",
            busy="<body onclick='for (;;) {}'>busy",
            alarms="<body onclick='for (;;) alert(1)'>alarms",
            greedy="<body onclick='const a = []; for (;;) a.push(new Uint8Array(1e8).fill(1))'>",
        )

        async def episode(made: Any, name: str, *calls: str) -> Any:
            session = await opened(made, tool_timeout=scaled(20))
            try:
                async with asyncio.timeout(scaled(12 if name in ("busy", "alarms") else 60)):
                    place = name if "://" in name else f"{name}.html"
                    said = texts(await session.reset(page(place), 0))
                    for call in calls:
                        step = await session.step(call)
                        if step.done:
                            return step.reward
                        said += texts(step.observation)
                return "\n".join(said)
            except (CallFailure, TimeoutError) as error:
                return error
            finally:
                made.end(session)

        async def work() -> dict[str, Any]:
            click = act(action="click", coordinate=[500, 500])
            wait = act(action="wait", amount=0.5)
            settings = options(tmp_path, accessibility=True, origins=[host])
            async with pool(SCRIPTED, options=settings, memory_mb=2048) as made:
                playing = {
                    name: asyncio.create_task(episode(made, name, wait, *calls))
                    for name, calls in (
                        *((name, ()) for name in ("dialogs", "unload", "tall", "slow", "never")),
                        *((name, ()) for name in ("redirects", "again", "download", "popups")),
                        *((f"http://{host}/{path}", ()) for path in ("loop", "slow")),
                        *((name, (click,)) for name in ("leaves", "closes", "busy", "alarms")),
                        ("greedy", (click,)),
                        ("good", (wait, wait, wait, click)),
                    )
                }
                found = {name: await task for name, task in playing.items()}
                assert len(made._processes) == 1
                found["after"] = await episode(made, "good", click)
                await ended(made)
                return found

        found = asyncio.run(work())
    assert found.pop("good") == found.pop("after") == 1.0
    said = found.pop("dialogs")
    told = ("alert: first", "confirm: second", "prompt: third", "read")
    places = [said.index(text) for text in told]
    assert places == sorted(places)  # a slow machine may look between two of them
    for name, text in (
        ("tall", "tall"),
        ("slow", "as far"),
        ("download", "stays"),
        ("redirects", "there"),
        ("unload", "ok"),
        ("closes", "closes"),
        ("never", "waits"),
        ("leaves", "leaves"),
    ):
        assert text in str(found[name]), (name, found)
        del found[name]
    assert found.pop(f"http://{host}/slow").strip() == "Look.", "the page is blank"
    assert not isinstance(found.pop("popups"), Exception)
    assert "ERR_TOO_MANY_REDIRECTS" in str(found.pop(f"http://{host}/loop"))
    del found["again"]  # a screenshot may meet two reloads in a row
    for name in ("busy", "alarms"):
        assert isinstance(found.pop(name), TimeoutError), name
    assert found.keys() == {"greedy"}  # refused the memory or crashed: the others went on


def command(process: psutil.Process) -> str:
    """Return the command line, "" of a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def named(found: list[psutil.Process], word: str) -> list[psutil.Process]:
    """Return the processes with a word in their command, without the browser's own children."""
    others = ("--type=", "crashpad_handler")
    return [p for p in found if word in (c := command(p)) and not any(o in c for o in others)]


def test_a_dead_browser_or_worker_costs_its_episodes_only(tmp_path: Path) -> None:
    write(tmp_path, form=FORM)

    async def work() -> None:
        async with pool(SCRIPTED, options=options(tmp_path)) as made:
            for kills in ("chromium", "driver"):
                sessions = [await opened(made) for _ in range(3)]
                await asyncio.gather(*(one.reset(page("form.html"), 0) for one in sessions))
                (browser,) = named(children(made), "--user-data-dir")  # one for all
                (driver,) = named(children(made), "run-driver")
                victim = browser if kills == "chromium" else driver
                victim.kill()
                await gone([victim])
                for one in sessions[:2]:
                    with pytest.raises(CallFailure):
                        await one.step(act(action="wait", amount=0))
                    made.end(one)
                async with asyncio.timeout(scaled(60)):
                    while len(made._processes[0].sessions) > 1:  # the process takes none so long
                        await asyncio.sleep(0.01)
                fresh = await opened(made)
                shown = await fresh.reset(page("form.html"), 0)
                assert isinstance(parts(shown)[-1], Image)
                assert not (await fresh.step(act(action="wait", amount=0))).done
                made.end(fresh)
                made.end(sessions[2])
                await ended(made)
                assert len(made._processes) == 1 and made._processes[0].takes_sessions
                await gone([browser, driver])
                assert not children(made)  # the browser ends with its last session
            session = await opened(made)
            await session.reset(page("form.html"), 0)
            left = children(made)
            os.kill(made._processes[0]._process.pid, signal.SIGKILL)
            with pytest.raises(CallFailure):
                await session.step(act(action="wait", amount=0))
            fresh = await opened(made)  # in another process
            assert isinstance(parts(await fresh.reset(page("form.html"), 0))[-1], Image)
            await gone(left)

    asyncio.run(work())


def test_nothing_is_left_after_a_kill_of_the_trainer(tmp_path: Path) -> None:
    write(tmp_path, form=FORM)
    os.environ["TEST_API_KEY"] = "a key"

    async def hold() -> None:
        async with pool(SCRIPTED, options=options(tmp_path)) as made:
            await (await opened(made)).reset(page("form.html"), 0)
            await asyncio.sleep(1000)

    if not (trainer := os.fork()):
        try:
            asyncio.run(hold())
        finally:
            os._exit(1)
    try:
        below = psutil.Process(trainer)
        end = time.monotonic() + scaled(60)
        while not any("--type=renderer" in command(one) for one in below.children(True)):
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(0.5)
        found = below.children(recursive=True)
        for one in found:
            if "--user-data-dir" in command(one):
                assert "TEST_API_KEY" not in one.environ() and "PYTHONPATH" not in one.environ()
    finally:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        del os.environ["TEST_API_KEY"]
    asyncio.run(gone(found))


def test_folders_go_with_their_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, form=FORM)
    (room := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(room))

    async def steps(session: Any, shown: Any) -> None:
        assert len(list(room.glob("megavlm-browser-*"))) == 1

    async def work() -> None:
        async with pool(SCRIPTED, options=options(tmp_path)) as made:
            session = await opened(made)
            await steps(session, await session.reset(page("form.html"), 0))
            made.end(session)
            await ended(made)
            assert list(room.iterdir()) == []

    asyncio.run(work())


def test_a_recipe_is_told_what_is_missing(tmp_path: Path) -> None:
    for wrong, said in (
        ({"pages": "nowhere"}, "pages=nowhere is not a folder"),
        ({"size": [0, 3]}, r"size=\[0, 3\] must be a width and a height"),
        ({"scale": 9}, "scale=9 must be above 0"),
        ({"chromium": "/bin/false"}, "Chromium did not start"),
    ):
        settings = EnvironmentConfig(name=SCRIPTED, options=options(tmp_path) | wrong)

        async def start(settings: EnvironmentConfig = settings) -> None:
            made: Any = await processes.make_environments(settings)
            try:
                await (await opened(made)).reset(page("form.html"), 0)
            finally:
                await made.close()

        with pytest.raises((ValueError, CallFailure), match=said):
            asyncio.run(start())
