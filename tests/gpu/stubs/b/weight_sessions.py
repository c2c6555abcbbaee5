"""Sessions of weight updates, which SGLang 0.5.17 does not have: megavlm's loader opens one around
each update. Without quantized weights they do nothing.

SGLang loads this module as a plugin (weight_sessions.dist-info).
"""

from types import SimpleNamespace
from typing import Any


def install() -> None:
    """Add sessions that do not begin, and so are not ended."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components import weight_updater

    def begin_weight_update(self: Any, request: Any) -> SimpleNamespace:
        return SimpleNamespace(success=False)

    io_struct.BeginWeightUpdateReqInput = object
    weight_updater.SchedulerWeightUpdaterManager.begin_weight_update = begin_weight_update
