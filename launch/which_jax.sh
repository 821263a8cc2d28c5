#!/usr/bin/env bash
# Prints which JAX this machine takes: cuda13, cuda12 or cpu. launch/setup.sh installs it.
#
#   launch/which_jax.sh [ROOT]    ROOT stands before /proc and /dev, for tests
#
# RPG_JAX names it; so does JAX_PLATFORMS, to the extent that without cuda in it nothing of CUDA is needed. Otherwise an
# NVIDIA driver decides, by JAX's table: 580 and newer cuda13, 525 and newer cuda12, which GPUs of compute capability
# below 7.5 need as well. What it decides against is said on stderr.
set -euo pipefail

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
help_if_asked "$@"
case "${RPG_JAX:-}" in
  "") ;;
  cpu | cuda12 | cuda13) echo "$RPG_JAX" && exit ;;
  *) echo "error: RPG_JAX is '$RPG_JAX'; known: cpu, cuda12, cuda13; unset, the NVIDIA driver decides" >&2 && exit 2 ;;
esac
case ",${JAX_PLATFORMS:-cuda}," in
  *,cuda,* | *,gpu,*) ;;
  *) echo cpu && exit ;;
esac

# A line a GPU, "580.159.04, 9.0"; the command fails without a driver or a GPU. Where it is missing or too old for the
# question the kernel's module says its version, and there must be a device: a container sees the module of its host.
root="${1:-}" gpus="" driver=0 capability=999 found='' # capability: the oldest GPU's, tenfold
if command -v nvidia-smi >/dev/null; then
  found="nvidia-smi is there and names no GPU" # to be said if the module says nothing either
  gpus="$(timeout 60 nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null)" || gpus=""
fi
if [[ -z "$gpus" && -r "$root/proc/driver/nvidia/version" ]] && compgen -G "$root/dev/nvidia[0-9]*" >/dev/null; then
  read -r gpus <"$root/proc/driver/nvidia/version"
fi

while read -r line; do
  [[ "$line" =~ ^(NVRM[^.]*[^0-9.])?([0-9]+)\.[0-9]+[0-9.]*(, *([0-9]+)\.([0-9]))? ]] || continue
  driver="${BASH_REMATCH[2]}"
  [[ -z "${BASH_REMATCH[3]}" ]] || ((capability <= ${BASH_REMATCH[4]}${BASH_REMATCH[5]})) ||
    capability="${BASH_REMATCH[4]}${BASH_REMATCH[5]}"
done <<<"$gpus"
if ((driver >= 580 && capability >= 75)); then
  echo cuda13
elif ((driver >= 525)); then
  echo cuda12
else
  ((!driver)) || found="the NVIDIA driver is $driver, and JAX takes 525 and newer"
  [[ -z "$found" ]] || echo "setup: $found: this is JAX for the CPU" >&2
  echo cpu
fi
