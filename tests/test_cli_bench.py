"""`omni-offload bench`: modes side by side, with their figures and whether their outputs are equal."""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from diffusers_omni_offload.cli import benching, main

BENCH = ["bench", "demo", "--calls", "1", "--steps", "2"]


def rows(printed: str) -> dict[str, list[str]]:
    """Mode -> cells of its row."""
    lines = printed.splitlines()[3:]
    return {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in lines if line and ": " not in line}


@pytest.fixture
def held(device: torch.device) -> int:
    """Device bytes that tests before have left."""
    return torch.accelerator.memory_allocated(device)


def test_modes_side_by_side(held: int, sim: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--modes", "resident,module,layer"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("demo on simulated device (modelled): the median of 1 calls after the first one\n")
    assert "modelled call" in printed
    found = rows(printed)
    assert list(found) == ["resident", "module", "layer"]
    assert [cells[-1] for cells in found.values()] == ["equal"] * 3
    assert found["resident"][3:5] == ["0 B", "0 B"] and "0 B" not in found["layer"][3:5] + found["module"][3:5]
    assert torch.accelerator.memory_allocated() == held and sim.stats()["pinned_current"] == 0


def test_figures_are_those_of_the_device(
    device: torch.device, sim: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, "--modes", "resident,layer", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["figures"] == "modelled" and found["device"] == "simulated device (modelled)"
    resident, layer = found["modes"]
    weights = 300_000  # more than half of them are in blocks
    assert resident["peak_nbytes"] - layer["peak_nbytes"] > weights / 2
    assert layer["moved_nbytes"] > weights / 2 and resident["moved_nbytes"] == 0
    assert 0 < layer["pinned_nbytes"] < layer["moved_nbytes"], "each of both steps copies blocks"
    assert resident["call_seconds"] > 0 and layer["is_equal"] is True and layer["refusal"] is None


def test_a_slower_link_is_seen(device: torch.device, sim: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for rate in (16e9, 1e7):
        sim.configure(h2d_bytes_per_s=rate)
        assert main([*BENCH, "--modes", "layer", "--json"]) == 0
        (layer,) = json.loads(capsys.readouterr().out)["modes"]
        seconds.append(layer["call_seconds"])
    assert seconds[1] > 2 * seconds[0] and seconds[1] > layer["moved_nbytes"] / 1e7 * 0.95


def test_a_mode_that_does_not_fit(held: int, sim: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sim.configure(capacity_bytes=held + 600_000)
    assert main([*BENCH, "--modes", "resident,module"]) == 0
    printed = capsys.readouterr().out
    assert list(rows(printed)) == ["module"] and "resident: Out of device memory: " in printed
    assert main([*BENCH, "--modes", "resident"]) == 1
    assert capsys.readouterr().err == "None of the modes could run.\n"
    sim.configure(capacity_bytes=held + 100_000)
    assert main([*BENCH, "--modes", "layer"]) == 1
    assert "layer: " in capsys.readouterr().out


def test_outputs_that_differ(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(range(100))
    monkeypatch.setattr(benching, "_timed", lambda platform, call: (1.0, np.array([next(answers)])))
    assert main([*BENCH, "--modes", "resident,layer"]) == 1
    printed = capsys.readouterr()
    assert "Outputs differ" in printed.err and rows(printed.out)["layer"][-1] == "DIFFERS"


def test_on_the_cpu_times_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--modes", "layer", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "demo on CPU" in printed and "modelled" not in printed
    (cells,) = rows(printed).values()
    assert cells[2] == "-" and cells[0] != "0 s"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench"], "Missing argument 'MODEL'"),
        (["bench", "nope"], "no folder 'nope'"),
        (["bench", "demo", "--modes", " , "], "--modes is empty"),
        (["bench", "demo", "--modes", "fast"], "--mode is 'fast', which is unknown"),
        (["bench", "demo", "--modes", "layer", "--memory-budget", "1GiB"], "isn't among --modes layer"),
        (["bench", "demo", "--memory-budget", "lots"], "'lots'"),
        (["bench", "demo", "--dtype", "int8"], "--dtype is 'int8'"),
        (["bench", "demo", "--device", "toaster"], "'toaster'"),
        ([*BENCH, "--modes", "layer", "--height", "17"], "divisible by 16"),
    ],
    ids=str,
)
def test_bad_input(arguments: list[str], words: str, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and words in printed.err and not printed.out
