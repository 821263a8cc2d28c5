"""Episodes of four turns beside the same tokens in one turn, at the same slots: what it costs to stop and to go on.

    python third_party/common/turns.py

Both sides call `generate` in this process, taking turns. An observation of 8 tokens stands between two turns; a row
that goes on waits for a slot, and what it had is prefilled again.
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import interleave
import jax
import jax.numpy as jnp
from ours import build_model, random_prompts

from rpg_jax.models import unstack_layers
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.sampling.turns import Answer

TURNS, OBSERVATION = 4, 8


class Talk:
    """Answers at once, as a tool does that takes no time."""

    stops = None

    def __init__(self, prompt: int, tokens: int):
        self.prompt, self.tokens, self.turns = prompt, tokens, {}

    def __call__(self, rows, seconds):
        return [self.answer(row) for row in rows]

    def answer(self, row):
        turn = self.turns[row.number] = self.turns.get(row.number, 0) + 1
        if turn > TURNS:
            return Answer(row.number, ended=True)
        said = [1] * OBSERVATION if turn > 1 else []
        return Answer(row.number, said, len(row.tokens) - self.prompt + len(said) + self.tokens // TURNS)


def make_steps(shape, rows, slots, prompt, tokens):
    """{name: a function that draws all episodes}."""
    model, key = build_model(shape), jax.random.key(0, impl="threefry2x32")
    params = jax.jit(lambda key: unstack_layers(model.init(key)))(key)
    most = tokens + (TURNS - 1) * OBSERVATION
    prompts = prompts_to_answer(*random_prompts(shape, rows, prompt), samples=1, max_new=most)
    settings = dict(samples=1, max_new=most, sampling=Sampling.make(), decoding=Decoding(slots))

    def step(number, talks):
        conversation = Talk(prompt, tokens) if talks else None
        limits = jnp.full(rows, most if talks else tokens)
        drawn = generate(
            model,
            params,
            prompts,
            key=key,
            step=jnp.int32(number),
            limits=limits,
            conversation=conversation,
            **settings,
        )
        assert int(drawn.loss_mask.sum()) == rows * tokens

    return {"one turn": lambda n: step(n, False), f"{TURNS} turns": lambda n: step(n, True)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="m1,m2", help="of interleave.SHAPES")
    parser.add_argument("--rounds", type=int, default=7)
    for name, default in dict(rows=64, slots=32, prompt=32, tokens=128).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    sizes = options.rows, options.slots, options.prompt, options.tokens
    print(f"{options.rows} episodes of {options.tokens} tokens, {options.slots} slots, prompts of {options.prompt}")
    for name in options.models.split(","):
        steps, seconds = make_steps(interleave.SHAPES[name], *sizes), {}
        for number in range(options.rounds + 1):  # the first compiles
            for side, step in steps.items():
                begin = time.perf_counter()
                step(number)
                seconds.setdefault(side, []).append(time.perf_counter() - begin)
        one, several = (values[1:] for values in seconds.values())
        ratios = sorted(b / a for a, b in zip(one, several, strict=True))
        for side, values in zip(steps, (one, several), strict=True):
            print(f"{name:8} {side:9} median {statistics.median(values):.2f} s ({min(values):.2f} - {max(values):.2f})")
        print(f"{name:8} ratio     median {statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
