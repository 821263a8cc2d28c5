#!/usr/bin/env bash
# Holds checkpoints against transformers itself: chat templates, every family, GGUF files, and a short form of the whole
# path. SMOLLM2_GGUF, QWEN_GGUF and GEMMA3_GGUF name files to compare, too (third_party/transformers/gguf_parity.py).
# Makes .venv-transformers from third_party/transformers/requirements.txt beside .venv.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
source launch/common.sh
take_nothing "$@"
# shellcheck source=launch/setup.sh
source launch/setup.sh </dev/null
rpg_install requirements-gguf.sha256 requirements-gguf.txt
peer=.venv-transformers
wanted="$(sha256sum third_party/transformers/requirements.txt)"
if [[ "$(cat "$peer/requirements.sha256" 2>/dev/null)" != "$wanted" ]]; then
  echo "parity: installing third_party/transformers/requirements.txt (a few minutes the first time)" >&2
  .venv/bin/python -m venv --clear "$peer"
  "$peer/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r third_party/transformers/requirements.txt
  echo "$wanted" >"$peer/requirements.sha256"
fi
eval "$(.venv/bin/python tests/environment.py)" # exports: what is compiled here runs once
export OMP_NUM_THREADS=1 # of torch, whose threads wait by spinning: on models this small, four times the work
compare() { .venv/bin/python "third_party/transformers/$1.py" --peer_python="$peer/bin/python" "${@:2}"; }
# Two at a time: compiling, which most of the time goes to, takes one core.
compare gguf_parity &
gguf=$! status=0
{ compare templates && compare parity && compare end_to_end --smoke --workdir=runs/end_to_end_smoke; } || status=$?
wait "$gguf" || status=$?
exit "$status"
