"""What `python -m rpg_jax.convert` does: reads weights of a folder, a GGUF file or a run, and writes them."""

import json
import math
import pathlib
import shutil
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import SingleDeviceSharding

from rpg_jax import InputError
from rpg_jax.data import gguf_tokenizer
from rpg_jax.data.problems import staged
from rpg_jax.models import Model, ModelConfig, huggingface
from rpg_jax.run import states
from rpg_jax.run.target import new_folder, print_summary
from rpg_jax.storage import gguf_files, weights, workdir
from rpg_jax.training.policies import merged
from rpg_jax.training.update import check_finite
from rpg_jax.types import Policy

# Copied beside the weights if the source has them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
TOKENIZER_FILES += ("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")
GENERATION = "generation_config.json"
PEFT = "peft"  # the format of adapters of Hugging Face's package of that name
FILES = {"huggingface": "model", PEFT: "adapter_model"}  # by format


class Source(NamedTuple):
    """Weights to convert, and the files that belong to them."""

    path: pathlib.Path | epath.Path  # of the folder or the GGUF file that the weights were read from
    params: dict
    texts: dict[str, dict | str]  # name of a file to write -> its text, or the values of its JSON
    copies: dict[str, pathlib.Path]  # name -> file to copy


def main(options) -> None:
    """Converts as the flags of `rpg_jax.convert` say."""
    check_flags(options)
    target = new_folder("target", options.target)
    start = time.perf_counter()
    source = of_run(options) if options.workdir else of_path(pathlib.Path(options.source), options.dtype)
    jax.block_until_ready(source.params)
    loaded = time.perf_counter()
    with staged(target) as folder:
        most = math.inf if options.to == PEFT else (options.max_shard_gb or 5.0) * 1e9
        tensors = weights.save_safetensors(folder, source.params, most, FILES[options.to])
        for name, file in source.copies.items():
            shutil.copyfile(file, folder / name)
        for name, values in source.texts.items():
            text = values if isinstance(values, str) else json.dumps(values, indent=2) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
    leaves = jax.tree.leaves(source.params)
    rows = {
        "tensors": tensors,
        "parameters": sum(leaf.size for leaf in leaves),
        "dtype": ", ".join(sorted({str(leaf.dtype) for leaf in leaves})),
        "seconds": f"{loaded - start:.1f} to read, {time.perf_counter() - loaded:.1f} to write",
    }
    print_summary(f"{source.path} -> {target} ({options.to})", rows)


def check_flags(options) -> None:
    """Raises ValueError for flags that make no sense together."""
    for name in ("which", "checkpoint_dir"):
        if getattr(options, name) is not None and options.workdir is None:
            raise InputError(f"--{name}={getattr(options, name)} is for the checkpoints of a --workdir")
    if options.to == PEFT and options.workdir is None:
        raise InputError(f"--to={PEFT} writes the adapters of a run: give its --workdir, not --source")
    if options.max_shard_gb is not None and options.to == PEFT:
        raise InputError("--max_shard_gb is for --to=huggingface")


def of_path(path: pathlib.Path, dtype: str) -> Source:
    """A folder of weights or a GGUF file, read into the host's memory."""
    texts, copies, config_from = {}, {}, None
    if path.suffix == gguf_files.SUFFIX:
        gguf = gguf_files.read_header(path)
        config = gguf_files.read_config(gguf)
        try:
            texts = gguf_tokenizer.files(gguf.metadata)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from None
    else:
        config, copies, config_from = huggingface.read_config(path), companions(path, path), path
    host = SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if dtype == "keep" else dtype, sharding=host),
        Model(config).shapes,
    )
    if dtype == "keep":
        shapes = weights.with_stored_dtypes(path, shapes)
    params = weights.load(path, shapes)
    texts["config.json"] = described(config, params, config_from) | texts.get(GENERATION, {})
    return Source(path, params, texts, copies)


def of_run(options) -> Source:
    """A run's checkpoint, at its evaluation parameters: its adapters for --to=peft, else the whole model."""
    folder = workdir.checkpoint_dir(options.workdir, options.checkpoint_dir)
    config, run = states.read_policy(folder)
    source, lora = config.model.checkpoint, run.model.lora
    if options.to == PEFT and lora is None:
        raise InputError(f"--to={PEFT} writes adapters, and {folder} is a run without any (its model.lora.rank is 0)")
    step, found = states.restore_state(folder, run, options.which or "best", states.load_frozen(config, run))
    place = folder / "checkpoints" / str(step)
    dtype = jnp.float32 if options.dtype == "keep" else options.dtype

    params = run.optimizer.evaluation_params(found.state.opt_state, found.state.params)
    if options.to != PEFT:
        params = jax.jit(merged)(Policy(run.model, params, found.state.step), found.frozen)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    check_finite(params, f"{folder}, step {step}", "they are not exported; name another checkpoint with --which")
    if options.to == PEFT:
        return Source(place, params, {"adapter_config.json": huggingface.adapter_config(lora, source)}, {})
    texts, tokenizer = {"config.json": described(run.model.config, params, source)}, run.data.tokenizer
    if source is None:
        ids = dict(bos_token_id=tokenizer.bos_id, pad_token_id=tokenizer.pad_id, eos_token_id=list(tokenizer.stop_ids))
        texts["config.json"] |= ids
        texts[GENERATION] = ids
    return Source(place, params, texts, companions(source, tokenizer.folder))


def described(config: ModelConfig, params: dict, source) -> dict:
    """`config.json` of parameters. Keys that this project does not know are kept as the folder `source` has them."""
    before = {} if source is None else huggingface.read_json(pathlib.Path(source) / "config.json")
    before = {key: value for key, value in before.items() if key != "dtype"}  # transformers 5 for torch_dtype
    return before | huggingface.config_json(config) | {"torch_dtype": str(params["embed"]["embedding"].dtype)}


def companions(source, tokenizer: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files to copy beside the weights, from the folders of the source weights, if any, and of the tokenizer."""
    files = {} if source is None else {GENERATION: pathlib.Path(source) / GENERATION}
    files |= {name: tokenizer / name for name in TOKENIZER_FILES}
    return {name: file for name, file in files.items() if file.is_file()}
