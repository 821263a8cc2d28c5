"""Recorded routes: they are those of one forward pass, they stay with their tokens, and training replays them."""

import dataclasses

import jax
import numpy as np
import pytest
from test_carry_over import OPTIMIZER, carried, collector
from test_environments import KEY, LENGTHS, NEW, PROMPTS, SAMPLES, STOP, Talk

from rpg_jax import parallel
from rpg_jax.data import Problem, ProblemStream
from rpg_jax.models import Model, ModelConfig, routes, unstack_layers
from rpg_jax.models.families import qwen3_moe
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training.collect import nothing_pending

CONFIG = qwen3_moe.Config(40, 32, 48, 2, 4, 2, 8, max_length=128, experts=6, experts_per_token=2, expert_size=16)
MODEL, WIDTH = Model(CONFIG), routes.width(CONFIG)
init = jax.jit(lambda seed: unstack_layers(jax.tree.map(lambda x: 2 * x, MODEL.init(jax.random.key(seed)))))


@jax.jit
def one_pass(params, tokens):
    """The routes of a forward pass over whole rows."""
    return routes.recorded(list(MODEL.hidden_and_auxiliary(params, tokens)[1]["routes"]))


def talked(pages):
    rows = prompts_to_answer(PROMPTS, LENGTHS, np.arange(len(LENGTHS)), samples=SAMPLES, max_new=NEW, routes=WIDTH)
    drawn = generate(
        MODEL, init(1), rows, key=KEY, step=0, samples=SAMPLES, max_new=NEW, conversation=Talk(stops=None),
        decoding=Decoding(4, page_size=4, cache_pages=pages), sampling=Sampling.make(stop_ids=[STOP]),
    )  # fmt: skip
    return jax.tree.map(np.asarray, drawn)


def test_routes_of_prompts_turns_and_observations_are_those_of_one_pass():
    """Also of rows that lose their pages. The last token of a row has none: it predicts nothing."""
    rows = talked(pages=12)
    read = np.arange(rows.tokens.shape[1]) < rows.length[:, None] - 1
    after_prompt = np.arange(rows.tokens.shape[1]) >= rows.prompt_length[:, None]
    assert (read & after_prompt & ~rows.loss_mask).sum() > 10, "too few observations"
    np.testing.assert_array_equal(rows.routes, np.where(read[..., None], one_pass(init(1), rows.tokens), 0))


def test_a_response_that_goes_on_keeps_the_routes_after_which_its_tokens_were_drawn():
    mesh, settings = parallel.make_mesh(devices=jax.devices()[:1]), carried(routes="record")
    stream = ProblemStream([Problem(i, "task", f"prompt {i}", "", str(i)) for i in range(40)], 0)
    collect = collector(mesh, stream, settings, model=MODEL)
    nothing = nothing_pending(settings, OPTIMIZER, mesh, WIDTH)
    pending, policies, mixed = nothing, [init(seed) for seed in range(3)], 0
    for step, params in enumerate(policies):
        collected = collect(params, np.int32(step), pending, step)
        rows, pending = jax.tree.map(np.asarray, collected.sequences), collected.pending
        shapes = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (pending, nothing))
        assert len(set(map(str, shapes))) == 1, "a resume restores these"
        each = np.stack([one_pass(params, rows.tokens) for params in policies])
        expected = np.take_along_axis(each, np.roll(rows.version, -1, axis=1)[None, ..., None], axis=0)[0]
        draws = np.roll(rows.loss_mask, -1, axis=1)
        np.testing.assert_array_equal(rows.routes[draws], expected[draws])
        assert (rows.routes[np.arange(rows.tokens.shape[1]) < rows.length[:, None] - 1] > 0).all()
        mixed += sum(len(set(row[mask])) > 1 for row, mask in zip(rows.version, rows.loss_mask, strict=True))
    assert mixed > 0


@pytest.mark.parametrize("config, experts", [
    (ModelConfig(29, 16, 12, 2, 4, 2, 4), "llama has none"),
    (dataclasses.replace(CONFIG, experts=256), "qwen3_moe has 256"),
])  # fmt: skip
def test_models_without_experts_or_with_too_many_are_refused(config, experts):
    with pytest.raises(ValueError, match=f"rollout.routes=record .* {experts}; set rollout.routes=recompute"):
        carried(routes="record").recorded(config)
    assert carried().recorded(config) == 0
