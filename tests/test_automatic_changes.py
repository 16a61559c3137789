"""Mode "auto" when something changes after it was enabled: weights, budgets, and what others have on the device."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import tiny
from tests.benchmarks.stacks import StackPipeline
from tests.equality import assert_equal_outputs, assert_no_hazards, outputs
from tests.logs import log_lines
from tests.test_automatic import BUDGET, STEPS, resident, residents, stack

TRANSFER_BOUND = {"flops_per_s": 1e9, "h2d_bytes_per_s": 5e7}


@pytest.fixture
def slow_link(sim: ModuleType, device: torch.device) -> torch.device:
    sim.configure(**TRANSFER_BOUND)
    return device


def peak(pipe: Any, **arguments: Any) -> int:
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    pipe(**arguments)
    held = pipe.omni_offload.backend.device_weights_nbytes()
    return torch.accelerator.max_memory_allocated() - (before - held)


def grow(pipe: StackPipeline, count: int) -> None:
    """Stands for a LoRA: tensors that come to every block."""
    for block in pipe.transformer.blocks():
        block.register_buffer("extra", torch.zeros(count))


def test_the_host_has_no_more_than_its_budget_at_any_time(slow_link: torch.device) -> None:
    pipe, pinned = stack(), []
    handle = pipe.enable_omni_offload("auto", memory_budget=800_000, host_memory_budget=500_000)
    pipe.transformer.register_forward_hook(lambda *_: pinned.append(handle.pinned_bytes))
    pipe(steps=STEPS)
    assert max(pinned) <= 500_000 and pinned[0] > pinned[-1] > 0, pinned


@pytest.mark.parametrize("options", [{"pin_memory": False}, {"device": "cpu"}])
def test_the_call_by_hand_has_all_options(slow_link: torch.device, options: dict[str, Any]) -> None:
    pipe, other = stack(), stack()
    with log_lines() as lines:
        handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET, **options)
    by_hand = eval(lines[2].removeprefix("by hand: "), {"pipe": other})
    assert by_hand.config == handle.config and by_hand.backend.device == handle.backend.device
    assert f"{next(iter(options))}=" in str(handle.report())


def test_only_auto_and_traces_take_over_the_count_of_the_peak(slow_link: torch.device) -> None:
    pipe = stack()
    pipe.enable_omni_offload("layer")
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    large = torch.empty(5_000_000, dtype=torch.uint8, device=slow_link)
    del large
    pipe(steps=2)
    assert torch.accelerator.max_memory_allocated() >= before + 5_000_000


def test_weights_that_come_after_enabling_count(slow_link: torch.device, sim: ModuleType) -> None:
    expected, pipe = resident(slow_link), stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    assert residents(handle) == [6]
    grow(pipe, 10_000)
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert residents(handle) != [6]
    assert peak(pipe, steps=STEPS) <= BUDGET
    assert handle.automatic.prediction.peak_nbytes == pytest.approx(peak(pipe, steps=STEPS), rel=0.02)
    assert_no_hazards(sim, "larger blocks")


def test_where_there_is_no_room_for_what_came_residents_leave(slow_link: torch.device, sim: ModuleType) -> None:
    expected, pipe = resident(slow_link), stack()
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + BUDGET)
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    assert residents(handle) == [6]
    grow(pipe, 5_000)
    for _ in range(2):
        assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert 0 < residents(handle)[0] < 6
    assert_no_hazards(sim, "larger blocks, no room")


def test_memory_that_somebody_took_is_not_counted_on_again(slow_link: torch.device, sim: ModuleType) -> None:
    expected, pipe = resident(slow_link), stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=2_000_000, activation_memory=1000)
    assert residents(handle) == [12]
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 4000)
    with log_lines() as lines:
        for _ in range(3):
            assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert sum("too short" in line for line in lines) == 1
    assert 0 < residents(handle)[0] < 12


@pytest.mark.parametrize("is_freed", [True, False])
def test_what_others_have_is_no_activation(slow_link: torch.device, is_freed: bool) -> None:
    taken = torch.empty(150_000 if is_freed else 1, dtype=torch.uint8, device=slow_link)
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=900_000)
    taken = torch.empty(1 if is_freed else 150_000, dtype=torch.uint8, device=slow_link)
    pipe(steps=STEPS, tokens=300)
    found = peak(pipe, steps=STEPS, tokens=300)
    assert found == pytest.approx(handle.automatic.prediction.peak_nbytes, rel=0.02) and found <= 900_000
    del taken


def test_a_vae_that_stays_is_measured_and_gets_room(slow_link: torch.device, sim: ModuleType) -> None:
    pipe, call = tiny.build_sd3()
    expected = outputs(pipe.to(slow_link), call, 1)
    pipe, call = tiny.build_sd3()
    handle = pipe.enable_omni_offload("auto", memory_budget=2_200_000)
    outputs(pipe, call, 1)
    assert handle.automatic.prediction.choice.kinds["vae"] == "resident" and residents(handle) == [4]
    assert {span.name for span in handle.backend.records.first_call.spans()} >= {"transformer", "vae"}
    taken: list[torch.Tensor] = []

    def take(*_: Any) -> None:
        if not taken:
            free = int(sim.get_config("capacity_bytes")) - torch.accelerator.memory_allocated()
            taken.append(torch.empty(free - 4096, dtype=torch.uint8, device=slow_link))

    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 500_000)
    pipe.vae.decoder.register_forward_pre_hook(take)
    with log_lines() as lines:
        assert_equal_outputs(outputs(pipe, call, 1), expected, "short of memory in the VAE")
    assert any("too short for vae" in line for line in lines)
    assert_no_hazards(sim, "short of memory in the VAE")


def test_a_component_that_runs_by_itself_is_no_call(slow_link: torch.device) -> None:
    pipe, call = tiny.build_sd3()
    handle = pipe.enable_omni_offload("auto", memory_budget=1_706_885)
    with torch.no_grad():
        pipe.encode_prompt(prompt="a cat", prompt_2="a", prompt_3="b", max_sequence_length=16, device=slow_link)
    outputs(pipe, call, 1)
    assert residents(handle) == [4]


def test_the_rest_of_a_call_is_no_call(slow_link: torch.device, sim: ModuleType) -> None:
    pipe, forwards, taken = stack(), [], []
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + BUDGET)
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET, activation_memory=1)

    def take(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == 9:
            free = int(sim.get_config("capacity_bytes")) - torch.accelerator.memory_allocated()
            taken.append(torch.empty(free - 4096, dtype=torch.uint8, device=slow_link))

    pipe.transformer.register_forward_pre_hook(take)
    pipe(steps=10)
    assert [component.forwards for component in handle.automatic.problem.components] == [30]
    pipe(steps=10)
    assert [component.forwards for component in handle.automatic.problem.components] == [10]
    (found,) = handle.report().components
    assert found.seconds == pytest.approx(found.predicted_seconds, rel=0.05)
