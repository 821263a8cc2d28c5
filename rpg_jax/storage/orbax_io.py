"""How `checkpoints` has Orbax read and write, and what it makes of Orbax's failures."""

import asyncio
import copy
import errno
import logging
import math
import os

import jax
import orbax.checkpoint as ocp

_STORAGE_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM)

# A failure in one of Orbax's threads reaches the caller as an exception. Orbax also logs it, as pages of tracebacks.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: "orbax" not in record.pathname + record.getMessage())


def wait_when_closed(loop: asyncio.AbstractEventLoop) -> None:
    """Has an event loop, when it is closed, first wait for the tasks that a failure has left."""
    close = loop.close

    def patiently():
        while tasks := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        close()

    loop.close = patiently


class _PatientHandler(ocp.type_handlers.ArrayHandler):
    """Reads and writes leaves side by side as Orbax does; when one fails, waits for the others.

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

    async def serialize(self, values, infos, args=None):
        first = copy.copy(infos[0])
        create = first.await_path_creation

        async def await_path_creation():  # Orbax awaits it in the loops of the save, before anything is written
            wait_when_closed(asyncio.get_running_loop())
            return await create()

        first.await_path_creation = await_path_creation
        return await super().serialize(values, [first, *infos[1:]], args)


def writer() -> ocp.PyTreeCheckpointHandler:
    """Orbax's writer of {leaf name: array}; the files are those of `ocp.args.StandardSave`."""
    handler = _PatientHandler()
    vars(handler).update(vars(ocp.type_handlers.get_type_handler(jax.Array)))  # Orbax's settings
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.PyTreeCheckpointHandler(save_concurrent_gb=96, type_handler_registry=registry)  # 96 as StandardSave


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


def storage_errno(error) -> int | None:
    """The errno of a storage failure among an exception's causes; TensorStore and gRPC mention it as text only."""
    while error is not None:
        for code in _STORAGE_ERRORS:
            if getattr(error, "errno", None) == code or os.strerror(code).lower() in str(error).lower():
                return code
        error = error.__cause__ or error.__context__
    return None
