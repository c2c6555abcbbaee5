"""Episodes in a browser from the trainer's side: screenshots become images of the prompt, and
coordinates of the model's image places on the page.
"""

from pathlib import Path

import pytest

from megavlm.config.data import Data
from megavlm.data.processor import Processor
from megavlm.data.rows import Row
from megavlm.demo.tiny_model import make_tiny_model
from megavlm.families import family_of
from tests.support.browsers import act, needs_chromium
from tests.unit.environments.adapters.played import user_modules
from tests.unit.rollout.scripted import Policy, graded, play

pytestmark = [needs_chromium, pytest.mark.xdist_group("browser")]
# Two buttons one above the other: which one is hit depends on the height of a click.
PAGE = """<body style="margin:0">
<button style="width:560px;height:100px" onclick="window.result=0">A</button>
<button style="width:560px;height:100px" onclick="window.result=1">B</button>"""


def test_screenshots_are_images_and_clicks_land_where_the_model_sees(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", ["Press B.", act(action="click")] * 20, seed=0)
    data = Data(max_prompt_tokens=512, max_pixels=280 * 112)
    processor = Processor(tmp_path / "model", data, family_of(tmp_path / "model"))
    (tmp_path / "page.html").write_text(PAGE)
    row = Row(0, "Press B.", "", (), "", "rows:0", extra={"page": "page.html"})
    wait, click = act(action="wait", amount=0), act(action="click", coordinate=[140, 75])
    policy = Policy(processor, wait, wait, click, click)
    with user_modules():
        episodes = play(
            processor,
            graded(),
            policy,
            "browser_environments:Scripted",
            row=row,
            max_new_tokens=256,
            max_turns=4,
            memory_mb=4096,
            options={"pages": str(tmp_path), "size": [560, 224], "show_tools": False},
        )
    # The model's image is 280 x 112: its row 75 is row 150 of the page, the second button.
    assert [(one.score.reward, one.score.correct) for one in episodes] == [(1.0, True)] * 2
    # In fractions of the screenshot, which the actions name by the key of their prompt's image.
    seen = [episode.prompts[1].images[-1].key for episode in episodes]
    assert [(one.actions[1][0].image, one.actions[1][0].at) for one in episodes] == [
        (key, [0.5, pytest.approx(75 / 112)]) for key in seen
    ]
    assert [one.actions[0][0].values() for one in episodes] == [
        {"kind": "wait", "image": one.prompts[0].images[0].key, "amount": 0.0} for one in episodes
    ]
    first, second = policy.asked[0][0][0], policy.asked[1][0][0]
    assert [len(prompt.images) for prompt in (first, second)] == [1, 2]
    assert first.images[0].num_patches == 20 * 8
