"""Writes weights in Hugging Face's format: of a GGUF file, in another dtype, or of a trained run.

    python -m rpg_jax.convert --source=SmolLM2-135M-Instruct.Q4_1.gguf --target=checkpoints/smollm2
    python -m rpg_jax.convert --source=Qwen3-4B --target=checkpoints/qwen3-4b --dtype=bfloat16
    python -m rpg_jax.convert --workdir=runs/quickstart --target=exports/quickstart [--which=best|last|STEP] [--to=peft]

A source is a folder with config.json and model.safetensors (or numbered files with an index), or a GGUF file
(`pip install ".[gguf]"`): its weights are dequantized, and its tokenizer and chat template written as well.
config.json and the tokenizer's files come along; `model.checkpoint` of a config takes the folder. A run is exported at
its evaluation parameters, such that transformers loads it; adapters are merged, or with --to=peft written by
themselves, such that peft loads them. Neither its problems nor its reward functions need be on this machine. Nothing
is left behind when something fails.
"""

from absl import flags

from rpg_jax import InputError
from rpg_jax.run import cli

flags.DEFINE_string("source", None, "Folder of weights to convert, or a GGUF file.")
flags.DEFINE_string("workdir", None, "Folder of a run to export.")
flags.DEFINE_string("checkpoint_dir", None, "Where a run's checkpoints are; the workdir knows.")
flags.DEFINE_string("which", None, "Which of a run's checkpoints: best (default), last, or a step.")
flags.DEFINE_string("target", None, "Folder to make; it must not exist, or be empty.")
flags.DEFINE_enum("to", "huggingface", ["huggingface", "peft"], "Format; peft is for the adapters of a run.")
flags.DEFINE_enum("dtype", "keep", ["keep", "bfloat16", "float32"], "Of the weights written.")
flags.DEFINE_float("max_shard_gb", None, "Most gigabytes of a safetensors file; 5 if unset.", lower_bound=1e-6)


def main(options):
    if (options.source is None) == (options.workdir is None) or not options.target:
        raise InputError("give --target=FOLDER, and one of --source=FOLDER and --workdir=FOLDER; see --help")
    from rpg_jax.run import convert

    return convert.main(options)


if __name__ == "__main__":
    cli.run(main)
