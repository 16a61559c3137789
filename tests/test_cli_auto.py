"""`omni-offload run` and `bench` with the automatic choice, a report and a trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusers_omni_offload import pipeline as pipeline_module
from diffusers_omni_offload.cli import main

RUN = ["run", "demo", "--prompt", "a cat", "--output", "cat.gif", "--steps", "2"]
TIGHT = "1100KiB"
"""Less than the demo takes with all weights on the device."""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the automatic choice was asked for."""
    found: list[Any] = []
    enable = pipeline_module._enable_automatically
    monkeypatch.setattr(
        pipeline_module, "_enable_automatically", lambda *args: (found.append(args[1]), enable(*args))[1]
    )
    return found


def test_without_flags_the_choice_is_automatic(
    device: torch.device, requests: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(RUN) == 0
    assert Path("cat.gif").exists()
    (request,) = requests
    assert request.memory_budget is None and request.host_memory_budget is None and request.keeps_profile
    assert request.workload == {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2}
    assert "nothing was copied: all weights stayed on the device" in capsys.readouterr().out


def test_budgets_are_passed_on(device: torch.device, requests: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--mode", "resident"]) == 0
    expected = Path("cat.gif").read_bytes()
    flags = ["--mode", "auto", "--memory-budget", TIGHT, "--host-memory-budget", "1GiB", "--no-profile"]
    assert main([*RUN, *flags]) == 0
    assert Path("cat.gif").read_bytes() == expected
    (request,) = requests
    assert (request.memory_budget, request.host_memory_budget) == (1100 << 10, 1 << 30)
    assert not request.keeps_profile
    assert re.search(r"[1-9]\d* components were copied", capsys.readouterr().out)


def test_what_fits_nowhere_is_one_sentence(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--memory-budget", "90KiB"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and re.search(r"[\d.]+ KiB of device memory are missing", printed.err)
    assert not Path("cat.gif").exists()


@pytest.mark.parametrize("choice", [["--mode", "layer"], ["--memory-budget", TIGHT]], ids=["layer", "auto"])
def test_a_report_of_a_call_that_is_traced(
    choice: list[str], device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *choice, "--report", "--trace", "trace.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("wrote trace.json, which https://ui.perfetto.dev opens\nwrote cat.gif\n")
    report = printed.split("\n", 2)[2]
    assert report.startswith("Offload on simulated device (modelled)\n")
    # Each expert runs once in two steps, with and without the prompt.
    assert re.search(r"\ntransformer_2 .* 2 +[\d.]+ [µm]?s ", report), report
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {"transformer", "transformer_2"} <= {event["name"] for event in events}


def test_a_report_alone(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--enable-layerwise-offload", "--report"]) == 0
    assert re.search(r"\ntransformer_2 .* 2 +[\d.]+ [µm]?s ", capsys.readouterr().out)


def test_the_first_of_several_calls_is_traced(device: torch.device) -> None:
    Path("prompts.txt").write_text("a cat\nrain\n")
    sizes = []
    for prompts in (["--prompt", "a cat"], ["--prompts", "prompts.txt"]):
        flags = ["--output", "cat.gif", "--steps", "2", "--mode", "layer", "--trace", "trace.json"]
        assert main(["run", "demo", *prompts, *flags]) == 0
        sizes.append(len(json.loads(Path("trace.json").read_text())["traceEvents"]))
    assert sizes[0] == sizes[1]


def test_bench_takes_budgets(device: torch.device, requests: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    held = torch.accelerator.memory_allocated(device)
    flags = ["--calls", "1", "--steps", "2", "--modes", "resident,auto", "--memory-budget", TIGHT, "--json"]
    assert main(["bench", "demo", *flags, "--no-profile"]) == 0
    resident, automatic = json.loads(capsys.readouterr().out)["modes"]
    assert automatic["is_equal"] is True and automatic["refusal"] is None
    assert automatic["peak_nbytes"] - held < min(resident["peak_nbytes"] - held, 1100 << 10)
    assert requests[0].memory_budget == 1100 << 10 and not requests[0].keeps_profile
