"""Training on pages in a real browser, of which some do their worst, and a replay of that run."""

import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.e2e.conftest import Running, World
from tests.e2e.test_replay import values, weights
from tests.support.browsers import needs_chromium, outside

pytestmark = [
    needs_chromium,
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.xdist_group("runs"),
]
# Each response clicks. On kills.html a click of the first step kills the browser, and one of the
# second step its process.
ENVIRONMENT = """
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from megavlm.environments.base import Step
from megavlm.environments.browser.environment import Browser

CALL = '''<tool_call>
{"name": "computer", "arguments": {"action": "click", "coordinate": [500, 500]}}
</tool_call>'''


class Clicked(Browser):
    async def reset(self, row, seed):
        self.mark = Path(self._pages) / f"kill-{seed}"  # a seed is a step's
        return await super().reset(row, seed)

    async def step(self, text):
        if self.row.extra["page"] == "kills.html" and self.is_first():
            kill(len([*self.mark.parent.glob("kill-*")]))
        return await super().step(CALL)

    def is_first(self):  # of two clicks that may come at the same time in two processes
        with suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            return True
        return False

    async def outcome(self, answer):
        reward = await self.evaluate("window.result ?? null")
        return None if reward is None else Step(None, float(reward), True)


def kill(number):
    for child in psutil.Process().children() if number == 1 else ():
        if any(word.startswith("--user-data-dir") for word in child.cmdline()):
            child.kill()
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
RIGHT = "<body style='height: 100vh' onclick='window.result = 1'>"
PAGES = {
    "right": RIGHT,
    "kills": RIGHT,
    "dialogs": f"{RIGHT}<script>alert(1); confirm(2); prompt(3)</script>",
    "tall": f"{RIGHT}<div style='height: 20000px; width: 20000px'>tall</div>",
    "loops": "<body style='height: 100vh' onclick='location = \"http://HOST/loop\"'>",
}
NEVER = "http://HOST/slow"
SECTIONS: dict[str, Any] = {
    "algorithm": {
        "prompts_per_step": len(PAGES) + 1,
        "responses_per_prompt": 2,
        "steps": 3,
        "entropy_coefficient": 0.01,  # where all rewards are equal there is a gradient, too
    },
    "optimizer": {"lr": 1e-3},
}


def test_a_run_survives_its_pages_and_is_replayed(world: World, running: Running) -> None:
    folder = world.root / "pages"
    folder.mkdir()
    (folder / "clicked.py").write_text(ENVIRONMENT)
    (temporary := folder / "tmp").mkdir()
    with outside() as (host, _):
        for name, text in PAGES.items():
            (folder / f"{name}.html").write_text(text.replace("HOST", host))
        never = NEVER.replace("HOST", host)
        pages = [*(f"{name}.html" for name in PAGES), never]
        rows = [{"problem": "Click.", "answer": "", "page": page} for page in pages]
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        sections: dict[str, Any] = SECTIONS | {
            "data": {
                "train_files": [str(folder / "rows.parquet")],
                "test_files": [],
                "image_keys": [],
                "extra_keys": ["page"],
                "category_key": "page",
                "max_prompt_tokens": 128,
            },
            "environment": {
                "name": "clicked:Clicked",
                "max_turns": 2,
                "max_observation_tokens": 64,
                "workers": 2,
                "options": {
                    "pages": str(folder),
                    "size": [84, 84],
                    "origins": [host],
                    "coordinates": "relative",
                    "show_tools": False,
                },
            },
        }
        recipe = world.recipe(
            "pages_run",
            **sections,
            rollout={**running.rollout, "max_new_tokens": 8},
            run={"record_rollouts": True},
        )
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Browsers of the run are found by the folder in which they write.
        keys = {"PYTHONPATH": path, "TMPDIR": str(temporary), **running.keys}
        done = world.megavlm("train", recipe, **keys)
    assert done.returncode == 0, done.stdout + done.stderr
    *killed, last = steps = world.metrics("pages_run")
    for step in killed:
        assert 1 <= step["reward_failures"] < 12, "episodes of the other process go on"
    assert last["reward_failures"] == 0 and last["skipped_bad"] == 0
    assert [last[f"reward/{page}"] for page in pages] == [1, 1, 1, 1, 0, 0]
    assert last["rollout_max_difference"] < 1e-4 and last["gradient_norm"] > 0
    replay = {"replay": str(world.root / "pages_run/rollouts"), "max_new_tokens": 8}
    done = world.megavlm("train", world.recipe("pages_again", **sections, rollout=replay), **keys)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [values(record) for record in world.metrics("pages_again")] == list(map(values, steps))
    before, after = weights(world.root / "pages_run", 3), weights(world.root / "pages_again", 3)
    assert before.keys() == after.keys() and len(before) > 5
    assert all(torch.equal(before[key], after[key]) for key in before)
