#!/usr/bin/env bash
# Run the rollout servers of one node: COUNT of them on GPUS GPUs each, at ports from PORT on. A server
# that dies is started again; the trainer gives it the weights anew. They end with this process, which
# SIGUSR2 ends: Slurm sends the other signals to every process of a job, and the trainer still needs its
# servers to finish the step. The keys are taken out of the environment here.
#
#   megavlm/slurm/servers.sh HOST PORT COUNT GPUS [SGLang arguments]
set -euo pipefail

host=$1 port=$2 count=$3 gpus=$4
shift 4
keys="{\"api_key\": \"$MEGAVLM_ROLLOUT_API_KEY\", \"admin_api_key\": \"$MEGAVLM_ROLLOUT_ADMIN_KEY\"}"
unset MEGAVLM_ROLLOUT_API_KEY MEGAVLM_ROLLOUT_ADMIN_KEY
main=$(cd "$(dirname "${BASH_SOURCE[0]}")/../inference" && pwd)/server_main.py
folder=$(mktemp -d)
trap '' TERM USR1 HUP
trap 'exit 0' USR2
# SIGKILL to the loops: their servers are killed by the kernel then (see server_main.py).
trap 'kill -KILL $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT

serve() { # INDEX: a server, and another one whenever it dies, after a pause that grows
    local pause=1
    while true; do
        # server_main.py ends its process group and removes its TMPDIR: each server has its own.
        mkdir -p "$folder/$1"
        TMPDIR=$folder/$1 setsid python -P "$main" "$BASHPID" "${@:2}" \
            < <(printf '%s\n' "$keys") || true
        echo "the rollout server $host:$((port + $1)) ended; it starts again in $pause s" >&2
        sleep "$pause"
        pause=$((pause < 60 ? pause * 2 : 60))
    done
}

for ((index = 0; index < count; index++)); do
    serve "$index" "$@" --host "$host" --port $((port + index)) --base-gpu-id $((index * gpus)) &
done
wait
