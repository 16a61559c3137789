"""Memory: device peaks, allocations, page-locked bytes, the host's peak, and what comes back when a pipeline goes."""

from __future__ import annotations

import gc
import logging
import operator
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import diffusers_omni_offload  # noqa: F401  (adds the methods to pipelines)
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import HostBuffer
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
accelerator = torch.accelerator

#: Pipelines with the stacks of their DiTs.
CASES: dict[str, tuple[Callable[[], tuple[Any, Any]], tuple[str, ...]]] = {
    "wan": (tiny.BUILDERS["wan"], ("transformer.blocks", "transformer_2.blocks")),
    "sd3": (tiny.BUILDERS["sd3"], ("transformer.transformer_blocks",)),
    "qwen_image": (tiny.BUILDERS["qwen_image"], ("transformer.transformer_blocks",)),
    "toy": (
        lambda: tiny.build_toy(6, width=128, sizes=[512, 1000, 129], text_encoder=True, vae=True),
        ("transformer.blocks",),
    ),
}


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def leaves(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def packed_size(block: nn.Module) -> int:
    """Bytes of the block with every leaf rounded up to 256."""
    return sum(-(-size_of([leaf]) // 256) * 256 for leaf in leaves(block))


def blocks_of(pipe: Any, stacks: Iterable[str]) -> list[nn.Module]:
    """The blocks of stacks that are named `component.attribute`."""
    return [block for path in stacks for block in operator.attrgetter(path)(pipe)]


def live(kind: type) -> int:
    return sum(1 for item in gc.get_objects() if type(item) is kind)


@pytest.fixture
def exact(sim: ModuleType) -> ModuleType:
    """The simulated device with allocations that take just their bytes, so that sums come out."""
    sim.configure(alloc_round=1)
    return sim


class Resident:
    """What three calls of the same pipeline take with all of it on the device; its outputs are the reference."""

    def __init__(self, name: str, device: torch.device, sim: ModuleType) -> None:
        build, stacks = CASES[name]
        start = accelerator.memory_allocated()
        pipe, call = build()
        blocks = blocks_of(pipe, stacks)
        self.blocks = [size_of(leaves(block)) for block in blocks]
        self.largest = max(map(packed_size, blocks))
        pipe.to(device)
        self.weights = accelerator.memory_allocated() - start
        self.state = self.weights - sum(self.blocks)
        accelerator.reset_peak_memory_stats()
        self.outputs: list[np.ndarray] = []
        self.allocations: list[int] = []
        self.bytes_to_host: list[int] = []
        for _ in range(3):
            before = sim.stats()
            self.outputs.append(tiny.run(pipe, call))
            after = sim.stats()
            self.allocations.append(after["allocations"] - before["allocations"])
            self.bytes_to_host.append(after["d2h_bytes"] - before["d2h_bytes"])
        self.activations = accelerator.max_memory_allocated() - start - self.weights
        # Schedulers keep their last outputs.
        self.kept = accelerator.memory_allocated() - start - self.weights


@pytest.mark.parametrize("resident_layers", [0, 1])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_device_peak_allocations_and_direction(
    device: torch.device, exact: ModuleType, name: str, slots: int, resident_layers: int
) -> None:
    reference = Resident(name, device, exact)
    gc.collect()
    build, _ = CASES[name]
    pipe, call = build()
    start = accelerator.memory_allocated()
    options = {"dit": {"resident_layers": resident_layers}} if resident_layers else None
    accelerator.reset_peak_memory_stats()
    to_host = exact.stats()["d2h_bytes"]
    handle = pipe.enable_omni_offload("layer", slots=slots, layer_options=options)
    assert exact.stats()["d2h_bytes"] == to_host

    residents = sum(size_of(leaves(stack.blocks[index])) for stack in handle.plan.stacks for index in stack.resident)
    assert (residents > 0) == (resident_layers > 0)
    held = reference.state + residents + slots * reference.largest
    assert accelerator.max_memory_allocated() - start <= held
    assert handle.device_bytes <= slots * reference.largest

    for index in range(3):
        before = exact.stats()
        output = tiny.run(pipe, call)
        after = exact.stats()
        assert np.array_equal(output, reference.outputs[index])
        assert after["d2h_bytes"] - before["d2h_bytes"] == reference.bytes_to_host[index]
    assert after["allocations"] - before["allocations"] == reference.allocations[2]
    assert accelerator.max_memory_allocated() - start <= held + reference.activations
    assert accelerator.memory_allocated() - start <= held + reference.kept


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_that_was_on_the_device_gives_its_blocks_back(
    device: torch.device, exact: ModuleType, name: str
) -> None:
    reference = Resident(name, device, exact)
    gc.collect()
    build, _ = CASES[name]
    start = accelerator.memory_allocated()
    pipe, call = build()
    pipe.to(device)
    weights = accelerator.memory_allocated() - start
    window = 2 * reference.largest
    accelerator.reset_peak_memory_stats()
    handle = pipe.enable_omni_offload("layer")
    assert accelerator.max_memory_allocated() - start <= weights + window
    assert accelerator.memory_allocated() - start <= reference.state + window
    accelerator.reset_peak_memory_stats()
    for index in range(3):
        assert np.array_equal(tiny.run(pipe, call), reference.outputs[index])
    peak = accelerator.max_memory_allocated() - start
    assert peak <= reference.state + window + reference.activations
    assert peak <= weights + window + reference.activations
    handle.disable()
    assert all(tensor.device.type == "cpu" for tensor in leaves(pipe.transformer))
    assert accelerator.memory_allocated() - start <= reference.kept


def test_streamed_encoders_leave_the_device_too(device: torch.device, exact: ModuleType) -> None:
    reference = Resident("sd3", device, exact)
    gc.collect()
    pipe, call = tiny.build_sd3()
    start = accelerator.memory_allocated()
    encoders = [pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    accelerator.reset_peak_memory_stats()
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    streamed = [block for stack in handle.plan.stacks for block in stack.blocks]
    assert sum(stack.kind != "dit" for stack in handle.plan.stacks) == len(encoders)
    held = reference.weights - sum(size_of(leaves(block)) for block in streamed)
    held += 2 * max(map(packed_size, streamed))
    assert accelerator.max_memory_allocated() - start <= held
    for index in range(3):
        assert np.array_equal(tiny.run(pipe, call), reference.outputs[index])
    assert accelerator.max_memory_allocated() - start <= held + reference.activations


# Page-locked memory


def real_pipeline(blocks: list[nn.Module]) -> Any:
    """A toy pipeline whose DiT holds these blocks, given memory but no values; it is never called."""
    pipe, _ = tiny.build_toy(1)
    pipe.transformer.blocks = nn.ModuleList(blocks).to_empty(device="cpu")
    return pipe


def real_blocks() -> Iterator[tuple[str, Callable[[], list[nn.Module]]]]:
    def wan() -> list[nn.Module]:
        from diffusers.models.transformers.transformer_wan import WanTransformerBlock

        # As in Wan 2.1 1.3B: 93 MB each in bfloat16.
        return [WanTransformerBlock(1536, 8960, 12, cross_attn_norm=True).bfloat16() for _ in range(2)]

    def sd3() -> list[nn.Module]:
        from diffusers.models.attention import JointTransformerBlock

        # As in SD3 medium, whose last block is smaller.
        return [JointTransformerBlock(1536, 24, 64, context_pre_only=last).half() for last in (False, True)]

    def odd() -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(1237, 4099), nn.LayerNorm(4099), nn.Linear(4099, 1237)) for _ in range(2)]

    yield "wan 1.3B", wan
    yield "sd3 medium", sd3
    yield "odd sizes", odd


@pytest.mark.parametrize("build", [pytest.param(build, id=name) for name, build in real_blocks()])
def test_pinned_bytes_are_the_weights(
    device: torch.device, sim: ModuleType, build: Callable[[], list[nn.Module]]
) -> None:
    with torch.device("meta"):
        blocks = build()
    pipe = real_pipeline(blocks)
    sim.configure(poison=0)
    before = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload("layer")
    pinned = sim.stats()["pinned_current"] - before
    weights = sum(size_of(leaves(block)) for block in blocks)
    assert weights > 30e6
    assert weights <= pinned <= 1.01 * weights
    assert handle.pinned_bytes == pinned
    handle.disable()
    assert sim.stats()["pinned_current"] == before


def test_pin_memory_false_registers_nothing(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pointer: int, nbytes: int) -> None:
        raise AssertionError("registered")

    monkeypatch.setattr(torch.sim, "host_register", refuse)
    twin, call = tiny.build_toy(4)
    expected = tiny.run(twin.to(device), call)
    pipe, call = tiny.build_toy(4)
    before = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload("layer", pin_memory=False)
    assert np.array_equal(tiny.run(pipe, call), expected)
    assert handle.pinned_bytes == 0 and sim.stats()["pinned_current"] == before
    # It was asked for, so there is nothing to warn of.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("blocks_that_fit", [0, 1, 3, 4, 6])
def test_a_budget_goes_to_the_dits_first(
    device: torch.device, sim: ModuleType, blocks_that_fit: int, caplog: pytest.LogCaptureFixture
) -> None:
    twin, call = tiny.build_toy(4, text_encoder=True)
    expected = tiny.run(twin.to(device), call)
    pipe, call = tiny.build_toy(4, text_encoder=True)
    block = packed_size(pipe.transformer.blocks[0])
    encoder_block = packed_size(pipe.text_encoder.layers[0])
    budget = min(blocks_that_fit, 4) * block + max(0, blocks_that_fit - 4) * encoder_block
    # Not enough for another one; less than an encoder's block, which is smaller.
    budget += encoder_block - 1 if blocks_that_fit < 6 else 0
    before = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"], pin_memory=budget)
    assert handle.pinned_bytes == sim.stats()["pinned_current"] - before <= budget
    weights = [*pipe.transformer.blocks, *pipe.text_encoder.layers]
    # torch doesn't ask the device whether memory is pinned before its own allocator has pinned some.
    torch.empty(1, pin_memory=True)
    pinned = [layer.expand.weight.is_pinned() for layer in weights]
    assert pinned == [True] * blocks_that_fit + [False] * (6 - blocks_that_fit)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (0 if blocks_that_fit == 6 else 1)
    assert all("pinned" in warning and "pageable" in warning for warning in warnings)
    assert np.array_equal(tiny.run(pipe, call), expected)


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_pinning_that_fails_falls_back_with_one_warning(
    device: torch.device,
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: int,
    error: type[Exception],
) -> None:
    register, calls = torch.sim.host_register, []

    def register_until(pointer: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) > failing:
            raise error("the system refuses to lock this memory")
        register(pointer, nbytes)

    twin, call = tiny.build_toy(4, two_stage=False, text_encoder=True)
    expected = tiny.run(twin.to(device), call)
    del twin
    gc.collect()
    pinned, allocated = sim.stats()["pinned_current"], accelerator.memory_allocated()
    monkeypatch.setattr(torch.sim, "host_register", register_until)
    pipe, call = tiny.build_toy(4, two_stage=False, text_encoder=True)
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    assert len(calls) == failing + 1
    for _ in range(2):
        assert np.array_equal(tiny.run(pipe, call), expected)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "the system refuses to lock this memory" in warnings[0] and "pageable" in warnings[0]
    assert handle.pinned_bytes == sim.stats()["pinned_current"] - pinned == sum(calls[:failing])
    handle.disable()
    assert sim.stats()["pinned_current"] == pinned and accelerator.memory_allocated() == allocated
    assert np.array_equal(tiny.run(pipe.to(device), call), expected)


# What comes back when a pipeline goes


def offloaded_toy() -> tuple[Any, Any]:
    pipe, call = tiny.build_toy(4, two_stage=True, text_encoder=True, vae=True)
    pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}})
    return pipe, call


