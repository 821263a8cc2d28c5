"""docs/surrogates.ipynb runs without an error and finds what its text says, and so do the outputs stored in it."""

import pathlib
import re

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs/surrogates.ipynb"
CHECKS = """
assert all(gap < 1e-12 for gap in per_sample.values()) and len(per_sample) == 12
assert bias[0.0] < 1e-12 and bias[1.0] > 0.1
assert found == {
    "stopped_ratio": ("biased", "biased"),
    "unweighted_k3": ("biased", "biased"),
    "weighted_k3": ("exact per sample", "exact per sample"),
}
assert verify.returncode == 1 and "NO" in verify.stdout and not verify.stderr.startswith("error"), verify
"""


def printed(notebook) -> list[str]:
    """The text that each cell printed, without the colors that Jupyter asks of its subprocesses (FORCE_COLOR)."""
    texts = ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]
    return [re.sub(r" +\n", "\n", re.sub(r"\x1b\[[\d;]*m", "", text)) for text in texts]


def test_the_notebook_finds_what_it_says(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, 4)
    stored = printed(notebook)
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS))
    # A cell that raises, the last one too, ends this with a CellExecutionError.
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT / "docs")}}).execute()
    exact = [i for i, cell in enumerate(stored) if "stopped_ratio  on policy" in cell or "exit status" in cell]
    assert len(exact) == 2
    assert [stored[i] for i in exact] == [printed(notebook)[i] for i in exact]
