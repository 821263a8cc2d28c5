#!/usr/bin/env bash
# Trains under SLURM: one task a node, with all of the node's devices; the job is queued again when it was preempted.
#
#   sbatch --nodes=2 --gpus-per-node=8 --time=24:00:00 launch/slurm.sh --config=FILE.py --workdir=runs/mine
#   launch/slurm.sh --dry-run --config=FILE.py --workdir=runs/mine    # prints what a job runs
#
# Submit from the root of the repository, on a disk that all nodes see, after launch/setup.sh, for GPUs
# RPG_JAX=cuda13 launch/setup.sh. What sbatch takes (partition, account, time) stands before the script's name, the flags
# of training after it. Three minutes before the time limit, and on preemption, training saves and ends with
# status 75, and the job is queued again; scancel ends it for good. Output goes to slurm-JOB.out.

#SBATCH --job-name=rpg
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# sbatch runs a copy of this file from a folder of its own.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
if [[ ! -f launch/common.sh ]]; then
  echo "error: $PWD is not the root of the repository; submit from there: sbatch launch/slurm.sh ..." >&2
  exit 2
fi
# shellcheck source=launch/common.sh
source launch/common.sh
take_options "$@"
set -- "${training[@]}"

host=FIRST_HOST nodes=NODES port=12345
if [[ -n "${SLURM_JOB_ID:-}" ]]; then
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  host="${hosts[0]}" nodes="${#hosts[@]}" port=$((20000 + SLURM_JOB_ID % 10000)) # jobs of one node do not meet
elif ((!dry_run)); then
  refuse "this is not a SLURM job: start it with sbatch"
fi

# A task that fails leaves the others a minute to end: by themselves, as they notice.
# shellcheck disable=SC2016 # the task knows its own number
command=(
  srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=60
  env "JAX_COORDINATOR_ADDRESS=$host:$port" "JAX_NUM_PROCESSES=$nodes"
  "JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
  bash -c 'JAX_PROCESS_ID=$SLURM_PROCID exec .venv/bin/python -m rpg_jax.train "$@"' train "$@"
)
run source launch/setup.sh </dev/null
trap : TERM # the tasks are told as well; this script outlives them
status=0
run "${command[@]}" || status=$?
if ((dry_run)); then
  echo "# if it ends with status 75 and was not cancelled:"
  run scontrol requeue "${SLURM_JOB_ID:-JOB}"
elif ((status == 75)) && [[ "$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T)" == RUNNING ]]; then
  echo "training was stopped after saving; job $SLURM_JOB_ID is queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
