"""cuDNN's attention without a GPU: which JAX has what of its private wrapper, and what is compiled for H100s."""

import ast
import inspect
import pathlib
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import child

from rpg_jax.models import cudnn
from rpg_jax.models.cudnn import wrapper

ROOT = pathlib.Path(__file__).parent.parent


def test_which_jax_has_what_of_cudnn():
    """JAX 0.10.2 to 0.12: the same functions, arguments and kinds of masks, and no kernel that JAX lets go of."""
    assert set(inspect.signature(wrapper.dot_product_attention).parameters) >= {
        "query", "key", "value", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type",
        "sliding_window_length",
    }  # fmt: skip
    paged = list(inspect.signature(wrapper.paged_attention).parameters)
    assert paged[:7] == ["query", "key", "value", "q_seqlen", "kv_seqlen", "page_table_k", "page_table_v"]
    assert {"scale", "mask_type"} <= set(paged[7:])
    assert {"PADDING", "PADDING_CAUSAL"} <= set(wrapper.MaskType.__members__)
    source = inspect.getsource(wrapper)
    for name in ("check_layout(", "check_cudnn_version()", 'check_compute_capability("9.0")'):
        assert source.count(name) > 1, f"{name} is no longer called by its name in the module"
    of_rpg = "".join(path.read_text() for path in (ROOT / "rpg_jax").rglob("*.py"))
    assert "pallas.ops.gpu" not in of_rpg


def test_which_jax_finds_the_keys_of_grouped_heads():
    """The offsets in numbers that cuDNN gets for 4 heads of queries and 2 of keys, of 8 numbers each."""
    begin, length = cudnn.segments(np.array([[5, 5, 7, 7, 7], [3, 2, 2, 2, 2]]), 3)
    np.testing.assert_array_equal(begin, [[0, 2, -1, -1], [0, 1, -1, -1]])
    np.testing.assert_array_equal(length, [[2, 3, -1], [1, 4, -1]])
    query, key = (jax.ShapeDtypeStruct((2, 5, heads, 8), jnp.bfloat16) for heads in (4, 2))
    lengths, _, of_queries, of_keys = wrapper._fix_seqlen_offsets(length, length, begin, begin, query, key)
    begins = np.array([0, 2, 5, 6, 10, 10, 10, 10])
    np.testing.assert_array_equal(lengths.reshape(-1), [2, 3, 1, 4, 0, 0])
    np.testing.assert_array_equal(of_queries.reshape(-1), begins * 32)
    np.testing.assert_array_equal(of_keys.reshape(-1), begins * (16 if cudnn.GROUPED else 32))


FOR_GPUS = """
import os, re
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from rpg_jax import parallel
from rpg_jax.models import ModelConfig, cudnn
from rpg_jax.models.attention import PLAIN, AttentionKind
from rpg_jax.lab.planning import chips
from rpg_jax.models.attention_kernels import make_attention
from rpg_jax.run.build import build_run
from rpg_jax.sampling import paged_attention
from configs import quickstart

H100 = chips.CHIPS["h100"].target
shape = "1x1x4"
made = topologies.get_topology_desc(platform="cuda", topology_name=shape, topology=shape, target_config=H100)
mesh = parallel.make_mesh(1, 2, 2, devices=made.devices)
spec = parallel.sharding.ACTIVATIONS["heads"]
attention = make_attention("auto", mesh, spec, dtype=jnp.bfloat16, head_dim=128, pack=True)
config = ModelConfig(64, 64, 64, 1, 8, 2, 128)
kernel = paged_attention.choose(mesh, config, 32)

def array(spec, dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

def calls(function, *arguments):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile().as_text()
    found = [len(re.findall(name, text)) for name in ('__cudnn.fmhaSoftmax"', "__cudnn.fmhaSoftmaxBackward", " all-")]
    return found + [" while(" in text]

def attend(kind):
    def function(*arguments):
        return kernel.attend(*arguments, 32, kind)
    rows = PartitionSpec(parallel.ROW_AXES)
    return parallel.over_rows(mesh, function, (rows, (kernel.rows,), rows, rows), rows)

q, k = (array(spec, jnp.bfloat16, 4, 640, heads, 128) for heads in (8, 2))
ids, rows = array(PartitionSpec(spec[0]), jnp.int32, 4, 640), PartitionSpec(parallel.ROW_AXES)
pool = (array(kernel.spec, jnp.bfloat16, 100, 2, 32, 2, 128),)  # fewer pages than 16 rows of 16 would hold
tables = array(rows, jnp.int32, 16, 16), array(rows, jnp.int32, 16)
gradient = jax.grad(lambda *args: attention(*args).astype(jnp.float32).sum(), (0, 1, 2))
one, several = (array(PartitionSpec(rows[0], None, "tensor"), jnp.bfloat16, 16, n, 8, 128) for n in (1, 4))
with cudnn.without_gpu():
    print(calls(gradient, q, k, k), calls(gradient, q, k, k, ids), sep=", ", end=", ")
    print(*(calls(attend(kind), queries, pool, *tables) for kind, queries in (
        (PLAIN, one), (AttentionKind(window=40), one), (PLAIN, several))), sep=", ", end=", ")
smoke = quickstart.get_config("smoke")
smoke.learner.pack = True
for smoke.model.dtype in ("bfloat16", "float32"):
    print(build_run(smoke, lambda line: None, devices=made.devices[:1]).loop.packed_sequences, end=", ")
"""


@pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="compiling for GPUs needs jax-cuda13-plugin")
def test_the_kernels_are_in_programs_for_h100s():
    """Forward, backward, what is sent, and whether there is a loop: of plain rows, packed rows, decoding (and that of a
    layer with a window), and prefill, which is as on every device; the sequences of a packed row, and in float32."""
    plain, packed, decode, window, prefill, most, any_number = ast.literal_eval(child("-c", FOR_GPUS))
    assert plain == packed == [1, 1, 0, False] and decode == [1, 0, 0, False] and window == [0, 0, 0, False]
    assert prefill == [0, 0, 0, True] and (most, any_number) == (cudnn.SEQUENCES, None)
