"""Makes a dataset for training or evaluation of parquet, JSON or reasoning-gym: checked, repeats folded.

    python -m rpg_jax.prepare --source=dapo-math-17k.parquet --target=data/dapo
    python -m rpg_jax.prepare --source=train.jsonl,more.jsonl --target=data/mine --name=mine --answer_field=final.value
    python -m rpg_jax.prepare --source="gym:chain_sum(max_terms=2, size=300) + gcd(size=60)" --target=data/sums
    python -m rpg_jax.prepare --list_gym

A row holds chat messages in `prompt` and the answer in `reward_model.ground_truth`, as in the files of the paper's
scripts, or a problem as text, which the template makes a user message of. The reply that ends a column `messages` is
its solution, and states the answer where no column does. Errors count rows and items from 0, lines from 1. The target
is what `data.train` and `data.heldout` of a config name: a TFDS dataset in ArrayRecord, and `summary.json`.
"""

from absl import flags

from rpg_jax.run import cli

flags.DEFINE_string("source", None, "FILE.parquet, FILE.jsonl, FILE.json, gym:FAMILY(...) + ...; comma separated.")
flags.DEFINE_enum("split", None, ["train", "heldout"], "Which problems of gym: sources; train if unset.")
flags.DEFINE_bool("list_gym", False, "Show the families of reasoning-gym and their parameters.")
flags.DEFINE_string("target", None, "Folder to make; it must not exist, or be empty.")
flags.DEFINE_string("name", None, "Name of the set, under which scores are reported; each source's own if unset.")
flags.DEFINE_string("template", "paper", "What makes a user message of a problem's text, as data.wording of a config.")
flags.DEFINE_enum("conflicts", "refuse", ["refuse", "drop"], "What to do with a problem of different answers.")
flags.DEFINE_string("problem_field", None, "Column of messages or text; unset: prompt, problem, question, messages.")
flags.DEFINE_string(
    "answer_field", None, "Column or path (answer.0) of it; unset: reward_model.ground_truth, answer, ground_truth."
)
flags.DEFINE_string("solution_field", None, "Column of worked solutions; unset: solution, extra_info.solution.")
flags.DEFINE_integer("limit", None, "Most problems to write, the first ones.", lower_bound=1)


def main(options):
    if not options.list_gym:
        cli.need(options, source="FILE", target="FOLDER")
    from rpg_jax.run import prepare

    return prepare.main(options)


if __name__ == "__main__":
    cli.run(main)
