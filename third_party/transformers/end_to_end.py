"""From a Hugging Face checkpoint and parquet to a trained, exported model, by the project's own commands.

    python third_party/transformers/end_to_end.py --peer_python=VENV/bin/python [--workdir=runs/word_problems] [--smoke]

transformers makes a small random Qwen3 with a tokenizer; sets of arithmetic word problems are written in the paper's
parquet format. Then: prepare, convert, train (configs/word_problems.py), evaluate on held-out problems and on the AIME
and AMC sets (--evaluation_sets, where they are; a score near zero is right there), convert to Hugging Face's format,
and transformers loads the result and must give our logits. Prints every command, and the seconds that each took.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEER = pathlib.Path(__file__).with_name("peer.py")
SETS = ("aime-2024", "aime25", "amc-23")
TOLERANCE = 1e-4

sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import word_problems  # noqa: E402

from rpg_jax.data.templates import named  # noqa: E402

paper = named("paper")


def main(peer_python, workdir, evaluation_sets, smoke):
    seconds = {}

    def run(name, *command):
        print(f"\n$ {' '.join(map(str, command))}", flush=True)
        begin = time.perf_counter()
        subprocess.run([str(part) for part in command], cwd=ROOT, check=True)
        seconds[name] = time.perf_counter() - begin

    def ours(name, module, *flags):
        run(name, sys.executable, "-m", f"rpg_jax.{module}", *flags)

    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    texts = make_sets(workdir, *((60, 6) if smoke else (1200, 64)))
    run("make a checkpoint", peer_python, PEER, "make", workdir / "huggingface", texts)
    for split in ("train", "heldout"):
        ours(f"prepare {split}", "prepare", f"--source={workdir / split}.parquet", f"--target={workdir / split}")
    ours("convert", "convert", f"--source={workdir / 'huggingface'}", f"--target={workdir / 'converted'}")
    variant = "configs/word_problems.py:smoke" if smoke else "configs/word_problems.py"
    places = dict(train=workdir / "train", heldout=f"('{workdir / 'heldout'}',)", tokenizer=workdir / "converted")
    config = [f"--config={variant}", f"--config.model.checkpoint={workdir / 'converted'}"]
    config += [f"--config.data.{name}={value}" for name, value in places.items()]
    ours("train", "train", *config, f"--workdir={workdir / 'run'}")
    ours("evaluate", "evaluate", f"--workdir={workdir / 'run'}", f"--k={2 if smoke else 8}")
    sets = [evaluation_sets / f"{name}.parquet" for name in SETS if (evaluation_sets / f"{name}.parquet").exists()]
    ours("export", "convert", f"--workdir={workdir / 'run'}", f"--target={workdir / 'exported'}")
    if sets:
        data = ",".join(map(str, sets[:1] if smoke else sets))
        lengths = ("--max_prompt=1024", "--max_new=32", "--overlong=drop", "--dtype=float32")
        where = (f"--checkpoint={workdir / 'exported'}", f"--data={data}", f"--out={workdir / 'competitions'}")
        ours("evaluate competitions", "evaluate", *where, f"--k={1 if smoke else 4}", *lengths)
    else:
        print(f"\nthe evaluation sets are not at {evaluation_sets}: skipped")
    compare(run, peer_python, workdir)
    print("\n" + "\n".join(f"{value:7.1f} s  {name}" for name, value in seconds.items()))
    print(f"{sum(seconds.values()):7.1f} s  in all")
    if not smoke:
        summary = json.loads((workdir / "run" / "summary.json").read_text())
        print(f"held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}")


def make_sets(workdir, train, heldout):
    """Writes train.parquet (each row twice: repeats are folded) and heldout.parquet; returns a file of their texts."""
    rows = word_problems.distinct(train + heldout)
    word_problems.write(workdir / "train.parquet", rows[:train], paper, repeats=2)
    word_problems.write(workdir / "heldout.parquet", rows[train:], paper)
    texts = workdir / "texts.json"
    texts.write_text(json.dumps([paper(text) + solution for text, solution, _ in rows[:train]]))
    return texts


def compare(run, peer_python, workdir):
    """The exported model's logits by transformers against ours of the same folder; exits 1 if they differ."""
    import jax
    import jax.numpy as jnp

    from rpg_jax import parallel
    from rpg_jax.models import Model, huggingface
    from rpg_jax.run import states

    folder = workdir / "exported"
    shape = huggingface.read_config(folder)
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, (4, 64))
    np.save(workdir / "tokens.npy", tokens)
    run("transformers", peer_python, PEER, "logits", folder, workdir / "tokens.npy", workdir / "logits.npy")
    model, theirs = Model(shape, scan=False), np.load(workdir / "logits.npy")
    params = states.checkpoint_params(folder, model, parallel.make_mesh())
    logits = jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))
    gap = np.abs(np.asarray(logits(params, jnp.asarray(tokens, jnp.int32))) - theirs).max() / np.abs(theirs).max()
    print(f"exported model, logits of transformers against ours: relative gap {gap:.1e} (at most {TOLERANCE:g})")
    if not gap <= TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", required=True, help="python of an environment with requirements.txt beside")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/word_problems"), help="is emptied")
    parser.add_argument("--evaluation_sets", type=pathlib.Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--smoke", action="store_true", help="a few steps: the same path, in a minute")
    main(**vars(parser.parse_args()))
