"""Which clip at which staleness, when bounds and learning rates are tuned: the runs of staleness.md.

    python docs/study/staleness.py [FOLDER]

Makes the runs that FOLDER/staleness.parquet lacks (the folder of this file, if none is given), two at a time: of each
cell (a delay, a reward, an arm) first those that choose its rate, then those that are compared. Then prints the tables
and draws the figure. It goes on where it was stopped.
"""

import argparse
import collections
import concurrent.futures
import functools
import multiprocessing
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # rpg_jax
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # oracle, resumable, sign

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import resumable
from oracle import policies, task
from sign import paired

from rpg_jax.lab.reporting import estimates
from rpg_jax.lab.reporting.figures import MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame
from rpg_jax.lab.sweeping.pool import cores
from rpg_jax.models import unstack_layers
from rpg_jax.objectives import make
from rpg_jax.training.optimizer import make_optimizer

HERE = pathlib.Path(__file__).parent
TIGHT, MIDDLE, WIDE = "0.2, 0.28", "0.5, 1", "0.8, 4"
BOUNDS = {TIGHT: (0.2, 0.28), MIDDLE: (0.5, 1.0), WIDE: (0.8, 4.0)}
CLIPS = {"Algorithm 2": "rpg", "equation 4.1": "coefficient", "Remark F.2": "truncate"}
DECOUPLED = f"decoupled, {TIGHT}"
ARMS = {
    "no clip": dict(name="rpg", beta=0.0),
    **{f"{clip}, {bounds}": dict(name="rpg", clip=name, clip_low=low, clip_high=high, beta=0.0)
       for clip, name in CLIPS.items() for bounds, (low, high) in BOUNDS.items()},
    DECOUPLED: dict(name="ppo_clip", clip_low=0.2, clip_high=0.28),
    **{f"urkl, {beta:g}": dict(name="rpg", beta=beta) for beta in (0.003, 0.01)},
}  # fmt: skip
# For each delay and reward the middle of the first three rates of each arm, as a number of `rate`: where earlier runs
# had their best, and lower where rewards are of whole responses, of which a trial broke.
WHOLE = (
    "no clip",
    f"Algorithm 2, {TIGHT}",
    f"Algorithm 2, {WIDE}",
    f"equation 4.1, {WIDE}",
    f"Remark F.2, {WIDE}",
    DECOUPLED,
)
MIDDLES = {
    (64, "share"): dict(zip(ARMS, (8, 14, 11, 8, 2, 4, 6, 3, 5, 7, 8, 8, 9), strict=True)),
    (16, "share"): dict(zip(ARMS, (8, 14, 10, 9, 6, 6, 8, 6, 7, 8, 10, 8, 9), strict=True)),
    (64, "whole"): dict(zip(WHOLE, (6, 13, 6, 4, 5, 6), strict=True)),
}
CELLS = [(*of, arm) for of, middles in MIDDLES.items() for arm in middles]  # delay, reward, arm
TUNING, SEEDS = tuple(range(200, 210)), tuple(range(300, 320))
FALL = 0.05  # a run falls that loses this much between two evaluations
RIGHT = 24  # of 32 tokens; rewards of whole responses are 1 for so many right ones, and else 0
MARGIN = 0.02  # of equality: two points
SAVED = 10  # runs that are saved at once
STEPS, UPDATES, PROMPTS, SAMPLES, LENGTH, EVERY = 60, 4, 16, 8, 32, 15
CELL = ["delay", "reward", "arm"]
KEY = [*CELL, "rate", "seed"]


def rate(number: int) -> float:
    """The learning rate of a number of the grid."""
    return float(f"{1e-4 * 2 ** (number / 2):.3g}")


