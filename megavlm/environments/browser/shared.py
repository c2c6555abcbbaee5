"""One browser for all sessions of a process."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from playwright.async_api import Browser, BrowserContext, Error, async_playwright

from megavlm.environments.browser.chromium import START_SECONDS, chromium
from megavlm.environments.browser.pages import serving
from megavlm.subprocess_pool.limits import memory_limit_lifted

T = TypeVar("T")
CLOSE_SECONDS = 15.0  # of a context, and of Playwright's driver
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """What the sessions of a browser share.

    program: Path of Chromium. pages: Folder that is served as http://pages.test. origins: Further
    hosts that pages may reach, as Chromium's proxy bypass rules write them.
    """

    program: str
    pages: str
    origins: tuple[str, ...] = ()


def shared_browser(settings: Settings) -> "SharedBrowser":
    """Return the browser of this process with these settings."""
    with _LOCK:  # `cache` alone may call twice for two threads
        return _made(settings)


@cache
def _made(settings: Settings) -> "SharedBrowser":
    return SharedBrowser(settings)


class SharedBrowser:
    """A browser in a thread with an event loop of its own, because Playwright's objects belong to
    one loop. It starts with the first context and ends with the last one. A broken browser is
    replaced when the next context is opened: only the contexts in it are lost.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._contexts: set[BrowserContext] = set()
        self._browser: Browser | None = None
        self._resources = AsyncExitStack()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Run a coroutine of Playwright from any loop. Cancelling the result cancels it."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def open(self, **options: Any) -> BrowserContext:
        """Open a context that shares nothing with others. options: Arguments of
        Browser.new_context. Raises ValueError if the browser does not start.
        """
        return await self.run(self._open(options))

    async def close(self, context: BrowserContext) -> None:
        """Close a context, and the browser after the last one."""
        await self.run(self._close(context))

    async def _open(self, options: dict[str, Any]) -> BrowserContext:
        async with self._lock:
            browser = self._browser or await self._start()
            try:
                context = await self._new_context(browser, options)
            except (Error, TimeoutError):  # it has crashed, or hangs
                await self._stop()
                context = await self._new_context(await self._start(), options)
            self._contexts.add(context)
            return context

    async def _new_context(self, browser: Browser, options: dict[str, Any]) -> BrowserContext:
        async with asyncio.timeout(START_SECONDS):
            return await browser.new_context(**options)

    async def _close(self, context: BrowserContext) -> None:
        with suppress(Error, TimeoutError):  # its browser is gone, or hangs
            async with asyncio.timeout(CLOSE_SECONDS):
                await context.close()
        async with self._lock:
            self._contexts.discard(context)
            if not self._contexts:
                await self._stop()

    async def _start(self) -> Browser:
        settings = self._settings
        async with AsyncExitStack() as stack:
            proxy = stack.enter_context(serving(settings.pages))
            url, folder = await stack.enter_async_context(
                chromium(settings.program, proxy, settings.origins)
            )
            with memory_limit_lifted():  # the driver, a Node, reserves more than a GB
                playwright = await async_playwright().start()
            stack.push_async_callback(_stopped, playwright)
            self._browser = await playwright.chromium.connect_over_cdp(
                url, artifacts_dir=folder, timeout=START_SECONDS * 1000
            )
            self._resources = stack.pop_all()
        return self._browser

    async def _stop(self) -> None:
        self._browser = None
        await self._resources.aclose()


async def _stopped(playwright: Any) -> None:
    """Stop Playwright. A driver that hangs is left to the end of its process."""
    with suppress(Error, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await playwright.stop()
