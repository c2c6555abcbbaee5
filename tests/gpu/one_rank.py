"""`megavlm` as the only rank of its run, so that it also runs where Transformer Engine is missing:

    python -m tests.gpu.one_rank [--lengths TOKENS] train RECIPE

Without it the layers are megatron-core's own and Adam is the one of CPU runs; everything else is as
in a run. With TOKENS, a JSON list, responses have these lengths in turn.
"""

import json
import os
import sys
from types import SimpleNamespace

from megavlm.inference.server import free_port
from megavlm.parallel import platform
from tests.gpu.model import has_transformer_engine


def main() -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    platform.install()
    from megavlm import cli
    from megavlm.models.common import language

    if not has_transformer_engine():
        language.platform = SimpleNamespace(has_gpu=lambda: False)  # type: ignore[assignment]
        platform._replace_transformer_engine()
        sys.argv.append("model.fusions=false")  # it has the kernels
    if sys.argv[1] == "--lengths":
        from tests.gpu.grpo import fix_lengths

        fix_lengths(json.loads(sys.argv[2]))
        del sys.argv[1:3]
    sys.argv[0] = "megavlm"
    cli.main()


if __name__ == "__main__":
    main()
