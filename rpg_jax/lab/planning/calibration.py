"""A rollout that others measured on TPUs, to hold estimates against: `python -m rpg_jax.plan --calibrate`.

The measured batch took 69.3 s to generate and 70.5 s in all, in vLLM on TPUs with its own model: `SOURCE`, BVF-101.
It says neither how long its prompts are nor how many responses ran at a time; 256 is vLLM's default. The spread of
lengths is not published either, only their mean and the most: a logarithmic normal distribution that has both.
"""

import pathlib

SOURCE = "https://github.com/marin-community/marin/blob/main/.agents/logbook/benchmark_vllm_fork_claude.md"
TOPOLOGY = "v6e:2x2"
CONFIG = pathlib.Path(__file__).parents[3] / "configs/measured.py"
LENGTHS = "lognormal:368.5,0.6"  # of which no more than 1,024 tokens: 362 on average
FLAGS = (f"--config={CONFIG}", f"--lengths={LENGTHS}", "--prompt_length=128")
SECONDS = 70.5  # a batch of 64 prompts x 16 responses


def text(plan: dict) -> str:
    """How far a plan of the measured shape is from the measured time."""
    seconds, estimated = (plan["step"][kind] for kind in ("seconds", "estimated"))
    at_least, expected = (kind["prefill"] + kind["decode"] for kind in (seconds, estimated))
    return (
        f"a rollout that others measured, Llama-3.1-8B on {TOPOLOGY}: {SECONDS} s with vLLM; ours takes at least "
        f"{at_least:.3g} s\nand by the compiler's estimate {expected:.3g} s: {expected / SECONDS:.2f} of the measured "
        f"time ({SOURCE})"
    )