class Broken(Exception):
    pass


def fail_in_a_block(pipe: Any, call: Any) -> None:
    def fail(*args: Any) -> None:
        raise Broken

    hook = pipe.transformer.blocks[2].register_forward_hook(fail)
    with pytest.raises(Broken):
        pipe(**call())
    hook.remove()


@pytest.mark.parametrize("name", ["wan", "sd3", "qwen_image"])
def test_deleting_an_offloaded_pipeline_gives_all_back(device: torch.device, sim: ModuleType, name: str) -> None:
    build, _ = CASES[name]
    twin, call = build()
    tiny.run(twin.to(device), call)
    before = accelerator.memory_allocated()
    del twin, call
    gc.collect()
    # Some pipelines cache what a forward computes for longer than they live.
    cached = accelerator.memory_allocated()
    assert cached < before

    pinned = sim.stats()["pinned_current"]
    pipe, call = build()
    pipe.enable_omni_offload("layer")
    tiny.run(pipe, call)
    assert sim.stats()["pinned_current"] > pinned
    del pipe, call
    gc.collect()
    assert sim.stats()["pinned_current"] == pinned
    assert accelerator.memory_allocated() <= 2 * cached


@pytest.mark.parametrize("how", ["untouched", "after calls", "after an exception", "with its handle"])
def test_deleting_gives_pinned_and_device_bytes_back(device: torch.device, sim: ModuleType, how: str) -> None:
    pinned, allocated = sim.stats()["pinned_current"], accelerator.memory_allocated()
    pipe, call = offloaded_toy()
    handle = pipe.omni_offload
    if how != "untouched":
        tiny.run(pipe, call)
        tiny.run(pipe, call)
    if how == "after an exception":
        fail_in_a_block(pipe, call)
    if how == "with its handle":
        del pipe, call
        gc.collect()
        assert not handle.is_enabled()
        with pytest.raises(RuntimeError, match="disabled"):
            handle.refresh()
    else:
        del pipe, call
    del handle
    gc.collect()
    assert sim.stats()["pinned_current"] == pinned
    assert accelerator.memory_allocated() == allocated


