#!/usr/bin/env bash
# Trains as a job of several processes on this machine, which talk over loopback (gloo) as hosts do over a network.
#
#   launch/multihost_cpu.sh N [--devices=D] -- --config=configs/quickstart.py --workdir=runs/mine [train's other flags]
#
# Each of the N processes has D simulated CPU devices (1 if not given). Process 0 is heard; of another one that fails,
# the last lines are shown. Exit statuses: 0 done; 2 a mistake in the input; 75 all were stopped by SIGTERM after saving
# (SIGTERM to this script or to any process); 1 a process was lost, and the others were ended: start again to resume.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=launch/common.sh
source "$root/launch/common.sh"
help_if_asked "$@"
grace=5 # seconds for the others to end by themselves once one has ended

count="${1:-}" devices=1
[[ "$count" =~ ^[1-9][0-9]*$ ]] || refuse "the number of processes is '$count'"
shift
while [[ $# -gt 0 && "$1" != -- ]]; do
  case "$1" in
    --devices=*) devices="${1#*=}" ;;
    *) refuse "unknown option '$1'" ;;
  esac
  shift
done
[[ "$devices" =~ ^[1-9][0-9]*$ ]] || refuse "the number of devices is '$devices'"
[[ $# -gt 0 ]] || refuse "-- is missing"
shift

# shellcheck source=launch/setup.sh
source "$root/launch/setup.sh" </dev/null
python="$root/.venv/bin/python"
export JAX_PLATFORMS=cpu JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo JAX_NUM_CPU_DEVICES="$devices"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$root/.jax_cache}"
export JAX_NUM_PROCESSES="$count" JAX_COORDINATOR_ADDRESS
port="$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')"
JAX_COORDINATOR_ADDRESS="localhost:$port"

logs="$(mktemp -d)"
pids=() statuses=()

trap '[[ ${#pids[@]} == 0 ]] || kill -KILL "${pids[@]}" || true; rm -rf "$logs"' EXIT
trap 'kill -TERM "${pids[@]}" || true' TERM
trap 'exit 130' INT

exec 3>&2 2>/dev/null # bash would tell of every process that is killed, in its own words
for ((i = 0; i < count; i++)); do
  command=("$python" -m rpg_jax.train "$@")
  if ((i == 0)); then
    JAX_PROCESS_ID=0 "${command[@]}" </dev/null 2>&3 &
  else
    JAX_PROCESS_ID=$i "${command[@]}" </dev/null >"$logs/$i" 2>&1 &
  fi
  pids[i]=$!
done

# Collects the statuses of those that have ended; the first of them is the one that was lost, if any was.
first="" left=$count
collect() {
  local i status
  for ((i = 0; i < count; i++)); do
    if [[ -z "${statuses[i]:-}" ]] && ! kill -0 "${pids[i]}"; then
      status=0
      wait "${pids[i]}" || status=$?
      statuses[i]=$status left=$((left - 1))
      first="${first:-$i}"
    fi
  done
}

deadline=""
while ((left > 0)); do
  collect
  if [[ -n "$first" ]]; then
    deadline="${deadline:-$((SECONDS + grace))}"
    ((SECONDS < deadline)) || kill -KILL "${pids[@]}" || true
  fi
  ((left == 0)) || sleep 0.2 || true
done
pids=()

same() { # whether every process ended with this status
  local status
  for status in "${statuses[@]}"; do [[ "$status" == "$1" ]] || return 1; done
}

for status in 0 75; do ! same "$status" || exit "$status"; done
if ((statuses[first] == 2)); then # who was refused said why; process 0 is heard already
  ((statuses[0] == 2)) || tail -n 1 "$logs/$first" >&3
  exit 2
fi

if ((statuses[first] > 128)); then
  how="was killed by signal $((statuses[first] - 128)) ($(kill -l "${statuses[first]}"))"
else
  how="ended with status ${statuses[first]}"
fi
((first == 0)) || tail -n 20 "$logs/$first" >&3
echo "error: process $first of $count was lost: it $how, and the others were ended; start again to go on from the" \
  "last checkpoint" >&3
exit 1
