"""The notebook of the documentation runs in Jupyter's kernel, and shows what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
# In a child process: the kernel's client has event loops and warnings of its own.
RUN = """
import json, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
print(json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"]))
"""


@pytest.mark.full
def test_the_notebook_streams_shows_markdown_and_frees_its_engine() -> None:
    command = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    outputs: list[list[dict[str, Any]]] = json.loads(done.stdout)
    model, streamed, completion, together, closed = outputs
    assert model[0]["data"]["text/plain"].startswith("ModelInfo('cllm-tiny'")
    assert "".join(output["text"] for output in streamed) == "1 2 3 4 5 6 7 8 9 10"
    assert completion[0]["data"]["text/markdown"] == "2"
    assert together[0]["data"]["text/plain"] == str([str(2 * n) for n in range(8)])
    assert closed == []


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
