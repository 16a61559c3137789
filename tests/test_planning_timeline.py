"""Predicted forwards against the engine's on the simulated device, whose times are modelled."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from types import ModuleType

import pytest

from diffusers_omni_offload.planning.choice import Choice
from diffusers_omni_offload.planning.costs import BlockCost, Rates
from diffusers_omni_offload.planning.prediction import StepPrediction
from diffusers_omni_offload.planning.timeline import Timeline
from diffusers_omni_offload.topology.residents import resident_indices
from tests.benchmarks.dice import Dice
from tests.benchmarks.problems import Case, carry_out


def step_time(
    blocks: Sequence[BlockCost], resident: Collection[int], slots: int, rates: Rates, other_seconds: float = 0.0
) -> StepPrediction:
    """One forward in the steady state of a call."""
    return Timeline(blocks, resident, slots, rates, other_seconds).step


def timeline_of(case: Case, residents: int, slots: int) -> Timeline:
    problem = case.problem()
    (dit,) = problem.components
    kept = resident_indices(len(dit.blocks), residents, "spread")
    return Timeline(dit.blocks, kept, slots, problem.rates, dit.seconds)


@pytest.mark.parametrize("seed", range(24))
def test_a_step_is_the_engines(sim: ModuleType, seed: int) -> None:
    dice = Dice(seed)
    case = dice.case(is_single=True)
    slots, count = 1 + seed % 4, len(case.parts["transformer"].blocks)
    residents = dice.integer(0, count - 2)
    outcome = carry_out(case, Choice({"transformer": "layer"}, {"transformer": residents}, slots))
    timeline = timeline_of(case, residents, slots)
    assert timeline.step.seconds == pytest.approx(outcome.steps["transformer"], rel=0.01)
    # The whole call, its first forward included, whose first block is loaded on demand.
    assert timeline.seconds(case.steps) == pytest.approx(outcome.call_seconds, rel=0.01)


def test_the_first_forward_is_the_engines(sim: ModuleType) -> None:
    case = Dice(3).case(is_single=True)
    for slots in (1, 2, 3):
        outcome = carry_out(case, Choice({"transformer": "layer"}, slots=slots), steps=1)
        assert timeline_of(case, 0, slots).seconds(1) == pytest.approx(outcome.call_seconds, rel=0.01)


RATES = Rates(1e9, 0.0)


def blocks(*sizes_and_times: tuple[float, float]) -> list[BlockCost]:
    """Blocks by milliseconds of copy and of compute."""
    return [BlockCost(round(copy * 1e6), compute / 1e3) for copy, compute in sizes_and_times]


def test_the_longer_of_compute_and_copies_sets_the_time_of_equal_blocks() -> None:
    fast = step_time(blocks(*[(1, 2)] * 10), (), 2, RATES, other_seconds=0.001)
    assert fast.seconds == pytest.approx(0.021) and fast.copy_seconds == pytest.approx(0.01)
    assert fast.bound == "compute"
    slow = step_time(blocks(*[(2, 1)] * 10), (), 2, RATES)
    assert slow.seconds == pytest.approx(0.020) and slow.compute_seconds == pytest.approx(0.01)
    assert slow.bound == "transfer"


def test_one_slot_overlaps_nothing() -> None:
    assert step_time(blocks(*[(2, 3)] * 4), (), 1, RATES).seconds == pytest.approx(0.020)


def test_what_fits_into_the_slots_is_loaded_once() -> None:
    stack = blocks(*[(50, 1)] * 6)
    timeline = Timeline(stack, (0, 2, 4, 5), 2, RATES)
    assert timeline.step == StepPrediction(pytest.approx(0.006), pytest.approx(0.006), 0.0)  # type: ignore[arg-type]
    assert timeline.seconds(1) > 0.1 and timeline.seconds(3) == pytest.approx(timeline.seconds(1) + 0.012)


def test_all_blocks_resident_is_compute() -> None:
    assert step_time(blocks((1, 2), (3, 4)), (0, 1), 2, RATES).seconds == pytest.approx(0.006)


def test_more_slots_carry_large_blocks_over_long_ones() -> None:
    stack = blocks(*[(1, 4), (1, 4), (7, 1), (1, 1)] * 3)
    by_slots = [step_time(stack, (), slots, RATES).seconds for slots in (1, 2, 3, 4)]
    assert by_slots == sorted(by_slots, reverse=True) and by_slots[2] < by_slots[1]
    assert by_slots[3] >= max(sum(copy for copy in (1, 1, 7, 1)) * 3e-3, 0.030) - 1e-9


def test_a_stack_without_blocks_is_its_other_compute() -> None:
    assert step_time([], (), 2, RATES, other_seconds=0.5).seconds == pytest.approx(0.5)


@pytest.mark.timing
def test_a_hundred_blocks_take_about_a_millisecond() -> None:
    stack = [BlockCost(100_000 + 9_999 * (7 * index % 11), 1e-4 * (1 + index % 7)) for index in range(100)]
    step_time(stack, (), 2, RATES)
    begin = time.perf_counter()
    for slots in (1, 2, 3, 4):
        step_time(stack, range(0, 100, 3), slots, RATES)
    # Ten times what it takes on an idle machine.
    assert (time.perf_counter() - begin) / 4 < 5e-3
