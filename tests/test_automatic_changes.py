"""Mode "auto" when something changes after it was enabled: weights, budgets, and what others have on the device."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import WanPipeline

from diffusers_omni_offload.backends import PlanBackend
from diffusers_omni_offload.backends.keeping import Keeping
from diffusers_omni_offload.backends.masters import Masters
from diffusers_omni_offload.backends.residency import Residency
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights.packed import PackedMaster
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
    assert {span.name for span in handle.backend.records.latest.spans()} >= {"transformer", "vae"}
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


@pytest.mark.parametrize("moment", ["realize", "retire", "readmit", "take_back", "place", "remove"])
@pytest.mark.parametrize("count", [2, 9])
def test_an_interrupt_while_blocks_change_leaves_a_pipeline_that_runs(
    slow_link: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, moment: str, count: int
) -> None:
    expected, pipe = resident(slow_link), stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    assert residents(handle) == [6]
    owner = {
        "realize": PackedMaster,
        "retire": Streamer,
        "readmit": Streamer,
        "take_back": Residency,
        "place": Residency,
        "remove": Masters,
    }[moment]
    original, calls = getattr(owner, moment), []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, interrupted)
        try:
            Keeping(handle.backend).keep({"transformer": count}, 2)
        except KeyboardInterrupt:
            pass
    for _ in range(2):
        assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    Keeping(handle.backend).keep({"transformer": 12}, 2)
    Keeping(handle.backend).keep({"transformer": 1}, 2)
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert_no_hazards(sim, f"interrupted in {moment}")


def test_a_sibling_with_fewer_components_joins(slow_link: torch.device) -> None:
    pipe, call = tiny.build_wan_i2v()
    handle = pipe.enable_omni_offload("auto", memory_budget=704_911)
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    other = WanPipeline(**{name: getattr(pipe, name) for name in names})
    joined = other.enable_omni_offload("auto", memory_budget=704_911)
    assert joined.backend is handle.backend and joined.automatic is handle.automatic
    assert outputs(pipe, call, 1)


def test_a_change_that_fails_leaves_auto_on(slow_link: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = stack()
    automatic = pipe.enable_omni_offload("auto", memory_budget=BUDGET).automatic
    pipe(steps=STEPS)
    install, calls = PlanBackend.install, []

    def fails_once(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("fragmented")
        install(*arguments)

    monkeypatch.setattr(PlanBackend, "install", fails_once)
    for mode, options in (("auto", {"memory_budget": 2 * BUDGET}), ("layer", {})):
        calls.clear()
        with pytest.raises(torch.OutOfMemoryError):
            pipe.enable_omni_offload(mode, **options)
        assert pipe.omni_offload.automatic is automatic and pipe.omni_offload.backend.runner.watcher is automatic
    pipe(steps=STEPS)


def test_a_larger_call_is_noticed(slow_link: torch.device) -> None:
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=800_000)
    pipe(steps=STEPS, tokens=8)
    before = residents(handle)
    with log_lines() as lines:
        pipe(steps=STEPS, tokens=200)
    assert any("more on the device than its budget" in line for line in lines)
    assert residents(handle) < before
    pipe(steps=STEPS, tokens=200)
    assert peak(pipe, steps=STEPS, tokens=200) <= 800_000


def test_by_hand_auto_is_let_go(slow_link: torch.device) -> None:
    pipe = stack()
    pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    handle = pipe.enable_omni_offload(components={"transformer": "layer"})
    assert handle.automatic is None
    pipe(steps=STEPS)
    assert residents(handle) == [0]
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    assert residents(handle) == [6] and handle.automatic.problem.components[0].forwards == STEPS


def test_auto_may_be_let_go_within_a_call(slow_link: torch.device) -> None:
    """By asking for the same by hand, in a callback say."""
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET, profile=False)
    letting_go = pipe.transformer.transformer_blocks[0].register_forward_hook(lambda *_: handle.automatic.detach())
    pipe(steps=1)
    letting_go.remove()
    assert handle.automatic is None and handle.is_enabled()
    pipe(steps=STEPS)
    assert residents(handle) == [0]


def wan_with_too_little_known(device: torch.device, sim: ModuleType) -> tuple[Any, Any, Any]:
    """A pipeline in the mode "auto" that finds other kinds to be faster in its first call; its call, and its output."""
    sim.configure(flops_per_s=2e8, h2d_bytes_per_s=2e7)
    pipe, call = tiny.build_wan_i2v()
    expected = outputs(pipe.to(device), call, 1)
    pipe, call = tiny.build_wan_i2v()
    nbytes = sum(
        leaf.nbytes
        for part in pipe.components.values()
        if isinstance(part, torch.nn.Module)
        for leaf in part.parameters()
    )
    pipe.enable_omni_offload(
        "auto", memory_budget=int(0.7 * nbytes), activation_memory=int(0.05 * nbytes), num_inference_steps=2
    )
    return pipe, call, expected


def test_kinds_that_turn_out_to_be_faster_come_with_the_next_call(device: torch.device, sim: ModuleType) -> None:
    """They were chosen when nobody knew how long the compute takes. The handle stays the same."""
    pipe, call, expected = wan_with_too_little_known(device, sim)
    handle = pipe.omni_offload
    first = dict(handle.automatic.prediction.choice.kinds)
    outputs(pipe, call, 1)
    better = handle.automatic.better
    assert better is not None, first
    with log_lines() as lines:
        assert_equal_outputs(outputs(pipe, call, 1), expected, "other kinds")
    assert handle is pipe.omni_offload and handle.is_enabled() and any("by hand" in line for line in lines)
    assert handle.automatic.prediction.choice.kinds == better.choice.kinds != first
    assert_equal_outputs(outputs(pipe, call, 1), expected, "other kinds")
    assert_no_hazards(sim, "other kinds")
    handle.disable()
    assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.parameters())


@pytest.mark.parametrize(
    "error", [RuntimeError("no more memory"), KeyboardInterrupt()], ids=lambda it: type(it).__name__
)
def test_kinds_that_cannot_be_enabled_are_not_tried_again(
    error: BaseException, device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offload stays as it was, with its handle, and the call goes on; an interrupt ends it."""
    pipe, call, expected = wan_with_too_little_known(device, sim)
    handle = pipe.omni_offload
    first, plan = handle.automatic.prediction.choice.kinds, str(handle.plan)
    outputs(pipe, call, 1)
    assert handle.automatic.better is not None
    stock, failures = PlanBackend.install, iter([error])

    def install(self: PlanBackend, *arguments: Any) -> None:
        stock(self, *arguments)
        for failure in failures:
            raise failure

    monkeypatch.setattr(PlanBackend, "install", install)
    if isinstance(error, Exception):
        with log_lines() as lines:
            assert_equal_outputs(outputs(pipe, call, 1), expected, "the old kinds")
        assert any("can't be enabled, so all stays as it is: no more memory" in line for line in lines)
    else:
        with pytest.raises(KeyboardInterrupt):
            outputs(pipe, call, 1)
    assert next(failures, None) is None
    assert handle is pipe.omni_offload and handle.is_enabled() and str(handle.plan) == plan
    assert handle.automatic.better is None and handle.automatic.prediction.choice.kinds == first
    for _ in range(3):
        assert_equal_outputs(outputs(pipe, call, 1), expected, "the old kinds")
        assert handle.automatic.better is None
    handle.report()
    pipe.disable_omni_offload()
    assert_no_hazards(sim, "the old kinds")


