"""Does the objective matter on a real model: makes the runs of real_model.md, prints its table and draws its figure.

    python docs/study/real_model.py runs/study [--machine=gpu] [--base=CHECKPOINT] [--seconds=N]
    python docs/study/real_model.py runs/study --only=stale,rpg,120    # a committed row once more
    python docs/study/real_model.py runs/study --sets                  # the problems alone, to be carried

Makes what real_model.parquet lacks, of the copies here and in FOLDER taken together, one run after the other: first
those that choose the level of the problems, then those that choose each arm's learning rate, then those that are
compared, seed by seed. Each is a training in FOLDER/runs, which the same command resumes, and becomes a row of
FOLDER/real_model.parquet as it ends, also of OUT/real_model.parquet where OUT is set. No run begins that would not end
within N seconds, by the longest so far, and one that does not is told to save and stop.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # rpg_jax, configs
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # resumable, sign

import numpy as np
import pandas as pd
import real_model_figures as figures
import resumable

from configs.real_model import LEVELS, QWEN, SMOLLM2, get_config
from rpg_jax import gym
from rpg_jax.data.problems import Records, to_problem
from rpg_jax.lab.reporting import runs

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ARMS = {
    "rpg": dict(name="rpg", clip="rpg"),  # Algorithm 2
    "none": dict(name="rpg", clip="none"),
    "grpo": dict(name="grpo", clip=""),
    "coefficient": dict(name="rpg", clip="coefficient"),  # equation 4.1
    "dapo": dict(name="dapo", clip=""),
}
UPDATES = {"stale": 8, "fresh": 2}  # of a rollout
# Of each: the config, the model, how many of the arms, and of each regime the number of the first three rates' middle.
MACHINES = {"cpu": ("study", SMOLLM2, 3, {"stale": 3}), "gpu": ("study-gpu", QWEN, 5, {"stale": 1, "fresh": 2})}
CELL = ["machine", "level", "regime", "arm"]
KEY = [*CELL, "rate", "seed"]
PILOT, TUNING, SEEDS = 100, (110, 111), (120, 121, 122, 123, 124)
PILOTED = ("rpg", "grpo")
BASE, TOP = (0.05, 0.25), 0.8  # of a level: the base model's score, and what the better pilot run ends below
FALL = 0.1  # a run falls that loses so much between two evaluations
GRACE = 45  # seconds for a run to finish its step and to save
BESIDE = ("kl_reference_weighted", "surprisal", "clip_fraction", "response_length")


def rate(number: int) -> float:
    """The learning rate of a number of the grid."""
    return 1e-6 * 2.0**number


def with_outcomes(kept: pd.DataFrame) -> pd.DataFrame:
    """The rows with their outcome `area`, the mean score of all evaluations but the first, and whether they fell."""
    area, fell = (kept.scores.map(of) for of in (lambda x: np.mean(x[1:]), lambda x: bool(np.min(np.diff(x)) <= -FALL)))
    return kept.assign(area=area.astype(float), fell=fell.astype(bool))


def choose_level(kept: pd.DataFrame, machine: str) -> tuple[int, list[tuple]]:
    """(The level of the problems, the pilot runs that it waits for): the first one, from the easiest, with room below
    and above; where one is too hard before that, the one before it; where all are too easy, the hardest."""
    _, model, _, middles = MACHINES[machine]
    for level in range(1, len(LEVELS[model]) + 1):
        names = [(machine, level, "stale", arm, rate(middles["stale"]), PILOT) for arm in PILOTED]
        rows = kept.set_index(KEY).scores.reindex(names)
        if rows.isna().any():
            return level, [name for name, lacks in zip(names, rows.isna(), strict=True) if lacks]
        before, after = np.mean([x[0] for x in rows]), max(x[-1] for x in rows)
        if before < BASE[0]:
            return max(level - 1, 1), []
        if before <= BASE[1] and after < TOP:
            break
    return level, []


def wanted(kept: pd.DataFrame, machine: str) -> list[tuple]:
    """The runs that are to be made next, the first one first; none once all are there."""
    level, missing = choose_level(kept, machine)
    _, _, arms, middles = MACHINES[machine]
    for regime, middle in middles.items():
        for arm in list(ARMS)[:arms] if not missing else ():
            cell = dict(zip(CELL, (machine, level, regime, arm), strict=True))
            missing += resumable.wanted(kept, cell, middle, rate, with_outcomes, TUNING, SEEDS, most=0)
        missing.sort(key=lambda run: run[-1])  # tuning first, then whole pairs
    return missing


def prepared(folder: pathlib.Path, variant: str) -> dict:
    """The settings that name a variant's problems in FOLDER/sets, which are drawn if they are not there."""
    data, titles = get_config(variant).data, []
    for name, source in zip(("train", "heldout", "untrained"), (data.train, *data.heldout), strict=True):
        titles.append(str(folder / "sets" / f"{variant}-{name}"))
        if not pathlib.Path(titles[-1]).exists():
            split = "train" if name == "train" else "heldout"
            flags = f"--source={source}", f"--split={split}", f"--template={data.wording}", f"--target={titles[-1]}"
            subprocess.run([sys.executable, "-m", "rpg_jax.prepare", *flags], cwd=ROOT, check=True)
    return {"data.train": titles[0], "data.heldout": tuple(titles[1:])}


