"""Evaluates a trained run or a checkpoint: mean@k, unbiased pass@k and maj@k with 95 % intervals over problems.

    python -m rpg_jax.evaluate --workdir=runs/quickstart [--k=32] [--which=best|last|STEP]
    python -m rpg_jax.evaluate --checkpoint=checkpoints/Qwen3-4B --data=data/aime24,data/aime25,amc23.parquet --k=32

--data takes folders that `rpg_jax.prepare` wrote, or sources that it reads; of "gym:gcd(size=60)" it takes held-out
problems, whose questions no training set of the family has. A run without it is evaluated on its own
held-out problems. Every response is written to OUT/responses.jsonl as it comes, the scores to OUT/evaluation.json.
The same command goes on where it was stopped, with the same responses as if it had not been.
SIGTERM ends it with status 75. A run may be evaluated while it trains, also from another machine: --checkpoint_dir.
"""

from absl import flags

from rpg_jax import InputError
from rpg_jax.run import cli

flags.DEFINE_string("workdir", None, "Folder of a run to evaluate.")
flags.DEFINE_string("checkpoint_dir", None, "Where a run's checkpoints are; the workdir knows.")
flags.DEFINE_string("which", None, "Which of a run's checkpoints: best by held-out accuracy (default), last, a step.")
flags.DEFINE_string("checkpoint", None, "Folder of weights to evaluate, in Hugging Face's format.")
flags.DEFINE_string("data", None, "Problem sets, comma separated; the run's held-out problems if unset.")
flags.DEFINE_string("out", None, "Folder to write; if unset, under WORKDIR/evaluation or runs/evaluation.")
flags.DEFINE_integer("k", None, "Responses to each problem; the run's evaluation.k, or 32.", lower_bound=1)
flags.DEFINE_float("temperature", None, "Sampling temperature, 0 is greedy; the run's, or 1.", lower_bound=0)
flags.DEFINE_integer("top_k", 0, "Sample among so many of the most probable tokens only; 0 is off.", 0, 2**31 - 1)
flags.DEFINE_float("top_p", 1.0, "Sample among the fewest tokens that have this probability together; 1 is off.")
flags.DEFINE_integer("max_prompt", None, "Most tokens of a prompt; the run's, or 1024.", lower_bound=1)
flags.DEFINE_integer("max_new", None, "Most tokens of a response; the run's, or 3072.", lower_bound=1)
flags.DEFINE_integer("slots", None, "Responses decoded at a time; the run's, or 64.", lower_bound=1)
flags.DEFINE_integer(
    "rows", None, "Problems between two writes; the run's generation batch or more, or 16.", lower_bound=1
)
flags.DEFINE_integer("seed", None, "Of the sampling noise; the run's, or 0.", 0, 2**32 - 1)
flags.DEFINE_string("reward", None, "dapo, boxed, math_verify or FILE.py:NAME; what gives the run's accuracy, or dapo.")
flags.DEFINE_bool("network", False, "Let --reward=FILE.py:NAME use the network.")
flags.DEFINE_string("extraction", None, "As reward.extraction, for gym: problems; the run's, or stated.")
flags.DEFINE_string("wording", None, "As data.wording: makes a user message of a problem's text; the run's, or paper.")
flags.DEFINE_string("tokenizer", None, "Folder of a --checkpoint's tokenizer; its own if unset.")
flags.DEFINE_string("template", None, "In place of a --checkpoint's chat template: plain, or a Jinja file.")
flags.DEFINE_string("template_options", "{}", 'Variables of the chat template, as JSON: {"enable_thinking": false}.')
flags.DEFINE_enum("overlong", "refuse", ["refuse", "drop"], "What to do with prompts over --max_prompt.")
flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of a --checkpoint's weights and activations.")
flags.DEFINE_integer("tensor", 1, "Devices that share one copy of a --checkpoint's weights.", lower_bound=1)


def check_flags(options) -> None:
    """Raises ValueError for flags that make no sense together."""
    if (options.workdir is None) == (options.checkpoint is None):
        raise InputError("give one of --workdir=FOLDER and --checkpoint=FOLDER; see --help")
    if options.checkpoint and not (options.data or "").strip(", "):
        raise InputError("--checkpoint needs --data=SET,...: folders of rpg_jax.prepare, .parquet or .jsonl files")
    for names, flag, reason in (
        ("tensor tokenizer template dtype", "checkpoint", "a --checkpoint: a run has that of its config; leave it out"),
        ("wording template_options overlong", "data", "the sets of --data=SET,..., which is not given; leave it out"),
        ("which checkpoint_dir", "workdir", "the checkpoints of a run: give its --workdir, not --checkpoint"),
    ):
        for name in names.split():
            if name in options.given and not getattr(options, flag):
                raise InputError(f"--{name} is for {reason}")


def main(options):
    check_flags(options)
    from rpg_jax.run import evaluate

    return evaluate.main(options)


if __name__ == "__main__":
    cli.run(main)
