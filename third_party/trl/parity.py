"""Loss and gradient of rpg_jax's objectives against trl's GRPOTrainer and RLOOTrainer, on the same log-probs.

python third_party/trl/parity.py --peer_python=VENV/bin/python
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import parity

PPO = dict(epsilon=0.2, epsilon_high=0.2)
CASES = {  # ours -> trl's settings
    "grpo": dict(loss_type="grpo", use_bias_correction_kl=False, **PPO),
    "grpo_corrected": dict(loss_type="grpo", use_bias_correction_kl=True, **PPO),
    "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
    "dr_grpo": dict(loss_type="dr_grpo", **PPO),
    "ppo_clip": dict(loss_type="bnpo", **PPO),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "cispo": dict(loss_type="cispo", epsilon_high=1.2),  # the cap itself, where ours is 1 + clip_high
    "rloo": dict(epsilon=1e9, epsilon_high=1e9),  # trl adds PPO's clip, here out of reach
}
OURS = {
    **{name: dict(beta=0.04, clip_low=0.2, clip_high=0.2) for name in ("grpo", "grpo_corrected")},
    "cispo": dict(clip_high=0.2),
}


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

    def compute(name):
        objective = objectives.make(name, **OURS.get(name, {}))

        def loss(logp, arrays):
            return objective(
                logp,
                arrays["behavior"],
                arrays["advantage"][:, None],
                arrays["mask"],
                reference_logp=arrays["reference"],
                denominator=arrays["mask"].size if objective.reduction == "constant" else None,
            )[0]

        def run(arrays):
            value, gradient = jax.value_and_grad(loss)(arrays["logp"], arrays)
            return {"gradient": gradient} | ({} if name == "rloo" else {"loss": value})  # its value has log π, trl's w

        return run

    return {case: (arrays(), compute(case)) for case in CASES}


def theirs(case):
    def run(arrays):
        import interleave
        import torch
        import trl
        import trl_trainer

        rows, length = arrays["logp"].shape
        trainer = trl_trainer.build(
            interleave.SHAPES["m1"], rows=rows, samples=4, prompt=32, new=length, **CASES[case], beta=0.0
        )
        trainer.beta = OURS.get(case, {}).get("beta", 0.0)  # given earlier, it would look for a reference on the hub
        tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
        logp = tensors["logp"].requires_grad_()
        # The model's part is replaced by given log-probs; everything after it is trl's.
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, torch.zeros_like(logp), None)
        mask = tensors["mask"].long()
        compute_loss = trl.RLOOTrainer._compute_loss if case == "rloo" else trl.GRPOTrainer._compute_loss
        loss = compute_loss(
            trainer,
            trainer.model,
            {
                "prompt_ids": torch.ones(rows, 1, dtype=torch.long),
                "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
                "completion_ids": torch.ones(rows, length, dtype=torch.long),
                "completion_mask": mask,
                "advantages": tensors["advantage"],
                "old_per_token_logps": tensors["behavior"],
                "old_logps": (tensors["behavior"] * mask).sum(1),
                "ref_per_token_logps": tensors["reference"],
                "num_items_in_batch": mask.sum(),
            },
        )
        loss.backward()
        return {"loss": loss.detach().numpy(), "gradient": logp.grad.numpy()}

    return run


if __name__ == "__main__":
    parity.main(__file__, "trl", ours, {case: theirs(case) for case in CASES}, tolerance=1e-5)
