"""Every notebook runs from top to bottom, on a CPU and without network."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.effort import for_release

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))

PRINTED = {
    "03_the_algorithm_in_one_file.ipynb": "step   1  reward",
    "04_echo_trap.ipynb": "success",
    "05_your_own_environment.ipynb": "held out:",
}
"""What a notebook prints; the others speak of masks."""
SHORT = {
    "03_the_algorithm_in_one_file.ipynb": "num_steps, num_drawn = 1, 2",
    "04_echo_trap.ipynb": "cold_steps, max_steps, seed = 1, 2, 0",
    "05_your_own_environment.ipynb": "max_steps, questions_per_step, num_test = 1, 4, 8",
}
"""Parameters for a run of seconds, in place of those in the cell with the tag."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAMES[0], *for_release(*NAMES[1:])])
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_R1_TRL_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = SHORT[name]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if output
    )
    assert PRINTED.get(name, "mask") in printed
