"""Schedule-free AdamW: the trajectory of rpg_jax's optimizer against the authors' package, in float64.

python third_party/schedulefree/parity.py --peer_python=VENV/bin/python
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import parity

CASES = {"no warm-up": dict(warmup_steps=0), "warm-up of 10": dict(warmup_steps=10)}
SETTINGS = dict(learning_rate=0.02, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1)


def arrays():
    """A noisy quadratic: the gradient at y is curvature * (y - target) + noise[t]."""
    rng = np.random.default_rng(0)
    return dict(
        start=rng.normal(size=6),
        target=rng.normal(size=6),
        curvature=rng.uniform(0.1, 3, 6),
        noise=0.3 * rng.normal(size=(200, 6)),
    )


def ours():
    import jax
    import jax.numpy as jnp
    import optax

    from rpg_jax.training.optimizer import make_optimizer

    def compute(case):
        def run(arrays):
            with jax.enable_x64():
                optimizer = make_optimizer("schedule_free_adamw", **SETTINGS, **CASES[case])
                start, target, curvature = (jnp.asarray(arrays[key]) for key in ("start", "target", "curvature"))

                def step(carry, noise):
                    y, state = carry
                    updates, state = optimizer.transformation.update(curvature * (y - target) + noise, state, y)
                    y = optax.apply_updates(y, updates)
                    return (y, state), (y, optimizer.evaluation_params(state, y))

                carry = start, optimizer.transformation.init(start)
                _, (y, x) = jax.jit(jax.lax.scan, static_argnums=0)(step, carry, jnp.asarray(arrays["noise"]))
                return {"y": np.asarray(y), "x": np.asarray(x)}

        return run

    return {case: (arrays(), compute(case)) for case in CASES}


def theirs(case):
    def run(arrays):
        import torch
        from schedulefree import AdamWScheduleFree

        tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
        y = torch.nn.Parameter(tensors["start"].clone())
        optimizer = AdamWScheduleFree(
            [y],
            lr=SETTINGS["learning_rate"],
            betas=(SETTINGS["beta1"], SETTINGS["beta2"]),
            eps=SETTINGS["epsilon"],
            weight_decay=SETTINGS["weight_decay"],
            **CASES[case],
        )
        trained, evaluated = [], []
        for noise in tensors["noise"]:
            optimizer.train()
            y.grad = tensors["curvature"] * (y.detach() - tensors["target"]) + noise
            optimizer.step()
            trained.append(y.detach().clone().numpy())
            optimizer.eval()
            evaluated.append(y.detach().clone().numpy())
        return {"y": np.stack(trained), "x": np.stack(evaluated)}

    return run


if __name__ == "__main__":
    parity.main(__file__, "schedulefree", ours, {case: theirs(case) for case in CASES}, tolerance=1e-6)
