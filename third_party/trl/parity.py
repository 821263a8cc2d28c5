"""GRPO and DAPO: loss and gradient of rpg_jax's objectives against trl's GRPOTrainer, on the same log-probs.

python third_party/trl/parity.py --peer_python=VENV/bin/python
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import parity

CASES = {
    "grpo": dict(epsilon=0.2, epsilon_high=0.2),
    "grpo_corrected": dict(epsilon=0.2, epsilon_high=0.2),
    "dapo": dict(epsilon=0.2, epsilon_high=0.28),
}
BETA = {"grpo": 0.04, "grpo_corrected": 0.04, "dapo": 0.0}


def arrays():
    """Ratios on both sides of every clip, ragged masks, advantages of both signs."""
    rng = np.random.default_rng(0)
    logp = rng.normal(-2, 1, (8, 12)).astype(np.float32)
    near = lambda: (logp + rng.normal(0, 0.4, logp.shape)).astype(np.float32)  # noqa: E731
    mask = np.arange(12) < rng.integers(1, 13, (8, 1))
    return dict(
        logp=logp, behavior=near(), reference=near(), mask=mask, advantage=rng.normal(size=8).astype(np.float32)
    )


def ours():
    import jax

    from rpg_jax import objectives

    def compute(name, settings):
        settings = dict(clip_low=settings["epsilon"], clip_high=settings["epsilon_high"], beta=BETA[name] or None)
        objective = objectives.make(name, **settings)

        def loss(logp, arrays):
            return objective(
                logp,
                arrays["behavior"],
                arrays["advantage"][:, None],
                arrays["mask"],
                reference_logp=arrays["reference"],
            )[0]

        def run(arrays):
            value, gradient = jax.value_and_grad(loss)(arrays["logp"], arrays)
            return {"loss": value, "gradient": gradient}

        return run

    return {case: (arrays(), compute(case, settings)) for case, settings in CASES.items()}


def theirs(case):
    def run(arrays):
        import interleave
        import torch
        import trl_trainer

        loss_type = "dapo" if case == "dapo" else "grpo"
        rows, length = arrays["logp"].shape
        settings = dict(loss_type=loss_type, use_bias_correction_kl=case == "grpo_corrected", **CASES[case], beta=0.0)
        trainer = trl_trainer.build(interleave.SHAPES["m1"], rows=rows, samples=4, new=length, **settings)
        trainer.beta = BETA[case]  # given earlier, it would look for a reference model on the hub
        tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
        logp = tensors["logp"].requires_grad_()
        # The model's part is replaced by given log-probs; everything after it is trl's.
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
        mask = tensors["mask"].long()
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": torch.ones(rows, 1, dtype=torch.long),
                "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
                "completion_ids": torch.ones(rows, length, dtype=torch.long),
                "completion_mask": mask,
                "advantages": tensors["advantage"],
                "old_per_token_logps": tensors["behavior"],
                "ref_per_token_logps": tensors["reference"],
                "num_items_in_batch": mask.sum(),
            },
        )
        loss.backward()
        return {"loss": loss.detach().numpy(), "gradient": logp.grad.numpy()}

    return run


if __name__ == "__main__":
    parity.main(__file__, "trl", ours, {case: theirs(case) for case in CASES}, tolerance=1e-5)
