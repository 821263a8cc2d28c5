"""The objectives outside of this package's trainer: plain Optax, tunix, and the page about both."""

import pathlib
import re
import runpy

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/in_other_trainers.md").read_text()
EXAMPLE = ROOT / "docs/examples/plain_optax.py"
TUNIX = ROOT / "third_party/tunix/rpg_in_tunix.py"


def test_the_example_learns():
    _, rewards = runpy.run_path(str(EXAMPLE))["train"](70)
    assert np.mean(rewards[:3]) < 0.2
    assert np.mean(rewards[-10:]) > 0.9


def test_python_blocks_of_the_page():
    """They run in order, and accumulation gives the gradient of the minibatch; a block of a file shows its lines."""
    files = [{line.strip() for line in path.read_text().splitlines()} for path in (EXAMPLE, TUNIX)]
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if not any({line.strip() for line in block.splitlines()} <= lines for lines in files):
            exec(compile(block, "docs/in_other_trainers.md", "exec"), names)
    whole = jax.jit(jax.grad(lambda logp: names["loss_of"](logp, slice(None), None)))(names["logp"])
    np.testing.assert_allclose(names["accumulated"], whole, rtol=1e-6)
    assert names["count"] == 5 and names["advantage"].shape == (2, 1)