def test_a_live_weight_keeps_its_values_but_neither_pinned_nor_device_bytes(
    device: torch.device, sim: ModuleType
) -> None:
    pinned, allocated = sim.stats()["pinned_current"], accelerator.memory_allocated()
    pipe, call = offloaded_toy()
    tiny.run(pipe, call)
    streamed = pipe.omni_offload.plan.stacks[0].streamed[0]
    weight = pipe.transformer.blocks[streamed].expand.weight
    buffer = pipe.transformer.blocks[streamed].scale
    values = weight.detach().clone(), buffer.clone()
    del pipe, call
    gc.collect()
    assert sim.stats()["pinned_current"] == pinned
    assert accelerator.memory_allocated() == allocated
    assert weight.device.type == buffer.device.type == "cpu" and not weight.is_pinned()
    assert torch.equal(weight, values[0]) and torch.equal(buffer, values[1])
    weight.data.mul_(2)
    assert torch.equal(weight, 2 * values[0])


def test_a_failed_call_keeps_nothing_alive_once_its_exception_is_gone(device: torch.device, sim: ModuleType) -> None:
    pipe, call = offloaded_toy()
    tiny.run(pipe, call)
    held, pinned = accelerator.memory_allocated(), sim.stats()["pinned_current"]
    for _ in range(3):
        fail_in_a_block(pipe, call)
        gc.collect()
        assert accelerator.memory_allocated() == held and sim.stats()["pinned_current"] == pinned


