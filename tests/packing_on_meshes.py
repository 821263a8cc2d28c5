"""A packed RL step on a mesh of 8 simulated devices beside an unpacked one on one device; run by test_packing.py."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from mesh_equivalence import collectives, distance
from test_packing import T, step

from rpg_jax import objectives, parallel
from rpg_jax.training import packing

COMPARED = ("logp", "gradient", "params", "loss", "entropy", "ratio_max")  # not those that are rounding alone


def largest_collective(mesh, batch: int, length: int) -> int:
    """Numbers in the largest array that devices exchange to put the microbatches of a packed batch together."""
    rows = jax.sharding.NamedSharding(mesh, parallel.ROWS)
    tokens, mask = (jax.ShapeDtypeStruct((batch, length), dtype, sharding=rows) for dtype in (jnp.int32, bool))
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=rows)

    def read(tokens, lengths, mask, plan):
        count_tokens = lambda tokens, mask, positions, segment_ids: (tokens + positions + segment_ids,)  # noqa: E731
        return packing.map_rows(count_tokens, mesh, plan, tokens, lengths, mask, 8)

    plan = packing.Plan(np.int32(1), np.zeros(batch, np.int32))
    text = jax.jit(read).lower(tokens, lengths, mask, plan).compile().as_text()
    return max(math.prod(shape) for _, shape in collectives(text)[0])


def main():
    objective = objectives.make("rpg", divergence="urkl", estimator="reinforce", clip="rpg", beta=0.1)
    one = step(parallel.make_mesh(1, devices=jax.devices()[:1]), objective, columns=None)
    other = step(parallel.make_mesh(2, 2, 2), objective, columns=T)
    found = {"distances": {name: distance(one[name], other[name]) for name in COMPARED}}
    found["largest_collective"] = largest_collective(parallel.make_mesh(2, 4), 64, 32)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
