#!/usr/bin/env bash
# Makes .venv in the repository root from the lists of core, training and test packages; does nothing when it is up to date.
# Sourced or called. PYTHON names the interpreter to use; otherwise the first python of 3.11 or newer on PATH is found.
# Where there is an NVIDIA driver JAX comes with CUDA; RPG_JAX=cpu, cuda12 or cuda13 says otherwise (launch/which_jax.sh).

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

# Installs lists of packages (files of the repository) together, and again when one of them has changed.
# The first argument names the file in .venv that keeps their digest.
rpg_install() {
  local python="$rpg_root/.venv/bin/python" stamp="$rpg_root/.venv/$1" list wanted lists=()
  shift
  wanted="$(cd "$rpg_root" && "$python" -c 'import hashlib, sys
print(hashlib.sha256(b"".join(open(name, "rb").read() for name in sys.argv[1:])).hexdigest())' "$@")" || return
  [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]] || return 0
  echo "setup: installing $* (a few minutes the first time)" >&2
  for list in "$@"; do lists+=(-r "$rpg_root/$list"); done
  "$python" -c 'import pip' 2>/dev/null || "$python" -m ensurepip >&2
  # Python compiles what it imports; compiling every file of every package takes longer than installing them.
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile "${lists[@]}" || {
    echo "error: pip could not install $*; mend what it says above and start again" >&2
    return 1
  }
  echo "$wanted" >"$stamp"
}

rpg_setup() {
  local venv="$rpg_root/.venv" python
  if ! rpg_new_enough "$venv/bin/python"; then
    if ! python="$(rpg_find_python)"; then
      echo "error: Python 3.11 or newer is needed and $(python3 --version 2>/dev/null || echo 'no python3') was found;" \
        "install it, or name one: PYTHON=/path/to/python3.11" >&2
      return 2
    fi
    echo "setup: making .venv with $("$python" --version)" >&2
    "$python" -m venv --clear "$venv" || return
  fi
  local lists=(requirements.txt requirements-core.txt requirements-test.txt) other
  rpg_jax="$("$rpg_root/launch/which_jax.sh")" || return
  if [[ "$rpg_jax" != cpu ]]; then
    lists+=("requirements-$rpg_jax.txt") # together with the others, so that jax and its plugin go together
    other="cuda$((25 - ${rpg_jax#cuda}))"
    if compgen -G "$venv/lib/python*/site-packages/jax_${other}_plugin" >/dev/null; then # JAX loads one of both
      rm -f "$venv/requirements.sha256" # the next call installs again if this one fails from here on
      "$venv/bin/python" -m pip uninstall --quiet --yes "jax-$other-plugin" "jax-$other-pjrt" || return
    fi
  elif [[ -n "${RPG_JAX:-}" ]]; then
    export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" # whatever is installed
  fi
  rpg_install requirements.sha256 "${lists[@]}" && return
  [[ "$rpg_jax" == cpu ]] || echo "error: RPG_JAX=cpu does without the GPU" >&2
  return 1
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then # called, not sourced
  # shellcheck source=launch/common.sh
  source "$rpg_root/launch/common.sh"
  take_nothing "$@"
fi

# Told to keep no bytecode, as in many containers, every process would compile two thousand modules anew, for 5 s. It
# lies in .venv then, so that the tree stays as it is.
if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$rpg_root/.venv/bytecode}"
fi
rpg_setup
