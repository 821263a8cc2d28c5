#!/usr/bin/env bash
# Trains on a TPU pod of Google Cloud: makes it, sets up every worker, trains on all, and starts again after preemption.
#
#   launch/tpu_pod.sh --name=NAME --zone=ZONE --type=TYPE [OPTION...] -- TRAIN_FLAGS
#   launch/tpu_pod.sh --name=rpg --zone=us-east5-a --type=v5p-32 --spot --delete -- --config=configs/paper.py:VARIANT \
#     --workdir=runs/mine --checkpoint_dir=gs://BUCKET/mine
#
#   --project=ID   the project, if not gcloud's own        --spot      a pod that may be preempted, at a lower price
#   --version=V    the VMs' image, if not the type's own   --delete    delete the pod when this script ends
#   --before=CMD   what each worker runs in the repository before it trains: to fetch weights and data
#   --dry-run      print the commands
#
# The files that git tracks are sent as they are on disk when the script starts. A pod of that name that is
# there is used. When training was stopped after saving (status 75) or the pod was preempted, it is made anew if need be
# and training goes on from the bucket. Where this script ends early, training goes on; the same command follows it.
# At the end the workdir is copied here. JAX_COMPILATION_CACHE_DIR, a bucket too, outlives the pod.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
help_if_asked "$@"
name="" type="" version="" before="" delete=0 where=() create=()
while [[ $# -gt 0 && "$1" != -- ]]; do
  case "$1" in
    --dry-run) dry_run=1 ;;
    --name=?*) name="${1#*=}" ;;
    --type=?*) type="${1#*=}" ;;
    --version=?*) version="${1#*=}" ;;
    --before=?*) before="${1#*=}" ;;
    --zone=?* | --project=?*) where+=("$1") ;;
    --spot) create+=(--spot) ;;
    --delete) delete=1 ;;
    *) refuse "unknown option '$1'" ;;
  esac
  shift
done
[[ -n "$name" && -n "$type" && "${where[*]}" == *--zone=* ]] || refuse "--name, --zone and --type are needed"
[[ $# -gt 1 ]] || refuse "-- and the flags of training are missing"
shift

workdir="" bucket=""
for flag in "$@"; do
  case "$flag" in
    --workdir=*) workdir="${flag#*=}" ;;
    --checkpoint_dir=gs://*) bucket="${flag#*=}" ;;
  esac
  file="${flag#*=}" file="${file%%:*}"
  if [[ "$file" == *.py && -f "$file" ]] && ! git ls-files --error-unmatch -- "$file" &>/dev/null; then
    refuse "git does not track $file, which would not be sent; git add it"
  fi
done
[[ -n "$workdir" && "$workdir" != [/~]* ]] || refuse "--workdir=FOLDER, relative to the repository, is needed"
[[ -n "$bucket" ]] || refuse "--checkpoint_dir=gs://BUCKET/FOLDER is needed: the disks of a pod go with it"
((dry_run)) || command -v gcloud >/dev/null || refuse "gcloud is not installed"

# https://cloud.google.com/tpu/docs/runtimes
case "$type" in
  v6e-*) version="${version:-v2-alpha-tpuv6e}" ;;
  v5p-*) version="${version:-v2-alpha-tpuv5}" ;;
  v5litepod-*) version="${version:-v2-alpha-tpuv5-lite}" ;;
  *) version="${version:-tpu-ubuntu2204-base}" ;;
esac

tpu() { run gcloud compute tpus tpu-vm "$1" "$name" "${where[@]}" --quiet "${@:2}"; }
copy() { run gcloud compute tpus tpu-vm scp "$1" "$2" "${where[@]}" --quiet "${@:3}"; }
on_all() { tpu ssh --worker=all --ssh-flag=-oServerAliveInterval=15 --command="$1"; }

state() {
  ((!dry_run)) || return 0
  gcloud compute tpus tpu-vm describe "$name" "${where[@]}" --format="value(state)" 2>/dev/null || true
}

# What every worker needs before it can train; does little where it was done before.
archive="$name.tar.gz"
# shellcheck disable=SC2016 # for the workers
setup="mkdir -p rpg-jax && tar -xzf $archive -C rpg-jax && cd rpg-jax"
# shellcheck disable=SC2016
setup+=' && python3 -m pip install --quiet --user uv && python3 -m uv python install --quiet 3.12'
# shellcheck disable=SC2016
setup+=' && PYTHON="$(python3 -m uv python find 3.12)" bash launch/setup.sh </dev/null'
setup+=' && .venv/bin/python -m pip install --quiet "jax[tpu]" gcsfs'
setup+="${before:+ && $before}"

ready() {
  local now
  now="$(state)"
  if [[ -n "$now" && "$now" != READY ]]; then
    tpu delete || return
    now=""
  fi
  [[ -n "$now" ]] || tpu create --accelerator-type="$type" --version="$version" "${create[@]}" || return
  copy "runs/$archive" "$name:" --worker=all && on_all "$setup"
}

# A worker that still trains, since the connection alone was lost, is waited for.
# shellcheck disable=SC2088 # the workers' home
cache="${JAX_COMPILATION_CACHE_DIR:-~/.jax_cache}"
train="cd rpg-jax && JAX_COMPILATION_CACHE_DIR=$cache flock .training .venv/bin/python -m rpg_jax.train --multihost"
train+=" $(quoted "$@")"

mkdir -p runs
run bash -c "git ls-files -z | tar -czf $(quoted "runs/$archive") --null -T -"
((!delete)) || trap 'tpu delete' EXIT
ready
while :; do
  status=0
  on_all "$train" || status=$?
  if ((dry_run)); then
    echo "# on status 75, and when the pod was preempted: delete it and create it again if need be, set up, start again"
    break
  fi
  ((status != 0)) || break
  now="$(state)"
  if ((status != 75 && status != 255)) && [[ "$now" == READY ]]; then # 255 is ssh's own
    exit "$status"
  fi
  echo "training ended with status $status and the pod is ${now:-gone}; starting again" >&2
  until ready; do
    echo "the pod cannot be had; trying again in a minute" >&2
    sleep 60
  done
done
run mkdir -p "$(dirname "$workdir")"
copy "$name:rpg-jax/$workdir" "$(dirname "$workdir")" --recurse --worker=0
