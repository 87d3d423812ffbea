"""The example notebook runs from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("default")  # warnings of Jupyter's own packages are no failure of the notebook
def test_first_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("multi_similarity" in output.get("data", {}).get("text/plain", "") for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
