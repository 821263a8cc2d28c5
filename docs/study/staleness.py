"""Which clip at which staleness, when bounds and learning rates are tuned: the runs of staleness.md.

    python docs/study/staleness.py [FOLDER]

Makes the runs that FOLDER/staleness.parquet lacks (the folder of this file, if none is given), two at a time: first
those that choose a rate for each arm and delay, then those that are compared. Then prints the tables and draws the
figure. It goes on where it was stopped.
"""

import collections
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # rpg_jax
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # oracle, sign

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from oracle import policies, task
from oracle.__main__ import save
from sign import paired

from rpg_jax.lab.reporting import estimates
from rpg_jax.lab.reporting.figures import MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame
from rpg_jax.lab.sweeping.pool import cores
from rpg_jax.objectives import make
from rpg_jax.training.optimizer import make_optimizer

HERE = pathlib.Path(__file__).parent
BOUNDS = {"0.2, 0.28": (0.2, 0.28), "0.5, 1": (0.5, 1.0), "0.8, 4": (0.8, 4.0)}
CLIPS = {"Algorithm 2": "rpg", "equation 4.1": "coefficient", "Remark F.2": "truncate", "decoupled": "ppo"}
BETAS = (0.003, 0.01, 0.03)
ARMS = {
    "no clip": dict(name="rpg", beta=0.0),
    **{f"{clip}, {bounds}": dict(name="ppo_clip" if clip == "decoupled" else "rpg", clip=name, clip_low=low,
                                 clip_high=high, **({} if clip == "decoupled" else dict(beta=0.0)))
       for clip, name in CLIPS.items() for bounds, (low, high) in BOUNDS.items()},
    **{f"urkl, {beta:g}": dict(name="rpg", beta=beta) for beta in BETAS},
}  # fmt: skip
DELAYS = (4, 16, 64)  # optimizer updates
RATES = (8e-4, 1.6e-3, 3.2e-3, 6.4e-3)  # to begin with; where the best is at an end, the next one is tried
TUNING, SEEDS = (100, 101), tuple(range(10))
MARGIN = 0.03  # of equality: three points
STEPS, UPDATES, PROMPTS, SAMPLES, LENGTH, EVERY = 60, 4, 16, 8, 32, 15
KEY = ["arm", "delay", "rate", "seed"]


@functools.cache
def updates(arm: str):
    """The jitted update of an arm: (params, optimizer state, rate, proximal params, behavior params, tokens)."""
    objective, model = make(**ARMS[arm]), policies.transformer()
    adamw = make_optimizer("adamw", learning_rate=1.0, warmup_steps=10)

    def loss(params, proximal, behavior, tokens):
        logp, old, drew = (policies.logprobs(model, of, tokens)[0] for of in (params, proximal, behavior))
        rewards = task.rewards(tokens).reshape(-1, SAMPLES)
        advantage = (rewards - rewards.mean(1, keepdims=True)).reshape(-1, 1)
        mask = jnp.ones(logp.shape, bool)
        if arm.startswith("decoupled"):  # the clip is around the proximal policy; arXiv 2505.24298, equation 2
            return objective(logp, old, advantage, mask, weight=jax.lax.stop_gradient(jnp.exp(old - drew)))[0]
        return objective(logp, drew, advantage, mask)[0]

    @jax.jit
    def update(params, state, rate, proximal, behavior, tokens):
        gradient = jax.grad(loss)(params, proximal, behavior, tokens)
        steps, state = adamw.transformation.update(gradient, state, params)  # of a rate of 1: steps are linear in it
        return optax.apply_updates(params, jax.tree.map(lambda x: rate * x, steps)), state

    return adamw.transformation.init, update


@functools.cache
def expected_reward():
    model, every = policies.transformer(), task.prompts().tokens
    right = jax.jit(lambda params, tokens: jnp.exp(policies.logprobs(model, params, tokens)[1]).mean())
    return lambda params, seed, step: float(
        right(params, policies.respond(model, params, every, 4, LENGTH, 10_000 + seed, step))
    )


