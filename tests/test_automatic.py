"""Mode "auto": what it chooses, when it chooses anew, and that the output never changes."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig

import diffusers_omni_offload
from diffusers_omni_offload import DoesNotFit
from diffusers_omni_offload.backends import records
from diffusers_omni_offload.profile import PROFILE_VARIABLE
from tests import tiny
from tests.benchmarks.stacks import StackPipeline, build
from tests.equality import Call, assert_equal_outputs, assert_no_hazards, build_resident, outputs
from tests.logs import log_lines

STEPS = 6
#: A copy of a block takes longer than its compute.
TRANSFER_BOUND = {"flops_per_s": 1e9, "h2d_bytes_per_s": 5e7}
BLOCK = 69_888
BUDGET = 600_000

FAMILIES: dict[str, Callable[[], tuple[Any, Call]]] = {
    "wan, two experts": tiny.build_wan_i2v,
    "flux2": tiny.build_flux2,
    "sd3": tiny.build_sd3,
    "qwen": tiny.build_qwen_image,
}


@pytest.fixture
def slow_link(sim: ModuleType, device: torch.device) -> torch.device:
    sim.configure(**TRANSFER_BOUND)
    return device


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "profile.json"
    monkeypatch.setenv(PROFILE_VARIABLE, str(path))
    return path


def stack() -> StackPipeline:
    return build("Wan-like", 12, width=32)


def resident(device: torch.device) -> torch.Tensor:
    output = stack().to(device)(steps=STEPS).cpu()
    gc.collect()
    return output


def residents(handle: Any) -> list[int]:
    return [len(stack.resident) for stack in handle.plan.stacks]


def free_bytes(sim: ModuleType) -> int:
    return int(sim.get_config("capacity_bytes")) - torch.accelerator.memory_allocated()


def fitting(pipe: Any, budget: int) -> Any:
    """`pipe` with a budget, or with the least that fits."""
    try:
        return pipe.enable_omni_offload("auto", memory_budget=budget, activation_memory=1)
    except DoesNotFit as error:
        return pipe.enable_omni_offload("auto", memory_budget=budget + error.missing_nbytes, activation_memory=1)


# ---------------------------------------------------------------------- what is chosen


def test_it_chooses_anew_within_the_first_call(slow_link: torch.device, sim: ModuleType) -> None:
    """Nothing is kept at first; from the third forward on, what fits is."""
    expected, pipe = resident(slow_link), stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    assert residents(handle) == [0]
    loads = []
    pipe.transformer.register_forward_hook(lambda *_: loads.append(handle.loads))
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert residents(handle) == [6]
    forward = [after - before for before, after in pairwise(loads)]
    assert forward[0] == 12 and forward[-2] == 6, forward
    before = handle.loads
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert residents(handle) == [6] and handle.loads - before == 6 * STEPS
    assert_no_hazards(sim, "auto")


def test_the_device_holds_what_was_predicted_and_no_more_than_the_budget(slow_link: torch.device) -> None:
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    others = torch.accelerator.memory_allocated() - handle.backend.device_weights_nbytes()
    pipe(steps=STEPS)
    peak = torch.accelerator.max_memory_allocated() - others
    assert peak == pytest.approx(handle.automatic.prediction.peak_nbytes, rel=0.02) and peak <= BUDGET


def test_a_call_that_is_longer_than_the_recording_is_measured_by_what_was_recorded(
    slow_link: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_ENOUGH", 4 * 12)
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=14)
    assert residents(handle) == [6] and handle.config.slots == 2
    (found,) = handle.report().components
    assert found.forwards == 14 and found.bound == "transfer"
    assert found.seconds == pytest.approx(found.predicted_seconds, rel=0.05)


def test_three_lines_say_what_was_chosen_and_the_last_one_does_the_same_by_hand(slow_link: torch.device) -> None:
    with log_lines() as lines:
        pipe = stack()
        pipe.enable_omni_offload("auto", memory_budget=BUDGET)
        pipe(steps=STEPS)
    first, anew = lines[:3], lines[3:6]
    assert first[0].startswith("auto, chosen from sizes and the link: transformer streamed, 0 of 12 blocks stay")
    assert anew[0].startswith("auto, chosen anew from what was measured: transformer streamed, 6 of 12 blocks stay")
    assert "transfer-bound" in anew[1] and "0.05 GB/s (measured)" in anew[1] and "585.9 KiB" in anew[1]
    by_hand = re.fullmatch(r"by hand: (pipe\.enable_omni_offload\(.*\))", anew[2])
    assert by_hand is not None
    chosen = pipe.omni_offload
    assert eval(by_hand[1]) is chosen, "asked for what is on, it changes nothing"
    again = stack()
    other = eval(by_hand[1], {"pipe": again})
    assert [stack.resident for stack in other.plan.stacks] == [stack.resident for stack in chosen.plan.stacks]
    assert other.config == chosen.config


def test_what_fits_as_a_whole_stays(slow_link: torch.device) -> None:
    expected, pipe = resident(slow_link), stack()
    handle = pipe.enable_omni_offload("auto", memory_budget="1GiB")
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert handle.loads == 0 and residents(handle) == [12]


def test_without_a_budget_it_takes_what_is_free(slow_link: torch.device, sim: ModuleType) -> None:
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + BUDGET)
    expected, pipe = resident(torch.device("cpu")), stack()
    handle = pipe.enable_omni_offload("auto")
    assert handle.automatic.problem.device_nbytes == int(BUDGET * 0.95)
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert residents(handle) == [5]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [0.3, 0.6, 2])
def test_outputs_are_equal(device: torch.device, sim: ModuleType, family: str, share: float) -> None:
    sim.configure(**TRANSFER_BOUND)
    pipe, call = build_resident(FAMILIES[family], device)
    expected = outputs(pipe, call)
    nbytes = sum(t.nbytes for c in pipe.components.values() if isinstance(c, torch.nn.Module) for t in c.parameters())
    del pipe
    gc.collect()
    pipe, call = FAMILIES[family]()
    handle = fitting(pipe, int(share * nbytes))
    assert_equal_outputs(outputs(pipe, call), expected, family)
    assert handle.loads + handle.swaps > 0 or share == 2
    assert_no_hazards(sim, family)
    handle.disable()
    assert_equal_outputs(outputs(pipe.to(device), call), expected, f"{family}, disabled")


def test_on_the_cpu_everything_stays(sim: ModuleType) -> None:
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", device="cpu")
    assert torch.equal(pipe(steps=2), stack()(steps=2))
    assert residents(handle) == [12]


def test_pipelines_that_share_components_share_the_choice(slow_link: torch.device) -> None:
    pipe, call = tiny.build_sd3()
    handle = pipe.enable_omni_offload("auto", memory_budget="1MiB", activation_memory=1)
    other = type(pipe).from_pipe(pipe)
    joined = other.enable_omni_offload("auto", memory_budget="1MiB", activation_memory=1)
    assert joined.backend is handle.backend and joined.automatic is handle.automatic
    assert_equal_outputs(outputs(other, call), outputs(pipe, call), "siblings")
    assert residents(joined) == residents(handle)


def test_a_handle_keeps_no_pipeline(slow_link: torch.device) -> None:
    before = torch.accelerator.memory_allocated()
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    assert torch.accelerator.memory_allocated() > before and handle.pinned_bytes > 0
    del pipe
    gc.collect()
    assert torch.accelerator.memory_allocated() == before and handle.pinned_bytes == 0
    assert handle.automatic.prediction.peak_nbytes > 0


# ---------------------------------------------------------------------- short of memory


def test_a_forward_that_ran_out_of_memory_is_run_once_more(slow_link: torch.device, sim: ModuleType) -> None:
    """The caller's word for the activations was wrong: blocks leave, and the next choice knows better."""
    expected, pipe = resident(slow_link), stack()
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + BUDGET)
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET, activation_memory=1)
    assert residents(handle) == [6]
    taken = torch.empty(free_bytes(sim) - 8192, dtype=torch.uint8, device=slow_link)
    with log_lines() as lines:
        assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert any("too short for transformer" in line for line in lines)
    assert residents(handle) == [5]
    before = handle.loads
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert 7 * STEPS <= handle.loads - before <= 7 * STEPS + 1  # It may not know yet that the call ends there.
    assert_no_hazards(sim, "out of memory")
    del taken


