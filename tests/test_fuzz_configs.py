"""Configs that nobody should write: a line names the key, or training begins."""

import itertools

import hypothesis
import pytest
from fuzzing import NUMBERS, VALUES, begin, budget, call
from hypothesis import strategies as st

from configs import quickstart
from rpg_jax.objectives import CLIPS, DIVERGENCES, RECIPES
from rpg_jax.objectives.advantages import ADVANTAGES
from rpg_jax.run import train
from rpg_jax.storage.settings import flatten

KEYS = sorted(flatten(quickstart.get_config("smoke").to_dict()))
NAMES = [*RECIPES, *CLIPS, *DIVERGENCES, *ADVANTAGES, "adamw", "cosine", "sampler", "unit", "int8", "float8_e4m3fn"]
NAMES += ["bfloat16", "float64", "dots", "offload", "splash", "cudnn", "every", "kl_target", "ema", "fixed", "optimal"]
NAMES += ["to_go", "full", "sequence", "constant", "sequence_mean", "q,v", "math_verify", "boxed", "reinforce"]
CHANGES = st.dictionaries(
    st.sampled_from(KEYS),
    st.one_of(VALUES, NUMBERS, st.sampled_from(NAMES), st.integers(1, 64), st.booleans(), st.binary(max_size=3)),
    min_size=1,
    max_size=4,
)
FILE = """from configs import quickstart
nan, inf = float("nan"), float("inf")
def get_config():
    config = quickstart.get_config("smoke")
    with config.ignore_type():
        config.data.directory = {directory!r}
        for key, value in {changes!r}.items():
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = value
    return config
"""


COUNT = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where `train` is called, which ends where training would begin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("configs"))
        patch.setattr(train, "train", begin)
        yield folder


@budget(60)
@hypothesis.given(changes=CHANGES)
def test_a_config_file_is_refused_by_the_name_of_a_key_or_begins(folder, changes):
    config = folder / f"fuzzed_{next(COUNT)}.py"  # a new name: bytecode of a file as long and as old would be taken
    config.write_text(FILE.format(directory=str(folder / "data"), changes=changes))
    status, line = call("train", f"--config={config}", "--workdir=run", "--watchdog_seconds=0")
    names = {name for key in changes for name in key.split(".")[-2:]} - {"name"}  # a key `name` goes by its section
    assert status == 2 and (line == "error: accepted" or any(map(line.count, names))), f"{changes}: {line}"
