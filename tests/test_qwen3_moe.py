"""Qwen3-MoE: the mixture against one expert and one token at a time, and all that a family must do."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from scipy.special import softmax
from test_families import check_files

from rpg_jax import models, objectives, parallel
from rpg_jax.models import Model, huggingface, layers, quantization, unstack_layers
from rpg_jax.models.attention import causal_attention
from rpg_jax.models.families import qwen3_moe
from rpg_jax.models.families.qwen3_moe import Config
from rpg_jax.objectives import metrics
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.packing import Plan
from rpg_jax.training.update import init_state, make_update, of_routers
from rpg_jax.types import TrainBatch

CONFIG = Config(29, 16, 12, 2, 4, 2, 4, rope_theta=1e3, max_length=64, experts=6, experts_per_token=2, expert_size=10)
MODEL = Model(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 17)).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


def dense_mixture(kernels, x, chosen, weight):
    """Every expert on every token."""
    gate, up = (jnp.einsum("btd,edm->btem", x, kernels[name]) for name in ("gate", "up"))
    every = jnp.einsum("btem,emd->bted", jax.nn.silu(gate) * up, kernels["down"])
    return jnp.einsum("btkd,btk->btd", jnp.take_along_axis(every, chosen[..., None], 2), weight)


def test_a_mixture_and_its_gradient_are_those_of_every_expert_on_every_token():
    """Also where a device has half of the experts, and where an expert has no token."""
    rng = np.random.default_rng(1)
    with jax.enable_x64():
        sizes = dict(gate=(6, 16, 10), up=(6, 16, 10), down=(6, 10, 16))
        kernels = {name: rng.normal(size=size) for name, size in sizes.items()}
        x, weight = rng.normal(size=(2, 9, 16)), rng.uniform(size=(2, 9, 2))
        chosen = np.array([0, 1, 2, 4, 5])[rng.permuted(np.tile(np.arange(5), (2, 9, 1)), axis=-1)[..., :2]]

        def halves(kernels, x, weight):
            parts = [{name: kernel[first : first + 3] for name, kernel in kernels.items()} for first in (0, 3)]
            return sum(qwen3_moe.mixture(part, 3 * n, x, chosen, weight) for n, part in enumerate(parts))

        def both(mixture):
            out, pullback = jax.vjp(mixture, kernels, x, weight)
            return out, pullback(jnp.cos(jnp.arange(out.size).reshape(out.shape)))

        found = jax.jit(lambda: [both(halves), both(lambda k, x, w: dense_mixture(k, x, chosen, w))])()
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12), *found)


def test_the_gradient_of_kernels_by_the_kernel_for_tpus():
    """In blocks that groups cross, with a group without rows and rows without a group."""
    rng, sizes = np.random.default_rng(3), np.int32([200, 0, 170, 40])
    x, d_out = (rng.normal(size=(450, width)).astype(np.float32) for width in (10, 16))
    found = jax.jit(partial(layers._tpu_gradient, interpret=True))(x, d_out, sizes)
    ends = np.cumsum(sizes)
    for kernel, end, size in zip(found, ends, sizes, strict=True):
        rows = slice(end - size, end)
        np.testing.assert_allclose(kernel, x[rows].T.astype(np.float64) @ d_out[rows], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jit(layers._ragged_gradient)(x, d_out, sizes), found, rtol=1e-4, atol=1e-4)


def test_layers_in_any_order_of_computing_and_with_given_routes(params):
    def computed(model):
        def loss(params, routes):
            hidden, auxiliary = model.hidden_and_auxiliary(params, TOKENS, routes=routes)
            return jnp.sin(hidden).sum(), auxiliary

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (value, auxiliary), gradient = computed(MODEL)(params, None)
    replayed = computed(dataclasses.replace(MODEL, scan=False, remat="full"))
    (other, _), again = replayed(params, auxiliary["routes"])
    np.testing.assert_allclose(other, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), again, gradient)
    assert np.abs(gradient["layers"]["router"]["kernel"]).max() > 0
    (moved, _), _ = replayed(params, (auxiliary["routes"] + 1) % 6)
    assert abs(moved - value) > 1e-2


def test_auxiliary_numbers_are_sums_over_the_counted_tokens(params):
    counted = np.arange(17) < np.array([[5], [9]])
    _, auxiliary = jax.jit(lambda p: MODEL.hidden_and_auxiliary(p, TOKENS, counted=counted))(params)
    assert auxiliary["routes"].shape == (2, 2, 17, 2)
    np.testing.assert_allclose(auxiliary["router_load"].sum(-1), 2 * 14)
    for layer, load in enumerate(auxiliary["router_load"]):
        np.testing.assert_allclose(load, np.bincount(auxiliary["routes"][layer][counted].reshape(-1), minlength=6))
    np.testing.assert_allclose(auxiliary["router_probability"].sum(-1), 14, rtol=1e-5)
    assert (0 < auxiliary["router_entropy"]).all() and (auxiliary["router_entropy"] < 14 * np.log(6)).all()


def test_decoding_computes_the_same_also_with_8_bits(params):
    attend = lambda kind, _, q, k, v: (causal_attention(q, k, v, kind=kind), None)  # noqa: E731
    quantized = quantization.quantize_params(unstack_layers(params), "int8")
    rounded = [quantization.dequantized(layer, jnp.float32) for layer in quantized["layers"]]
    assert isinstance(quantized["layers"][0]["experts"]["up"]["kernel"], quantization.Quantized)
    assert quantized["layers"][0]["experts"]["up"]["kernel"].scales.shape == (6, 10)
    np.testing.assert_array_equal(rounded[1]["router"]["kernel"], params["layers"]["router"]["kernel"][1])

    @jax.jit
    def both(plain, quantized, rounded):
        decoded = [
            MODEL.cached(tree, TOKENS, MODEL.turns(np.arange(17)[None]), attend, [None] * 2)[0]
            for tree in (unstack_layers(plain), quantized)
        ]
        return decoded[0], MODEL.hidden(plain, TOKENS), decoded[1], MODEL.hidden(rounded, TOKENS)

    embed = quantization.dequantized(quantized["embed"], jnp.float32)
    found = both(params, quantized, params | {"layers": rounded, "embed": embed})
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[2], found[3], rtol=1e-4, atol=1e-5)


def test_its_files(params, tmp_path):
    for config in (CONFIG, dataclasses.replace(CONFIG, normalized=False, tied_embeddings=False, balance=0.25)):
        assert huggingface.parse_config(huggingface.config_json(config)) == config
    check_files(CONFIG, params, tmp_path)
    leaves = {"layers/experts/gate/kernel": np.empty((2, 6, 16, 10)), "layers/router/kernel": np.empty((2, 16, 6))}
    places = huggingface.places(leaves)
    assert places["model.layers.1.mlp.experts.5.gate_proj.weight"].shape == (10, 16)
    assert places["model.layers.1.mlp.gate.weight"].shape == (6, 16)


@pytest.mark.parametrize(("changes", "said"), [
    (dict(mlp_only_layers=[0]), "mlp_only_layers is .0.; only .. is supported"),
    (dict(decoder_sparse_step=2), "decoder_sparse_step is 2; only 1"),
    (dict(num_experts_per_tok=7), r"experts_per_token \(7\) must be at most experts \(6\)"),
    (dict(moe_intermediate_size="wide"), "moe_intermediate_size is 'wide'; expected an integer"),
])  # fmt: skip
def test_what_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        huggingface.parse_config(huggingface.config_json(CONFIG) | changes)


def test_a_router_is_numpys_and_in_bfloat16_one_of_the_rounded_numbers(params):
    x = jax.random.normal(jax.random.key(1), (2, 17, 16), jnp.bfloat16)
    kernel = jax.tree.map(lambda leaf: leaf[0], params["layers"]["router"])
    wide = {"kernel": kernel["kernel"].astype(jnp.bfloat16).astype(jnp.float32)}
    narrow, normal = (qwen3_moe.route(CONFIG, *of, None) for of in ((x, kernel), (x.astype(jnp.float32), wide)))
    plain = qwen3_moe.route(dataclasses.replace(CONFIG, normalized=False), x.astype(jnp.float32), wide, None)
    for one, other in zip(narrow, normal, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5)
    probability = softmax(np.asarray(x, np.float64) @ np.asarray(wide["kernel"], np.float64), -1)
    kept = -np.sort(-probability, -1)[..., :2]
    np.testing.assert_allclose(normal[2], kept / kept.sum(-1, keepdims=True), rtol=1e-5)
    expected = probability, np.argsort(-probability, -1)[..., :2], kept
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), plain, expected)


def test_a_mesh_that_divides_rows_and_experts_computes_what_one_device_does():
    """Recorded routes and tokens are the same, and packed updates are: of weights, and of adapters with kl="full"."""
    done = processes.execute("-m", "experts_on_meshes", timeout=600, JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["shards"] == [[1, 2, 8, 12], [1, 2, 32]], "what expert does not divide otherwise it does as fsdp does"
    assert all(found["same"].values()) and found["replayed"] > 4 * found["tokens"] / 2 > 100, found
    apart = found["logp"], *found["weights"].values(), *found["adapters"].values()
    assert max(apart) < 2e-5, found


def test_a_mesh_divides_experts_only_where_there_are_some():
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 3), parallel.mesh.AXES)
    with pytest.raises(ValueError, match="experts/.*mesh.expert=4 does not divide 6; .* mesh.expert may be 1, 2, 3, 6"):
        parallel.check_model(jax.sharding.AbstractMesh((1, 1, 1, 4), parallel.mesh.AXES), MODEL)
    with pytest.raises(ValueError, match="mesh.expert=3 divides the experts of a layer, and a llama has none"):
        parallel.check_model(mesh, Model(models.ModelConfig(29, 16, 12, 2, 4, 2, 4)))


def test_the_balance_of_loads_by_hand():
    load, probability = np.float32([[6, 2, 0, 0], [2, 2, 2, 2]]), np.float32([[2, 1, 0.5, 0.5], [1, 1, 1, 1]])
    sums = dict(router_load=load, router_probability=probability, router_entropy=np.float32([4, 8]))
    balance, measured = of_routers(sums, jnp.float32(4))  # of two experts a token
    found = metrics.values(measured)
    by_hand = np.mean([4 * (6 / 4 * 2 / 4 + 2 / 4 * 1 / 4), 2])
    np.testing.assert_allclose([balance, found["router_balance"]], by_hand)
    np.testing.assert_allclose([found[f"router_{name}"] for name in ("entropy", "load_max", "unused")], [1.5, 3, 0.25])


def test_the_balance_loss_alone_spreads_tokens(params):
    """Advantages of zero leave nothing else to learn from; the loss is the mean over both microbatches."""
    mesh, optimizer = parallel.make_mesh(data=1, devices=jax.devices()[:1]), make_optimizer("adamw", learning_rate=0.01)
    state = init_state(optimizer, mesh, jax.tree.map(jnp.copy, params))
    ones, none = np.ones((4, 9), np.float32), np.zeros((4, 9), np.float32)
    tokens = np.random.default_rng(2).integers(0, 29, (4, 9)).astype(np.int32)
    batch = TrainBatch(tokens, np.full(4, 9, np.int32), np.arange(9) > none, -ones, -ones, none[:, :1], ones)
    update = make_update(
        MODEL, objectives.make("reinforce"), optimizer, mesh, state, rows=2, temperature=1.0, clip_norm=1e9,
        logprob_chunk=9, router_balance=0.5,
    )  # fmt: skip
    history = []
    for _ in range(6):
        state, measured = update(state, parallel.to_global(mesh, parallel.ROWS, batch), Plan(jnp.int32(2), None), {})
        history.append(jax.device_get(metrics.values(measured)))
    np.testing.assert_allclose([row["loss"] for row in history], [row["router_balance"] / 2 for row in history], 1e-5)
    assert history[-1]["router_balance"] < history[0]["router_balance"]
    assert 0 < history[0]["router_entropy"] < np.log(6) and 1 <= history[0]["router_load_max"] <= 3
