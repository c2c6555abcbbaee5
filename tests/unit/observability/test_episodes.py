"""Episodes in the report: what a turn shows, what is drawn, branches, and a player that works in a
real browser whatever a model wrote.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from megavlm.observability import report as module
from megavlm.observability.episodes import drawing, in_words
from megavlm.observability.report import write_report
from megavlm.observability.samples import SampleWriter
from tests.support.browsers import find_chromium, needs_chromium

from .runs import group, image, write_run
from .test_report import Page

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>"
CLICK = {"kind": "click", "image": "start", "at": [0.5, 0.25]}


def turn(text: str, **values: Any) -> dict[str, Any]:
    return {"message": "", "images": [], "text": text, "actions": [], **values}


def played(*turns: dict[str, Any], **first: Any) -> dict[str, Any]:
    """A group with one episode, whose first turn clicks on the prompt's image."""
    asked = group("Buy <image>.", texts=["Go."], images=[image("start", (300, 200))])
    rewards = {"rewards": [0.25] * (1 + len(turns))}
    asked["responses"][0] |= {"actions": [CLICK], **rewards, "turns": list(turns), **first}
    return asked


def page(folder: Path, *groups: dict[str, Any], steps: int = 1) -> Page:
    write_run(folder, steps=steps, groups=groups)
    return Page(write_report(folder))


def shown(found: Page, number: str) -> str:
    """The HTML of a turn."""
    (text,) = re.findall(
        rf'<div class="turn" data-turn="{re.escape(number)}">(.*?)(?=<div class="turn"|</article>)',
        found.html,
        re.DOTALL,
    )
    return str(text)


def test_a_turn_shows_what_the_policy_saw_thought_and_did(tmp_path: Path) -> None:
    typed = {"kind": "type", "image": "next", "text": "tea"}
    later = turn(
        "I type.\n<tool_call>\n{}\n</tool_call>",
        message="<image>a dialog",
        images=[image("next", (300, 200))],
        actions=[typed],
    )
    found = page(tmp_path, played(later, turn("<think>Enough.</think>milk", message="error: no")))
    first, second, third = (shown(found, f"1.{number}") for number in range(3))
    assert found.values("href")[0].startswith("data:image/webp;base64,")
    assert 'href="#image0"' in first and f'class="ink" d="{drawing(CLICK, 1000 * 2 / 3)}"' in first
    assert "click at 50 %, 25 %" in first and "Answer</h4>" in first and "0.250" in first
    assert 'href="#image1"' in second and "<path" not in second
    assert '<span class="typed">type “tea”</span>' in second
    assert re.findall(r"<h4>(.*?)</h4>", second) == [
        "Result",
        "Thought",
        "Call",
        "Action",
        "Reward",
    ]
    assert "a dialog" in second and "&lt;image&gt;" not in second
    # It has no image of its own, and is about the last one.
    assert 'href="#image1"' in third and "error: no" in third
    assert re.findall(r"<h4>(.*?)</h4>", third)[1:3] == ["Thought", "Answer"]


def test_an_action_is_drawn_on_the_image_that_it_names(tmp_path: Path) -> None:
    zoom = {"kind": "zoom", "image": "start", "at": [0.1, 0.2, 0.5, 0.6]}
    gone = {"kind": "click", "image": "never-shown", "at": [0.5, 0.5]}
    crop = turn("again", images=[image("crop")], actions=[zoom, gone])
    second = shown(page(tmp_path, played(crop)), "1.1")
    assert re.findall(r'href="#image(\d)"', second) == ["1", "0"], "its own, and the one it names"
    assert second.count('class="ink"') == 1
    assert second.index('href="#image0"') < second.index('class="ink"')
    assert "click at 50 %, 50 %" in second


@pytest.mark.parametrize(
    ("action", "path", "words"),
    [
        (
            {"kind": "zoom", "at": [0.1, 0.2, 0.5, 0.6]},
            "M100.0 100.0H500.0V300.0H100.0Z",
            "zoom at 10 %, 20 % to 50 %, 60 %",
        ),
        (
            {"kind": "drag", "at": [0, 0.5], "to": [1, 0.5]},
            "M0.0 250.0L1000.0 250.0M964.0 268.0L1000.0 250.0M964.0 232.0L1000.0 250.0",
            "drag at 0 %, 50 % to 100 %, 50 %",
        ),
        (
            {"kind": "scroll", "at": [0.5, 0.5], "amount": -3.0},
            "M500.0 315.0L500.0 185.0",
            "scroll -3 at 50 %, 50 %",
        ),
    ],
)
def test_each_kind_of_action_has_its_form(action: dict[str, Any], path: str, words: str) -> None:
    assert path in drawing(action, 500.0) and in_words(action) == words


