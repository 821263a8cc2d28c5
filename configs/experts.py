r"""Qwen3-30B-A3B, a mixture of 128 experts, by the recipe of configs/paper.py; variants OBJECTIVE,CONTEXT[,OPTION...].

    python -m rpg_jax.plan --config=configs/experts.py:rpg-reinforce-urkl,8k --topology=v5p:2x4x4 --prompt_length=256
    python -m rpg_jax.train --config=configs/experts.py:rpg-reinforce-urkl,8k --workdir=runs/a3b

The model is in checkpoints/Qwen3-30B-A3B, and the words after it are those of configs/paper.py. Hardware: 32 chips of a
TPU v5p, for which all of its programs were compiled (docs/devices.md has memory and time). No run was made.
"""

from configs import paper


def get_config(variant="rpg-reinforce-urkl,8k"):
    config = paper.get_config(f"qwen3-4b,{variant}")
    config.model.checkpoint = "checkpoints/Qwen3-30B-A3B"
    config.model.router_balance = 1e-3  # as in the model's config.json
    config.mesh.expert = 4  # weights to sample with: 17 GB a chip in place of 61
    config.learner.microbatch_rows = config.learner.scoring_rows = 32  # one a chip
    config.rollout.slots, config.rollout.cache_pages = 2048, 65536
    return config
