#!/usr/bin/env bash
# Checks Python files, shell scripts and types in half a minute; installs requirements-dev.txt in .venv first.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
take_nothing "$@"
# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null
rpg_install requirements-dev.sha256 requirements-dev.txt
.venv/bin/python -m ruff check
.venv/bin/python -m ruff format --check
.venv/bin/shellcheck -x launch/*.sh .ci/run
.venv/bin/python -m mypy
