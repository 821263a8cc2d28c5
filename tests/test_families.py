"""The fork test of a family: one made-up file trains, decodes, scans, is read and written; against numpy in float64."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import made_up_family
import numpy as np
import pytest

from rpg_jax.models import Model, families, huggingface, parameter_count, token_logprobs, unstack_layers
from rpg_jax.models.attention import causal_attention
from rpg_jax.storage import weights

CONFIG = made_up_family.Config(29, 8, 12, 6, 4, 2, 4, rope_theta=1e3, max_length=64)
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 17)).astype(np.int32)
SEGMENT = np.where(np.arange(17) < 7, 0, 1)[None].repeat(2, 0).astype(np.int32)
POSITION = np.where(SEGMENT == 0, np.arange(17), np.arange(17) - 7).astype(np.int32)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The one line of a fork in models/families/__init__.py."""
    monkeypatch.setitem(families.FAMILIES, "made_up", made_up_family)
    monkeypatch.setitem(huggingface.ARCHITECTURES, "MadeUpForCausalLM", "made_up")
    monkeypatch.setattr(families, "TENSORS", made_up_family.MODULES)


# Of every family: a test of a new one takes them from here.


def parameters(config=CONFIG, dtype=np.float64):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(0, 0.4, x.shape).astype(dtype), Model(config).shapes)


def rms(x, w):
    return x / np.sqrt(np.mean(x * x) + 1e-6) * (1 + w)


def turned(x, position, theta):
    """The numbers of a head, in pairs (i, i + half), by angles that `theta` makes smaller from pair to pair."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def mixed(q, k, v, t, window, theta, score=lambda x: x, stretch=1.0):
    """What a token's heads attend to, put together; q, k and v are [token][head], with two heads of q to one of k."""
    seen, found = range(max(0, t - window + 1), t + 1), []
    for head, query in enumerate(q[t]):
        keys = np.array([turned(k[s][head // 2], s / stretch, theta) for s in seen])
        weight = np.exp(score(keys @ turned(query, t / stretch, theta)))
        found.append(weight / weight.sum() @ np.array([v[s][head // 2] for s in seen]))
    return np.concatenate(found)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def check_files(config, params, folder):
    """What is written in Hugging Face's format is read as it was."""
    weights.save_safetensors(folder, jax.tree.map(jnp.asarray, params), 1e9)
    (folder / "config.json").write_text(json.dumps(huggingface.config_json(config)))
    assert huggingface.read_config(folder) == config
    jax.tree.map(np.testing.assert_array_equal, weights.load(folder, Model(config).shapes), params)


def numpy_logits(params):
    """One sequence, one position and one head at a time."""

    def sequence(tokens):
        x = [params["embed"]["embedding"][token] * np.sqrt(8) for token in tokens]
        for index in range(6):
            w = {name: next(iter(leaf.values()))[index] for name, leaf in params["layers"].items()}
            window, theta = (99, 1e3) if index in (2, 5) else (4, 50.0)
            h = [rms(token, w["n"]) for token in x]
            heads = [[(token @ w[name]).reshape(-1, 4) for token in h] for name in "qkv"]
            for t in range(len(x)):
                x[t] = x[t] + mixed(*heads, t, window, theta, lambda x: 2 * np.tanh(0.6 * x / 2)) @ w["o"]
                x[t] = x[t] + gelu(x[t] @ w["a"]) * (x[t] @ w["b"]) @ w["c"]
        return [params["embed"]["embedding"] @ rms(token, params["final_norm"]["scale"]) for token in x]

    return np.array([sequence(row[:7]) + sequence(row[7:]) for row in TOKENS])  # [2, 17, 29]


def numpy_loss(params):
    logits = numpy_logits(params)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    columns = [t for t in range(1, 17) if t != 7]  # the first token of a sequence is predicted by nothing
    return -sum(logp[row, t - 1, TOKENS[row, t]] for row in range(2) for t in columns)


def loss(model, params):
    mask = np.ones((2, 17), bool)
    mask[:, 7] = False
    logp = token_logprobs(model, params, TOKENS, mask, positions=POSITION, segment_ids=SEGMENT, chunk=5)
    return -logp.sum()


def test_its_loss_and_gradient_are_those_of_numpy():
    """The gradient along a random direction, by differences of the numpy loss in float64."""
    params, rng = parameters(), np.random.default_rng(2)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    at, up, down = (numpy_loss(jax.tree.map(lambda x, d, e=e: x + e * d, params, direction)) for e in (0, 1e-5, -1e-5))
    for variant in ({"scan": False}, {"remat": "attention"}):
        with jax.enable_x64():
            model = Model(CONFIG, dtype=jnp.float64, **variant)
            value, gradient = jax.jit(jax.value_and_grad(partial(loss, model)))(params)
            slope = sum(np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
            np.testing.assert_allclose(value, at, rtol=1e-6)  # rotary angles are float32
            np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-5)


def test_layers_in_periods_are_scanned_or_decoded_by_their_kinds_and_give_auxiliary_numbers():
    model, params = Model(CONFIG), parameters(dtype=np.float32)
    text, turns = str(jax.make_jaxpr(model.hidden)(params, TOKENS)), model.turns(np.arange(17)[None])
    assert "length=2" in text and "length=6" not in text, "two periods of three layers"
    assert [kind.window for kind in model.kinds] == [4, 4, None] * 2 and len(turns) == 2, "and two bases of rotations"

    @jax.jit
    def every_way(params):
        attend = lambda kind, _, q, k, v: (causal_attention(q, k, v, kind=kind), None)  # noqa: E731
        both = [dataclasses.replace(model, scan=scan).hidden_and_auxiliary(params, TOKENS) for scan in (True, False)]
        return *both, model.cached(unstack_layers(params), TOKENS, turns, attend, [None] * 6)

    (hidden, scanned), (plain, unrolled), (decoded, *_) = every_way(params)
    np.testing.assert_allclose(hidden, plain, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hidden, decoded, rtol=1e-4, atol=1e-5)
    assert scanned["gate"].shape == (6,) and len(set(np.asarray(scanned["gate"]).tolist())) == 6
    np.testing.assert_allclose(scanned["gate"], unrolled["gate"], rtol=1e-3)


def test_its_files(tmp_path):
    params = parameters(dtype=np.float32)
    assert parameter_count(CONFIG) == sum(x.size for x in jax.tree.leaves(params))
    check_files(CONFIG, params, tmp_path)