def test_calls_do_not_grow_anything(device: torch.device, sim: ModuleType) -> None:
    gc.collect()
    of_others = sim.stats()["pinned_current"]
    pipe, call = offloaded_toy()
    handle = pipe.omni_offload
    # By then every block has been in every slot.
    for _ in range(3):
        tiny.run(pipe, call)
    gc.collect()
    masters, buffers = live(PackedMaster), live(HostBuffer)
    held, pinned = accelerator.memory_allocated(), sim.stats()["pinned_current"]
    tensors = sum(isinstance(item, torch.Tensor) for item in gc.get_objects())
    for _ in range(10):
        tiny.run(pipe, call)
        gc.collect()
        assert (live(PackedMaster), live(HostBuffer)) == (masters, buffers)
        assert accelerator.memory_allocated() == held and sim.stats()["pinned_current"] == pinned
    assert sum(isinstance(item, torch.Tensor) for item in gc.get_objects()) == tensors
    assert handle.pinned_bytes == pinned - of_others


def test_repacking_replaces_masters_and_does_not_add_any(device: torch.device, sim: ModuleType) -> None:
    pipe, call = offloaded_toy()
    tiny.run(pipe, call)
    gc.collect()
    buffers, pinned = live(HostBuffer), sim.stats()["pinned_current"]
    held = accelerator.memory_allocated()
    for _ in range(3):
        for parameter in pipe.transformer.parameters():
            parameter.data = parameter.data.clone()
        tiny.run(pipe, call)
        gc.collect()
        assert live(HostBuffer) == buffers
        assert sim.stats()["pinned_current"] == pinned and accelerator.memory_allocated() == held


