"""What training keeps for the page: two whole groups of a step's last minibatch, with what its update saw.

The last minibatch is the one whose policy has moved furthest from the one that drew, which is where clips act. The
update itself is left as it is, so that a run has the same bits and compiles nothing more: just before it, a forward
pass of its own, over the microbatches of these rows alone, scores them with the parameters that the update is about to
differentiate at (under schedule-free its point y). Both passes are the same mathematics; they differ by rounding.
"""

import json
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rpg_jax import parallel
from rpg_jax.data import ProblemStream
from rpg_jax.run.build import Run
from rpg_jax.sampling.turns import spans
from rpg_jax.training.collect import Collected
from rpg_jax.training.experience import make_score, take_rows
from rpg_jax.training.loop import Look
from rpg_jax.training.packing import Plan, on_host
from rpg_jax.training.policies import BASE, BEHAVIOR
from rpg_jax.types import Checkpoint, Policy, TrainBatch

GROUPS = 2  # of the minibatch's, which are in random order
# Of a response's tokens, in a row of look.parquet; `advantage` has one number where all tokens have the same.
OF_TOKENS = ("tokens", "loss_mask", "behavior_logp", "current_logp", "reference_logp", "entropy", "weight", "age")


def make_look(run: Run, stream: ProblemStream, chunk: int) -> Look:
    """Builds the `look` of `training.loop.Parts`; `chunk` is learner.logprob_chunk.

    `look.rows(checkpoint, batch, groups, rows, step)` are those of RL step `step`, none where the settings keep none;
    `rows` of the batch are those of the step's last minibatch.
    """
    settings, columns = run.loop, run.loop.packed_columns
    count = min(GROUPS, settings.minibatch_prompts) * settings.samples
    score = make_score(
        run.mesh, rows=settings.microbatch_rows, temperature=run.rollout.temperature, logprob_chunk=chunk,
        packed_columns=columns,
    )  # fmt: skip

    def seen(params, step, frozen, batch, plan):
        policies = {BEHAVIOR: Policy(run.model, params, step)} | frozen
        logp, entropy = score(policies, batch, plan)[BEHAVIOR]
        kept = {name: getattr(batch, name) for name in (*OF_TOKENS, "advantage") if hasattr(batch, name)}
        kept |= dict(current_logp=logp, entropy=entropy, age=step - batch.version)
        return jax.tree.map(lambda x: x[:count], kept)

    whole = jax.jit(seen, out_shardings=NamedSharding(run.mesh, parallel.REPLICATED))

    def program(checkpoint: Checkpoint, batch: TrainBatch, plan: Plan) -> tuple[Any, tuple]:
        frozen = {name: policy for name, policy in checkpoint.frozen.items() if name == BASE}
        return whole, (checkpoint.state.params, checkpoint.state.step, frozen, batch, plan)

    def look(checkpoint: Checkpoint, batch: TrainBatch, groups: Collected, rows: np.ndarray, step: int) -> list:
        done, every = step + 1, settings.look_every
        if not (settings.is_evaluated(done) or every and done % every == 0):
            return []
        plan = settings.plan(np.where(np.arange(len(rows)) < count, groups.lengths[rows], 0), settings.microbatch_rows)
        if plan.start is None:  # of the rows in their order only the first
            plan = Plan(np.int32(-(-count // settings.microbatch_rows)), None)
        function, arguments = program(checkpoint, take_rows(batch, rows), plan)
        kept = jax.device_get(function(*arguments))
        ends = groups.lengths, on_host(groups.sequences.prompt_length), on_host(groups.sequences.finished)
        lengths, prompts, finished = (x[rows[:count]] for x in ends)
        looked = []
        for number, row in enumerate(rows[:count].tolist()):
            group, sample = divmod(row, settings.samples)
            position, scores = groups.graded[group]
            (problem,), turns = stream.at([position]), spans(kept["loss_mask"][number])
            told = dict(problem=problem.id, task=problem.task, prompt=problem.prompt, answer=str(problem.answer))
            told |= dict(update=int(checkpoint.state.step), group=group, sample=sample, finished=bool(finished[number]))
            named = {name: float(values[sample]) for name, values in scores.items()}
            response = slice(int(prompts[number]), int(lengths[number]))
            arrays = {name: kept[name][number, response] for name in OF_TOKENS}
            each = kept["advantage"][number]
            arrays["advantage"] = each if len(each) == 1 else each[response]
            arrays["turns"] = np.array(turns, np.int32).reshape(-1) - response.start  # begin, end, begin, …
            looked.append(told | dict(rewards=json.dumps(named)) | arrays)
        return looked

    return Look(program, look)
