# shellcheck shell=bash
# Sourced by launchers that can say what they would run.

dry_run=0

# Prints the comment at the top of the script that was started.
show_help() { sed '1d;/^$/,$d;/^[^#]/,$d;s/^# \{0,1\}//' "launch/$(basename "$0")"; }

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
  while [[ $# -gt 0 ]]; do
    case "$1" in
      --help | -h) show_help && exit ;;
      --dry-run) dry_run=1 ;;
      *) break ;;
    esac
    shift
  done
  [[ $# -gt 0 ]] || refuse "the flags of training are missing"
  # shellcheck disable=SC2034 # read by the launchers
  training=("$@")
}