def trial(name: tuple) -> dict:
    """A run: its expected rewards at steps 0, EVERY, 2 EVERY, ... from 512 fresh responses each."""
    arm, delay, rate, seed = name
    model, every = policies.transformer(), task.prompts().tokens
    params = policies.warm_start(model, 0, **policies.DEMONSTRATIONS)
    init, update = updates(arm)
    state, rng = init(params), np.random.default_rng(seed)
    past = collections.deque([params], maxlen=delay // UPDATES + 1)  # at the starts of steps, oldest first
    scores = [expected_reward()(params, seed, 0)]
    for step in range(1, STEPS + 1):
        behavior, proximal = past[0], params
        chosen = every[rng.integers(len(every), size=PROMPTS)]
        drawn = policies.respond(model, behavior, chosen, SAMPLES, LENGTH, seed, step)
        for tokens in np.asarray(drawn).reshape(UPDATES, -1, drawn.shape[1]):
            params, state = update(params, state, rate, proximal, behavior, tokens)
        past.append(params)
        if step % EVERY == 0:
            scores.append(expected_reward()(params, seed, step))
    return dict(zip(KEY, name, strict=True)) | dict(scores=scores)


def areas(kept: pd.DataFrame) -> pd.Series:
    """The mean score over the run of each row, by trapezoids."""
    return kept.scores.map(lambda scores: float(np.trapezoid(scores) / (len(scores) - 1)))


def best_rates(kept: pd.DataFrame) -> pd.DataFrame:
    """For each arm and delay the rate of the best area over the seeds of tuning, and whether it is at an end."""
    tuned = kept[kept.seed.isin(TUNING)].assign(area=areas)
    mean = tuned.groupby(["arm", "delay", "rate"]).area.mean().reset_index()
    best = mean.loc[mean.groupby(["arm", "delay"]).area.idxmax()]
    ends = mean.groupby(["arm", "delay"]).rate.agg(["min", "max"]).reset_index()
    best = best.merge(ends)
    return best.assign(at_end=(best.rate == best["min"]) | (best.rate == best["max"]))


def wanted(kept: pd.DataFrame) -> list[tuple]:
    """The runs that are to be made next; none once all are there."""
    cells = itertools.product(ARMS, DELAYS)
    tuning = [(arm, delay, rate, seed) for arm, delay in cells for rate in RATES for seed in TUNING]
    done = set(kept[KEY].itertuples(index=False, name=None))
    if missing := [name for name in tuning if name not in done]:
        return missing
    best = best_rates(kept)
    further = [
        (at.arm, at.delay, at.rate * 2 if at.rate == at.max else at.rate / 2, seed)
        for at in best[best.at_end].itertuples()
        for seed in TUNING
    ]
    if further:
        return further
    final = [(at.arm, at.delay, at.rate, seed) for at in best.itertuples() for seed in SEEDS]
    return [name for name in final if name not in done]


def pin(cores):
    """Gives a worker a core of its own: with threads for all of them, workers wait for each other."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [cores.get()])


def make_runs(file: pathlib.Path) -> pd.DataFrame:
    """All runs, from the file and made anew."""
    kept = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=[*KEY, "scores"])
    context, each = multiprocessing.get_context("spawn"), cores()
    own = context.SimpleQueue()
    for core in each:
        own.put(core)
    with concurrent.futures.ProcessPoolExecutor(len(each), context, pin, (own,)) as pool:
        while names := wanted(kept):
            for number, row in enumerate(pool.map(trial, names), 1):
                kept = pd.concat([kept, pd.DataFrame([row])], ignore_index=True) if len(kept) else pd.DataFrame([row])
                if number % 20 == 0 or number == len(names):
                    save(kept, file)
                    print(f"{number} of {len(names)} runs of this stage", file=sys.stderr, flush=True)
    return kept


def compared(kept: pd.DataFrame) -> pd.DataFrame:
    """A row for each arm and delay: its rate, its area, and what that is above no clip, over the ten seeds."""
    final = kept[kept.seed.isin(SEEDS)].assign(area=areas, last=lambda of: of.scores.map(lambda scores: scores[-1]))
    rows = []
    for delay, at in final.groupby("delay"):
        area = at.pivot(index="seed", columns="arm", values="area")
        for arm in ARMS:
            of = at[at.arm == arm]
            row = dict(delay=delay, arm=arm, rate=of.rate.iloc[0], area=of.area.mean(), last=of["last"].mean())
            rows.append(row | ({} if arm == "no clip" else paired(area[arm] - area["no clip"], MARGIN)))
    table = pd.DataFrame(rows)
    for _, at in table[table.arm != "no clip"].groupby("delay"):
        for p in ("t", "flip", "equal"):
            table.loc[at.index, f"{p}, Holm"] = estimates.holm(at[p])
    return table


def draw(table: pd.DataFrame) -> str:
    """A panel a delay: what each arm's area is above no clip, in points, with 95 % intervals."""

    def panels(axes):
        names = [arm for arm in ARMS if arm != "no clip"]
        for axis, (delay, at) in zip(axes, table.groupby("delay"), strict=True):
            of = at.set_index("arm").loc[names[::-1]]
            for row, (arm, cell) in enumerate(of.iterrows()):
                family = [*CLIPS, "urkl"].index(arm.partition(",")[0])
                style = dict(color=COLORS[family], marker=MARKERS[family], capsize=2)
                axis.errorbar(100 * cell["mean"], row, xerr=100 * cell.half, **style)
            axis.axvline(0, color="black", linewidth=0.8)
            axis.set_yticks(range(len(names)), names[::-1] if axis is axes[0] else [""] * len(names))
            frame(axis, f"responses of {delay} updates ago", "points of mean score above no clip", "")

    return svg_figure("staleness", len(DELAYS), panels, height=4.2, columns=3)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) if sys.argv[1:] else HERE
    folder.mkdir(parents=True, exist_ok=True)
    table = compared(make_runs(folder / "staleness.parquet"))
    print(table.to_string(index=False, float_format="{:.3g}".format))
    (folder / "staleness.svg").write_text(draw(table) + "\n")
