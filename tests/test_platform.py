"""Devices: which are taken, by what name, which are refused, and where a pipeline may be before it is enabled."""

from __future__ import annotations

import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import diffusers_omni_offload
from diffusers_omni_offload import host as host_module
from diffusers_omni_offload.backends import LayerwiseBackend, get_offload_backend
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.platform import (
    CpuPlatform,
    Platform,
    available_host_bytes,
    host_memory,
    is_supported,
    on_device,
    platform_for,
    resolve_device,
)
from tests import tiny

accelerator = torch.accelerator


def sim_device(index: int) -> torch.device:
    return torch.device("sim", index)


def tensors_of(pipe: Any) -> list[torch.Tensor]:
    modules = [module for module in pipe.components.values() if isinstance(module, nn.Module)]
    return [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]


# Names


@pytest.mark.parametrize("asked", [None, "sim", "sim:0", 0])
def test_names_of_the_accelerator(device: torch.device, asked: Any) -> None:
    assert resolve_device(asked) == sim_device(0)
    assert resolve_device(device) == sim_device(0)


def test_none_is_the_current_device(device: torch.device, sim: ModuleType) -> None:
    sim.configure(devices=2)
    accelerator.set_device_index(1)
    assert resolve_device(None) == resolve_device("sim") == resolve_device(torch.device("sim")) == sim_device(1)
    assert resolve_device("sim:0") == resolve_device(0) == sim_device(0)


