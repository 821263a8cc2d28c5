"""Stale gradients by sampling: held against enumeration, against each objective's own gradient, and as a command."""

import functools
import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "docs/study"))
from oracle import estimators, gradients, measure, tables, task  # noqa: E402
from oracle.estimators import ESTIMATORS  # noqa: E402
from oracle.policies import logprobs  # noqa: E402

logprobs_of, rewards_of = jax.jit(logprobs, static_argnums=0), jax.jit(task.rewards)


class Bigram(NamedTuple):
    """A model whose logits depend on the token before alone."""

    def hidden(self, params, tokens):
        return params["table"][tokens]

    def logits(self, params, hidden):
        return hidden


@pytest.fixture(scope="module")
def policy():
    random = np.random.default_rng(0)
    return {"table": jnp.asarray(random.normal(0, 0.5, (task.VOCABULARY, task.VOCABULARY)), jnp.float32)}


@functools.partial(jax.jit, static_argnums=(2, 3))
def drawn(params, prompts, samples, length, seed=0):
    """Responses of the bigram policy to each prompt."""
    tokens, key = jnp.repeat(prompts, samples, axis=0), jax.random.key(seed)
    for step in range(length):
        logits = params["table"][tokens[:, -1]]
        tokens = jnp.column_stack([tokens, jax.random.categorical(jax.random.fold_in(key, step), logits)])
    return tokens


def test_the_right_tokens_count_on():
    tokens = np.array([[task.VALUES + 2, 14, 15, 0, 5]])
    assert jax.jit(task.right_tokens)(tokens).tolist()[0][2:] == [15, 0, 1]
    assert rewards_of(tokens).tolist() == pytest.approx([2 / 3])
    demonstrations = task.demonstrations(np.random.default_rng(0), 400, 16)
    assert np.asarray(rewards_of(demonstrations)).mean() == pytest.approx(np.mean(task.SURE) + 0.45 / 16, abs=0.02)


def test_the_reference_gradient_is_that_of_the_enumerated_reward(policy):
    prompts = task.prompts(16).tokens

    def reward(params):  # of two tokens: the first is right, and the second given every first one
        first = jax.nn.log_softmax(params["table"][prompts[:, 1]])
        every = np.stack([np.column_stack([prompts, np.full((len(prompts), 2), x)]) for x in range(first.shape[1])])
        second = jnp.exp(jax.vmap(lambda tokens: logprobs(Bigram(), params, tokens)[1])(every))  # [V, P, 2]
        return jnp.mean(second[0, :, 0] + jnp.sum(jnp.exp(first) * second[:, :, 1].T, 1)) / 2

    exact = np.asarray(jax.jit(jax.grad(reward))(policy)["table"]).reshape(-1)
    sampled = gradients.fresh_block(Bigram(), policy, drawn(policy, prompts, 512, 2), 512)
    assert np.linalg.norm(sampled - exact) < 0.1 * np.linalg.norm(exact)


def test_moments_are_those_of_the_gradients_of_groups(policy, monkeypatch):
    name, like = "token, RPG-Style Clip", "sequence, RPG-Style Clip"
    for module in (gradients, estimators):  # few enough to compile in a test
        monkeypatch.setattr(module, "ESTIMATORS", {key: ESTIMATORS[key] for key in ("no ratio", name, like)})
    prompts, samples, size = task.prompts(32).tokens, 4, 2
    tokens = drawn(policy, prompts, samples, 3)
    behavior = logprobs_of(Bigram(), policy, tokens)[0]
    now = {"table": np.asarray(policy["table"]) * 1.5}
    block = gradients.stale_block(Bigram(), now, tokens, behavior, samples, (size,))
    rewards = np.asarray(rewards_of(tokens)).reshape(-1, size)
    advantage = jnp.asarray(rewards - rewards[:, ::-1]).reshape(-1, 1)  # without the mean of the other one

    for place, key in enumerate(("no ratio", name, like)):

        def loss(params, rows, objective=ESTIMATORS[key].objective):
            logp, mask = logprobs(Bigram(), params, tokens[rows])[0], jnp.ones((size, 3), bool)
            return -objective(logp, behavior[rows], advantage[rows], mask, denominator=size)[0]

        gradient = jax.jit(lambda *x, loss=loss: jax.grad(loss)(*x)["table"].ravel())
        groups = [np.asarray(gradient(now, np.arange(i, i + size))) for i in range(0, len(tokens), size)]
        np.testing.assert_allclose(block.mean[size][place], np.mean(groups, 0), atol=1e-6)
        assert block.square[size][place] == pytest.approx(np.mean([float(g @ g) for g in groups]), rel=1e-4)


def kept(seed=0, blocks=24, dimensions=5, noise_of_reference=0.1):
    """Moments of made-up gradients: the reference has norm 1, unclipped is exact, the other has bias² 0.04."""
    random = np.random.default_rng(seed)
    truth = np.eye(dimensions)[0]
    fresh = list(truth + random.normal(0, noise_of_reference, (blocks, dimensions)))
    made = {"token": (truth, 0.8), "token, RPG-Style Clip": (0.8 * truth, 0.4)}
    stale = []
    for _ in range(blocks):
        mean, square = np.tile(truth, (len(ESTIMATORS), 1)), np.ones(len(ESTIMATORS))
        for name, (center, noise) in made.items():
            draws = center + random.normal(0, noise, (400, dimensions))
            place = list(ESTIMATORS).index(name)
            mean[place], square[place] = draws.mean(0), (draws**2).sum(1).mean()
        stale.append(gradients.Stale({8: mean}, {8: square}, np.zeros((1, 1))))
    facts = dict(length=16, updates=4, kl=0.1, token_ess=1.0, sequence_ess=1.0, outside=0.0, reward=0.5)
    return measure.rows(fresh, stale, (8,)).assign(**facts)


def test_bias_variance_and_crossing_are_recovered():
    table = tables.estimates(kept()).set_index("estimator")
    clip, base = table.loc["token, RPG-Style Clip"], table.loc["token"]
    assert clip.bias == pytest.approx(0.04, abs=3 * clip.bias_error) and abs(base.bias) < 3 * base.bias_error
    assert clip.variance == pytest.approx(5 * 0.16, rel=0.1) and base.variance == pytest.approx(5 * 0.64, rel=0.1)
    assert clip.n_star == pytest.approx(8 * (3.2 - 0.8) / 0.04, rel=0.4) and clip.n_star_low < clip.n_star
    assert clip.direction == pytest.approx(1, abs=0.01)  # it is shorter, and points the same way
    assert clip.reference_error == pytest.approx(0.1 * np.sqrt(5 / 24), rel=0.3)
    assert clip.cosine == pytest.approx(0.8 / np.sqrt(0.64 + 0.8 / 16), abs=0.02)


def test_the_page_shows_the_points_of_the_kept_moments():
    root = pathlib.Path(__file__).parents[1]
    page = (root / "docs/study/oracle.md").read_text()
    table = tables.estimates(pd.read_parquet(root / "docs/study/oracle.parquet"))
    for row in table.drop_duplicates(["length", "updates"]).itertuples():
        shown = "yes" if row.reference_error < tables.LARGEST_ERROR else "no"
        facts = f"{row.reward:.3f} | {row.outside:.2%} | {row.token_ess:.1%} | {row.sequence_ess:.2%}"
        line = f"| {row.length}, {row.updates} | {row.kl:.3g} | {facts} | {row.reference_error:.1%} | {shown} |"
        assert line in page
