"""Memory in module mode: device peaks, one copy a load and none back, nothing made on the host, the host's peak."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diffusers_omni_offload import enable_omni_offload
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import HostBuffer
from tests import tiny
from tests.comparing import State, leftovers
from tests.equality import Build
from tests.occupancy import Occupancy
from tests.swapped import Need, build_large_toy, build_wan, largest_stage, leaves_of, packed_size, size_of
from tests.tiny.toy import ToyPipeline

ROOT = Path(__file__).resolve().parents[1]
accelerator = torch.accelerator


@pytest.fixture
def exact(sim: ModuleType) -> ModuleType:
    """The simulated device with allocations that take just their bytes, so that sums come out."""
    sim.configure(alloc_round=1)
    return sim


# ---------------------------------------------------------------------- device memory


MEMORY_CASES: dict[str, tuple[Build, dict[str, str]]] = {
    "toy": (build_large_toy, {"dit": "module", "text_encoder": "module"}),
    "toy with its VAE": (build_large_toy, {"dit": "module", "text_encoder": "module", "vae": "module"}),
    "wan": (build_wan, {"dit": "module", "text_encoder": "module"}),
    "wan with its VAE": (build_wan, {"dit": "module", "text_encoder": "module", "vae": "module"}),
    "sd3": (tiny.BUILDERS["sd3"], {"dit": "module", "text_encoder": "module"}),
    "sdxl": (tiny.BUILDERS["sdxl"], {"dit": "module", "text_encoder": "module", "vae": "module"}),
    "wan_i2v_clip": (
        tiny.VARIANTS["wan_i2v_clip"],
        {"dit": "module", "text_encoder": "module", "image_encoder": "module"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "from_device"),
    [
        pytest.param(name, from_device, marks=[pytest.mark.slow] if from_device != (number % 2 == 0) else [])
        for number, name in enumerate(MEMORY_CASES)
        for from_device in (False, True)
    ],
)
def test_device_peak_is_the_largest_stage_and_the_residents(
    name: str, from_device: bool, device: torch.device, exact: ModuleType
) -> None:
    build, choice = MEMORY_CASES[name]
    need = Need.of(build, device)
    gc.collect()
    pipe, call = build()
    start = accelerator.memory_allocated()
    pipe.to(device) if from_device else None
    # It moves every byte once: nothing is there twice, and nothing comes on top.
    accelerator.reset_peak_memory_stats()
    handle = enable_omni_offload(pipe, components=choice)
    swapped = sum(sum(map(size_of, leaves_of(handle.plan.component(path).module))) for path in handle.plan.swapped)
    residents = need.weights - swapped
    assert 0 < swapped and residents >= 0
    gc.collect()
    assert accelerator.memory_allocated() - start <= residents
    assert accelerator.max_memory_allocated() - start <= (need.weights if from_device else residents)

    stage = largest_stage(handle)
    assert stage < 0.9 * swapped, "nothing would be gained"
    peaks = []
    for _ in range(3):
        accelerator.reset_peak_memory_stats()
        assert np.array_equal(tiny.run(pipe, call), need.expected)
        gc.collect()
        peaks.append(accelerator.max_memory_allocated() - start)
        assert peaks[-1] <= residents + stage + need.activations
        # Between calls nothing of it is there, so the next call starts as the first one did.
        assert accelerator.memory_allocated() - start <= residents + need.kept
        assert handle.device_bytes == 0
    assert peaks[1] <= peaks[0] + need.kept and peaks[2] == peaks[1]


@pytest.mark.parametrize("without_cleanup", [False, True])
def test_a_pipeline_that_cleans_nothing_up_leaves_nothing_there(
    without_cleanup: bool, device: torch.device, exact: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_cleanup:
        monkeypatch.setattr(ToyPipeline, "maybe_free_model_hooks", lambda self: None)
    pipe, call = build_large_toy()
    handle = enable_omni_offload(pipe, "module")
    gc.collect()
    idle = accelerator.memory_allocated()
    for _ in range(3):
        tiny.run(pipe, call)
        gc.collect()
        assert accelerator.memory_allocated() == idle and handle.device_bytes == 0


def test_two_stages_need_not_fit_together(device: torch.device, exact: ModuleType) -> None:
    need = Need.of(build_large_toy, device)
    gc.collect()
    pipe, call = build_large_toy()
    experts = [packed_size(pipe.transformer), packed_size(pipe.transformer_2)]
    residents = need.weights - sum(
        sum(map(size_of, leaves_of(module))) for module in (pipe.transformer, pipe.transformer_2, pipe.text_encoder)
    )
    capacity = accelerator.memory_allocated() + residents + max(experts) + need.activations
    assert capacity < accelerator.memory_allocated() + residents + sum(experts)
    exact.configure(capacity_bytes=capacity)
    handle = enable_omni_offload(pipe, "module")
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), need.expected)
    handle.disable()
    # With less than the largest stage it is refused, and the pipeline is as it was.
    exact.configure(capacity_bytes=accelerator.memory_allocated() + residents + max(experts) - 1)
    before = State.of(pipe)
    with pytest.raises(RuntimeError, match=r"sim.*free, and this needs"):
        enable_omni_offload(pipe, "module")
    before.assert_same(State.of(pipe))
    assert leftovers(pipe) == []


# ---------------------------------------------------------------------- copies


def test_a_load_is_one_copy_of_the_component_and_nothing_comes_back(device: torch.device, sim: ModuleType) -> None:
    resident, call = build_large_toy()
    resident.to(device)
    tiny.run(resident, call)
    before = sim.stats()
    tiny.run(resident, call)
    after = sim.stats()
    of_the_call = {key: after[key] - before[key] for key in ("copies", "h2d_bytes", "d2h_bytes")}
    pipe, call = build_large_toy()
    handle = enable_omni_offload(pipe, "module")
    tiny.run(pipe, call)
    before = sim.stats()
    tiny.run(pipe, call)
    after = sim.stats()
    weights = sum(packed_size(module) for module in (pipe.text_encoder, pipe.transformer, pipe.transformer_2))
    assert after["copies"] - before["copies"] == of_the_call["copies"] + 3
    assert after["h2d_bytes"] - before["h2d_bytes"] == of_the_call["h2d_bytes"] + weights
    assert after["d2h_bytes"] - before["d2h_bytes"] == of_the_call["d2h_bytes"]
    assert handle.swaps == 6 and handle.bytes_moved == 2 * weights


def test_nothing_is_pinned_packed_or_allocated_on_the_host_after_enabling(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, call = build_large_toy()
    handle = enable_omni_offload(pipe, components={"dit": "module", "text_encoder": "module", "vae": "module"})
    tiny.run(pipe, call)
    pointers = [tensor.data_ptr() for path in handle.plan.swapped for tensor in leaves_of(getattr(pipe, path))]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("after enabling")

    monkeypatch.setattr(torch.sim, "host_register", refuse)
    monkeypatch.setattr(HostBuffer, "__init__", refuse)
    monkeypatch.setattr(PackedMaster, "pack", refuse)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    pinned = sim.stats()["pinned_current"]
    for _ in range(3):
        tiny.run(pipe, call)
        assert sim.stats()["pinned_current"] == pinned
    assert pointers == [tensor.data_ptr() for path in handle.plan.swapped for tensor in leaves_of(getattr(pipe, path))]


def test_device_memory_goes_back_once_a_swap(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator keeps is given back where a component leaves and nowhere else: it makes the host wait."""
    returned: list[int] = []
    monkeypatch.setattr(Platform, "return_freed_memory", lambda self: returned.append(1))
    pipe, call = build_large_toy()
    handle = enable_omni_offload(pipe, "module")
    with Occupancy(handle) as occupancy:
        tiny.run(pipe, lambda: {**call(), "steps": 8})
    assert 0 < len(returned) <= len(occupancy.loads) == 3
    returned.clear()
    pipe.enable_omni_offload("layer")
    returned.clear()
    tiny.run(pipe, lambda: {**call(), "steps": 8})
    assert not returned