@pytest.mark.parametrize("asked", ["cpu", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_cpu_is_taken_by_name(asked: Any) -> None:
    assert resolve_device(asked) == torch.device("cpu")
    assert isinstance(platform_for(torch.device("cpu")), CpuPlatform)


def test_the_cpu_is_not_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(ValueError, match=r'No accelerator was found.*device="cpu"'):
        resolve_device(None)
    pipe, _ = tiny.build_toy(2)
    with pytest.raises(ValueError, match="No accelerator was found"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None and all(tensor.device.type == "cpu" for tensor in tensors_of(pipe))


@pytest.mark.parametrize("asked", ["mps", "mps:0", torch.device("mps")])
def test_mps_is_refused(device: torch.device, asked: Any) -> None:
    with pytest.raises(ValueError, match=r"shares its memory with the host.*pipe\.to\('mps'\)"):
        resolve_device(asked)
    pipe, _ = tiny.build_toy(2)
    with pytest.raises(ValueError, match="shares its memory"):
        pipe.enable_omni_offload("layer", device=asked)
    assert pipe.omni_offload is None
    assert not is_supported(torch.device("mps"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("cuda", r"'cuda' is not the accelerator of this process \(found: sim\)"),
        ("xpu:1", "'xpu:1' is not the accelerator"),
        ("sim:1", "'sim:1' doesn't exist: 1 of type 'sim' found"),
        (3, "'sim:3' doesn't exist"),
        ("meta", "'meta' is not the accelerator"),
        ("gpu", "device='gpu' is not a device that torch knows"),
        ("sim:x", "is not a device that torch knows"),
    ],
)
def test_devices_that_are_not_there(device: torch.device, asked: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resolve_device(asked)
    pipe, _ = tiny.build_toy(2)
    with pytest.raises(ValueError, match=said):
        pipe.enable_omni_offload("layer", device=asked)
    assert pipe.omni_offload is None and all(tensor.device.type == "cpu" for tensor in tensors_of(pipe))


def test_what_is_supported(device: torch.device) -> None:
    assert is_supported(torch.device("cpu")) and is_supported(sim_device(0))
    assert not is_supported(torch.device("cuda", 0)) and not is_supported(torch.device("meta"))


def test_no_backend_for_a_device_that_cannot_be_streamed_to(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    layer = OffloadConfig.from_options("layer")
    assert get_offload_backend(layer, torch.device("mps")) is None
    assert get_offload_backend(layer, torch.device("cuda", 0)) is None
    assert [("mps" in r.getMessage(), "cuda:0" in r.getMessage()) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]
    backend = get_offload_backend(layer, sim_device(0))
    assert isinstance(backend, LayerwiseBackend) and not backend.is_enabled()


# Platforms


def test_the_accelerator_s_figures(device: torch.device, sim: ModuleType) -> None:
    platform = platform_for(sim_device(0))
    assert type(platform) is Platform and platform.is_asynchronous and platform.registers_host_memory
    used = accelerator.memory_allocated()
    sim.configure(capacity_bytes=used + 1_000_000)
    assert platform.total_bytes() == used + 1_000_000
    assert platform.free_bytes() == 1_000_000
    kept = torch.empty(100_000, dtype=torch.uint8, device=device)
    assert platform.free_bytes() <= 900_000
    del kept
    assert platform.free_bytes() == 1_000_000


def test_streams_and_events_order_work(device: torch.device, sim: ModuleType) -> None:
    platform = platform_for(sim_device(0))
    stream, done = platform.stream(), platform.event(enable_timing=True)
    assert stream != platform.current_stream()
    started = platform.event(enable_timing=True)
    started.record(stream)
    source = torch.ones(1 << 16, dtype=torch.uint8)
    platform.register_host_memory(source.data_ptr(), source.numel())
    target = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    ready = platform.event()
    ready.record(platform.current_stream())
    stream.wait_event(ready)
    with stream:
        assert platform.current_stream() == stream
        target.copy_(source, non_blocking=True)
    done.record(stream)
    platform.current_stream().wait_event(done)
    assert target.sum().item() == 1 << 16
    platform.synchronize()
    assert started.elapsed_time(done) > 0
    platform.unregister_host_memory(source.data_ptr())


def test_capturing_is_noticed(device: torch.device, sim: ModuleType) -> None:
    platform = platform_for(sim_device(0))
    assert not platform.is_capturing()
    sim.configure(capturing=1)
    assert platform.is_capturing()
    assert not CpuPlatform(torch.device("cpu")).is_capturing()


def test_the_cpu_s_streams_do_nothing() -> None:
    platform = CpuPlatform(torch.device("cpu"))
    stream, event = platform.stream(), platform.event()
    with stream:
        event.record(stream)
    stream.wait_event(event)
    stream.synchronize()
    platform.synchronize()
    assert event.elapsed_time(event) == 0 and not platform.is_asynchronous and not platform.registers_host_memory
    assert 0 < platform.free_bytes() <= platform.total_bytes() == host_memory().total_bytes


def test_on_device_makes_it_current_and_goes_back(device: torch.device, sim: ModuleType) -> None:
    sim.configure(devices=2)
    with on_device(sim_device(1)):
        assert accelerator.current_device_index() == 1
        with on_device(torch.device("cpu")):
            assert accelerator.current_device_index() == 1
    assert accelerator.current_device_index() == 0
    with pytest.raises(KeyError), on_device(sim_device(1)):
        raise KeyError
    assert accelerator.current_device_index() == 0


# Host memory


def fake_files(monkeypatch: pytest.MonkeyPatch, values: dict[str, int]) -> None:
    monkeypatch.setattr(host_module, "_read_int", lambda path: values.get(str(path)))


def test_host_memory_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_files(monkeypatch, {})
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            assert memory.total_bytes == pytest.approx(int(line.split()[1]) * 1024, rel=0.01)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    limit, usage = {
        2: ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        1: ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    }[version]
    fake_files(monkeypatch, {limit: 100 << 20, usage: 30 << 20})
    memory = host_memory()
    assert memory.total_bytes == 100 << 20 and memory.available_bytes == 70 << 20 == available_host_bytes()
    fake_files(monkeypatch, {limit: 100 << 20, usage: 130 << 20})
    assert host_memory().available_bytes == 0
    # Version 1 says "no limit" with a number larger than any memory.
    fake_files(monkeypatch, {limit: (1 << 63) - 4096, usage: 30 << 20})
    unlimited = host_memory()
    fake_files(monkeypatch, {})
    assert unlimited.total_bytes == host_memory().total_bytes


def test_unreadable_limits_are_no_limits(tmp_path: Path) -> None:
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "number").write_text("123\n")
    assert host_module._read_int(tmp_path / "max") is None
    assert host_module._read_int(tmp_path / "absent") is None
    assert host_module._read_int(tmp_path / "number") == 123


# Pipelines on devices


def test_the_cpu_as_device(device: torch.device, sim: ModuleType) -> None:
    twin, call = tiny.build_toy(4, text_encoder=True, vae=True)
    expected = tiny.run(twin, call)
    pipe, _ = tiny.build_toy(4, text_encoder=True, vae=True)
    before = sim.stats()
    handle = pipe.enable_omni_offload(
        "layer", components=["dit", "text_encoder"], layer_options={"dit": {"resident_layers": 1}}, device="cpu"
    )
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
    assert handle.pinned_bytes == 0 and handle.loads > 0 and handle.device_bytes > 0
    after = sim.stats()
    assert after["allocations"] == before["allocations"] and after["h2d_bytes"] == before["h2d_bytes"]
    assert pipe.device == torch.device("cpu")
    handle.disable()
    assert np.array_equal(tiny.run(pipe, call), expected)


@pytest.mark.parametrize("name", ["wan", "sd3", "qwen_image"])
def test_the_cpu_as_device_for_stock_pipelines(name: str) -> None:
    twin, call = tiny.BUILDERS[name]()
    expected = tiny.run(twin, call)
    pipe, _ = tiny.BUILDERS[name]()
    pipe.enable_omni_offload("layer", device="cpu")
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
    pipe.disable_omni_offload()
    assert np.array_equal(tiny.run(pipe, call), expected)


@pytest.mark.parametrize("how", ["name", "index", "torch.device", "current"])
@pytest.mark.parametrize("name", ["toy", "sd3"])
def test_the_second_device(device: torch.device, sim: ModuleType, name: str, how: str) -> None:
    sim.configure(devices=2)
    build = tiny.build_sd3 if name == "sd3" else lambda: tiny.build_toy(4, two_stage=True, text_encoder=True, vae=True)
    twin, call = build()
    # The first device stays empty, and current.
    start = [accelerator.memory_allocated(index) for index in (0, 1)]
    expected = tiny.run(twin.to("sim:1"), call)
    twin.to("cpu")
    allocations = sim.stats(0)["allocations"]
    pipe, _ = build()
    asked = {"name": "sim:1", "index": 1, "torch.device": sim_device(1), "current": None}[how]
    if how == "current":
        accelerator.set_device_index(1)
    handle = pipe.enable_omni_offload("layer", device=asked, layer_options={"dit": {"resident_layers": 1}})
    assert accelerator.current_device_index() == (1 if how == "current" else 0)
    assert pipe.device == sim_device(1)
    for _ in range(3):
        assert np.array_equal(tiny.run(pipe, call), expected)
    assert accelerator.current_device_index() == (1 if how == "current" else 0)
    places = {tensor.device for tensor in tensors_of(pipe)}
    assert places == {torch.device("cpu"), sim_device(1)}
    assert sim.stats(0)["allocations"] == allocations
    pipe.transformer.proj_out.weight.data.mul_(1.5)
    for block in pipe.transformer.transformer_blocks if name == "sd3" else pipe.transformer.blocks:
        for parameter in block.parameters():
            parameter.data = parameter.data.clone()
    assert not np.array_equal(tiny.run(pipe, call), expected)
    assert sim.stats(0)["allocations"] == allocations
    handle.disable()
    assert {tensor.device for tensor in tensors_of(pipe)} == {torch.device("cpu")}
    del pipe, handle, twin
    gc.collect()
    # What diffusers caches for longer than a pipeline lives aside.
    assert accelerator.memory_allocated(0) == start[0]
    assert accelerator.memory_allocated(1) <= start[1] + 4096


def test_two_pipelines_on_two_devices(device: torch.device, sim: ModuleType) -> None:
    sim.configure(devices=2)
    twin, call = tiny.build_toy(4)
    expected = tiny.run(twin.to("sim:0"), call)
    pipes = [tiny.build_toy(4)[0] for _ in range(2)]
    for index, pipe in enumerate(pipes):
        pipe.enable_omni_offload("layer", device=index)
    for _ in range(2):
        for pipe in pipes:
            assert np.array_equal(tiny.run(pipe, call), expected)
    pipes[0].disable_omni_offload()
    assert np.array_equal(tiny.run(pipes[1], call), expected)


def test_moving_to_another_device_by_enabling_again(device: torch.device, sim: ModuleType) -> None:
    sim.configure(devices=2)
    twin, call = tiny.build_toy(4)
    expected = tiny.run(twin.to("sim:0"), call)
    pipe, _ = tiny.build_toy(4)
    first = pipe.enable_omni_offload("layer", device=0)
    tiny.run(pipe, call)
    second = pipe.enable_omni_offload("layer", device="sim:1")
    assert second is not first and not first.is_enabled() and second.is_enabled()
    assert pipe.enable_omni_offload("layer", device=sim_device(1)) is second
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
    assert {tensor.device for tensor in tensors_of(pipe)} == {torch.device("cpu"), sim_device(1)}


@pytest.mark.parametrize("name", ["wan", "sd3", "qwen_image"])
def test_a_pipeline_that_is_on_the_device_already(device: torch.device, name: str) -> None:
    twin, call = tiny.BUILDERS[name]()
    expected = tiny.run(twin.to(device), call)
    pipe, _ = tiny.BUILDERS[name]()
    pipe.to(device)
    identities = [id(tensor) for tensor in tensors_of(pipe)]
    pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}})
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
    assert [id(tensor) for tensor in tensors_of(pipe)] == identities
    pipe.disable_omni_offload()
    assert {tensor.device for tensor in tensors_of(pipe)} == {torch.device("cpu")}
    assert np.array_equal(tiny.run(pipe.to(device), call), expected)


def test_a_pipeline_that_is_half_on_the_device(device: torch.device) -> None:
    twin, call = tiny.build_toy(4, text_encoder=True, vae=True)
    expected = tiny.run(twin.to(device), call)
    pipe, _ = tiny.build_toy(4, text_encoder=True, vae=True)
    pipe.vae.to(device)
    pipe.transformer.blocks[1].to(device)
    pipe.transformer.blocks[2].gate.data = pipe.transformer.blocks[2].gate.data.to(device)
    pipe.enable_omni_offload("layer")
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)


