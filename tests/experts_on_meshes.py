"""A mixture of experts on a mesh of 8 simulated devices against one, as JSON; run by tests/test_qwen3_moe.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from mesh_equivalence import distance

from rpg_jax import parallel
from rpg_jax.models import Model, token_logprobs, unstack_layers
from rpg_jax.models.attention import causal_attention
from rpg_jax.models.families import qwen3_moe

CONFIG = qwen3_moe.Config(
    32, 16, 12, 1, 4, 2, 8, rope_theta=1e3, max_length=64, experts=8, experts_per_token=3, expert_size=12
)
MESHES = {}, dict(fsdp=2, tensor=2, expert=2)


def measured(sizes) -> dict:
    mesh = parallel.make_mesh(data=1, devices=jax.devices()[: int(np.prod([*sizes.values()]))], **sizes)
    functions = (parallel.make_constrain, parallel.make_per_shard, parallel.make_per_expert)
    constrain, per_shard, per_expert = (make(mesh) for make in functions)
    model = Model(CONFIG, constrain=constrain, per_shard=per_shard, per_expert=per_expert)
    parallel.check_model(mesh, model)
    params = jax.jit(model.init, out_shardings=parallel.shardings(mesh, model.shapes))(jax.random.key(0))
    shard = params["layers"]["experts"]["up"]["kernel"].addressable_shards[0].data
    tokens = np.random.default_rng(0).integers(0, 32, (4, 9)).astype(np.int32)
    tokens = parallel.to_global(mesh, parallel.ROWS, tokens)

    def loss(params):
        hidden, auxiliary = model.hidden_and_auxiliary(params, tokens)
        balance = jnp.vdot(auxiliary["router_load"], auxiliary["router_probability"])
        return token_logprobs(model, params, tokens, tokens >= 0, chunk=9).sum() + 1e-3 * balance

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)

    def decode(params, tokens):  # as the sampler runs it, on the rows of a data shard
        attend = lambda layer, q, k, v: (causal_attention(q, k, v, kind=model.attention_kind(layer)), None)  # noqa: E731
        return model.cached(params, tokens, model.turns(jnp.arange(9)[None]), attend)[0]

    sampled = jax.device_get(unstack_layers(params))
    sampled = jax.device_put(sampled, parallel.shardings(mesh, sampled, parallel.SAMPLING))
    decode = jax.jit(parallel.over_rows(mesh, decode, (parallel.REPLICATED, parallel.ROWS), parallel.ROWS))
    found = dict(value=value, gradient=gradient, decoded=decode(sampled, tokens))
    return jax.device_get(found) | {"shard": shard.shape}


if __name__ == "__main__":
    one, other = map(measured, MESHES)
    shards = [found.pop("shard") for found in (one, other)]
    print(json.dumps(dict(shards=shards, apart={name: distance(one[name], other[name]) for name in one})))
