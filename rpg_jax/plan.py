"""Whether a config fits a slice of TPUs or a machine of GPUs, and how long a step takes there, without either.

    python -m rpg_jax.plan --config=configs/paper.py:qwen3-4b,rpg-reinforce-urkl,8k --topology=v5p:2x2x4,h100:16
    python -m rpg_jax.plan --calibrate    # a rollout that others measured, and what the compiler estimates for it

Every program of a step is compiled, for TPUs by libtpu and for GPUs by JAX's CUDA plugin (requirements-plan.txt):
memory and collectives are those of the compiled programs, and so are the time that the TPU compiler estimates and what
a GPU launches for a token. What a step takes at least is modelled from shapes. No data, tokenizer or weights are read;
a checkpoint that is not here is planned as the model size that its folder is named after. Chips are v5e, v5p and v6e
(slices as 4x8 or 2x2x4; for a slice that does not exist the error lists those that do), a100, h100 and h200 (a number
of them).
"""

from absl import flags
from ml_collections import config_flags

from rpg_jax.run import cli

config_flags.DEFINE_config_file(
    "config", None, "The experiment: FILE.py or FILE.py:VARIANT.", lock_config=False, accept_new_attributes=True
)
flags.DEFINE_string("topology", None, "Slices to plan for, as v5p:2x2x4,v5e:8x8,h100:8.")
flags.DEFINE_string(
    "lengths", "uniform", "Tokens of responses: uniform up to rollout.max_new, lognormal:MEAN,SIGMA, or fixed:TOKENS."
)
flags.DEFINE_float("prompt_length", None, "Mean tokens of a prompt; rollout.max_prompt if unset.")
flags.DEFINE_bool("calibrate", False, "Also hold the estimate of a rollout against the time that others measured.")
flags.DEFINE_string("measured", None, "JSON of third_party/transformers/gpu_benchmark.py, for times beside the least.")
flags.DEFINE_string("json", None, "File to write all numbers to.")
flags.DEFINE_bool("alone", False, "Plan in this process; set by the command itself for the process of each topology.")


def main(options):
    if not options.calibrate or options.given & {"config", "topology"}:
        cli.need(options, config="FILE.py", topology="CHIP:SHAPE")
    from rpg_jax.lab.planning import command

    return command.main(options)


if __name__ == "__main__":
    cli.run(main)
