#!/usr/bin/env bash
# Runs the test suite, two files at a time; options go to pytest: launch/test.sh tests/test_checkpoints.py -k bit -n0
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh </dev/null
exec .venv/bin/python -m pytest -n2 --dist=loadfile --no-loadscope-reorder "$@"
