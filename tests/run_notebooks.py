"""Runs notebooks from top to bottom and stores their outputs: `python -m tests.run_notebooks notebooks/*.ipynb`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent

#: Run before the first cell. What torchao says of the machine when it is imported is no output of a notebook.
QUIET = """
import logging
for library in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(library).setLevel(logging.ERROR)
del library, logging
"""


def execute(path: Path, *, repeats: int = 1, again: bool = False, timeout: float = 120.0) -> Any:
    """Run a notebook in a fresh kernel and return it with its outputs; the file isn't written.

    Args:
        repeats: how often each cell runs before the next one does.
        again: run every cell once more at the end, from the last to the first.
        timeout: seconds that one cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", record_timing=False, resources={"metadata": {"path": ROOT}}
    )
    # The bar of a terminal does: ipywidgets isn't needed to store outputs.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found", "OMP_NUM_THREADS": "1"}
    environment["DIFFUSERS_OMNI_OFFLOAD_PROFILE"] = ""  # What was measured on this machine before doesn't count.
    with client.setup_kernel(env=environment):
        notebook.cells.insert(0, nbformat.v4.new_code_cell(QUIET))
        client.execute_cell(notebook.cells[0], 0, store_history=False)
        notebook.cells.pop(0)
        code_cells = [(cell, index) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        for count, (cell, index) in enumerate(code_cells, start=1):
            for _ in range(repeats):
                client.execute_cell(cell, index)
            cell.execution_count = count
            cell.outputs = [output for output in map(settle, joined(cell.outputs)) if output is not None]
        if again:
            for cell, index in reversed(code_cells):
                client.execute_cell(cell, index)
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs, with pieces of the same stream that follow each other made one."""
    result: list[Any] = []
    for output in outputs:
        is_stream = output.output_type == "stream"
        if is_stream and result and result[-1].output_type == "stream" and result[-1].name == output.name:
            result[-1].text += output.text
        else:
            result.append(output)
    return result


def settle(output: Any) -> Any:
    """The output as a terminal would leave it: of a progress bar the last state, of nothing None."""
    if output.output_type == "stream":
        lines = [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in output.text.split("\n")]
        output.text = "\n".join(lines).strip("\n")
        if not output.text:
            return None
        output.text += "\n"
    if "execution_count" in output:
        output.execution_count = None
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        begin = time.monotonic()
        notebook = execute(path)
        nbformat.validate(notebook)
        nbformat.write(notebook, path)
        cells = sum(cell.cell_type == "code" for cell in notebook.cells)
        print(f"{path}: {cells} cells ran in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
