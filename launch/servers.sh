#!/usr/bin/env bash
# Start the rollout servers of one node: COUNT of them on GPUS GPUs each, at ports from PORT on. They end
# with this process. The keys are taken out of the environment here.
#
#   launch/servers.sh HOST PORT COUNT GPUS [SGLang arguments]
set -euo pipefail

host=$1 port=$2 count=$3 gpus=$4
shift 4
keys="{\"api_key\": \"$MEGAVLM_ROLLOUT_API_KEY\", \"admin_api_key\": \"$MEGAVLM_ROLLOUT_ADMIN_KEY\"}"
unset MEGAVLM_ROLLOUT_API_KEY MEGAVLM_ROLLOUT_ADMIN_KEY
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for ((index = 0; index < count; index++)); do
    # server_main.py ends its process group and removes its TMPDIR: each server has its own.
    mkdir "$folder/$index"
    TMPDIR=$folder/$index setsid python -P megavlm/inference/server_main.py $$ "$@" \
        --host "$host" --port $((port + index)) --base-gpu-id $((index * gpus)) \
        < <(printf '%s\n' "$keys") &
done
wait
echo "all rollout servers of $host have ended" >&2
exit 1
