# shellcheck shell=bash
# Sourced by launchers: their help, and what they would run.

dry_run=0

# Prints the comment at the top of the script that was started, where a word before -- asks for it, and ends.
help_if_asked() {
  local word
  for word in "$@"; do
    case "$word" in
      --) return ;;
      --help | -h)
        sed '1d;/^$/,$d;/^[^#]/,$d;s/^# \{0,1\}//' "${BASH_SOURCE[0]%/*}/$(basename "$0")"
        exit
        ;;
    esac
  done
}

# For a script that takes no words but --help.
take_nothing() {
  help_if_asked "$@"
  [[ $# -eq 0 ]] || refuse "unexpected argument '$1'"
}

refuse() {
  echo "error: $1; see launch/$(basename "$0") --help" >&2
  exit 2
}

# Words as a shell would read them, quoted where need be.
quoted() {
  local word line=""
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="${word@Q}"
    line+="${line:+ }$word"
  done
  echo "$line"
}

# Runs a command; in a dry run, prints it.
run() { if ((dry_run)); then quoted "$@"; else "$@"; fi; }

# Takes --help and --dry-run off the front of its words; the others, which are training's flags, become `training`.
take_options() {
  help_if_asked "$@"
  while [[ "${1:-}" == --dry-run ]]; do dry_run=1 && shift; done
  [[ $# -gt 0 ]] || refuse "the flags of training are missing"
  # shellcheck disable=SC2034 # read by the launchers
  training=("$@")
}
