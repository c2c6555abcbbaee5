"""Episodes on a page in a real browser."""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Literal

from playwright.async_api import BrowserContext, Dialog, Page
from playwright.async_api import Error as BrowserError
from playwright.async_api import TimeoutError as BrowserTimeout

from megavlm.environments.base import Context
from megavlm.environments.browser.chromium import find_chromium
from megavlm.environments.browser.pages import ORIGIN
from megavlm.environments.browser.shared import Settings, shared_browser
from megavlm.environments.computer import Action, Computer, View
from megavlm.rewards.base import Example

NOTCH = 100  # pixels of a page that a notch of the wheel scrolls
SETTLE_SECONDS = 0.1  # for what an action begins
LOAD_SECONDS = 5.0  # after which a page is shown as far as it has loaded
ANSWER_SECONDS = 10.0  # after which a request for another document is given up
MAX_PAGES = 4  # of an episode; of pop-ups, the newest one is shown
_KEYS = {
    "ctrl": "Control",
    "cmd": "Meta",
    "super": "Meta",
    "esc": "Escape",
    "return": "Enter",
    "del": "Delete",
    "space": "Space",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "pageup": "PageUp",
    "pagedown": "PageDown",
}
# Boxes of the elements that can be clicked where they are, in pixels of the page.
_CLICKABLE = """() => {
  const wanted = 'a[href],button,input,select,textarea,summary,label,[onclick],[role=button],'
    + '[role=link],[role=tab],[role=menuitem],[role=checkbox],[role=option],[contenteditable]';
  const boxes = [];
  for (const one of document.querySelectorAll(wanted)) {
    const box = one.getBoundingClientRect();
    const left = Math.max(box.left, 0), right = Math.min(box.right, innerWidth);
    const top = Math.max(box.top, 0), bottom = Math.min(box.bottom, innerHeight);
    if (right - left < 2 || bottom - top < 2) continue;
    const hit = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
    if (hit && (one.contains(hit) || hit.contains(one))) boxes.push([left, top, right, bottom]);
  }
  return boxes.slice(0, 99);
}"""


