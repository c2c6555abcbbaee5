#!/usr/bin/env bash
# Run a recipe on the GPUs of one node with torchrun. `megavlm train RECIPE` does the same in one
# command, forwards signals and leaves no process behind; use this script to pass torchrun options.
#
#   launch/torchrun.sh RECIPE NUM_RANKS [key=value ...]
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: launch/torchrun.sh RECIPE NUM_RANKS [key=value ...]" >&2
    exit 2
fi
recipe=$1 num_ranks=$2
shift 2

# Check once, before any rank starts: files, columns, images, and the layout against the world size.
WORLD_SIZE=$num_ranks megavlm train "$recipe" "$@" --dry-run >/dev/null
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --standalone --nproc-per-node "$num_ranks" -m megavlm train "$recipe" "$@"