def test_blocks_that_may_leave_are_compiled_as_if_they_moved(slow_link: torch.device, compiler: None) -> None:
    """Graphs would go on reading where they were."""
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=2_000_000, activation_memory=1000)
    assert residents(handle) == [12]
    for module in (pipe.transformer, pipe.transformer.transformer_blocks[0]):
        with pytest.raises(TypeError, match="CUDA graphs"):
            module.compile(mode="reduce-overhead")


def test_a_dit_whose_blocks_have_left_runs_in_one_scope_by_hand(slow_link: torch.device) -> None:
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=2_000_000, activation_memory=1000)
    Keeping(handle.backend).keep({"transformer": 0}, 2)
    hidden_states, context = pipe.inputs(8, slow_link)
    with torch.no_grad():
        for _ in range(3):
            pipe.transformer(hidden_states, context)
    assert handle.demand_loads == 3


def test_a_report_has_no_figures_of_another_choice(slow_link: torch.device) -> None:
    others = torch.empty(2_000_000, dtype=torch.uint8, device=slow_link)
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=2)
    for _ in range(2):
        report = handle.report()
        (found,) = report.components
        assert found.seconds is None or found.seconds == pytest.approx(found.predicted_seconds, rel=0.05)
        pipe(steps=STEPS)
    assert report.peak_nbytes == pytest.approx(report.predicted_peak_nbytes, rel=0.02)
    del others


def test_a_report_has_no_peak_of_before(slow_link: torch.device) -> None:
    pipe = stack()
    handle = pipe.enable_omni_offload("layer")
    large = torch.empty(5_000_000, dtype=torch.uint8, device=slow_link)
    del large
    pipe(steps=STEPS)
    peak = handle.report().peak_nbytes
    assert peak is not None and peak < 1_000_000


def test_a_trace_inside_of_the_first_call_spoils_nothing(slow_link: torch.device) -> None:
    others = torch.empty(1_000_000, dtype=torch.uint8, device=slow_link)
    pipe, forwards, traces = stack(), [], ExitStack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)

    def trace(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == 3:
            traces.enter_context(handle.trace())
        if len(forwards) == 5:
            traces.close()

    pipe.transformer.transformer_blocks[4].register_forward_hook(trace)
    for _ in range(2):
        pipe(steps=8)
    assert residents(handle) == [6]
    assert [component.forwards for component in handle.automatic.problem.components] == [8]
    del others
