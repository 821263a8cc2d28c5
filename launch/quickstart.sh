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
.venv/bin/python -m rpg_jax.look --workdir="$workdir" >/dev/null
[[ $workdir == /* ]] || workdir="$PWD/$workdir"
echo "curves: $workdir/figures/training.png; every token under the objective, in a browser: $workdir/look.html"