def test_nothing_of_ours_outlives_the_pipeline(device: torch.device, sim: ModuleType) -> None:
    pipe, call = offloaded_toy()
    tiny.run(pipe, call)
    fail_in_a_block(pipe, call)
    handle = pipe.omni_offload
    backend = handle.backend
    watched = [pipe, handle, backend, backend.streamer, backend.scope, pipe.transformer, pipe.transformer.blocks[0]]
    watched += [pipe.transformer.blocks[0].expand.weight, pipe.text_encoder, pipe.vae]
    watched += [master for master in backend.streamer.masters if master is not None]
    references = {f"{type(item).__name__} {index}": weakref.ref(item) for index, item in enumerate(watched)}
    del pipe, call, handle, backend, watched
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


def test_disabling_leaves_no_master_behind(device: torch.device, sim: ModuleType) -> None:
    gc.collect()
    masters, buffers, pinned = live(PackedMaster), live(HostBuffer), sim.stats()["pinned_current"]
    allocated = accelerator.memory_allocated()
    pipe, call = offloaded_toy()
    for _ in range(3):
        pipe.disable_omni_offload()
        gc.collect()
        assert (live(PackedMaster), live(HostBuffer)) == (masters, buffers)
        assert sim.stats()["pinned_current"] == pinned and accelerator.memory_allocated() == allocated
        pipe.enable_omni_offload("layer")
        tiny.run(pipe, call)


# The host's peak, in a process of its own

HOST_PEAK = """
import gc, sys
from pathlib import Path

import torch
from torch import nn

from tests import simdevice

torch.set_num_threads(1)
# Device memory is host memory here: unpoisoned, its pages take none until they are written.
device = simdevice.install(poison=0)
import diffusers_omni_offload
from tests import tiny

MB = 1 << 20
many, where = sys.argv[1] == "many", sys.argv[2]


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        for index in range(64):
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.ones(MB // 4)))


def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


pipe, _ = tiny.build_toy(1)
warm, _ = tiny.build_toy(2)
warm.enable_omni_offload("layer").disable()
del warm
gc.collect()
# Once a tensor of this size was freed, as in any program that loads models, glibc takes tensors up to it from the heap.
torch.ones(31 * MB // 4)
before = status("VmRSS")
blocks = nn.ModuleList()
for _ in range(16):
    if many:
        blocks.append(Many())
    else:
        with torch.device("meta"):
            block = nn.Linear(4096, 4096, bias=False)
        block.weight = nn.Parameter(torch.ones(4096, 4096))
        blocks.append(block)
pipe.transformer.blocks = blocks
weights = sum(parameter.nbytes for parameter in blocks.parameters())
del blocks
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
pipe.enable_omni_offload("layer")
print(weights, status("VmHWM") - before, status("VmRSS") - before)
if where == "disabled too":
    pipe.disable_omni_offload()
    print(weights, status("VmHWM") - before, status("VmRSS") - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("layout", ["one", "many"])
def test_host_peak_while_enabling_is_the_weights_and_one_block(layout: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", HOST_PEAK, layout, "disabled too"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for line in result.stdout.strip().splitlines():
        weights, peak, _ = map(int, line.split())
        assert weights == 1 << 30
        assert peak <= 1.05 * (weights + weights // 16), f"{peak / weights:.3f} of the weights"
