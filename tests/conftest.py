"""What holds for every test and every process that tests start: compiling is kept short, and long files go first."""

import os
import pathlib

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# What is compiled here runs once: LLVM's expensive passes and the code generator for fusions would take two thirds of
# the suite's time. XLA's own passes stay.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"

import jax  # noqa: E402

LONG = ("test_readme", "test_train", "test_multihost", "test_mesh", "test_update")  # files that take minutes


def pytest_collection_modifyitems(items):
    """Long files first, so that two workers end together."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="module", autouse=True)
def executables_of_one_file():
    """Frees a file's compiled programs at its end: together those of all files would take gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture
def call_verify(tmp_path, capsys, monkeypatch):
    """Calls `verify` in tmp_path as cli.run does; (exit status, stdout, stderr)."""
    from absl.testing import flagsaver

    from rpg_jax import verify
    from rpg_jax.run import cli

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as left:
            cli.run(verify.main, ["verify", *arguments])
        out, err = capsys.readouterr()
        return left.value.code, out, err

    return run
