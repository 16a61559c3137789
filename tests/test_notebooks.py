"""The notebooks run from top to bottom, and any cell of them can be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.run_notebooks import ROOT, execute, settle

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook: Any) -> list[list[str]]:
    """What each cell prints or evaluates to."""
    return [
        [output.text if output.output_type == "stream" else output.data["text/plain"] for output in cell.outputs]
        for cell in code_cells(notebook)
    ]


def test_there_are_notebooks() -> None:
    assert ROOT / "notebooks" / "quickstart.ipynb" in NOTEBOOKS


@pytest.mark.processes
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_cells_can_be_run_again(path: Path) -> None:
    notebook = execute(path, repeats=2, again=True)
    printed = "".join(text for cell in shown(notebook) for text in cell)
    assert "Traceback" not in printed and "False" not in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(cell.outputs for cell in code_cells(notebook)), "run `make notebooks`"
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert all(output.output_type != "error" for cell in code_cells(notebook) for output in cell.outputs)


def test_quickstart_enables_layer_mode_in_the_third_cell() -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    assert any('enable_omni_offload("layer"' in cell.source for cell in code_cells(notebook)[:3])


def test_a_progress_bar_leaves_its_last_state() -> None:
    stream = nbformat.v4.new_output("stream", text="Packing 0%\rPacking 100%\rdone   \nnext\n")
    assert settle(stream).text == "done\nnext\n"
    assert settle(nbformat.v4.new_output("stream", text="Packing 0%\r        \r")) is None