def train(run: tuple, folder: pathlib.Path, base: str | None, seconds: float | None) -> dict | None:
    """The row of a run; None if it was stopped, by hand or after so many seconds, and can be resumed."""
    machine, level, regime, arm, learning_rate, seed = run
    variant, workdir = f"{MACHINES[machine][0]}-{level}", folder / "runs" / "-".join(map(str, run))
    config = get_config(variant)
    settings = {f"objective.{key}": value for key, value in ARMS[arm].items()} | prepared(folder, variant)
    settings["learner.minibatch_prompts"] = config.rollout.prompts // UPDATES[regime]
    settings |= {"optimizer.learning_rate": learning_rate, "seed": seed}
    settings["model.checkpoint"] = base or config.model.checkpoint
    flags = [f"--config=configs/real_model.py:{variant}", f"--workdir={workdir}"]
    flags += [f"--config.{key}={value}" for key, value in settings.items()]
    # As launch/real_model.sh has it: glibc gives freed arrays back.
    own = dict(JAX_COMPILATION_CACHE_DIR=str(folder / "cache"), MALLOC_MMAP_THRESHOLD_="1048576")
    own["JAX_PLATFORMS"] = "cuda,cpu" if machine == "gpu" else "cpu"
    begin = time.monotonic()
    how = dict(cwd=ROOT, env=own | dict(os.environ), stdout=subprocess.DEVNULL, start_new_session=True)  # one signal
    process = subprocess.Popen([sys.executable, "-m", "rpg_jax.train", *flags], **how)
    try:
        status = process.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()  # it saves, at the end of a step
        process.wait()
        return None
    if status:
        sys.exit(f"{workdir}: the training ended with status {status}; nothing of it is kept")
    row = dict(zip(KEY, run, strict=True)) | outcome(runs.read(workdir), gym.parse(config.data.heldout[0]))
    shutil.rmtree(workdir)  # gigabytes of checkpoints
    return row | dict(seconds=time.monotonic() - begin)


def outcome(run: runs.Run, trained: list[gym.Part]) -> dict:
    """Of a finished run: mean scores of the trained families by evaluation, those of each family, its settings, and by
    step what is shown beside."""
    scores = run.scores[run.tasks]
    beside = run.metrics.reindex(columns=[f"train/{name}" for name in BESIDE]).iloc[1:]
    return dict(
        scores=scores[[f"{gym.PREFIX}{part.family}" for part in trained]].mean(axis=1).tolist(),
        families=json.dumps(scores.to_dict("list")),
        settings=json.dumps(run.relevant),
        **dict(zip(figures.BESIDE, beside.T.to_numpy().tolist(), strict=True)),
    )


