"""`megavlm` as the only rank of its run, without torchrun:

    python -m tests.gpu.one_rank [--lengths TOKENS] train RECIPE

With TOKENS, a JSON list, responses have these lengths in turn.
"""

import json
import os
import sys

from megavlm.inference.server import free_port
from megavlm.parallel import platform


def main() -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    platform.install()
    from megavlm import cli

    if sys.argv[1] == "--lengths":
        from tests.gpu.grpo import fix_lengths

        fix_lengths(json.loads(sys.argv[2]))
        del sys.argv[1:3]
    sys.argv[0] = "megavlm"
    cli.main()


if __name__ == "__main__":
    main()
