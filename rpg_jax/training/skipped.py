"""Why an update was skipped: which of loss, gradient and step was not finite, and of a loss which of its inputs."""

import math

import jax
import jax.numpy as jnp

from rpg_jax.objectives import metrics as metric
from rpg_jax.types import TrainBatch

UNFINITE = "unfinite: "  # begins the names of metrics that are 1 if something is not finite, and are not logged
SKIPPED = UNFINITE + "update"  # 1 if loss, gradient or step is not
MEND = "the warning at the first one says what was not finite; mend that, and start in another --workdir"


class NothingLearned(Exception):
    """No update of a run was applied; its text is one line for the user."""


def finiteness(logp: jax.Array, batch: TrainBatch) -> metric.Metrics:
    """{UNFINITE + a name: 1 if a token that counts is NaN or infinite, else 0} for each input of a loss.

    Args:
      logp: f32[B, T], those of the policy that is trained.
    """
    inputs = {
        "the policy's log-probs": logp,
        "the behavior policy's log-probs": batch.behavior_logp,
        "the reference's log-probs": batch.reference_logp,
        "advantages": batch.advantage,
        "weights": batch.weight,
    }
    mask = batch.loss_mask
    broken = {name: ~jnp.isfinite(jnp.broadcast_to(x, mask.shape)) for name, x in inputs.items()}
    return {UNFINITE + name: metric.max_of(where.astype(jnp.float32), mask) for name, where in broken.items()}


def split_finiteness(metrics: metric.Metrics) -> tuple[metric.Metrics, str | None]:
    """(the metrics that are logged, why the update was skipped) from those that `Update` gives, on the host.

    None if the update was applied.
    """
    logged = {name: x for name, x in metrics.items() if not name.startswith(UNFINITE)}
    values = {name: float(value) for name, value in metric.values(metrics).items()}
    loss, norm = values["loss"], values["grad_norm"]
    if not values[SKIPPED]:
        return logged, None
    if math.isfinite(loss) and math.isfinite(norm):
        return logged, "the optimizer's step is not finite; the loss and its gradient are"
    if math.isfinite(loss):
        return logged, f"the gradient's norm is {spelled(norm)}; the loss, {loss:.3g}, is finite"
    inputs = sorted(x.removeprefix(UNFINITE) for x in values.keys() - logged.keys() - {SKIPPED} if values[x])
    others = [name for name in logged if name not in ("loss", "grad_norm") and not math.isfinite(values[name])]
    where = f"of its inputs, {' and '.join(inputs)} are not finite" if inputs else "all of its inputs are finite"
    also = f"; metrics that are not: {', '.join(others)}" if others else ""
    return logged, f"the loss is {spelled(loss)}: {where}{also}"


def spelled(number: float) -> str:
    """NaN, inf or -inf."""
    return "NaN" if math.isnan(number) else str(number)
