"""Public cases of device peaks and of bytes that were moved in vain, in module mode and mixed choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from diffusers_omni_offload.backends.preflight import device_need
from diffusers_omni_offload.streaming.streamer import Streamer
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.modes import MODES, in_every_mode
from tests.occupancy import Occupancy
from tests.tiny import build_toy, build_wan, run


def full_toy(**options: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True, **options)


def two_experts() -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = build_wan()
    pipe.register_to_config(boundary_ratio=0.8)
    return pipe, lambda: {**call(), "num_inference_steps": 4}


@cache
def two_experts_output(device: torch.device) -> np.ndarray:
    return resident_output(two_experts, device)


EXPERTS: list[Any] = [
    MODES["module"],
    MODES["mixed"],
    *(
        pytest.param(options, marks=pytest.mark.slow)
        for options in (
            MODES["layer"],
            {"components": {"transformer": "layer", "transformer_2": "module", "text_encoder": "module"}},
            {"components": {"transformer": "module", "transformer_2": "layer"}},
            {"components": {"dit": "module", "vae": "module"}},
        )
    ),
]


@pytest.mark.parametrize("options", EXPERTS)
def test_sglang_15511_the_second_expert_is_not_copied_before_the_boundary(
    device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Both experts were copied in the first step, and the step at the boundary took as long as seven others."""
    reference = two_experts_output(device)
    pipe, call = two_experts()
    handle = pipe.enable_omni_offload(**options)
    copied: list[str] = []
    load, load_apart = Streamer._load, Streamer.load_apart

    def spy(self: Streamer, block: int, master: Any, slot: Any) -> None:
        copied.append(master.path.split(".")[0])
        load(self, block, master, slot)

    def spy_apart(self: Streamer, master: Any, slot: Any) -> None:
        copied.append(master.path.split(".")[0])
        load_apart(self, master, slot)

    monkeypatch.setattr(Streamer, "_load", spy)
    monkeypatch.setattr(Streamer, "load_apart", spy_apart)
    at_the_boundary: list[tuple[set[str], int]] = []
    pipe.transformer_2.register_forward_pre_hook(
        lambda *_: at_the_boundary.append((set(copied), handle.demand_loads)),
    )
    ends: list[int] = []
    pipe.transformer_2.register_forward_hook(lambda *_: ends.append(handle.demand_loads))
    for _ in range(2):
        copied.clear()
        at_the_boundary.clear()
        ends.clear()
        with Occupancy(handle) as occupancy:
            assert_equal(run(pipe, call), reference)
        before, demand_loads = at_the_boundary[0]
        assert "transformer_2" not in before and "transformer" in before
        assert ends[0] - demand_loads <= 1
        # One swap each way: what isn't streamed comes once a call.
        assert all(occupancy.loads.count(path) == 1 for path in handle.plan.swapped)
        swapped_dits = {path for path in handle.plan.swapped if path.startswith("transformer")}
        assert all(len(swapped_dits & moment.loaded) <= 1 for moment in occupancy.moments)


@pytest.mark.parametrize("options", [MODES["module"], MODES["mixed"]])
def test_sglang_40590_what_is_resident_stays_when_others_are_swapped(
    device: torch.device, sim: ModuleType, options: dict[str, Any]
) -> None:
    """Residents were dropped at the end of each use, so that keeping them helped nothing."""
    residents = {"dit": {"resident_layers": 2}} if options is MODES["mixed"] else None
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload(**options, layer_options=residents)
    kept = [stack.blocks[index] for stack in handle.plan.stacks for index in stack.resident]
    kept += [] if options is MODES["mixed"] else [pipe.vae]
    addresses = [tensor.data_ptr() for part in kept for tensor in [*part.parameters(), *part.buffers()]]
    assert addresses
    moved, copied = [], []
    for _ in range(3):
        before, copies = handle.bytes_moved, sim.stats()["h2d_bytes"]
        assert_equal(run(pipe, call), reference)
        moved.append(handle.bytes_moved - before)
        copied.append(sim.stats()["h2d_bytes"] - copies)
        assert addresses == [tensor.data_ptr() for part in kept for tensor in [*part.parameters(), *part.buffers()]]
        assert {tensor.device.type for part in kept for tensor in part.parameters()} == {"sim"}
    masters = [master.nbytes for master in handle.backend.masters]
    # With as many streamed blocks as slots, all that is offloaded comes once a call, and the residents never do.
    assert moved == [sum(masters)] * 3
    assert len(set(copied)) == 1 and sum(masters) <= copied[0] <= sum(masters) + 1024


@in_every_mode
def test_wan_44_freed_memory_goes_back_once_a_switch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """What a component left behind stayed reserved, so the next one ran out; and each time costs a wait."""
    emptied: list[int] = []
    module = torch.get_device_module("sim")
    empty_cache = module.empty_cache

    def counting() -> None:
        emptied.append(1)
        empty_cache()

    pipe, call = full_toy(two_stage=True)
    handle = pipe.enable_omni_offload(**MODES[mode])
    monkeypatch.setattr(module, "empty_cache", counting)
    counts = []
    for steps in (2, 2, 8):
        emptied.clear()
        swaps = handle.swaps
        run(pipe, lambda steps=steps: {**call(), "steps": steps})
        counts.append(len(emptied))
        assert len(emptied) <= handle.swaps - swaps
        assert (len(emptied) > 0) == (mode != "layer")
        assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    assert len(set(counts)) == 1, "none of them for a block"


@in_every_mode
def test_stable_diffusion_cpp_1830_too_little_memory_is_said_before_anything_moves(
    device: torch.device, sim: ModuleType, mode: str
) -> None:
    """It failed in the middle of a run: the sentence says what is free and what is the least that is needed."""
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload(**MODES[mode])
    plan = handle.plan
    handle.disable()
    allocated, pinned = torch.accelerator.memory_allocated(), sim.stats()["pinned_current"]
    need = device_need(plan, device, handle.config.slots)
    before, allocations = State.of(pipe), sim.stats()["allocations"]
    sim.configure(capacity_bytes=allocated + need.total - 1)
    with pytest.raises(RuntimeError, match=r"has .* free, and this needs .* before any activations") as error:
        pipe.enable_omni_offload(**MODES[mode])
    assert str(need) in str(error.value)
    before.assert_same(State.of(pipe))
    assert leftovers(pipe) == [] and torch.accelerator.memory_allocated() == allocated
    assert sim.stats()["pinned_current"] == pinned and sim.stats()["allocations"] == allocations
    # The least is enough for all but activations.
    sim.configure(capacity_bytes=allocated + need.total + 64 * 1024)
    pipe.enable_omni_offload(**MODES[mode])
    assert_equal(run(pipe, call), reference)
