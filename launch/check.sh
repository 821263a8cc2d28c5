#!/usr/bin/env bash
# Checks the style of the Python files and the shell scripts, in seconds; installs requirements-dev.txt in .venv first.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null
rpg_install requirements-dev.sha256 requirements-dev.txt
.venv/bin/python -m ruff check
.venv/bin/python -m ruff format --check
.venv/bin/shellcheck -x launch/*.sh .ci/run
