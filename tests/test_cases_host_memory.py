"""Public cases of host memory and page locks: weights that are there twice, budgets, hosts without room."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from diffusers_omni_offload import load_omni_pipeline
from diffusers_omni_offload.host import HostMemory
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming import staging
from diffusers_omni_offload.weights import pinning
from tests import distributed_cases as cases
from tests import tiny
from tests.living import fast_ones
from tests.modes import MODES
from tests.test_loading import anonymous_bytes

FILES: dict[str, Any] = {"mode": "layer", "layer_options": {"dit": {"source": "checkpoint"}}}
GATHERED: dict[str, Any] = {"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}}


@pytest.fixture
def wan(tmp_path: Path) -> Path:
    """A folder of its own with a tiny Wan of two DiTs, each in several files."""
    return cases.save("wan", tmp_path / "wan")


def call() -> dict[str, Any]:
    return cases.build("wan", 0)[1]()


@cache
def expected(device: torch.device) -> np.ndarray:
    """What the Wan gives with everything on the device."""
    return cases.reference("wan", 0, device)


def mapped(folder: Path, **options: Any) -> Any:
    return load_omni_pipeline(type(cases.build("wan", 0)[0]), folder, **options)


def blocks_of(pipe: Any) -> list[nn.Module]:
    return [*pipe.transformer.blocks, *pipe.transformer_2.blocks]


# ---------------------------------------------------------------------- how much memory


@pytest.mark.parametrize("options", [{"mode": "layer"}, GATHERED], ids=["layers", "group of one"])
def test_helios_141_weights_in_files_never_come_to_memory_as_a_whole(options: dict[str, Any], tmp_path: Path) -> None:
    """Weights of 40 GB took 80 GB of host memory while offload was enabled."""
    pipe, _ = cases.build("wan", 0)
    # About 60 MB in 12 blocks.
    large = WanTransformer3DModel(num_attention_heads=4, attention_head_dim=64, num_layers=12, ffn_dim=1400,
                                  freq_dim=16, in_channels=16, out_channels=16, text_dim=32)  # fmt: skip
    nbytes = sum(parameter.nbytes for parameter in large.parameters())
    pipe.register_modules(transformer=large, transformer_2=None)
    pipe.register_to_config(boundary_ratio=None)
    pipe.save_pretrained(tmp_path)
    del pipe, large
    for attempt in range(2):  # the first one is for what libraries keep
        pipe = mapped(tmp_path)
        gc.collect()
        before = anonymous_bytes()
        handle = pipe.enable_omni_offload(**options, device="cpu")
        enabled = anonymous_bytes() - before
        tiny.run(pipe, lambda: {**call(), "guidance_scale_2": None})
        gc.collect()
        called = anonymous_bytes() - before
        assert handle.loads >= 12 and sum(m.host_nbytes for m in handle.backend.masters) == 0
        if attempt:
            assert nbytes > 50e6 and enabled < nbytes / 12 and called < nbytes / 3, "two slots of a twelfth each"
        pipe.disable_omni_offload()
        del pipe, handle


# ---------------------------------------------------------------------- page locks


@pytest.mark.parametrize("system", fast_ones(["linux", "windows"], "linux"))
@pytest.mark.parametrize("source", ["memory", "files"])
@pytest.mark.parametrize("blocks", [0, 1, None])
def test_musubi_585_a_budget_is_never_exceeded(
    blocks: int | None,
    source: str,
    system: str,
    device: torch.device,
    sim: ModuleType,
    wan: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where only a part of the memory can be locked, nothing was, or all was tried."""
    staged: list[weakref.ref[Any]] = []
    most = 0
    make = staging.HostBuffer

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        buffer = make(*args, **kwargs)
        staged.append(weakref.ref(buffer))
        most = max(most, sum(reference() is not None for reference in staged))
        return buffer

    monkeypatch.setattr(staging, "HostBuffer", counting)
    if system == "windows":  # there memory isn't locked where it is
        monkeypatch.setattr(Platform, "registers_host_memory", property(lambda self: False))
    reference = expected(device)
    pipe = mapped(wan) if source == "files" else cases.build("wan", 0)[0]
    size = max(sum(t.nbytes for t in [*block.parameters(), *block.buffers()]) for block in blocks_of(pipe))
    budget: int | bool = True if blocks is None else blocks * 2 * size
    before = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload("layer", pin_memory=budget)
    seen: list[int] = []

    def look(*args: Any) -> dict[str, Any]:
        seen.append(sim.stats()["pinned_current"] - before)
        return {}

    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, lambda: {**call(), "callback_on_step_end": look}), reference)
    assert len(seen) == 4 and max(seen) == handle.pinned_bytes
    assert max(seen) <= budget if blocks is not None else max(seen) > 0
    assert (max(seen) > 0) == (blocks != 0)
    assert (0 < most <= 2) if source == "files" else most == 0
    pipe.disable_omni_offload()
    if system == "windows":  # there weights stay in the locked memory as long as they live
        del pipe, handle
    gc.collect()
    assert sim.stats()["pinned_current"] == before


@pytest.mark.parametrize("total", [0, 1, 1000])
def test_wan2gp_103_a_host_without_room_is_told_in_plain_figures(
    total: int, device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ "Reservable RAM is -20425 MB", and the option that it named couldn't be reached."""
    monkeypatch.setattr(pinning, "host_memory", lambda: HostMemory(total, 0))
    before = sim.stats()["pinned_current"]
    pipe, _ = cases.build("wan", 0)
    handle = pipe.enable_omni_offload("layer")
    assert np.array_equal(tiny.run(pipe, call), expected(device))
    assert handle.pinned_bytes == 0 and sim.stats()["pinned_current"] == before
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    message = record.getMessage()
    assert "host memory could not be pinned" in message and "`pin_memory=`" in message
    assert not any(word.startswith("-") and word[1:2].isdigit() for word in message.split())


UNPINNED: dict[str, dict[str, Any]] = {
    **MODES,
    "encoders": {"components": ["dit", "text_encoder"]},
    "residents": {"layer_options": {"dit": {"resident_layers": 1}}},
    "files": FILES,
    "group of one": GATHERED,
}


@pytest.mark.parametrize("mode", fast_ones(UNPINNED, "layer", "module", "files"))
def test_vllm_37699_pin_memory_false_counts_everywhere(
    mode: str, device: torch.device, sim: ModuleType, wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all places that pinned memory, three hadn't been told not to."""
    asked: list[str] = []
    pin, empty = torch.Tensor.pin_memory, torch.empty

    def noted_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            asked.append("empty")
        return empty(*args, **kwargs)

    def noted_pin(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        asked.append("pin_memory")
        return pin(tensor, *args)

    reference = expected(device)
    pipe = mapped(wan) if mode == "files" else cases.build("wan", 0)[0]
    monkeypatch.setattr(Platform, "register_host_memory", lambda *args: asked.append("register"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", noted_pin)
    monkeypatch.setattr(torch, "empty", noted_empty)
    before = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload(**UNPINNED[mode], pin_memory=False)
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), reference)
    assert handle.bytes_moved > 0 and asked == []
    assert handle.pinned_bytes == 0 and sim.stats()["pinned_current"] == before
