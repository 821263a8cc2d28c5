#!/usr/bin/env bash
# Trains a small transformer with RPG on this machine, evaluates it, and draws its curves.
# Options go to the training: launch/quickstart.sh --config.objective.beta=1e-3
# WORKDIR and CONFIG name another folder and experiment.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
help_if_asked "$@"
# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null

export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
workdir="${WORKDIR:-runs/quickstart}"
.venv/bin/python -m rpg_jax.train --config="${CONFIG:-configs/quickstart.py}" --workdir="$workdir" "$@"
.venv/bin/python -m rpg_jax.evaluate --workdir="$workdir"
[[ $workdir == /* ]] || workdir="$PWD/$workdir"
said="curves: $workdir/figures/training.png"
if [[ -e "$workdir/look.parquet" ]]; then # not with --config.log.look_every=0
  .venv/bin/python -m rpg_jax.look --workdir="$workdir" >/dev/null
  said+="; every token under the objective, for a browser: $workdir/look.html"
fi
echo "$said"
