#!/usr/bin/env bash
# Everything that is measured on a borrowed GPU, in one bounded call that prints as it goes and keeps what it has.
#
#   launch/gpu_session.sh [tests] [benchmark] [training] [peer]    in that order
#
# If none is named: tests and benchmark, training if BASE or GGUF is set, and peer if PEER_PYTHON is.
#
# tests      tests/test_gpu.py
# benchmark  third_party/transformers/gpu_benchmark.py, ours alone with --trace: benchmark.json
# training   configs/real_model.py:qwen2.5-coder-0.5b-gpu twice in fresh processes, with a cold and a warm compilation
#            cache: seconds from the start to each row of metrics.jsonl, and the mean times of steps from the third on
# peer       the benchmark again, in turns with eager and compiled torch of PEER_PYTHON: peer.json
#
# SECONDS_IN_ALL (1500) bounds a call; a part that does not fit any more is left out with a line. On an H100 the tests
# may take 7 minutes, and benchmark, training and peer 5 each: name some where a call is bounded. OUT (gpu_session) takes
# logs and results. PYTHON is .venv/bin/python, or python3 without one; the training starts from BASE, a converted
# checkpoint, or from GGUF, a file of a model, and learns from TRAIN and HELDOUT (data/gpu/*.jsonl) where they are, else
# from the config's problems. STEPS (8) are those of a training; SIZE, ROUNDS (5) and WORKS are the benchmark's.
set -uo pipefail # and not -e: what failed is said, and the next part runs

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# shellcheck source=launch/common.sh
source launch/common.sh
help_if_asked "$@"
parts=()
for part in "$@"; do
  case "$part" in
    tests | benchmark | training | peer) parts+=("$part") ;;
    *) refuse "there is no part $part; known: tests, benchmark, training, peer" ;;
  esac
done
python="${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
out="${OUT:-gpu_session}" deadline=$((SECONDS + ${SECONDS_IN_ALL:-1500})) failed=0
mkdir -p "$out"
export PYTHONUNBUFFERED=1 JAX_PLATFORMS="${JAX_PLATFORMS:-cuda,cpu}"

# Runs a command for so many seconds at most, or as many as are left; its output is shown, and kept in OUT/NAME.log.
step() { # NAME SECONDS COMMAND...
  local name="$1" most="$2" left=$((deadline - SECONDS)) status
  shift 2
  ((left > 20)) || { echo "== $name is left out: no time" && failed=1 && return 1; }
  echo "== $name, at second $SECONDS"
  timeout --kill-after=5 "$((most < left ? most : left))" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  ((!status)) || { echo "== $name ended with status $status$( ((status != 124)) || echo ', out of time')" && failed=1; }
  return "$status"
}

run_tests() { step tests 420 "$python" -m pytest -q -p no:cacheprovider tests/test_gpu.py; }

# Compiled programs of the benchmark are kept for the peer's part, also of another call on the same machine.
benchmark() { # NAME FLAGS...
  local name="$1" flags=(--rounds="${ROUNDS:-5}" --limit=120 --seconds=25 --json="$out/$1.json" "${@:2}")
  [[ -z "${SIZE:-}" ]] || flags+=(--size="$SIZE")
  [[ -z "${WORKS:-}" ]] || flags+=(--works="$WORKS")
  JAX_COMPILATION_CACHE_DIR="${TMPDIR:-/tmp}/gpu_session_cache" \
    step "$name" 480 "$python" third_party/transformers/gpu_benchmark.py "${flags[@]}"
}

run_training() {
  local flags=(--config="${CONFIG:-configs/real_model.py:qwen2.5-coder-0.5b-gpu}" --config.steps="${STEPS:-8}")
  local base="${BASE:-}" train="${TRAIN:-data/gpu/train.jsonl}" heldout="${HELDOUT:-data/gpu/heldout.jsonl}" cache
  if [[ -z "$base" && -n "${GGUF:-}" ]]; then
    base="$(mktemp -d)/base"
    JAX_PLATFORMS=cpu step convert 90 "$python" -m rpg_jax.convert --source="$GGUF" --target="$base" || return
  fi
  [[ -n "$base" ]] || { echo "== training is left out: neither BASE nor GGUF is set" && failed=1 && return 1; }
  flags+=(--config.model.checkpoint="$base" --config.checkpoint.every=1000 --config.evaluation.every=1000)
  if [[ -e "$train" ]]; then
    flags+=(--config.data.train="$train" --config.data.heldout="$heldout")
    flags+=(--config.reward.function=docs/examples/my_reward.py:right)
  fi
  JAX_COMPILATION_CACHE_DIR="$(mktemp -d)"
  export JAX_COMPILATION_CACHE_DIR
  for cache in cold warm; do
    step "training-$cache" 150 "$python" -m launch.rows_as_they_come "$out/training-$cache" "${flags[@]}" || return
  done
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | tee "$out/gpu.txt"
"$python" -c 'import jax; print("jax", jax.__version__, jax.devices())' || exit 1
if ((!${#parts[@]})); then
  parts=(tests benchmark)
  [[ -z "${BASE:-}${GGUF:-}" ]] || parts+=(training)
  [[ -z "${PEER_PYTHON:-}" ]] || parts+=(peer)
fi
for part in "${parts[@]}"; do
  case "$part" in
    tests) run_tests ;;
    benchmark) benchmark benchmark --alone --trace ;;
    training) run_training ;;
    peer) benchmark peer ${PEER_PYTHON:+--peer_python="$PEER_PYTHON"} ;;
  esac
done
echo "== done at second $SECONDS; $out has $(find "$out" -type f | wc -l) files"
exit "$failed"
