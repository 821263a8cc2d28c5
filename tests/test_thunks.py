"""A decode step of a GPU that is not here, as XLA would launch it: no branch, one loop condition, one CUDA graph."""

import importlib
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import models, parallel
from rpg_jax.lab.planning import chips, hlo
from rpg_jax.sampling import Decoding, Sampling, batching, decode, make_sampler

module = importlib.import_module("rpg_jax.sampling.generate")  # the package has a function of that name
H100 = chips.CHIPS["h100"].target


@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-pjrt and -plugin are not installed")
def test_a_decode_step_for_an_h100_is_one_graph_without_branches(tmp_path):
    """Qwen3-0.6B's shape, 256 rows: of at most 420 kernels only the loop's condition is outside of the graph."""
    from jax.experimental.topologies import get_topology_desc

    from rpg_jax.models import cudnn

    names = dict(platform="cuda", topology_name="1x1x1", topology="1x1x1")
    mesh = parallel.make_mesh(data=1, devices=get_topology_desc(**names, target_config=H100).devices)
    model = models.Model(models.SIZES["qwen3-0.6b"], dtype=jnp.bfloat16, constrain=parallel.make_constrain(mesh))
    sampler, slots, pages = make_sampler(model, mesh, Decoding(256), 128, 160, 256)
    prompts = (jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((32, 128), (32,), (32,)))
    rows = jax.eval_shape(partial(module.to_answer, mesh, samples=8, max_new=160), *prompts)
    begin = partial(module.start, sampler, mesh, samples=8, slots=slots, cache_pages=pages, ready=decode.WAITING)
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    keys, state = jax.eval_shape(begin, rows, key, jnp.int32(0), jax.ShapeDtypeStruct((32,), jnp.int32))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), model.shapes)
    inputs = decode.Inputs(
        jax.eval_shape(models.unstack_layers, params), keys, jax.eval_shape(Sampling.make), version=jnp.int32(0),
        until=jnp.int32(32), must=np.zeros(256, bool), left=jnp.int32(decode.COMPLETE), stops=None,
    )  # fmt: skip

    def steps(inputs, state, end):
        return batching.decode(sampler, decode.prepared(sampler, inputs, state), state, end)

    inputs_spec, state_spec = module.layouts(sampler.kernel.rows)
    on_shards = parallel.over_rows(mesh, steps, (inputs_spec, state_spec, parallel.REPLICATED), state_spec)
    with cudnn.without_gpu():
        lowered = jax.jit(on_shards).trace(inputs, state, jnp.int32(9)).lower(lowering_platforms=("cuda",))
    lowered.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    [file] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    counts = hlo.launches(file.read_text())
    assert counts | dict(kernels=0) == dict(kernels=0, outside=1, command_buffers=1, conditionals=0, loops=0), counts
    assert counts["kernels"] <= 420, counts