def test_one_that_runs_out_again_is_an_error(slow_link: torch.device, sim: ModuleType) -> None:
    expected, pipe = resident(slow_link), stack()
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + BUDGET)
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET, activation_memory=1)
    taken = torch.empty(free_bytes(sim) + 12 * BLOCK, dtype=torch.uint8, device="cpu")

    def fill(*_: Any) -> None:
        nonlocal taken
        taken = taken.to(slow_link)

    hook = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(fill)
    with pytest.raises(torch.OutOfMemoryError):
        pipe(steps=STEPS)
    hook.remove()
    del taken
    gc.collect()
    assert torch.equal(pipe(steps=STEPS).cpu(), expected)
    assert handle.is_enabled()
    assert_no_hazards(sim, "out of memory twice")


def test_a_forward_whose_cache_has_noted_it_is_not_run_again(device: torch.device, sim: ModuleType) -> None:
    pipe, call = tiny.build_wan_i2v()
    for transformer in (pipe.transformer, pipe.transformer_2):
        transformer.enable_cache(FirstBlockCacheConfig(threshold=100.0))
    handle = fitting(pipe, 1)
    ran = []

    def fail(*_: Any) -> None:
        ran.append(1)
        raise torch.OutOfMemoryError("there is none")

    pipe.transformer.blocks[1].ffn.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        pipe(**call())
    assert len(ran) == 1 and handle.is_enabled()


