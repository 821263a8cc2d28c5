"""The KV cache that fills the memory which decoding leaves, and how many slots it serves."""

import dataclasses
import math

from rpg_jax.lab.planning import decoding, estimates, needs
from rpg_jax.lab.planning.chips import Topology
from rpg_jax.lab.planning.estimates import Workload

FILLED = 0.95  # of a device's memory, at most
ROWS = 8  # slots of a shard are a multiple of it: a register of a TPU has so many rows


def largest_cache(topology: Topology, w: Workload, peak: float, cache: float) -> dict[str, float]:
    """Slots and pages over all shards for rollout.slots and rollout.cache_pages; responses do not depend on either.

    Args:
      peak: bytes of a device while decoding as configured; cache: those of them that are the KV cache.

    Returns:
      slots, pages, and seconds: what decoding for one RL step then takes at least.
    """
    shards, page_size = w.row_shards, w.rollout.page_size
    requests, configured = w.generated_rows // shards, w.rollout.slots // shards
    a_slot = needs.decode_needs(w)["sum"] / configured
    others = peak - cache - a_slot * configured
    slots = configured
    for _ in range(20):  # a slot takes little beside its pages, so this settles
        free = FILLED * topology.chip.memory - others - a_slot * slots
        pages = max(int(free / (estimates.kv_bytes(w) * page_size)), 0)
        slots = min(decoding.slots_that_fit(w.lengths, w.prompt_length, pages, page_size), requests)
    slots -= slots % ROWS if slots > ROWS else 0
    if not slots:
        return {"slots": 0, "pages": 0, "seconds": math.inf}
    changed = dataclasses.replace(w, rollout=dataclasses.replace(w.rollout, slots=slots * shards, cache_pages=None))
    a_step = max(estimates.decode(changed).seconds(topology).values())
    seconds = decoding.steps(w.lengths, requests, slots, shards) * a_step
    return {"slots": slots * shards, "pages": pages * shards, "seconds": seconds}
