"""Converts weights between Hugging Face's format and Orbax, and exports a trained run to either.

    python -m rpg_jax.convert --source=Qwen3-4B --target=checkpoints/qwen3-4b [--to=orbax] [--dtype=bfloat16]
    python -m rpg_jax.convert --workdir=runs/quickstart --target=exports/quickstart [--which=best|last|STEP]

A source is a folder with config.json and model.safetensors (or numbered files with an index), or one that this command
wrote. Both formats carry config.json and the tokenizer's files; `model.checkpoint` of a config takes either. A run is
exported at its evaluation parameters, such that transformers loads it. Nothing is left behind when something fails.
"""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from etils import epath
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from rpg_jax.models import Model, huggingface
from rpg_jax.run import build, cli, states
from rpg_jax.storage import weights, workdir

_SOURCE = flags.DEFINE_string("source", None, "Folder of weights to convert.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run to export.")
_CHECKPOINT_DIR = flags.DEFINE_string("checkpoint_dir", None, "Where a run's checkpoints are; the workdir knows.")
_WHICH = flags.DEFINE_string("which", None, "Which of a run's checkpoints: best (default), last, or a step.")
_TARGET = flags.DEFINE_string("target", None, "Folder to make; it must not exist, or be empty.")
_TO = flags.DEFINE_enum("to", None, ["orbax", "huggingface"], "Format; if unset, the one that the source is not in.")
_DTYPE = flags.DEFINE_enum("dtype", "keep", ["keep", "bfloat16", "float32"], "Of the weights written.")
_MAX_SHARD_GB = flags.DEFINE_float(
    "max_shard_gb", None, "Most gigabytes of a safetensors file; 5 if unset.", lower_bound=1e-6
)

# What goes with weights, where there is one of that name.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION = "generation_config.json"


class Source(NamedTuple):
    """What is converted."""

    folder: pathlib.Path | epath.Path  # where it was read
    params: dict
    texts: dict  # {JSON file: its values} to write
    copies: dict  # {name: file} to copy


def main(_):
    with cli.door():
        target, to = check_flags()
        start = time.perf_counter()
        source = of_run() if _WORKDIR.value else of_folder(pathlib.Path(_SOURCE.value))
        jax.block_until_ready(source.params)
        loaded = time.perf_counter()
    with staged(target) as folder:
        if to == "orbax":
            weights.save_orbax(folder, source.params)
        else:
            weights.save_safetensors(folder, source.params, (_MAX_SHARD_GB.value or 5.0) * 1e9)
        for name, file in source.copies.items():
            shutil.copyfile(file, folder / name)
        for name, values in source.texts.items():
            (folder / name).write_text(json.dumps(values, indent=2) + "\n")
    title = f"{source.folder} -> {target} ({to})"
    print_summary(title, source, loaded - start, size_of(target), time.perf_counter() - loaded)


def check_flags():
    """The target and its format; raises ValueError for flags that make no sense together."""
    if (_SOURCE.value is None) == (_WORKDIR.value is None) or not _TARGET.value:
        raise ValueError("give --target=FOLDER, and one of --source=FOLDER and --workdir=FOLDER; see --help")
    for flag in (_WHICH, _CHECKPOINT_DIR):
        if flag.value is not None and _WORKDIR.value is None:
            raise ValueError(f"--{flag.name}={flag.value} is for the checkpoints of a --workdir")
    to = _TO.value or ("orbax" if _SOURCE.value and not weights.is_orbax(_SOURCE.value) else "huggingface")
    if _MAX_SHARD_GB.value is not None and to == "orbax":
        raise ValueError("--max_shard_gb is for --to=huggingface")
    target = pathlib.Path(_TARGET.value)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is no empty folder; remove it or name another --target")
    place = next(folder for folder in target.absolute().parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise PermissionError(f"--target={target}: {place} is no folder that can be written to; name another")
    return target, to


def of_folder(source) -> Source:
    """A folder of weights, read into the host's memory."""
    config = huggingface.read_config(source)
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32 if _DTYPE.value == "keep" else _DTYPE.value, sharding=host),
        jax.eval_shape(Model(config).init, jax.random.key(0)),
    )
    if _DTYPE.value == "keep":
        shapes = weights.with_stored_dtypes(source, shapes)
    params = weights.load(source, shapes)
    return Source(source, params, {"config.json": described(config, params, source)}, companions(source, source))


def of_run() -> Source:
    """A run's checkpoint, at its evaluation parameters."""
    path = pathlib.Path(_WORKDIR.value)
    folder = workdir.checkpoint_dir(path, _CHECKPOINT_DIR.value)
    settings = states.to_read(workdir.read_config(folder))
    generated = "tasks" in settings.data
    if not generated:  # the training set is not needed, and may not be on this machine
        settings.data.train = None
    run = build.build_run(settings)
    with run.scorer:
        step, state = states.restore_state(folder, run, _WHICH.value or "best")
    params = jax.jit(run.optimizer.evaluation_params)(state.opt_state, state.params)
    if _DTYPE.value != "keep":
        params = jax.tree.map(lambda x: x.astype(_DTYPE.value), params)
    source = settings.model.checkpoint
    copies = companions(source, run.data.path if generated else settings.data.tokenizer or source)
    texts = {"config.json": described(run.model.config, params, source)}
    if source is None:
        tokenizer = run.data.tokenizer
        ids = dict(bos_token_id=tokenizer.bos_id, pad_token_id=tokenizer.pad_id, eos_token_id=list(tokenizer.stop_ids))
        texts["config.json"] |= ids
        texts[GENERATION] = ids
    return Source(folder / "checkpoints" / str(step), params, texts, copies)


def described(config, params, source) -> dict:
    """`config.json` of parameters: ours over that of the folder they come from, if any, for what we do not know of."""
    before = {} if source is None else huggingface.read_json(pathlib.Path(source) / "config.json")
    before = {key: value for key, value in before.items() if key != "dtype"}  # transformers 5 for torch_dtype
    return before | huggingface.config_json(config) | {"torch_dtype": str(params["embed"]["embedding"].dtype)}


def companions(source, tokenizer) -> dict:
    """{name: file} of what is to be copied beside weights, from the weights' folder and the tokenizer's."""
    tokenizer = pathlib.Path(tokenizer)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    files = {} if source is None else {GENERATION: pathlib.Path(source) / GENERATION}
    files |= {name: folder / name for name in TOKENIZER_FILES}
    return {name: file for name, file in files.items() if file.is_file()}


@contextlib.contextmanager
def staged(target):
    """A folder beside the target that takes its name at the end, and is removed if the end is not reached."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's folders are for their owner only
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def size_of(folder) -> int:
    """Bytes of all files under a folder."""
    return sum((root / name).stat().length for root, _, names in epath.Path(folder).walk() for name in names)


def print_summary(title, source, reading, written, writing):
    leaves, read = jax.tree.leaves(source.params), size_of(source.folder)
    table = Table(title=title, show_header=False)
    rows = {
        "tensors": f"{weights.tensor_count(source.params):,}",
        "parameters": f"{sum(x.size for x in leaves):,}",
        "dtype": ", ".join(sorted({str(x.dtype) for x in leaves})),
        "read": f"{read / 1e9:,.3f} GB in {reading:,.1f} s, {read / reading / 1e6:,.0f} MB/s",
        "written": f"{written / 1e9:,.3f} GB in {writing:,.1f} s, {written / writing / 1e6:,.0f} MB/s",
    }
    for row in rows.items():
        table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    cli.run(main)
