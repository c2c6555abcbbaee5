"""MiniWoB++ in a real browser."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megavlm.environments.base import Context, Step
from megavlm.environments.browser.environment import Browser
from megavlm.rewards.base import Example

SIZE = (160, 210)  # pixels of every task; the page shows its reward beside them
# Milliseconds, in place of the page's own limit, which would measure the rollout servers.
_NO_LIMIT = 10**9
_BEGIN = """async ([seed, limit]) => {
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = limit;
  core.startEpisodeReal();
  while (!WOB_TASK_READY) await new Promise(resolve => setTimeout(resolve, 50));
  const asked = core.getUtterance();
  return asked.utterance ?? asked;  // some pages also give its fields
}"""


class MiniWoB(Browser):
    """An episode of the task in the row's column `task`, with the problem of its column `seed`.

    The reward is the page's, without its discount for time and never below 0; an episode is correct
    if it is above 0, as BrowserGym counts.
    """

    def __init__(
        self, context: Context, pages: str | None = None, scale: float = 2.0, **options: Any
    ) -> None:
        """Store the options.

        pages: Folder with MiniWoB++'s pages (html of the package miniwob); None finds the package.
        scale: Pixels of a screenshot for each of the page's. options: The options of Browser.
        """
        folder = str(_pages() if pages is None else pages)
        super().__init__(context, folder, SIZE, scale, **options)

    async def open(self, row: Example, seed: int) -> str:
        """Begin the row's task, and return its question."""
        await self.open_page(f"miniwob/{row.extra['task']}.html")
        asked: str = await self.evaluate(_BEGIN, [row.extra["seed"], _NO_LIMIT])
        return asked

    async def outcome(self, answer: str | None) -> Step | None:
        """Return the page's reward once it has given one. An answer in words ends the episode."""
        done, reward = await self.evaluate("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
        if not done and answer is None:
            return None
        return Step(None, max(float(reward), 0.0), True, {"correct": done and reward > 0})


def _pages() -> Path:
    """Return the folder of the package's pages. The package is not imported, because it would need
    selenium. Raises ValueError if it is not installed.
    """
    found = importlib.util.find_spec("miniwob")
    places: Sequence[str] = (found and found.submodule_search_locations) or ()
    if not places:
        raise ValueError(
            "MiniWoB++'s pages are not installed: pip install --no-deps miniwob, or set "
            "environment.options.pages to a folder with them"
        )
    return Path(places[0], "html")
