"""A training step with long-tailed responses, with and without `rollout.carry_over`, at the same slots.

    python third_party/common/carry_over.py

Both sides run the functions of `rpg_jax.train` in this process, taking turns. Lengths are log-normal, as long_tails of
interleave.py has them: each problem has its own, at which its responses end.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import interleave
import jax
import jax.numpy as jnp
import numpy as np

from configs import quickstart
from rpg_jax.data import ProblemStream
from rpg_jax.run import build, states
from rpg_jax.sampling import Sampling, generate
from rpg_jax.training import collect, loop

SLOTS, SAMPLES, LONGEST = 32, 4, 1000
LENGTHS = interleave.response_lengths(dict(mean=100, responses=4000, new=LONGEST))


def of_given_lengths(model, params, rows, *, limits, samples, sampling, **settings):
    """`generate` without stop tokens; a response is finished when it has the length of its problem."""
    lengths = np.where(np.asarray(limits) > 0, LENGTHS[np.asarray(rows.problem)[::samples]], 0)
    arguments = dict(limits=lengths, samples=samples, sampling=Sampling.make(), **settings)
    drawn = generate(model, params, rows, **arguments)
    has, goal = drawn.length - drawn.prompt_length, jnp.asarray(np.repeat(lengths, samples))
    finished = (has == goal) & (goal > 0)
    return dataclasses.replace(drawn, finished=finished)


def make_step(folder, carry_over, prompts):
    """Builds `step() -> (seconds, tokens drawn, seconds of the rollout)`."""
    config = quickstart.get_config("smoke")
    config.data.update(dict(directory=folder, train_size=500))
    config.rollout.update(dict(prompts=prompts, samples=SAMPLES, max_new=LONGEST, slots=SLOTS, overlong_buffer=0))
    config.rollout.update(dict(carry_over=carry_over, oversample=2.0 if carry_over else 1.0))
    config.behavior.source = "sampler"
    config.learner.update(dict(minibatch_prompts=prompts, microbatch_rows=2, pack=True))
    run = build.build_run(config, log=lambda line: None)
    checkpoint = states.build_state(run, states.initial_params(config, run))
    shapes = jax.eval_shape(lambda: checkpoint.state)
    services = dict(stream=ProblemStream(run.data.problems("train"), 0), checkpoints=None, log=None, traced=None)
    parts = build.build_parts(config, run, shapes, should_stop=lambda *_: False, **services)
    number = 0

    def step():
        nonlocal checkpoint, number
        begin = time.perf_counter()
        checkpoint, record = loop.rl_step(parts, run.loop, checkpoint, number)
        number += 1
        seconds = time.perf_counter() - begin
        return seconds, record.groups.tokens, record.row(checkpoint.state)["time/rollout"]

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="groups a step, of 4 responses (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="RL steps of a turn (default: %(default)s)")
    args = parser.parse_args()
    collect.generate = of_given_lengths
    print(interleave.processor(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: make_step(folder, name == "carry-over", args.prompts) for name in ("whole steps", "carry-over")}
        for step in sides.values():
            for _ in range(4):  # compiles; and what is under way becomes what it is in the long run
                step()
        timed = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, step in sides.items():
                timed[name].append([step() for _ in range(args.steps)])
    speeds = {}
    for name, turns in timed.items():
        seconds, drawn, rollouts = np.array(turns).sum(1).T  # [rounds] each
        speeds[name] = np.median(drawn / seconds)
        print(
            f"{name:11s} {speeds[name]:6,.0f} tokens/s [{min(drawn / seconds):,.0f}, {max(drawn / seconds):,.0f}], "
            f"{np.median(seconds) / args.steps:.2f} s a step, {np.median(rollouts) / args.steps:.2f} s of it rollout"
        )
    print(f"{speeds['carry-over'] / speeds['whole steps']:.2f} x the tokens per second of a training step")


if __name__ == "__main__":
    main()
