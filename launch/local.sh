#!/usr/bin/env bash
# Trains on this machine, on all of its devices, and starts again when training was stopped after saving (status 75).
#
#   launch/local.sh [--dry-run] --config=configs/quickstart.py --workdir=runs/mine [train's other flags]
#
# --dry-run prints the commands. SIGTERM or Ctrl-C lets training save and ends the script with status 75; the same
# command goes on. JAX_COMPILATION_CACHE_DIR names another folder of compiled programs than .jax_cache.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
take_options "$@"
set -- "${training[@]}"

run source launch/setup.sh </dev/null
command=(env "JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}" .venv/bin/python -m rpg_jax.train "$@")
if ((dry_run)); then
  run "${command[@]}"
  echo "# again as long as it ends with status 75"
  exit
fi

child="" stopping=0
stop() {
  stopping=1
  [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null || true
}
trap stop TERM INT
while :; do
  "${command[@]}" </dev/null &
  child=$! status=0
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the child
    status=0
    wait "$child" || status=$?
  done
  ((status == 75 && !stopping)) || exit "$status"
  echo "training was stopped after saving; starting again" >&2
done
