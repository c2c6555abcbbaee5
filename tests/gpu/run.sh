#!/usr/bin/env bash
# Run a stage of the GPU kit, from the repository's root on a machine with a GPU:
#   bash gpu/run.sh a        after `make gpu-a` where the packages came from
#   bash tests/gpu/run.sh a  where everything is installed
# Results are appended to $OUT/a.jsonl, or gpu/results/a.jsonl where OUT is not set; logs to a.log.
set -euo pipefail
stage=${1:?usage: bash gpu/run.sh a|b|c|d|e}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
test -d megavlm || { echo "run this from the repository's root" >&2; exit 2; }
if [ -f "$here/site.tar.xz" ]; then
  site=$(mktemp -d)
  "${PYTHON:-python3}" -m tarfile -e "$here/site.tar.xz" "$site"  # an image may lack xz
  export PYTHONPATH="$site:$PWD"
  export SGLANG_IS_FLASHINFER_AVAILABLE=false  # its place is taken by stand-ins
  # torch_memory_saver is loaded before torch, and needs the CUDA runtime that torch would find in its
  # wheels; an image with CUDA's own folders has it on the loader's path.
  if runtime=$("${PYTHON:-python3}" -c 'import nvidia; print(nvidia.__path__[0])' 2>/dev/null); then
    export LD_LIBRARY_PATH="$runtime/cu13/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  fi
fi
[ ! -f "$here/state" ] || export STATE="$(cat "$here/state")"  # of the project, when it was packed
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" -m tests.gpu.stage "$stage" "${OUT:-gpu/results}"
