"""What holds for every test and every process that tests start: compiling is kept short, and long files go first."""

import ctypes
import gc
import os

import hypothesis
import pytest
from environment import environment

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(environment())
os.environ.pop("PYTHONUNBUFFERED", None)  # what tests start buffers its output, as where users start it

import jax  # noqa: E402

hypothesis.settings.register_profile("any machine", deadline=None)  # a slow one is no error
hypothesis.settings.load_profile("any machine")

# Tracing allocates by the million: at Python's own threshold, looking for garbage takes a sixth of the suite's time.
gc.set_threshold(100_000)
C = ctypes.CDLL(None)
# Files that start processes, train, or compile models and samplers in many forms, the longest first: `train` compiles
# what `documents` runs. The inner loop of somebody who changes an objective, a metric or a task does without them:
# `launch/test.sh --quick`.
SLOW = [
    f"test_{name}"
    for name in (
        "verify train multihost mesh documents lora environments distillation rollouts qwen3_moe sampling real_model "
        "notebook checkpoints oracle fuzz_commands models families packing draw fuzz_configs fuzz_files security "
        "huggingface tradeoff report sweep plan in_other_trainers math_rewards third_party attention convert parallel "
        "evaluate update rewards_pool paged quantization carry_over gguf gym prepare huggingface_tokenizer "
        "logprobs cudnn rollout delay gpu package launch data workdir"
    ).split()
]


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out the files that tests/conftest.py calls slow")


def pytest_ignore_collect(collection_path, config):
    return True if config.option.quick and collection_path.stem in SLOW else None


def pytest_collection_modifyitems(items):
    """Long files first, so that all workers end together."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@pytest.fixture(scope="module", autouse=True)
def executables_of_one_file():
    """Frees a file's compiled programs at its end: together those of all files would take gigabytes."""
    yield
    jax.clear_caches()
    gc.collect()
    if hasattr(C, "malloc_trim"):  # glibc gives nothing back by itself
        C.malloc_trim(0)


@pytest.fixture
def call_command(tmp_path, monkeypatch):
    """`call_command(COMMAND, *arguments)` in tmp_path as cli.run does it; (exit status, stdout, stderr)."""
    from fuzzing import outcome

    monkeypatch.chdir(tmp_path)
    return outcome