class ManyTensors(nn.Module):
    """An encoder of 2,000 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((8,), 1 + 1e-4 * index)) for index in range(2000))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.scales)).sum(dim=0) + tokens[..., None]


@pytest.mark.timing
def test_eviction_of_many_tensors_is_quick(device: torch.device, sim: ModuleType) -> None:
    pipe, _ = tiny.build_toy(2, text_encoder=True)
    pipe.text_encoder = ManyTensors()
    handle = enable_omni_offload(pipe, "module")
    stages = handle.backend.stages
    times = []
    with handle.call(), torch.no_grad():
        for _ in range(3):
            pipe.text_encoder(torch.zeros(1, 4, device=device))
            assert stages.at("text_encoder").is_loaded
            torch.accelerator.synchronize()
            copies, begin = sim.stats()["copies"], time.thread_time()
            stages.make_room("dit")
            times.append(time.thread_time() - begin)
            assert not stages.at("text_encoder").is_loaded and sim.stats()["copies"] == copies
    assert min(times) < 0.05, times


# ---------------------------------------------------------------------- host memory

HOST_PEAK = """
import gc, sys
from pathlib import Path

import torch
from torch import nn

from tests import simdevice

torch.set_num_threads(1)
# Device memory is host memory here: unpoisoned, its pages take none until they are written.
device = simdevice.install(poison=0)
from diffusers_omni_offload import disable_omni_offload, enable_omni_offload
from diffusers_omni_offload.weights import packed
from tests import tiny

MB = 1 << 20
# What was freed goes back to the system now and then; here more often, so that the rest shows.
packed._TRIM_BYTES = 16 * MB


def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def large(megabytes):
    module = nn.Module()
    for index in range(megabytes // 8):
        module.register_parameter(f"weight_{index}", nn.Parameter(torch.ones(2 * MB)))
    module.forward = lambda *args: None
    return module


def build():
    pipe, _ = tiny.build_toy(1, two_stage=True, text_encoder=True)
    return pipe


enable_omni_offload(build(), "module").disable()
gc.collect()
torch.ones(31 * MB // 4)
before = status("VmRSS")
pipe = build()
for name, megabytes in (("transformer", 192), ("transformer_2", 96), ("text_encoder", 64)):
    getattr(pipe, name).big = large(megabytes)
weights = sum(p.nbytes for m in pipe.components.values() if m is not None for p in m.parameters())
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
enable_omni_offload(pipe, "module")
print(weights, status("VmHWM") - before, status("VmRSS") - before)
disable_omni_offload(pipe)
print(weights, status("VmHWM") - before, status("VmRSS") - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_host_peak_while_enabling_is_the_weights() -> None:
    result = subprocess.run([sys.executable, "-c", HOST_PEAK], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    for line in result.stdout.strip().splitlines():
        weights, peak, now = map(int, line.split())
        assert weights > 352 << 20
        assert peak <= weights + (40 << 20), f"{peak / weights:.3f} of the weights"
        assert now <= weights + (24 << 20), f"{now / weights:.3f} of the weights"
