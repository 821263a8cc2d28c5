#!/usr/bin/env bash
# Builds the documentation's site into site/; a broken link or a docstring that names no parameter is an error.
#
#   launch/docs.sh            build; then open site/index.html, which needs neither a server nor a network
#   launch/docs.sh --serve    show it at http://127.0.0.1:8000 and build again whenever a page changes
#
# Installs requirements-dev.txt in .venv first.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
help_if_asked "$@"
case "$*" in
  "" | --serve) ;;
  *) refuse "unknown option: $*" ;;
esac
# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null
rpg_install requirements-dev.sha256 requirements-dev.txt
export NO_MKDOCS_2_WARNING=1
if [[ "${1:-}" == --serve ]]; then
  exec .venv/bin/python -m mkdocs serve --strict --livereload
fi
exec .venv/bin/python -m mkdocs build --strict --quiet