def test_branches_begin_where_their_turns_say(tmp_path: Path) -> None:
    turns = [
        turn("b", continues=0, images=[image("b")]),
        turn("c", continues=0),
        turn("d", continues=2),
        turn("e", continues=None, images=[image("e")]),
    ]
    found = page(tmp_path, played(*turns))
    assert found.values("data-turns") == ["1.0 1.1", "1.0 1.2 1.3", "1.4"]
    # A branch shows the last image of its own turns: c and d follow the start, not b.
    seen = [re.findall(r'href="#image(\d)"', shown(found, f"1.{n}")) for n in range(5)]
    assert seen == [["0"], ["1"], ["0"], ["0"], ["2"]]
    for one in turns:
        del one["continues"]  # a run of the release before
    assert page(tmp_path / "old", played(*turns)).values("data-turns") == ["1.0 1.1 1.2 1.3 1.4"]


def test_runs_whose_environment_shows_no_image_have_no_player(tmp_path: Path) -> None:
    asked = group(images=[image("a")])
    asked["responses"][0] |= {"actions": [], "turns": [turn("two", message="Again.")]}
    found = page(tmp_path, asked)
    assert "player" not in found.values("class") and "image" not in found.tags
    assert found.values("class").count("observation") == 1


def test_an_image_is_in_the_page_once_and_each_step_has_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = played(turn("b", images=[image("start", (300, 200))]))
    both["responses"] *= 3
    found = page(tmp_path, both, both, steps=3)
    (uri,) = [uri for uri in found.values("href") if uri.startswith("data:")]
    assert found.values("href").count("#image0") == 3 * 2 * 3 * 2
    monkeypatch.setattr(module, "MAX_IMAGE_BYTES", int(2.2 * len(uri)))
    folder = tmp_path / "long"
    writer = SampleWriter(folder, num_steps=2)
    for step in (1, 2):
        asked = played(turn("b", images=[image(f"{step}later", (300, 200))]))
        writer.write(step, [asked | {"images": [image(f"{step}first", (300, 200))]}])
    found = Page(write_report(folder))
    assert len([uri for uri in found.values("href") if uri.startswith("data:")]) == 2
    first, second = found.html.split("data-step=")[1:]
    assert 'href="#image0"' in first and "left out for size: 1later.png" in first
    assert 'href="#image1"' in second and "left out for size: 2later.png" in second


@needs_chromium
@pytest.mark.xdist_group("browser")
def test_the_player_walks_in_a_browser_and_hostile_texts_do_not_run(tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    hostile = {"kind": HOSTILE, "image": "start", "text": HOSTILE}
    later = turn(HOSTILE, message=HOSTILE, images=[image("next", (300, 600))], actions=[hostile])
    asked = played(later, turn("done"), text=f"{HOSTILE}<tool_call>")
    asked["source"] = "/data/" + 90 * "x"  # wider than the narrow page
    asked["responses"].append({**asked["responses"][0], "turns": [later], "rewards": [0, 1]})
    path = tmp_path / "report.html"
    found = page(tmp_path, asked, steps=2)
    assert found.tags.count("script") == 1 and "img" not in found.tags
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        for width in (400, 1280):
            view = browser.new_page(viewport={"width": width, "height": 800})
            problems: list[str] = []
            view.on("console", lambda message, to=problems: to.append(message.text))
            view.on("pageerror", lambda error, to=problems: to.append(str(error)))
            view.goto(path.as_uri())
            assert view.title() == f"megavlm: {tmp_path.name}"

            def seen(view: Any = view) -> list[str]:
                turns = view.locator(".turn:visible")
                return [turns.nth(i).get_attribute("data-turn") for i in range(turns.count())]

            assert seen() == ["1.0"]
            view.keyboard.press("ArrowRight")
            view.keyboard.press("ArrowRight")
            view.keyboard.press("ArrowRight")  # it is the last turn
            assert seen() == ["1.2"]
            view.keyboard.press("ArrowLeft")
            assert (
                seen() == ["1.1"] and view.locator(".place:visible").inner_text() == "turn 2 of 3"
            )
            view.locator(".tabs:visible button").nth(1).click()
            view.locator(".walk:visible .next").click()
            assert seen() == ["2.1"] and view.locator(".walk:visible .next").is_disabled()
            view.locator("select").select_option(index=0)  # another step, with a player of its own
            view.keyboard.press("ArrowRight")  # chooses no other step
            view.locator("h1").click()
            assert view.locator("section:visible").count() == 1
            assert view.locator(".turn:visible use").evaluate("one => one.getBBox().width") == 1000
            assert view.evaluate("document.documentElement.scrollWidth") == width
            assert problems == [] and HOSTILE in view.locator("body").inner_text()
            view.close()
        browser.close()