def respond(model, params, prompts, key):
    """Responses to prompts i32[B, PROMPT], drawn at temperature 1: (tokens i32[B, PROMPT + LENGTH], log-probs of the
    responses f32[B, LENGTH])."""
    params, config, prompts = unstack_layers(params), model.config, jnp.asarray(prompts)
    rows, width = len(prompts), task.PROMPT + LENGTH
    turns, shape = model.turns(jnp.arange(width)[None]), (rows, width, config.kv_heads, config.head_dim)

    def step(carry, column):
        caches, token = carry
        kept = []

        def attend(layer, q, k, v):  # each [B, 1, heads, head_dim]
            at = (0, column, 0, 0)
            k, v = (jax.lax.dynamic_update_slice(of, x, at) for of, x in zip(caches[layer], (k, v), strict=True))
            kept.append((k, v))
            q = q.reshape(rows, config.kv_heads, -1, config.head_dim)
            scores = jnp.einsum("bkgd,btkd->bkgt", q, k) * config.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(jnp.arange(width) <= column, scores, -jnp.inf))
            return jnp.einsum("bkgt,btkd->bkgd", weights, v).reshape(rows, 1, -1, config.head_dim), None

        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, column, 1, axis=1), turns)
        hidden, *_ = model.cached(params, token[:, None], own, attend)
        logp = jax.nn.log_softmax(model.logits(params, hidden[:, 0]))  # [B, V]
        drawn = jax.random.categorical(jax.random.fold_in(key, column), logp)
        token = jnp.where(column + 1 < task.PROMPT, prompts[:, (column + 1) % task.PROMPT], drawn).astype(jnp.int32)
        return (kept, token), (token, jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0])

    empty = [(jnp.zeros(shape), jnp.zeros(shape))] * config.layers
    _, (tokens, logp) = jax.lax.scan(step, (empty, prompts[:, 0]), jnp.arange(width - 1))
    return jnp.concatenate([prompts[:, :1], tokens.T], 1), logp.T[:, task.PROMPT - 1 :]


def rewards(tokens: jax.Array, kind: str) -> jax.Array:
    """Of responses i32[B, PROMPT + LENGTH], f32[B]: the share of right tokens, or whether there are RIGHT of them."""
    share = task.rewards(tokens)
    return share if kind == "share" else (share >= RIGHT / LENGTH).astype(jnp.float32)


@functools.cache
def programs(arm: str, kind: str):
    """Of an arm: (init, the jitted step, the jitted score) of (parameters, ...)."""
    objective, model, every = make(**ARMS[arm]), policies.transformer(), task.prompts().tokens
    adamw = make_optimizer("adamw", learning_rate=1.0, warmup_steps=10)

    def loss(params, tokens, advantage, drew, old):
        logp = policies.logprobs(model, params, tokens)[0]
        mask = jnp.ones(logp.shape, bool)
        if arm == DECOUPLED:  # the clip is around the proximal policy; arXiv 2505.24298, equation 2
            return objective(logp, old, advantage, mask, weight=jnp.exp(old - drew))[0]
        return objective(logp, drew, advantage, mask)[0]

    @jax.jit
    def step(params, state, rate, behavior, prompts, key):
        tokens, drew = respond(model, behavior, jnp.repeat(prompts, SAMPLES, 0), key)
        old = policies.logprobs(model, params, tokens)[0] if arm == DECOUPLED else drew
        of = rewards(tokens, kind).reshape(-1, SAMPLES)
        advantage = (of - of.mean(1, keepdims=True)).reshape(-1, 1)

        def update(carry, batch):
            params, state = carry
            steps, state = adamw.transformation.update(jax.grad(loss)(params, *batch), state, params)
            return (optax.apply_updates(params, jax.tree.map(lambda x: rate * x, steps)), state), None

        parts = jax.tree.map(lambda x: x.reshape(UPDATES, -1, *x.shape[1:]), (tokens, advantage, drew, old))
        return jax.lax.scan(update, (params, state), parts)[0]  # steps of a rate of 1: they are linear in it

    @jax.jit
    def score(params, key):
        tokens, _ = respond(model, params, jnp.repeat(every, 4, 0), key)
        if kind == "share":  # what the policy expects of each token that it drew
            return jnp.exp(policies.logprobs(model, params, tokens)[1]).mean()
        return rewards(tokens, kind).mean()

    return adamw.transformation.init, step, score


