"""Whether this machine has a browser, and calls of the tool of screens."""

import json
from typing import Any

import pytest

from megavlm.environments.browser.chromium import find_chromium

needs_chromium = pytest.mark.skipif(
    find_chromium() is None,
    reason="a browser needs Chromium (apt-get install chromium-headless-shell)",
)


def act(**arguments: Any) -> str:
    """Write a call of the tool `computer`."""
    call = json.dumps({"name": "computer", "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"
