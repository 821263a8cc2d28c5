"""The objectives outside of this package's trainer: plain Optax, tunix, and the page about both."""

import ast
import os
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.exact import Problem, every_sequence, targets

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/in_other_trainers.md").read_text()
EXAMPLE = ROOT / "docs/examples/plain_optax.py"
TUNIX = ROOT / "third_party/tunix/rpg_in_tunix.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def test_the_example_needs_only_optax_and_the_objectives():
    imported = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{name.name}" for name in node.names}
    assert imported == {"jax", "jax.numpy", "optax", "rpg_jax.objectives"}


def test_the_example_learns(example):
    _, rewards = example["train"](70)
    assert np.mean(rewards[:3]) < 0.2
    assert np.mean(rewards[-10:]) > 0.9


def test_the_gradient_of_the_example_is_the_exact_one(example):
    """On policy, summed over every response to one prompt, against the derivative of the exact objective in float64."""
    objective, vocab = example["objective"], example["VOCAB"]
    space = every_sequence("responses", vocab, 3, stop=0)
    tokens, mask = space.token, space.mask
    prompts = np.full(len(tokens), 5)
    # Column t of row x follows history[x, t]; one place at which each history occurs.
    place = np.flatnonzero(mask)[np.unique(space.history[mask], return_index=True)[1]]

    def table(params):
        """Logits of the next token after each history, [H, vocab]: what `rpg_jax.exact` takes for a policy."""
        inputs = jnp.concatenate([prompts[:, None], tokens[:, :-1]], axis=1)
        state, rows = jnp.zeros((len(tokens), example["WIDTH"])), []
        for t in range(tokens.shape[1]):
            state, logits = example["advance"](params, state, inputs[:, t])
            rows.append(logits)
        return jnp.stack(rows, axis=1).reshape(-1, vocab)[place]

    with jax.enable_x64():
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.jit(example["init"])(jax.random.key(1)))
        reference = jax.tree.map(lambda x: 0.5 * x, params)
        rewards = np.asarray(example["reward"](prompts, tokens, mask))
        assert 0 < rewards.sum() < len(rewards)
        advantage = np.broadcast_to(rewards[:, None] - 0.5, mask.shape)
        policy = jax.jit(lambda params: (example["token_logp"](params, prompts, tokens), table(params)))
        (behavior_logp, behavior), (reference_logp, held) = jax.device_get([policy(p) for p in (params, reference)])
        probability = np.exp((behavior_logp * mask).sum(1, keepdims=True))
        np.testing.assert_allclose(probability.sum(), 1)

        def expected_loss(params):
            logp = example["token_logp"](params, prompts, tokens)
            rest = dict(reference_logp=reference_logp, weight=probability, denominator=1.0)
            return objective(logp, behavior_logp, advantage, mask, **rest)[0]

        problem = Problem(policy=None, behavior=behavior, reference=held, advantage=advantage)

        def exact(params):
            parts = targets.token_parts(space, table(params), problem, 1.0, [objective.divergence])
            return parts["reward"] - objective.beta * parts[objective.divergence]

        gradients = [jax.jit(jax.grad(function))(params) for function in (expected_loss, exact)]
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, -y, rtol=1e-9, atol=1e-14), *gradients)


def test_python_blocks_of_the_page():
    """They run in order, and accumulation gives the gradient of the minibatch; a block of a file shows its lines."""
    files = [path.read_text().splitlines() for path in (EXAMPLE, TUNIX)]
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if not any(set(block.splitlines()) <= set(lines) for lines in files):
            exec(compile(block, "docs/in_other_trainers.md", "exec"), names)
    whole = jax.jit(jax.grad(lambda logp: names["loss_of"](logp, slice(None), None)))(names["logp"])
    np.testing.assert_allclose(names["accumulated"], whole, rtol=1e-6)
    assert names["count"] == 5 and names["advantage"].shape == (2, 1)


def test_the_page_shows_code_of_both_files():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for path in (EXAMPLE, TUNIX):
        assert any(block in path.read_text() for block in blocks), f"the page shows nothing of {path.name}"


def test_tunix_script_explains_itself(tmp_path):
    """Without tunix: help works, and a run is one line that says what to install."""
    bare = [sys.executable, "-S", str(TUNIX)]  # this interpreter without its packages
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    helped = subprocess.run([*bare, "--help"], capture_output=True, text=True, timeout=60, env=environment)
    assert helped.returncode == 0 and "--steps" in helped.stdout, helped.stderr
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip()
    assert "\n" not in line and "tunix is not installed in" in line and "requirements.txt" in line, line
