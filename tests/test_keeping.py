"""Blocks that come to stay on the device, and leave it, while a pipeline is offloaded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from diffusers_omni_offload import load_omni_pipeline
from diffusers_omni_offload.backends.keeping import Keeping
from diffusers_omni_offload.platform import Platform
from tests import quantized, tiny
from tests.equality import Call, assert_equal_outputs, assert_no_hazards, build_resident, outputs
from tests.quantized import ONE_A_LIBRARY
from tests.tiny import build_toy

#: Numbers of residents of the toy's 6 blocks, one after another.
COUNTS = (2, 6, 0, 4, 1)


def toy(**options: Any) -> tuple[Any, Call]:
    return build_toy(6, **options)


def keep(handle: Any, count: int, slots: int = 2, component: str = "transformer") -> None:
    keeping = Keeping(handle.backend)
    assert keeping.can_change
    keeping.keep({component: count}, slots)


def residents(handle: Any) -> int:
    return len(handle.backend.plan.stacks[0].resident)


def test_outputs_stay_equal_and_memory_is_that_of_the_plan(device: torch.device, sim: ModuleType) -> None:
    pipe, call = build_resident(toy, device)
    expected = outputs(pipe, call, 1)
    del pipe
    gc.collect()
    pipe, call = toy()
    handle = pipe.enable_omni_offload("layer")
    block = handle.backend.plan.stacks[0].nbytes[0]
    state = torch.accelerator.memory_allocated() - handle.device_bytes
    for count in COUNTS:
        keep(handle, count)
        assert residents(handle) == count
        assert handle.pinned_bytes >= (6 - count) * block and handle.pinned_bytes <= (6 - count) * (block + 4096)
        assert torch.accelerator.memory_allocated() - handle.device_bytes >= state + count * block
        before = handle.loads
        assert_equal_outputs(outputs(pipe, call, 1), expected, f"{count} residents")
        assert (handle.loads == before) == (count == 6)
        assert_no_hazards(sim, f"{count} residents")
    handle.disable()
    assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.parameters())
    assert_equal_outputs(outputs(pipe.to(device), call, 1), expected, "disabled")


class Keeper:
    """Does something after each component that has run, and nothing else."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def component_has_run(self, path: str) -> None:
        self.action()

    def call_has_ended(self) -> None: ...

    def weights_have_changed(self) -> None: ...

    def can_make_room(self, path: str) -> bool:
        return False

    def make_room(self, path: str) -> None:
        raise AssertionError("it can't")

    def give_up(self, path: str) -> None: ...


def test_between_the_forwards_of_a_call(device: torch.device, sim: ModuleType) -> None:
    pipe, call = build_resident(toy, device)
    expected = outputs(pipe, call, 1)
    pipe, call = toy()
    handle = pipe.enable_omni_offload("layer")
    counts = iter([3, 6, 1, 0] * 4)
    watcher = Keeper(lambda: keep(handle, next(counts), slots=2 + next(counts) % 2))
    handle.backend.watch(watcher)
    assert_equal_outputs(outputs(pipe, call, 1), expected, "changed in a call")
    assert_no_hazards(sim, "changed in a call")


@pytest.mark.parametrize("kind", ONE_A_LIBRARY.values())
def test_quantized_blocks(device: torch.device, sim: ModuleType, kind: str) -> None:
    pipe, call = quantized.build(kind, "sd3", 128)
    expected = outputs(quantized.to_resident(pipe, device), call, 1)
    pipe, call = quantized.build(kind, "sd3", 128)
    handle = pipe.enable_omni_offload("layer")
    blocks = len(handle.plan.stacks[0].blocks)
    for count in (1, blocks, 0):
        keep(handle, count)
        assert_equal_outputs(outputs(pipe, call, 1), expected, f"{kind}, {count} residents")
    assert_no_hazards(sim, kind)


def test_what_is_edited_counts(device: torch.device, sim: ModuleType) -> None:
    """On a block that has come, and on one that has left."""
    pipe, call = toy()
    handle = pipe.enable_omni_offload("layer")
    resident, other = build_resident(toy, device)
    for count in (6, 0):
        keep(handle, count)
        for one in (pipe, resident):
            with torch.no_grad():
                next(one.transformer.blocks[1].parameters()).mul_(1.5)
        assert_equal_outputs(outputs(pipe, call, 1), outputs(resident, other, 1), f"{count} residents")
    assert_no_hazards(sim, "edits")


def test_a_component_in_its_files(device: torch.device, sim: ModuleType, tmp_path: Path) -> None:
    """What comes from the files to stay is in device memory; what leaves has bytes of its own on the host."""
    pipe, call = tiny.build_wan_i2v()
    pipe.save_pretrained(tmp_path)
    pipe = load_omni_pipeline(type(pipe), tmp_path)
    expected = outputs(pipe.to(device), call, 1)
    pipe = load_omni_pipeline(type(pipe), tmp_path)
    handle = pipe.enable_omni_offload("layer")
    for count in (2, 4, 0):
        keep(handle, count)
        assert_equal_outputs(outputs(pipe, call, 1), expected, f"{count} residents")
    assert_no_hazards(sim, "files")


def test_too_little_memory_leaves_what_there_was(device: torch.device, sim: ModuleType) -> None:
    pipe, call = build_resident(toy, device)
    expected = outputs(pipe, call, 1)
    del pipe
    gc.collect()
    pipe, call = toy()
    handle = pipe.enable_omni_offload("layer")
    keep(handle, 1)
    block = handle.backend.plan.stacks[0].nbytes[0]
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 2 * block)
    with pytest.raises(torch.OutOfMemoryError):
        keep(handle, 6)
    sim.configure(capacity_bytes=None)
    assert residents(handle) == 1
    assert_equal_outputs(outputs(pipe, call, 1), expected, "after too little memory")
    keep(handle, 6)
    assert_equal_outputs(outputs(pipe, call, 1), expected, "and then enough")
    assert_no_hazards(sim, "too little memory")


def test_no_host_memory_for_what_leaves(device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays pageable: slower, not wrong."""
    pipe, call = build_resident(toy, device)
    expected = outputs(pipe, call, 1)
    pipe, call = toy()
    handle = pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 6}})

    def refuse(*_: Any) -> None:
        raise RuntimeError("there is none")

    monkeypatch.setattr(Platform, "register_host_memory", refuse)
    keep(handle, 0)
    assert handle.pinned_bytes == 0
    assert_equal_outputs(outputs(pipe, call, 1), expected, "pageable")


def test_not_while_a_block_runs(device: torch.device) -> None:
    pipe, call = toy()
    handle = pipe.enable_omni_offload("layer")
    pipe.transformer.blocks[2].contract.register_forward_hook(lambda *_: keep(handle, 3))
    with pytest.raises(RuntimeError, match="while a block or a swapped component is running"):
        pipe(**call())
    assert residents(handle) == 0


def test_shared_leaves_keep_residents_as_they_are(device: torch.device) -> None:
    pipe, _ = toy()
    pipe.transformer.blocks[1].gate = pipe.transformer.blocks[0].gate
    handle = pipe.enable_omni_offload("layer")
    assert not Keeping(handle.backend).can_change
