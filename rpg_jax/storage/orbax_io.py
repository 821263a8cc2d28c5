"""How `checkpoints` has Orbax read, and what it makes of Orbax's failures."""

import asyncio
import logging
import math

import jax
import orbax.checkpoint as ocp

# A failure in one of Orbax's threads reaches the caller as an exception. Orbax also logs it, as pages of tracebacks.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: "orbax" not in record.pathname + record.getMessage())


class _PatientHandler(ocp.type_handlers.ArrayHandler):
    """Reads leaves side by side as Orbax does; when one is damaged, waits for the others.

    Orbax closes its event loop at the first failure. Each of TensorStore's threads that then reports on another leaf
    to the closed loop would print a traceback.
    """

    async def deserialize(self, infos, args=None):
        earlier = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        finally:
            while unfinished := asyncio.all_tasks() - earlier:
                await asyncio.gather(*unfinished, return_exceptions=True)


def reader(like: dict) -> ocp.Checkpointer:
    """Orbax's reader of {leaf name: ShapeDtypeStruct}, without its barriers and with a limit on host memory.

    Inside a barrier, processes would wait for another that found its part damaged. By default Orbax holds the whole
    checkpoint in host memory twice; here it reads at once as little as the largest leaf allows.
    """
    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    largest = max((math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in like.values()), default=0)  # bytes
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=alone,
        restore_concurrent_gb=1 + largest // 10**9,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, _PatientHandler())),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
