"""Pipelines of `load_omni_pipeline` in every mode: withheld weights are read where they are needed, and files that were
changed are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from diffusers_omni_offload import CheckpointError, load_omni_pipeline
from diffusers_omni_offload.backends.attaching import Attaching
from diffusers_omni_offload.weights.withheld import is_withheld
from tests import tiny
from tests.equality import Call

MODES: dict[str, dict[str, Any]] = {
    "module": {"mode": "module"},
    "memory": {"mode": "layer", "layer_options": {"dit": {"source": "memory"}}},
    "files": {"mode": "layer"},
    "residents": {"mode": "layer", "layer_options": {"dit": {"resident_layers": 1}}},
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Call]:
    """A tiny Wan in float32, with each DiT in several files."""
    pipe, call = tiny.build_wan(num_layers=3)
    pipe.save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path, call


def withheld(pipe: Any) -> list[str]:
    return [path for path, weight in pipe.transformer.named_parameters() if is_withheld(weight)]


@pytest.mark.parametrize("mode", MODES)
def test_cast_weights_in_each_mode(mode: str, saved: tuple[Path, Call], device: torch.device) -> None:
    folder, call = saved
    stock = WanPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    stock.set_progress_bar_config(disable=True)
    reference = tiny.run(tiny.align_parameters(stock).to(device), call)
    pipe = load_omni_pipeline(WanPipeline, folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    assert withheld(pipe)
    pipe.enable_omni_offload(**MODES[mode])
    assert bool(withheld(pipe)) == (mode in ("files", "residents"))
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert not withheld(pipe)
    assert np.array_equal(tiny.run(pipe.to(device), call), reference)


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_was_changed_before_enabling(mode: str, saved: tuple[Path, Call], device: torch.device) -> None:
    folder, _ = saved
    pipe = load_omni_pipeline(WanPipeline, folder)
    changed = sorted((folder / "transformer").glob("*.safetensors"))[0]
    content = bytearray(changed.read_bytes())
    content[-4:] = b"\0\0\x80?"
    with changed.open("r+b") as file:
        file.write(content)
    later = changed.stat().st_mtime_ns + 1_000_000
    os.utime(changed, ns=(later, later))
    with pytest.raises(CheckpointError, match=changed.name):
        pipe.enable_omni_offload(**MODES[mode])
    assert pipe.omni_offload is None
    assert all(weight.device.type == "cpu" for weight in pipe.transformer.parameters())


def test_a_start_that_fails_reads_nothing_and_says_why(
    saved: tuple[Path, Call], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, call = saved
    pipe = load_omni_pipeline(WanPipeline, folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    before = withheld(pipe)

    def fail(*args: Any) -> None:
        raise MemoryError("no room for hooks")

    with monkeypatch.context() as patch:
        patch.setattr(Attaching, "attach", fail)
        with pytest.raises(MemoryError, match="no room for hooks"):
            pipe.enable_omni_offload("layer")
    assert withheld(pipe) == before
    pipe.enable_omni_offload("layer")
    assert np.isfinite(tiny.run(pipe, call)).all()
