"""Numbers that go wrong have a defined outcome: what no other test covers (docs/reliability.md has the promises)."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from rpg_jax.objectives import RECIPES, make
from rpg_jax.run import build
from rpg_jax.sampling import draw as drawing
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.reference import ReferenceSchedule
from rpg_jax.types import Checkpoint, Policy, TrainState

LAST = build.MOST_UPDATES - 1  # the count of updates before the last that a run may take
SHAPE = (4, 5)
SETTINGS = {"cispo": dict(clip_high=3.0)}  # without a default


def batch(seed=0):
    """{name: array [4, 5]} of an update on policy, with a reference apart."""
    rng = np.random.default_rng(seed)
    logp, reference = rng.normal(-3, 0.3, (2, *SHAPE)).astype(np.float32)
    return dict(logp=logp, behavior_logp=logp, advantage=rng.normal(size=SHAPE).astype(np.float32)), reference


@cache
def compiled(name):
    """(loss, gradient) of an objective with its defaults, as a function of `batch`'s arrays."""
    objective = make(name, **SETTINGS.get(name, {}))
    denominator = 7.0 if objective.reduction == "constant" else None

    def loss(logp, behavior_logp, advantage, mask, reference):
        return objective(logp, behavior_logp, advantage, mask, reference_logp=reference, denominator=denominator)[0]

    return jax.jit(jax.value_and_grad(loss))


def gradient(name, arrays, mask, reference):
    return jax.device_get(compiled(name)(*arrays.values(), mask, reference))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("which", ["logp", "behavior_logp", "advantage"])
def test_a_token_that_is_not_a_number_is_never_learned_from(name, which):
    """The loss or the gradient is not finite either, and the update is skipped and counted; or it plays no part."""
    arrays, reference = batch()
    arrays = {key: array.copy() for key, array in arrays.items()}
    _, clean = gradient(name, arrays, np.ones(SHAPE, bool), reference)
    arrays[which][2, 3] = np.nan
    loss, slope = gradient(name, arrays, np.ones(SHAPE, bool), reference)
    assert not (np.isfinite(loss) and np.isfinite(slope).all()) or (slope == clean).all()


def test_logits_that_are_not_numbers_draw_a_token_whose_log_prob_says_so():
    logits = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    logits[1], logits[2, 7] = np.nan, np.inf
    arguments = logits, 1.0, np.full(4, -np.inf, np.float32), np.full((2, 4), 0.5, np.float32)
    tokens, logp = jax.device_get(jax.jit(drawing.draw)(*arguments))
    assert (tokens < 300).all() and (tokens >= 0).all()
    assert np.isfinite(logp).tolist() == [True, False, False, True]


def test_more_updates_than_a_counter_holds_are_refused():
    config = quickstart.get_config()
    config.steps = build.MOST_UPDATES
    with pytest.raises(ValueError, match=r"^steps=2147483647 of 4 optimizer updates .* lower steps"):
        build.build_settings(config)


LEFT = {None: lambda done: 1, "linear": lambda done: 1 - done, "cosine": lambda done: (1 + np.cos(np.pi * done)) / 2}


@pytest.mark.parametrize("name, decay", [*(("adamw", decay) for decay in LEFT), ("schedule_free_adamw", None)])
def test_steps_are_those_of_the_papers_in_float64(name, decay):
    """AdamW's Algorithm 2, and Algorithm 1 of Defazio et al. 2024 with averages weighted by squares of the rate."""
    settings = dict(warmup_steps=3, beta1=0.8, beta2=0.99, weight_decay=0.2, decay=decay, total_steps=8)
    optimizer = make_optimizer(name, learning_rate=0.1, **settings)
    x = y = z = np.array([1.0, -2.0, 0.5])
    m = v = weight = 0.0
    params = jnp.array(y, jnp.float32)
    state, step = optimizer.transformation.init(params), jax.jit(optimizer.transformation.update)
    for t in range(1, 10):
        g, rate = np.cos(t * np.arange(1.0, 4.0)), 0.1 * min(1.0, t / 3) * LEFT[decay](np.clip((t - 3) / 5, 0, 1))
        m, v = 0.8 * m + 0.2 * g, 0.99 * v + 0.01 * g * g
        pull = (m / (1 - 0.8**t) if name == "adamw" else g) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + 0.2 * y
        z, weight = z - rate * pull, weight + rate**2
        x = z if name == "adamw" else x + rate**2 / weight * (z - x)
        y = 0.2 * z + 0.8 * x
        change, state = step(jnp.array(g, jnp.float32), state, params)
        params = params + change
        np.testing.assert_allclose(params, y, rtol=2e-5)
        np.testing.assert_allclose(optimizer.evaluation_params(state, params), x, rtol=2e-5)


@pytest.mark.parametrize(("name", "decay"), [("adamw", "cosine"), ("adamw", None), ("schedule_free_adamw", None)])
def test_the_last_update_that_a_counter_holds(name, decay):
    optimizer = make_optimizer(name, learning_rate=0.1, warmup_steps=10, decay=decay, total_steps=build.MOST_UPDATES)
    params = {"kernel": np.ones(3, np.float32)}
    state = jax.jit(optimizer.transformation.init)(params)
    late = jax.tree.map(lambda leaf: np.full_like(leaf, LAST) if leaf.dtype == jnp.int32 else leaf, state)
    steps, after = jax.jit(optimizer.transformation.update)(params, late, params)
    assert np.isfinite(steps["kernel"]).all() and (steps["kernel"] <= 0).all()
    assert {int(leaf) for leaf in jax.tree.leaves(after) if leaf.dtype == jnp.int32} == {build.MOST_UPDATES}


def test_the_reference_and_the_noise_of_late_steps():
    state = TrainState(jnp.int32(LAST), {}, (), jnp.zeros(2, jnp.int32), jnp.zeros(()))
    last = Checkpoint(state, Policy(None, {}, jnp.int32(LAST - 1)))
    schedule = ReferenceSchedule(mode="every", every=3)
    assert schedule.age(last) == 1 and schedule.is_due(last) == (LAST // 3 > (LAST - 1) // 3)
    earlier = dataclasses.replace(state, step=jnp.int32(LAST - 1))
    assert not schedule.is_due(dataclasses.replace(last, state=earlier))
    key = jax.random.key(0, impl="threefry2x32")
    noise = [drawing.request_key(key, jnp.int32(step), jnp.int32(LAST), jnp.int32(LAST)) for step in (0, LAST)]
    assert (noise[0] != noise[1]).any()
