"""Scripts that train the runs of a sweep on a cluster: a SLURM array, or a TPU pod for each run."""

import pathlib
import re
import shlex
from collections.abc import Sequence

SLURM = r"""#!/usr/bin/env bash
# {count} runs of {sweep} as a SLURM array, one task each. Submit from the root of the repository:
#   sbatch --gpus-per-node=1 --time=24:00:00 {script}
# What sbatch takes (partition, account, --array=0-{last}%8 for 8 at once) stands before the script's name.

#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

cd "${{SLURM_SUBMIT_DIR:?submit this script with sbatch}}"
runs=(
{runs}
)
read -r run flags <<<"${{runs[SLURM_ARRAY_TASK_ID]}}"
[[ ! -f {out}/"$run"/summary.json ]] || exit 0 # done
{prepare}eval "exec bash launch/slurm.sh $flags"
"""
SLURM_PREPARE = """# The first one trains the warm start that all share; the others wait for it.
bash launch/setup.sh </dev/null
status=0
srun --nodes=1 --ntasks=1 {prepare} --prepare="$run" || status=$?
if ((status != 0)); then
  ((status != 75)) || scontrol requeue "$SLURM_JOB_ID"
  exit "$status"
fi
"""
TPU = r"""#!/usr/bin/env bash
# {count} runs of {sweep}, a TPU pod each. Start it in the root of the repository:
#   bash {script} gs://BUCKET/FOLDER --zone=ZONE --type=TYPE [--spot] [--delete] [launch/tpu_pod.sh's other options]
# PODS=4 before it has 4 at once; the same command goes on and leaves out what is done.
set -euo pipefail

bucket="${{1:-}}"
[[ "$bucket" == gs://?* ]] || {{ sed -n '2,4s/^# //p' "$0" >&2 && exit 2; }}
shift
runs=(
{runs}
)
train() {{
  local number="$1" run flags words
  read -r run flags <<<"${{runs[number]}}"
  eval "words=($flags)"
  shift
  [[ ! -f {out}/"$run"/summary.json ]] || return 0 # done
{prepare}  bash launch/tpu_pod.sh --name="{name}-$number" "$@" -- "${{words[@]}}" --checkpoint_dir="$bucket/$run"
}}
failed=0
for number in "${{!runs[@]}}"; do
  while (($(jobs -rp | wc -l) >= ${{PODS:-1}})); do wait -n || failed=1; done
  train "$number" "$@" &
done
while [[ -n "$(jobs -p)" ]]; do wait -n || failed=1; done
exit "$failed"
"""
TPU_PREPARE = """  {prepare} --prepare="$run"
  gcloud storage rsync --recursive {out}/"$run"/warm_start "$bucket/$run/warm_start"
"""


TEMPLATES = {"slurm": (SLURM, SLURM_PREPARE), "tpu": (TPU, TPU_PREPARE)}


def script(
    kind: str,
    runs: Sequence[tuple[str, Sequence[str]]],
    *,
    sweep: str,
    path: pathlib.Path,
    out: pathlib.Path,
    prepare: Sequence[str] | None,
) -> str:
    """The text of a script: "slurm", an array job, or "tpu", a pod for each run.

    Args:
      runs: (name, flags of rpg_jax.train) of each; sweep: the file they are of; path: where the script will lie.
      out: the folder of the runs.
      prepare: the command that, with --prepare=NAME, gives a run its warm start; None if runs have none.
    """
    text, prepare_text = TEMPLATES[kind]
    folder = shlex.quote(str(out))
    return text.format(
        count=len(runs),
        last=len(runs) - 1,
        sweep=sweep,
        script=path,
        name=re.sub("[^a-z0-9]+", "-", f"rpg-{out.name}".lower()).strip("-")[:50],  # as pods may be named
        runs="\n".join("  " + shlex.quote(shlex.join([name, *flags])) for name, flags in runs),
        out=folder,
        prepare=prepare_text.format(prepare=shlex.join(prepare), out=folder) if prepare else "",
    )
