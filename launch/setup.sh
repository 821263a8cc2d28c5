#!/usr/bin/env bash
# Makes .venv in the repository root from requirements.txt; does nothing when it is up to date.
# Sourced or called. PYTHON names the interpreter to use; otherwise the first python of 3.11 or newer on PATH is found.

rpg_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

rpg_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

rpg_find_python() {
  local name
  for name in ${PYTHON:+"$PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11; do
    if rpg_new_enough "$name"; then
      command -v "$name"
      return
    fi
  done
  return 1
}

rpg_setup() {
  local venv="$rpg_root/.venv" python wanted
  local stamp="$venv/requirements.sha256"
  if ! rpg_new_enough "$venv/bin/python"; then
    if ! python="$(rpg_find_python)"; then
      echo "error: Python 3.11 or newer is needed and $(python3 --version 2>/dev/null || echo 'no python3') was found;" \
        "install it, or name one: PYTHON=/path/to/python3.11" >&2
      return 2
    fi
    echo "setup: making .venv with $("$python" --version)" >&2
    "$python" -m venv --clear "$venv" || return
  fi
  wanted="$("$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
    "$rpg_root/requirements.txt")" || return
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "setup: installing requirements.txt (a few minutes the first time)" >&2
    "$venv/bin/python" -c 'import pip' 2>/dev/null || "$venv/bin/python" -m ensurepip >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$rpg_root/requirements.txt" || {
      echo "error: pip could not install requirements.txt; mend what it says above and start again" >&2
      return 1
    }
    echo "$wanted" >"$stamp"
  fi
}

rpg_setup
