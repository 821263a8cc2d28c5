"""Configs that nobody should write: a line names the key, or all is well and a step can be trained."""

import hypothesis
import pytest
from fuzzing import FACTOR, NUMBERS, VALUES, begin, budget, call
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("configs")


def trained(folder, changes):
    """What `train` says of the smoke run with changes that a config file makes."""
    config = folder / "fuzzed.py"
    config.write_text(FILE.format(directory=str(folder / "data"), changes=changes))
    return call("train", f"--config={config}", f"--workdir={folder / 'run'}", "--watchdog_seconds=0")


def is_named(keys, line):
    """Whether one of the keys, or the section of one that is called `name`, is in a line."""
    return any(part in line for key in keys for part in key.split(".")[-2:] if part != "name")


@budget(60)
@hypothesis.given(changes=CHANGES)
def test_a_config_file_is_refused_by_the_name_of_a_key_or_begins(folder, monkeypatch_module, changes):
    monkeypatch_module.setattr(train, "train", begin)
    status, line = trained(folder, changes)
    assert status == 2 and (line == "error: accepted" or is_named(changes, line)), f"{changes}: {line}"


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@budget(25)
@hypothesis.given(
    key=st.sampled_from(KEYS), value=st.one_of(NUMBERS.map(str), st.sampled_from([*NAMES, "", "[]", "x"]))
)
def test_a_flag_of_a_config_is_refused_by_the_name_of_its_key_or_begins(folder, monkeypatch_module, key, value):
    monkeypatch_module.setattr(train, "train", begin)
    monkeypatch_module.chdir(folder)
    file = f"--config={quickstart.__file__}:smoke"
    flags = [f"--config.{key}={value}", "--workdir=run", "--watchdog_seconds=0"]
    status, line = call("train", file, *flags)
    assert status == 2 and (line == "error: accepted" or is_named([key], line)), f"{key}={value}: {line}"


SENSIBLE = {
    "seed": st.integers(0, 2**32 - 1),
    "model.scan": st.booleans(),
    "model.dtype": st.sampled_from(["float32", "bfloat16"]),
    "model.remat": st.sampled_from(["none", "full", "dots"]),
    "rollout.samples": st.integers(1, 5),
    "rollout.slots": st.integers(1, 20),
    "rollout.max_new": st.integers(1, 36),
    "rollout.page_size": st.sampled_from([8, 16, 128]),
    "rollout.temperature": st.floats(1e-3, 50),
    "rollout.dynamic_sampling": st.booleans(),
    "rollout.carry_over": st.booleans(),
    "rollout.oversample": st.floats(1, 3),
    "rollout.max_batches": st.integers(1, 3),
    "rollout.overlong_buffer": st.integers(0, 5),
    "rollout.cache_dtype": st.sampled_from(["int8", "float8_e4m3fn"]),
    "behavior.source": st.sampled_from(["trainer", "sampler"]),
    "reward.scale": st.sampled_from(["signed", "unit"]),
    "objective.name": st.sampled_from(list(RECIPES)),
    "objective.clip": st.sampled_from(list(CLIPS)),
    "objective.divergence": st.sampled_from(list(DIVERGENCES)),
    "objective.estimator": st.sampled_from(["reinforce", "differentiable"]),
    "objective.beta": st.floats(0, 10),
    "objective.advantage": st.sampled_from(list(ADVANTAGES)),
    "objective.level": st.sampled_from(["token", "sequence"]),
    "objective.kl": st.sampled_from(["token", "to_go", "full"]),
    "reference.mode": st.sampled_from(["iterative", "fixed"]),
    "learner.minibatch_prompts": st.integers(1, 4),
    "learner.microbatch_rows": st.integers(1, 8),
    "learner.logprob_chunk": st.integers(1, 100),
    "learner.pack": st.booleans(),
    "learner.packed_lengths": st.integers(1, 3),
    "optimizer.name": st.sampled_from(["adamw", "schedule_free_adamw"]),
    "optimizer.learning_rate": st.floats(0, 1),
    "optimizer.epsilon": st.sampled_from([1e-38, 1e-8, 1.0]),
    "optimizer.clip_norm": st.sampled_from([1e-38, 1.0, 1e38]),
}
SMALL = {"steps": 1, "warm_start.steps": 0, "model.size": "micro", "data.train_size": 20, "data.heldout_size": 2}
SMALL |= {"evaluation.k": 1, "log.tensorboard": False}


@pytest.mark.skipif(FACTOR == 1, reason="each example compiles a run: with FUZZ=N, N of them")
@budget(1)
@hypothesis.given(
    changes=st.lists(st.sampled_from(list(SENSIBLE)), max_size=4, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: SENSIBLE[key] for key in keys})
    )
)
def test_what_is_accepted_trains_a_step(tmp_path_factory, folder, changes):
    config, run = folder / "fuzzed.py", tmp_path_factory.mktemp("step")
    config.write_text(FILE.format(directory=str(folder / "data"), changes=SMALL | changes))
    status, line = call("train", f"--config={config}", f"--workdir={run}", "--watchdog_seconds=0", seconds=600)
    assert status == 0 or is_named(changes, line), f"{changes}: {line}"
