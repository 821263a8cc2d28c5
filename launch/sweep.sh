#!/usr/bin/env bash
# Trains every variant of a sweep with every seed, as many at once as this machine carries, and prints a table.
#
#   launch/sweep.sh configs/sweeps/NAME.py [--out=runs/NAME] [--seeds=0,1,2] [--parallel=N] [--dry-run]
#   launch/sweep.sh configs/sweeps/NAME.py --slurm    # or --tpu: writes a script that runs it there instead
#
# The same command goes on after a kill at any time and leaves out what is done. SIGTERM or Ctrl-C lets the runs save and
# ends with status 75. Then: python -m rpg_jax.report runs/NAME. JAX_COMPILATION_CACHE_DIR names another folder of
# compiled programs than .jax_cache.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
help_if_asked "$@"
set -- "${@/#--dry-run/--dry_run}" # the spelling of launchers, and that of flags
[[ $# -gt 0 ]] || refuse "the file of a sweep is missing"

# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
exec .venv/bin/python -m rpg_jax.sweep "$@"