def families(final: pd.DataFrame, folder: pathlib.Path) -> pd.DataFrame:
    """By machine, level, regime and family: what a constant answer scores on its held-out problems, the base model, and
    each arm after the last step. The constant is the commonest answer among those problems: no other one scores more.
    """
    tables = {}
    for at, of in final.groupby(figures.AT, sort=False):
        heldout = prepared(folder, f"{MACHINES[at[0]][0]}-{at[1]}")["data.heldout"]
        asked = [to_problem(record) for title in heldout for record in Records(title, "train")]
        answers = pd.DataFrame([(problem.task, gym.own_answer(problem.answer)) for problem in asked])
        table = answers.groupby(0, sort=False)[1].agg(
            problems="size", constant=lambda own: own.value_counts(normalize=True).iloc[0]
        )
        scores = pd.DataFrame([
            (arm, family, score[0], score[-1])
            for arm, text in zip(of.arm, of.families, strict=True) for family, score in json.loads(text).items()
        ], columns=["arm", "family", "base", "last"])  # fmt: skip
        table["base model"] = scores.groupby("family").base.mean()
        tables[at] = table.join(scores.pivot_table(index="family", columns="arm", values="last", sort=False))
    return pd.concat(tables, names=[*figures.AT, "family"])


def make_runs(kept: pd.DataFrame, machine: str, folder: pathlib.Path, base: str | None, seconds: float):
    """All rows, once none is wanted or the time is over; each is saved as it comes."""
    end = time.monotonic() + seconds - GRACE
    while names := wanted(kept, machine):
        left, longest = end - time.monotonic(), kept[kept.machine == machine].seconds.max() if len(kept) else 0
        print(f"{len(kept)} rows, at least {len(names)} to come; next {names[0]}", file=sys.stderr, flush=True)
        if left < np.nan_to_num(longest) or not (row := train(names[0], folder, base, left)):
            print("stopped; the same command goes on", file=sys.stderr)
            break
        print(f"scores {np.round(row['scores'], 3)} after {row['seconds']:.0f} s", file=sys.stderr, flush=True)
        kept = pd.concat([kept, pd.DataFrame([row])], ignore_index=True) if len(kept) else pd.DataFrame([row])
        for place in {folder, pathlib.Path(os.environ.get("OUT") or folder)}:
            resumable.save(kept, place / "real_model.parquet")
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--machine", choices=list(MACHINES), default="cpu")
    parser.add_argument("--base", help="the converted checkpoint; the config's, if unset")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="0 prints and draws what there is")
    parser.add_argument("--only", metavar="REGIME,ARM,SEED")
    parser.add_argument("--sets", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = [pd.read_parquet(file) for at in (HERE, options.folder) if (file := at / "real_model.parquet").exists()]
    kept = pd.concat(kept or [pd.DataFrame(columns=[*KEY, "scores", "seconds"])], ignore_index=True)
    kept = kept.drop_duplicates(KEY, ignore_index=True)
    if options.sets:
        for level, _ in enumerate(LEVELS[MACHINES[options.machine][1]], 1):
            print(*prepared(options.folder, f"{MACHINES[options.machine][0]}-{level}").values())
    elif options.only:
        named = kept[["machine", "regime", "arm", "seed"]].astype(str).agg(",".join, axis=1)
        if not (rows := kept[named == f"{options.machine},{options.only}"].to_dict("records")):
            parser.error(f"real_model.parquet has no run {options.only} of {options.machine}; expected one that it has")
        for row in rows:
            print("committed", row["rate"], row["scores"], flush=True)
            if again := train(tuple(row[key] for key in KEY), options.folder, options.base, None):
                print("made again", row["rate"], np.array(again["scores"]))
    else:
        kept = make_runs(kept, options.machine, options.folder, options.base, options.seconds)
        final = with_outcomes(kept[kept.seed.isin(SEEDS)])
        figures.show(final, list(ARMS), options.folder)
        if not final.empty:
            print(families(final, options.folder).to_string(float_format="{:.1%}".format))