def test_what_fits_nothing_is_refused_and_leaves_the_pipeline_as_it_was(slow_link: torch.device) -> None:
    pipe = stack()
    with pytest.raises(DoesNotFit, match=r"missing.*transformer.*What would help"):
        pipe.enable_omni_offload("auto", memory_budget="20KiB")
    assert pipe.omni_offload is None and type(pipe) is StackPipeline
    assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.parameters())


# ---------------------------------------------------------------------- what is kept


def test_the_next_session_knows_what_this_one_measured(slow_link: torch.device, profile: Path) -> None:
    expected, pipe = resident(slow_link), stack()
    pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    pipe.disable_omni_offload()
    assert set(json.loads(profile.read_text())) == {"version", "devices", "pipelines"}
    with log_lines() as lines:
        again = stack()
        handle = again.enable_omni_offload("auto", memory_budget=BUDGET)
    assert residents(handle) == [6] and "chosen from what was measured before" in lines[0] and "(profile)" in lines[1]
    assert torch.equal(again(steps=STEPS).cpu(), expected)
    assert residents(handle) == [6]


def test_the_profile_can_be_left_out(slow_link: torch.device, profile: Path) -> None:
    pipe = stack()
    pipe.enable_omni_offload("auto", memory_budget=BUDGET, profile=False)
    pipe(steps=STEPS)
    assert not profile.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1, "devices": [], "pipelines": {}}', '{"version": 7}'])
def test_a_profile_that_is_no_profile_is_begun_anew(slow_link: torch.device, profile: Path, text: str) -> None:
    profile.parent.mkdir()
    profile.write_text(text)
    pipe = stack()
    pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    pipe(steps=STEPS)
    assert json.loads(profile.read_text())["version"] == 1 and not list(profile.parent.glob("profile.json.*"))


def test_figures_that_are_no_figures_are_measured_anew(slow_link: torch.device, profile: Path) -> None:
    stack().enable_omni_offload("auto", memory_budget=BUDGET)
    content = json.loads(profile.read_text())
    content["devices"] = {name: {"link_bytes_per_s": "fast"} for name in content["devices"]}
    profile.write_text(json.dumps(content))
    handle = stack().enable_omni_offload("auto", memory_budget=BUDGET)
    assert handle.automatic.problem.rates.source == "measured"


# ---------------------------------------------------------------------- what is asked for


def test_the_same_request_is_the_same_handle(slow_link: torch.device) -> None:
    pipe = stack()
    handle = pipe.enable_omni_offload("auto", memory_budget=BUDGET)
    assert pipe.enable_omni_offload("auto", memory_budget=BUDGET) is handle
    other = pipe.enable_omni_offload("auto", memory_budget=2 * BUDGET)
    assert other.automatic.problem.device_nbytes == 2 * BUDGET
    layer = pipe.enable_omni_offload("layer")
    assert layer.automatic is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"components": ["dit"]}, ValueError, "components=.*auto.*leave it out"),
        ({"layer_options": {"dit": {}}}, ValueError, "layer_options=.*leave it out"),
        ({"slots": 3}, ValueError, "slots=3.*leave it out"),
        ({"memory_budget": "12 apples"}, ValueError, "memory_budget is '12 apples'.*12GiB"),
        ({"memory_budget": "24"}, ValueError, "memory_budget is '24'.*12GiB"),
        ({"memory_budget": 0}, ValueError, "more than 0 bytes"),
        ({"activation_memory": True}, TypeError, "activation_memory is True"),
        ({"num_inference_steps": 0}, ValueError, "num_inference_steps is 0"),
        ({"height": "512"}, TypeError, "height is '512'"),
        ({"device": "nowhere"}, ValueError, "nowhere"),
    ],
)
def test_bad_requests(device: torch.device, options: dict[str, Any], error: type[Exception], message: str) -> None:
    pipe = stack()
    with pytest.raises(error, match=message):
        pipe.enable_omni_offload("auto", **options)
    assert pipe.omni_offload is None


def test_budgets_belong_to_auto(device: torch.device) -> None:
    for mode in ("layer", "module", None):
        with pytest.raises(ValueError, match=r'memory_budget=.*belongs to the mode "auto"'):
            diffusers_omni_offload.enable_omni_offload(stack(), mode, memory_budget="1GiB")