class Browser(Computer):
    """An episode on the page that the row's column `page` names, in a context of its own of the
    process's browser. A class that extends it may override `open` (what happens before the first
    screenshot) and `outcome` (when the page itself tells that a task is done).
    """

    def __init__(
        self,
        context: Context,
        pages: str,
        size: Sequence[int] = (1024, 768),
        scale: float = 1.0,
        origins: Sequence[str] = (),
        chromium: str | None = None,
        accessibility: bool = False,
        coordinates: Literal["relative", "pixels"] | None = None,
        marks: bool = False,
        seconds: float = 600.0,
        show_tools: bool = True,
    ) -> None:
        """Store the options.

        pages: Folder that is served as http://pages.test.
        size: Width and height of the page in its own pixels.
        scale: Pixels of a screenshot for each of them.
        origins: Other hosts that pages may reach, such as shop.example:8080; with them a page that
            the row names may be a URL.
        chromium: Path of Chromium; None finds it.
        accessibility: True shows the tree of accessible elements as text beside the screenshot.
        coordinates, marks, seconds, show_tools: The options of Computer.
        """
        super().__init__(context, coordinates, marks, seconds, show_tools)
        self._pages, self._origins, self._program = pages, tuple(origins), chromium
        self._page_size, self._scale, self._has_text = tuple(size), scale, accessibility
        self._context: BrowserContext | None = None
        self._said: list[str] = []

    async def check(self) -> None:
        """Raise ValueError for an option that cannot be used, and where there is no Chromium."""
        await super().check()
        if not os.path.isdir(self._pages):
            raise ValueError(f"environment.options.pages={self._pages} is not a folder")
        if len(self._page_size) != 2 or not all(
            isinstance(side, int) and side > 0 for side in self._page_size
        ):
            raise ValueError(
                f"environment.options.size={list(self._page_size)} must be a width and a height"
            )
        if not isinstance(self._scale, int | float) or not 0 < self._scale <= 4:
            raise ValueError(f"environment.options.scale={self._scale!r} must be above 0, up to 4")
        self._settings()

    def _settings(self) -> Settings:
        program = self._program or find_chromium()
        if program is None:
            raise ValueError(
                "there is no Chromium: install it (apt-get install chromium-headless-shell), "
                "or set environment.options.chromium to its path"
            )
        return Settings(program, os.path.abspath(self._pages), self._origins)

    async def open(self, row: Example, seed: int) -> str:
        """Open the row's page. Raises ValueError for a row without one."""
        if not isinstance(page := row.extra.get("page"), str):
            raise ValueError("the row has no text in its column page: set data.extra_keys=[page]")
        await self.open_page(page)
        return ""

    async def open_page(self, page: str) -> None:
        """Open a file of the folder of pages, or a URL of environment.options.origins."""
        self._browser = shared_browser(self._settings())
        width, height = self._page_size
        self._context = await self._browser.open(
            viewport={"width": width, "height": height},
            device_scale_factor=self._scale,
            accept_downloads=False,
            service_workers="block",
        )
        url = page if "://" in page else f"{ORIGIN}/{page.lstrip('/')}"
        await self._browser.run(self._begin(self._context, url))

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Return the value of JavaScript in the page that is shown."""
        return await self._run(self._page.evaluate(script, argument))

    async def look(self) -> View:
        """Return a screenshot of the part of the page that is seen, with the texts of dialogs."""
        page, said = self._page, self._said
        self._said = []
        picture = await self._run(_screenshot(page))
        tree = await self._run(page.locator("body").aria_snapshot()) if self._has_text else ""
        boxes = await self.evaluate(_CLICKABLE) if self._has_marks else ()
        marks = [[side * self._scale for side in box] for box in boxes]
        return View(picture, "\n".join([*said, tree]).strip(), marks)

    async def act(self, action: Action) -> None:
        """Do an action, and wait until the page has settled. Raises BrowserError for an unknown
        key.
        """
        await self._run(self._do(action))

    async def close(self) -> None:
        if self._context is not None:
            await self._browser.close(self._context)

    @property
    def _page(self) -> Page:
        """The newest page of the episode. Raises BrowserError if the page has closed itself."""
        assert self._context is not None
        if not (pages := self._context.pages):
            raise BrowserError("the page has closed itself")
        return pages[-1]

    async def _run(self, work: Any) -> Any:
        result: Awaitable[Any] = self._browser.run(work)
        return await result

    async def _begin(self, context: BrowserContext, url: str) -> None:
        context.on("dialog", self._dismiss)
        context.on("page", self._limit)
        page = await context.new_page()
        with suppress(BrowserTimeout):
            await page.goto(url, wait_until="commit", timeout=LOAD_SECONDS * 1000)
        await _loaded(page)

    async def _dismiss(self, dialog: Dialog) -> None:
        """Accept a dialog, because no screenshot shows it, and keep what it says for the policy."""
        self._said = [*self._said, f"{dialog.type}: {dialog.message[:200]}"][-3:]
        try:
            await dialog.accept()
        except BrowserError:
            pass  # its page is gone

    async def _limit(self, page: Page) -> None:
        if len(page.context.pages) > MAX_PAGES:
            try:
                await page.close()
            except BrowserError:
                pass  # it has closed itself

    async def _do(self, action: Action) -> None:
        page = self._page
        x, y = (side / self._scale for side in action.at)
        if action.kind == "click":
            await page.mouse.click(x, y)
        elif action.kind == "double_click":
            await page.mouse.dblclick(x, y)
        elif action.kind == "drag":
            to_x, to_y = (side / self._scale for side in action.to)
            await page.mouse.move(x, y)
            await page.mouse.down()
            await page.mouse.move(to_x, to_y, steps=8)
            await page.mouse.up()
        elif action.kind == "type":
            await page.keyboard.type(action.text)
        elif action.kind == "key":
            await page.keyboard.press(_keys(action.text))
        elif action.kind == "scroll":
            await page.mouse.move(x, y)
            await page.mouse.wheel(0, action.amount * NOTCH)
        else:
            await asyncio.sleep(action.amount)
        await asyncio.sleep(SETTLE_SECONDS)
        await _loaded(self._page)


async def _loaded(page: Page) -> None:
    """Wait until a page has loaded, for LOAD_SECONDS at most. A request for another document is
    given up if nobody answers, because Chromium runs no script and takes no screenshot meanwhile.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await page.evaluate("0")
    except TimeoutError:
        await (await page.context.new_cdp_session(page)).send("Page.stopLoading")
    except BrowserError:
        pass  # the other document has come
    with suppress(BrowserTimeout):
        await page.wait_for_load_state("load", timeout=LOAD_SECONDS * 1000)


async def _screenshot(page: Page) -> bytes:
    """Return a screenshot of the part of a page that is seen."""
    try:
        return await page.screenshot(timeout=0)
    except BrowserError:  # it went to another page meanwhile
        await page.wait_for_load_state("load", timeout=LOAD_SECONDS * 1000)
        return await page.screenshot(timeout=0)


def _keys(text: str) -> str:
    """Return keys as Playwright names them: ctrl+a is Control+a."""
    keys = ["+" if not key else key for key in text.strip().split("+")] if text != "+" else ["+"]
    return "+".join(
        _KEYS.get(key.lower(), key if len(key) == 1 else key[:1].upper() + key[1:]) for key in keys
    )