def trial(name: tuple) -> dict:
    """A run: its expected rewards at steps 0, EVERY, 2 EVERY, ... from 512 fresh responses each."""
    delay, kind, arm, rate, seed = name
    params = policies.warm_start(policies.transformer(), 0, **policies.DEMONSTRATIONS)
    init, step, score = programs(arm, kind)
    state, rng, every = init(params), np.random.default_rng(seed), task.prompts().tokens
    past = collections.deque([params], maxlen=delay // UPDATES + 1)  # at the starts of steps, oldest first
    noise, fresh = jax.random.split(jax.random.key(seed))  # the same in all arms
    scores = [float(score(params, fresh))]
    for number in range(1, STEPS + 1):
        chosen = every[rng.integers(len(every), size=PROMPTS)]
        params, state = step(params, state, rate, past[0], chosen, jax.random.fold_in(noise, number))
        past.append(params)
        if number % EVERY == 0:
            scores.append(float(score(params, jax.random.fold_in(fresh, number))))
    return dict(zip(KEY, name, strict=True)) | dict(scores=scores)


def with_outcomes(kept: pd.DataFrame) -> pd.DataFrame:
    """The rows with their area, the mean score over the run by trapezoids, their last score, and whether they fell."""
    scores = np.array(kept.scores.tolist()).reshape(len(kept), -1)
    area = np.trapezoid(scores, axis=1) / max(scores.shape[1] - 1, 1)
    return kept.assign(area=area, last=scores[:, -1:].sum(1), fell=(np.diff(scores) < -FALL).any(1))


def wanted(kept: pd.DataFrame, cell: tuple) -> list[tuple]:
    """The runs of a cell that are to be made next; none once all are there."""
    of = dict(zip(CELL, cell, strict=True))
    return resumable.wanted(kept, of, MIDDLES[cell[:2]][cell[2]], rate, with_outcomes, TUNING, SEEDS, most=1)


def pin(cores):
    """Gives a worker a core of its own: with threads for all of them, workers wait for each other."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [cores.get()])


def make_runs(file: pathlib.Path) -> pd.DataFrame:
    """All runs, from the file and made anew, a cell after the other."""
    kept = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=[*KEY, "scores"])
    context, each = multiprocessing.get_context("spawn"), cores()
    own = context.SimpleQueue()
    for core in each:
        own.put(core)
    with concurrent.futures.ProcessPoolExecutor(len(each), context, pin, (own,)) as pool:
        for number, cell in enumerate(CELLS, 1):
            while names := wanted(kept, cell):
                print(f"{number} of {len(CELLS)}: {cell}, {len(names)} runs to make", file=sys.stderr, flush=True)
                rows = pd.DataFrame(pool.map(trial, names[:SAVED]))
                kept = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
                resumable.save(kept, file)
    return kept


def compared(kept: pd.DataFrame) -> pd.DataFrame:
    """A row for each cell: its rate, area, last score and runs that fell, and what its area is above no clip, over the
    seeds that chose no rate."""
    final = with_outcomes(kept[kept.seed.isin(SEEDS)])
    rows = []
    for (delay, kind), at in final.groupby(["delay", "reward"], sort=False):
        area = at.pivot(index="seed", columns="arm", values="area")
        for arm in (arm for arm in ARMS if arm in area):
            of = at[at.arm == arm]
            row = dict(delay=delay, reward=kind, arm=arm, rate=of.rate.iloc[0], area=of.area.mean())
            row |= dict(last=of["last"].mean(), fell=of.fell.sum())
            rows.append(row | ({} if arm == "no clip" else paired(area[arm] - area["no clip"], MARGIN)))
    table = pd.DataFrame(rows)
    for _, at in table[table.arm != "no clip"].groupby(["delay", "reward"]):
        for p in ("t", "flip", "equal"):
            table.loc[at.index, f"{p}, Holm"] = estimates.holm(at[p])
    return table


def draw(table: pd.DataFrame) -> str:
    """A panel for each delay and reward: what each arm's area is above no clip, in points, with 95 % intervals."""
    panels_of = list(table.groupby(["delay", "reward"], sort=False))

    def panels(axes):
        names = [arm for arm in ARMS if arm != "no clip"]
        for axis, ((delay, kind), at) in zip(axes, panels_of, strict=True):
            of = at.set_index("arm")
            for row, arm in enumerate(names[::-1]):
                if arm in of.index:
                    family = [*CLIPS, "decoupled", "urkl"].index(arm.partition(",")[0])
                    style = dict(color=COLORS[family], marker=MARKERS[family], capsize=2)
                    axis.errorbar(100 * of["mean"][arm], row, xerr=100 * of.half[arm], **style)
            axis.axvline(0, color="black", linewidth=0.8)
            axis.set_yticks(range(len(names)), names[::-1] if axis is axes[0] else [""] * len(names))
            axis.set_ylim(-0.6, len(names) - 0.4)
            of_whole = ", whole responses" if kind == "whole" else ""
            frame(axis, f"{delay} updates ago{of_whole}", "points of mean score above no clip", "")

    return svg_figure("staleness", len(panels_of), panels, height=4.2, columns=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=HERE, help="of runs, table and figure")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    table = compared(make_runs(folder / "staleness.parquet"))
    print(table.to_string(index=False, float_format="{:.3g}".format))
    (folder / "staleness.svg").write_text(draw(table) + "\n")
