#!/usr/bin/env bash
# Runs the test suite, three files at a time, because some wait for processes of their own; options go to pytest:
# launch/test.sh tests/test_checkpoints.py -k bit -n0
# --quick, for whoever changes an objective, a metric or a task: at most 90 s on 2 cores once .venv is there. It leaves
# out the files that start processes, train, or compile many models; SLOW in tests/conftest.py lists them. The RL step's
# own file is tests/test_update.py.
# The suite runs on the CPU and its simulated devices; without options tests/test_gpu.py follows on an NVIDIA GPU.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
help_if_asked "$@"
# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null
for extra in gguf gym; do # one of gym's packages needs a C compiler
  rpg_install "requirements-$extra.sha256" "requirements-$extra.txt" ||
    echo "test: that list is optional, and the tests that need it are skipped" >&2
done
test=(.venv/bin/python -m pytest)
suite=("${test[@]}" -n3 --dist=loadfile --no-loadscope-reorder)
export JAX_PLATFORMS=cpu
[[ "${rpg_jax:-cpu}" != cpu && $# == 0 ]] || exec "${suite[@]}" "$@"
status=0
"${suite[@]}" || status=$?
JAX_PLATFORMS=cuda "${test[@]}" tests/test_gpu.py || status=$?
exit "$status"
