"""On PYTHONPATH of launched ranks: `megavlm.run.train` replaced by the ends a run can have.

The run's seed chooses the end; see test_launcher.py.
"""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

from megavlm.parallel.signals import STOP_SIGNALS


def train(config: Any, progress: Any) -> bool:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if config.run.seed == 0:
        (folder / f"ran-{rank}").write_text(os.environ["WORLD_SIZE"])
    elif config.run.seed == 1:
        raise ValueError("every rank refuses this")
    elif config.run.seed == 2:
        dist.init_process_group("gloo")
        if rank == 1:
            raise ValueError("only rank 1 refuses this")
        dist.barrier()
    elif config.run.seed == 3:
        raise ZeroDivisionError("a fault of ours")
    elif config.run.seed == 5:
        from megavlm.inference.errors import RolloutServerError

        raise RolloutServerError("the server did not start\nits last words")
    elif config.run.seed == 4:  # works for ever, with a process that hides in its own session
        hidden = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # noqa: S607
        dist.init_process_group("gloo")
        (folder / f"pids-{rank}").write_text(f"{os.getpid()} {hidden.pid}")
        dist.barrier()
        if rank == 0:
            print("working", flush=True)
        while True:
            dist.barrier()
    elif config.run.seed == 6:  # asked to stop in a step, which takes longer than torchrun waits
        asked: list[int] = []
        for number in STOP_SIGNALS:
            signal.signal(number, lambda caught, _: asked.append(caught))
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            print("working", flush=True)
        while not asked:
            time.sleep(0.01)
        time.sleep(float(os.environ["STEP_SECONDS"]))
        (folder / f"saved-{rank}").touch()
        return False
    return True


module = types.ModuleType("megavlm.run.train")
module.train = train  # type: ignore[attr-defined]
sys.modules["megavlm.run.train"] = module
