"""How long tests wait: MEGAVLM_TEST_TIMEOUT_SCALE multiplies all of it, for slow machines."""

import os

SCALE = float(os.environ.get("MEGAVLM_TEST_TIMEOUT_SCALE", "1"))


def scaled(seconds: float) -> float:
    """Return how long to wait for what takes less than `seconds` on two quiet cores.

    For limits that only a failure reaches; a wait that is itself the test's subject stays as it is.
    """
    return seconds * SCALE
