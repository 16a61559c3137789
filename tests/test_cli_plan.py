"""`omni-offload plan`: the forecast of a pipeline from its configurations, as text and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from diffusers_omni_offload.cli import main
from diffusers_omni_offload.demo.tiny_wan import build_pipeline
from diffusers_omni_offload.planner import plan_omni_offload
from tests import tiny

DEMO_SIZE = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 4}


def test_the_forecast_is_that_of_python(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory-budget", "1MiB", "--host-memory-budget", "1GiB", "--link-gb-per-s", "25", "--tflops", "0.1"]
    expected = plan_omni_offload(
        build_pipeline()[0],
        memory_budget="1MiB",
        host_memory_budget="1GiB",
        link_gb_per_s=25,
        tflops=0.1,
        **DEMO_SIZE,  # type: ignore[arg-type]
    )
    assert main(["plan", "demo", *flags]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["plan", "demo", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(expected.to_json())


def test_sizes_and_dtype_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.build_sd3()[0].save_pretrained(tmp_path / "sd3")
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    flags = ["--height", "32", "--width", "48", "--steps", "7", "--memory-budget", "1GiB"]
    found = {}
    for dtype in ("bfloat16", "float32"):
        assert main(["plan", str(tmp_path / "sd3"), *flags, "--dtype", dtype, "--json"]) == 0
        found[dtype] = json.loads(capsys.readouterr().out)
    request = found["float32"]["call"]
    assert (request["height"], request["width"], request["num_inference_steps"]) == (32, 48, 7)
    sizes = [{one["path"]: one["dtypes"] for one in found[dtype]["components"]} for dtype in found]
    halved, full = (sizes[index]["transformer"] for index in (0, 1))
    assert 2 * halved["bfloat16"] == full["float32"]


def test_on_a_terminal_it_is_drawn_and_nothing_is_cut_off(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, without colors
    assert main(["plan", "demo", "--memory-budget", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert "────" in printed and "…" not in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "Missing argument 'MODEL'"),
        (["plan", "nope"], "no folder 'nope'"),
        (["plan", "demo", "--memory-budget", "lots"], "'lots'"),
        (["plan", "demo", "--memory-budget", "0GiB"], "more than 0 bytes"),
        (["plan", "demo", "--tflops", "0"], "tflops is 0.0"),
        (["plan", "demo", "--link-gb-per-s", "x"], "'--link-gb-per-s'"),
        (["plan", "demo", "--height", "-1"], "'--height'"),
        (["plan", "demo", "--dtype", "int8"], "--dtype is 'int8'"),
        (["plan", "demo", "--device", "toaster"], "'toaster'"),
    ],
    ids=str,
)
def test_bad_input(arguments: list[str], words: str, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and words in printed.err and not printed.out