def test_a_pipeline_on_the_other_device(device: torch.device, sim: ModuleType) -> None:
    sim.configure(devices=2)
    twin, call = tiny.build_toy(4, text_encoder=True, vae=True)
    expected = tiny.run(twin.to("sim:0"), call)
    pipe, _ = tiny.build_toy(4, text_encoder=True, vae=True)
    pipe.to("sim:1")
    pipe.enable_omni_offload("layer", device="sim:0")
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
    assert sim_device(1) not in {tensor.device for tensor in tensors_of(pipe)}


META = ["transformer.blocks.1.gate", "transformer.proj_in.weight", "text_encoder.embed.weight", "vae.decoder.bias"]


@pytest.mark.parametrize("path", META)
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_meta_weights_are_refused_and_nothing_is_touched(device: torch.device, path: str, where: str) -> None:
    twin, call = tiny.build_toy(3, text_encoder=True, vae=True)
    expected = tiny.run(twin.to(device), call)
    pipe, _ = tiny.build_toy(3, text_encoder=True, vae=True)
    component, _, rest = path.partition(".")
    owner_path, _, name = rest.rpartition(".")
    owner = getattr(pipe, component).get_submodule(owner_path)
    kept = getattr(owner, name)
    pipe.to(where)
    setattr(owner, name, nn.Parameter(torch.empty_like(kept, device="meta")))
    before = [(id(tensor), tensor.device) for tensor in tensors_of(pipe)]
    allocated = accelerator.memory_allocated()
    with pytest.raises(ValueError, match=rf"{path} is on the meta device.*load"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None and type(pipe) is tiny.ToyPipeline
    assert [(id(tensor), tensor.device) for tensor in tensors_of(pipe)] == before
    assert accelerator.memory_allocated() == allocated
    setattr(owner, name, kept)
    pipe.enable_omni_offload("layer")
    assert np.array_equal(tiny.run(pipe, call), expected)


def test_a_whole_component_on_meta(device: torch.device) -> None:
    pipe, _ = tiny.build_sd3()
    pipe.transformer.to("meta")
    with pytest.raises(ValueError, match=r"transformer\..* is on the meta device"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None


class Quantized(torch.Tensor):
    """Stands for a quantizer's tensor: its bytes are elsewhere."""


def test_a_tensor_subclass_is_refused_where_it_would_be_streamed(device: torch.device) -> None:
    pipe, _ = tiny.build_toy(3)
    block = pipe.transformer.blocks[1]
    kept = block.gate
    block._parameters["gate"] = kept.data.as_subclass(Quantized)
    with pytest.raises(TypeError, match=r"transformer\.blocks\.1\.gate is a Quantized"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None
    block._parameters["gate"] = kept
    assert pipe.enable_omni_offload("layer").is_enabled()


def test_the_public_names(device: torch.device) -> None:
    pipe, call = tiny.build_toy(3)
    handle = diffusers_omni_offload.enable_omni_offload(pipe, "layer", device=0)
    assert handle is pipe.omni_offload and handle.is_enabled()
    tiny.run(pipe, call)
    diffusers_omni_offload.disable_omni_offload(pipe)
    assert pipe.omni_offload is None and not handle.is_enabled() and "disabled" in repr(handle)
