"""The notebooks run from top to bottom, and any cell of them can be run again."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
import torch

from diffusers_omni_offload.demo.tiny_wan import build_pipeline
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
    assert {"quickstart", "which_mode", "multi_gpu", "custom_model"} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.processes
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem == "quickstart" else [pytest.mark.slow]) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
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


def test_which_mode_stores_modelled_times_and_a_plot() -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "which_mode.ipynb", as_version=4)
    assert "times: modelled" in code_cells(notebook)[0].outputs[0].text
    assert not any(word in str(notebook.cells) for word in ("Warning", "Traceback"))


@pytest.mark.parametrize(
    ("name", "pictures", "tables"),
    [("quickstart", 1, 1), ("which_mode", 2, 1), ("custom_model", 1, 1), ("multi_gpu", 1, 0)],
)
def test_pictures_and_tables_are_stored(name: str, pictures: int, tables: int) -> None:
    """GitHub shows PNG and HTML, and text where there is no other form."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    kinds = [kind for cell in code_cells(notebook) for output in cell.outputs for kind in output.get("data", {})]
    assert kinds.count("image/png") == pictures and kinds.count("text/html") == tables
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 250_000


TINY_CALL = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16, "num_inference_steps": 2}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["quickstart", "which_mode", "custom_model", "multi_gpu"])
def test_a_real_model_is_one_name(name: str, tmp_path: Path) -> None:
    """The name of a model, here a folder, takes the place of None, and every cell runs with it."""
    folder = tmp_path / "model"
    build_pipeline(two_stage=False)[0].save_pretrained(folder)
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    changes = 0
    for cell in code_cells(notebook):
        changes += len(re.findall(r"^model_id = None", cell.source, flags=re.MULTILINE))
        cell.source = re.sub(r"^model_id = None", f"model_id = {str(folder)!r}", cell.source, flags=re.MULTILINE)
        arguments = {"arguments": {"prompt": "a cat", **TINY_CALL}, "call": TINY_CALL}
        for variable, values in arguments.items():
            cell.source = re.sub(rf"^{variable} = {{.*}}", f"{variable} = {values}", cell.source, flags=re.MULTILINE)
    assert changes == 1
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    printed = "".join(text for cell in shown(execute(tmp_path / "notebook.ipynb")) for text in cell)
    assert "Traceback" not in printed and "equal: False" not in printed


def test_multi_gpu_stores_what_a_rank_holds_and_what_differs() -> None:
    """Blocks are nearly all of the weights: four ranks hold a quarter of them each."""
    notebook = nbformat.read(ROOT / "notebooks" / "multi_gpu.ipynb", as_version=4)
    texts = [text for cell in shown(notebook) for text in cell]
    (table,) = [text for text in texts if text.startswith("MiB a rank")]
    own = {line[:33].strip(): int(line[33:42]) for line in table.splitlines()[1:]}
    local, gathered = own["rank-local, from memory"], own["all-gather"]
    assert local > 50 and gathered == pytest.approx(local / 4, abs=3), own
    assert own["rank-local, from the checkpoint"] <= 3, own
    assert any("num_inference_steps is 2 on ranks 0, 1 and 3, 3 on rank 2" in text for text in texts)
    assert not any(word in "".join(texts) for word in ("Warning", "Traceback", "False"))


def test_custom_model_declares_a_plan_in_ten_lines_and_proves_it() -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "custom_model.ipynb", as_version=4)
    (plan,) = [cell for cell in code_cells(notebook) if "class OffloadableSketch" in cell.source]
    declaration = plan.source.partition("\n\n\n")[0].splitlines()[1:]
    assert len(declaration) <= 10, declaration
    texts = [text for cell in shown(notebook) for text in cell]
    assert any("12 of 12 blocks streamed" in text and "3 of 3 blocks streamed" in text for text in texts)
    assert "".join(texts).count("equal: True") == 6
    assert {"blocks without an effect: none\nas before: True\n", "races: none\n"} <= set(texts)
    assert any("has no DiT to offload" in text for text in texts)
    assert not any(word in "".join(texts) for word in ("Warning", "Traceback", "False"))


def test_the_sizes_of_which_mode_are_those_that_the_device_counts(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights lie below what is allocated at most, by no more than the activations of the resident pipeline."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the notebook adds to
    sim.configure(alloc_round=1)
    notebook = nbformat.read(ROOT / "notebooks" / "which_mode.ipynb", as_version=4)
    names: dict[str, Any] = {}
    for cell in code_cells(notebook)[:3]:
        exec(cell.source.partition("\nresults = ")[0].replace("num_layers=12", "num_layers=4"), names)
    found = {}
    for way in names["WAYS"]:
        gc.collect()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        _, held, moved, _ = names["run"](way)
        found[way] = held, torch.accelerator.max_memory_allocated() - before, moved
    activations = found["no offload"][1] - found["no offload"][0]
    assert all(held <= peak <= held + activations for held, peak, _ in found.values()), found
    assert found["mixed"][0] < found["layer"][0] and found["module"][0] < found["no offload"][0]
    assert found["no offload"][2] == 0 < found["module"][2] < found["layer"][2]


def test_a_progress_bar_leaves_its_last_state() -> None:
    stream = nbformat.v4.new_output("stream", text="Packing 0%\rPacking 100%\rdone   \nnext\n")
    assert settle(stream).text == "done\nnext\n"
    assert settle(nbformat.v4.new_output("stream", text="Packing 0%\r        \r")) is None
