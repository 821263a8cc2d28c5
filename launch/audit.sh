#!/usr/bin/env bash
# Lists known vulnerabilities of the packages in .venv with pip-audit, which it keeps in .venv/audit.
#
# Ends with status 1 if there are any. Packages that the index has no advisories for are counted; a package index within
# a company may have none for any.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
take_nothing "$@"
# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null
audit=.venv/audit
if [[ ! -x "$audit/bin/pip-audit" ]]; then
  .venv/bin/python -m venv "$audit"
  "$audit/bin/python" -m pip install --quiet --disable-pip-version-check pip-audit
fi
status=0
told="$(timeout 300 "$audit/bin/pip-audit" --progress-spinner=off --path .venv/lib/python3.*/site-packages 2>&1)" || status=$?
grep -v "could not be audited" <<<"$told" || true
echo "audit: $(grep -c "could not be audited" <<<"$told") packages without advisories; status $status" >&2
exit "$status"
