"""Loss and gradient of rpg_jax's objectives against the functions of the paper's authors, on the same log-probs.

python third_party/rpg/parity.py --repo=FOLDER --peer_python=VENV/bin/python

FOLDER is a checkout of github.com/complex-reasoning/RPG. Its `verl/trainer/ppo/core_algos.py` is run as it is, under
stand-ins for the packages around it, of which these functions use only two masked sums. Cases that end in "as printed"
compare our Algorithm 2 with their implementation of it, which no part of their repository calls (docs/paper.md).
"""

import importlib.util
import os
import pathlib
import sys
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import parity

BETA, BOUNDS = 0.04, dict(clip_low=0.2, clip_high=0.28)
DIVERGENCES = ("fkl", "rkl", "ufkl", "urkl")
ACTOR = dict(name="rpg", clip="dual_reward", clip_c=10.0, **BOUNDS)  # what their actor runs
FAR = dict(clip_low=0.999999, clip_high=1e6)  # bounds out of reach
KLS = {  # their kl_loss_type -> ours
    **{f"rpg_{name}": dict(**ACTOR, divergence=name, beta=BETA) for name in DIVERGENCES},
    "rpg_ujs": dict(**ACTOR, divergence="jeffreys", beta=0.5 * BETA),
    "rpg_js": dict(**ACTOR, divergence="jeffreys", beta=0.5 * BETA),  # theirs has (w + 1) for (w − 1): no divergence
    "low_var_kl": dict(name="grpo", beta=BETA, reduction="token_mean", **FAR),
    "mse": dict(name="reinforce_pp_baseline", beta=BETA, **FAR),
}
NEAR, WIDE = 0.06, 0.5  # deviation of log ratios: all inside the clip's bounds, or on both sides of them
CASES = {  # case -> (ours, their kl type or None, their bounds, whether Algorithm 2, deviation)
    "actor, no KL": (dict(ACTOR, beta=0.0), None, BOUNDS, False, WIDE),
    **{f"actor, {kl}": (ours, kl, BOUNDS if "clip" in ours else FAR, False, WIDE) for kl, ours in KLS.items()},
    **{
        f"{name}, {where}": (
            dict(name="rpg", clip="rpg", clip_c=10.0, divergence=name, beta=BETA, **BOUNDS),
            f"rpg_rf_{name}_clip_ppo",
            BOUNDS,
            True,
            deviation,
        )
        for name in DIVERGENCES
        for where, deviation in (("inside the bounds", NEAR), ("as printed", WIDE))
    },
}
# The coefficient of fkl's KL does not contain the ratio, whose clipped form is what differs in the others.
DIFFERENT = {"actor, rpg_js", *(f"{name}, as printed" for name in ("rkl", "ufkl", "urkl"))}


def arrays(deviation):
    """Ragged masks, advantages of both signs and far from 0; the reference is the behavior policy, as in their runs."""
    rng = np.random.default_rng(0)
    logp = rng.normal(-2, 0.5, (16, 24))
    mask = np.arange(24) < rng.integers(1, 25, (16, 1))
    advantage = rng.choice([-1.0, 1.0], 16) * rng.uniform(0.5, 1.5, 16)
    behavior = logp + np.clip(rng.normal(0, deviation, logp.shape), -3 * deviation, 3 * deviation)
    return dict(logp=logp, behavior=behavior, mask=mask, advantage=advantage)


def ours():
    import jax

    jax.config.update("jax_enable_x64", True)
    from rpg_jax import objectives

    def compute(case):
        settings = dict(CASES[case][0])
        objective = objectives.make(settings.pop("name"), **settings)

        def loss(logp, given):
            return objective(logp, given["behavior"], given["advantage"][:, None], given["mask"])[0]

        def run(given):
            value, gradient = jax.value_and_grad(loss)(given["logp"], given)
            # The value of a REINFORCE-style loss means nothing.
            return {"gradient": gradient} | ({} if CASES[case][3] else {"loss": value})

        return run

    return {case: (arrays(CASES[case][4]), compute(case)) for case in CASES}


def core_algos():
    """Their module, from its file; the packages that it lies in are not run, which would want ray and more."""
    import torch

    masked = types.ModuleType("verl.utils.torch_functional")
    masked.masked_mean = lambda values, mask, axis=None: (values * mask).sum(axis) / mask.sum(axis)
    for name in ("verl", "verl.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["verl.utils.torch_functional"] = sys.modules["verl.utils"].torch_functional = masked
    sys.modules["verl"].utils = sys.modules["verl.utils"]
    path = os.path.join(os.environ["PEER_REPO"], "verl/trainer/ppo/core_algos.py")
    spec = importlib.util.spec_from_file_location("core_algos", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return torch, module


def theirs(case):
    _, kl, bounds, algorithm_2, _ = CASES[case]

    def run(given):
        torch, core = core_algos()
        tensors = {name: torch.from_numpy(array) for name, array in given.items()}
        logp, behavior, mask = tensors["logp"].requires_grad_(), tensors["behavior"], tensors["mask"].double()
        advantage = tensors["advantage"][:, None].expand_as(logp)
        clip = dict(zip(("low", "high"), bounds.values(), strict=True))
        if algorithm_2:
            more = dict(kl_type=kl, kl_loss_coef=BETA, clip_ratio_c=10.0)
            bounded = {f"clip_ratio_{name}": value for name, value in clip.items()}
            loss = core.compute_policy_loss_reinforce(behavior, logp, advantage, mask, **more, **bounded)[0]
        else:
            bounded = {f"cliprange_{name}": value for name, value in clip.items()}
            ceiling = 10.0 if bounds is BOUNDS else 1e9
            loss = core.compute_policy_loss(behavior, logp, advantage, mask, clip_ratio_c=ceiling, **bounded)[0]
            if kl:
                penalty = core.kl_penalty(logp, behavior, kl)
                loss = loss + BETA * core.agg_loss(penalty, mask, "token-mean")
        loss.backward()
        return {"loss": loss.detach().numpy(), "gradient": logp.grad.numpy()}

    return run


if __name__ == "__main__":
    parity.main(
        __file__, "torch", ours, {case: theirs(case) for case in CASES}, tolerance=1e-9, different=DIFFERENT,
        checkout=("github.com/complex-reasoning/RPG", "verl/trainer/ppo/core_algos.py"),
    )  # fmt: skip
