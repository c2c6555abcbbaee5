"""The process of a headless Chromium."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from megavlm.process import die_with
from megavlm.subprocess_pool.limits import limit_data_only
from megavlm.temporary import temporary_folder

# A headless shell has no windows, whose parts cost more than a small page.
PROGRAMS = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
START_SECONDS, KILL_SECONDS = 30.0, 10.0
_PORT_FILE = "DevToolsActivePort"  # Chromium writes its port and the path of its socket here
_LOG = "log"
_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have 64 MB there
    "--disable-breakpad",
    "--disable-extensions",
    "--disable-sync",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-client-side-phishing-detection",
    "--disable-domain-reliability",
    "--disable-default-apps",
    "--disable-notifications",
    "--mute-audio",
    "--hide-scrollbars",
    "--password-store=basic",
    "--force-color-profile=srgb",
    "--lang=en-US",
    # WebRTC would go past the proxy.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    # Else screenshots hang after a request for a document was given up. Playwright sets it, too.
    "--enable-features=CDPScreenshotNewSurface",
    "--disable-features=Translate,MediaRouter,OptimizationHints,AutofillServerCommunication,"
    # Else each window starts three more renderers, for parts of it that nobody sees.
    "SpareRendererForSitePerProcess,WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,"
    "PreloadTopChromeWebUI",
)


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, None if there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@asynccontextmanager
async def chromium(
    program: str, proxy: str, direct: Sequence[str]
) -> AsyncIterator[tuple[str, Path]]:
    """Run a Chromium, and yield the URL of its debugging socket, and the folder that has all that
    it writes. At the end the process is killed and the folder removed.

    program: Path of Chromium. proxy: HOST:PORT of the proxy for all requests. direct: Hosts that
    are reached without it. Raises ValueError if it does not start.
    """
    with temporary_folder("megavlm-browser-") as folder:
        command = [
            program,
            *_FLAGS,
            # Chromium refuses its sandbox to root, as which containers run.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            f"--proxy-server=http://{proxy}",
            # Without <-loopback>, requests to this machine would go past the proxy.
            f"--proxy-bypass-list={';'.join(['<-loopback>', *direct])}",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        with (folder / _LOG).open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                # Nothing of the run's environment is there, nor is anything written elsewhere. The
                # relative name keeps the paths of sockets below their limit of 107 bytes.
                env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": "."},
                cwd=folder,
                start_new_session=True,
                preexec_fn=partial(_prepare, os.getpid()),
            )
        try:
            yield await _socket(process, folder), folder
        finally:
            await _kill_group(process)


def _prepare(parent: int) -> None:
    """Bind this process to its parent's life, and lift its limit of address space."""
    die_with(parent)
    limit_data_only()


async def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its group, and wait until all of them have ended. Those that lose their
    parent become children of this process (adopt_orphans).
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + KILL_SECONDS
    with suppress(ChildProcessError):  # there is none left
        while time.monotonic() < end:
            if os.waitpid(-process.pid, os.WNOHANG) == (0, 0):
                await asyncio.sleep(0.01)
    process.wait()


async def _socket(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait until Chromium listens, and return the URL."""
    end, port_file = time.monotonic() + START_SECONDS, folder / _PORT_FILE
    while process.poll() is None and time.monotonic() < end:
        with suppress(FileNotFoundError):
            port, _, path = port_file.read_text().partition("\n")
            if path:
                return f"ws://127.0.0.1:{port}{path.strip()}"
        await asyncio.sleep(0.02)
    said = (folder / _LOG).read_text(errors="replace").strip()[-400:]
    raise ValueError(f"Chromium did not start: {said or 'it wrote nothing'}")
