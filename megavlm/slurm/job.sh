# The body of a Slurm job. A batch script (launch/slurm.sbatch, or job.sbatch.j2 of `megavlm launch`) sources it
# with a recipe and overrides as arguments. It runs on the first node of the job.
#
# The last ROLLOUT_NODES nodes run SGLang servers, as many of rollout.tensor_parallel GPUs as fit on a
# node, or one over several whole nodes; the other nodes run a rank for each GPU. With ROLLOUT_NODES=0
# the trainer starts the servers on its own nodes (rollout.colocate). In a heterogeneous job the second
# component runs the servers, with ROLLOUT_GPUS_PER_NODE GPUs on each node.
#
# The batch script may set two arrays before: srun_options (for a container by pyxis, say), and
# in_container, the words before each program (apptainer exec ...).
set -euo pipefail

: "${1:?usage: sbatch launch/slurm.sbatch RECIPE [key=value ...]}"
# %a is the number of the task in an array of jobs, for sweeps.
set -- "${@//%a/${SLURM_ARRAY_TASK_ID:-0}}"
recipe=$1 overrides=("${@:2}")

rollout_nodes=${ROLLOUT_NODES:-1}
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
server_gpus=${ROLLOUT_GPUS_PER_NODE:-$gpus}
# Jobs that share a node have ports of their own.
port=${ROLLOUT_PORT:-$((10000 + SLURM_JOB_ID % 480 * 20))}
max_requeues=${MAX_REQUEUES:-10}

# srun takes neither the job's --cpus-per-task (since Slurm 22.05) nor, with --export=NONE, this
# shell's environment by itself.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
export SLURM_EXPORT_ENV=ALL SLURM_KILL_BAD_EXIT=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
    mapfile -t servers < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
    rollout_nodes=${#servers[@]}
    nodes+=("${servers[@]}")
fi
trainer_nodes=$((${#nodes[@]} - rollout_nodes))
if [ "$trainer_nodes" -lt 1 ]; then
    echo "megavlm: ${#nodes[@]} nodes cannot hold $rollout_nodes rollout nodes (ROLLOUT_NODES) and a trainer" >&2
    exit 2
fi
trainers=("${nodes[@]:0:trainer_nodes}") servers=("${nodes[@]:trainer_nodes}")
join() { local IFS=,; echo "$*"; }
# Set `step` to the words that start a process on each of the given nodes, of one component. Not a
# function that runs it: in the background that would be a shell, and not srun, that a signal goes to.
on() { # NODE...
    local component=()
    if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
        component=(--het-group=0)
        [[ " ${servers[*]} " != *" $1 "* ]] || component=(--het-group=1)
    fi
    step=(srun "${component[@]}" --nodes $# --ntasks $# --ntasks-per-node 1 --nodelist "$(join "$@")"
        "${srun_options[@]}" "${in_container[@]}")
}

# The run directory, the command of each rollout node (server_0, ...) and the servers' addresses.
addresses=() placed=()
if [ "$rollout_nodes" -gt 0 ]; then
    printf -v urls "'http://%s:$port'," "${servers[@]}"
    placed=(rollout.mode=external rollout.min_servers=1 "rollout.urls=[${urls%,}]" --gpus "$server_gpus")
fi
on "${nodes[0]}"
plan=$("${step[@]}" megavlm plan --servers "$recipe" "${overrides[@]}" "${placed[@]}")
eval "$plan"
given=("${overrides[@]}" "${addresses[@]}")

# Random keys of this job. They are passed in the environment, which only this user can read, and to
# SGLang over standard input: arguments are visible to everyone on the node.
random_key() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
MEGAVLM_ROLLOUT_API_KEY=$(random_key)
MEGAVLM_ROLLOUT_ADMIN_KEY=$(random_key)
export MEGAVLM_ROLLOUT_API_KEY MEGAVLM_ROLLOUT_ADMIN_KEY

# Check before anything starts: the recipe, the files, and the layout against the number of ranks;
# then that all nodes see the run directory.
WORLD_SIZE=$((trainer_nodes * gpus)) "${step[@]}" \
    megavlm train "$recipe" "${given[@]}" --dry-run
mkdir -p "$run_dir"
token=$run_dir/.job-$SLURM_JOB_ID
: > "$token"
for names in "${trainers[*]}" "${servers[*]}"; do
    if [ -z "$names" ]; then continue; fi
    # shellcheck disable=SC2086
    on $names
    "${step[@]}" bash -c 'for ((i = 0; i < 30; i++)); do
        [ -e "$0" ] && exit 0; sleep 1; done
        echo "megavlm: $(hostname) does not see run.dir=${0%/*}: put it on a file system of all nodes" >&2
        exit 2' "$token"
done
rm -f "$token"
progress() { cat "$run_dir/checkpoints/latest" 2>/dev/null || true; }
before=$(progress)

server_steps=()
for index in "${!servers[@]}"; do
    declare -n command=server_$index
    on "${servers[index]}"
    "${step[@]}" "${command[@]}" ${MEM_FRACTION:+--mem-fraction-static "$MEM_FRACTION"} &
    server_steps+=($!)
done
# The servers end with the trainer, whatever ends it.
stop_servers() {
    for server in "${server_steps[@]}"; do kill -USR2 "$server" 2>/dev/null || true; done
    wait
}
trap stop_servers EXIT

on "${trainers[@]}"
# Nodes that stop end a moment apart, each with its code; those that hang have two minutes.
SLURM_KILL_BAD_EXIT=0 SLURM_WAIT=120 WORLD_SIZE=$((trainer_nodes * gpus)) MEGAVLM_NODES=$trainer_nodes \
    MEGAVLM_MASTER="${nodes[0]}:$((port + 19))" "${step[@]}" megavlm train "$recipe" "${given[@]}" &
trainer=$!
# Slurm's warning before the time limit (#SBATCH --signal=B:USR1@...) comes to this shell alone; srun
# passes it to the trainer's ranks, which finish the step and save.
# SIGTERM (scancel --batch --signal=TERM) does the same, and the job is not queued again.
signal=
trap 'signal=USR1; kill -USR1 "$trainer" 2>/dev/null' USR1
trap 'signal=TERM; kill -USR1 "$trainer" 2>/dev/null' TERM
code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do # a signal ended the wait, not the trainer
    code=0
    wait "$trainer" || code=$?
done

# 75: stopped on request. 69, 71 (a hang) and those of signals: transient, worth another start as long as a
# checkpoint was saved since the last one. See docs/guides/troubleshooting.md.
again=
case $code in
75) [ "$signal" = TERM ] || again=yes ;;
69 | 71 | 1[3-5][0-9]) [ "$(progress)" = "$before" ] || again=yes ;;
esac
if [ -n "$again" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_requeues" ]; then
    echo "megavlm: exit code $code; the job is queued again, restart $((${SLURM_RESTART_COUNT:-0} + 1)) of $max_requeues" >&2
    stop_servers
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
