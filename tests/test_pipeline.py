"""The one line: methods and functions, the handle, reconfiguring, pipelines that share, modular pipelines, threads."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.modular_pipelines import ModularPipeline

import diffusers_omni_offload
from diffusers_omni_offload import (
    OffloadConfig,
    OffloadPlan,
    OffloadStrategy,
    disable_omni_offload,
    enable_omni_offload,
    get_offload_backend,
    omni_offload,
    resolve_offload_plan,
)
from diffusers_omni_offload.backends import DistributedLayerwiseBackend, LayerwiseBackend
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.tiny import ToyDiT, ToyPipeline, build_minimax_h3, build_sd3, build_toy, run
from tests.tiny.toy import ToyOutput


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True)


# ---------------------------------------------------------------------- the line


@pytest.mark.processes
def test_importing_changes_nothing_else_of_diffusers() -> None:
    """In a process of its own: the attributes of diffusers' classes and hook modules before and after the import."""
    program = """
import diffusers, diffusers.hooks.hooks, diffusers.hooks.group_offloading, diffusers.models.modeling_utils, torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.modular_pipelines import ModularPipeline

owners = [DiffusionPipeline, ModularPipeline, ModelMixin, torch.nn.Module, torch.Tensor, diffusers.hooks.hooks,
          diffusers.hooks.hooks.HookRegistry, diffusers.hooks.hooks.ModelHook, diffusers.hooks.group_offloading]
before = [dict(vars(owner)) for owner in owners]
import diffusers_omni_offload
for owner, old in zip(owners, before):
    new = dict(vars(owner))
    print(getattr(owner, "__name__", owner), sorted(set(new) - set(old)), [k for k in old if new.get(k) is not old[k]])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = "['disable_omni_offload', 'enable_omni_offload', 'omni_offload'] []"
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"DiffusionPipeline {ours}", f"ModularPipeline {ours}"]
    assert all(line.endswith("[] []") for line in lines[2:]) and len(lines) == 9, result.stdout


@pytest.mark.parametrize("as_function", [False, True], ids=["method", "function"])
def test_one_line_on_and_off(device: torch.device, as_function: bool) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    assert pipe.omni_offload is None and omni_offload(pipe) is None
    handle = enable_omni_offload(pipe, "layer") if as_function else pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is handle and omni_offload(pipe) is handle and handle.is_enabled()
    for _ in range(3):
        assert_equal(run(pipe, call), reference)
    disable_omni_offload(pipe) if as_function else pipe.disable_omni_offload()
    assert pipe.omni_offload is None and omni_offload(pipe) is None and not handle.is_enabled()
    assert leftovers(pipe) == []
    pipe.to(device)
    assert_equal(run(pipe, call), reference)


def test_the_class_keeps_its_name_and_its_place(device: torch.device) -> None:
    pipe, _ = build_sd3()
    cls = type(pipe)
    pipe.enable_omni_offload("layer")
    assert isinstance(pipe, cls) and type(pipe).__name__ == cls.__name__ and type(pipe).__module__ == cls.__module__
    assert type(pipe).__qualname__ == cls.__qualname__ and type(pipe).__doc__ == cls.__doc__
    pipe.disable_omni_offload()
    assert type(pipe) is cls


def test_the_defaults_are_the_dit_pinned_in_two_slots(device: torch.device) -> None:
    pipe, _ = full_toy()
    handle = pipe.enable_omni_offload()
    assert handle.config.components == ("dit",) and handle.config.slots == 2 and handle.config.pin_memory is True
    assert handle.config.resident_policy == "spread" and handle.config.strategy is OffloadStrategy.LAYERWISE
    assert [stack.component for stack in handle.plan.stacks] == ["transformer"]
    assert handle.backend.device == torch.device("sim:0")


def test_enabling_twice_returns_the_same_handle(device: torch.device) -> None:
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    run(pipe, call)
    before, loads, pinned = State.of(pipe), handle.loads, handle.pinned_bytes
    # Equal requests in other words.
    for arguments in (
        {"components": ["dit", "text_encoder"]},
        {"components": ("text_encoder", "dit"), "device": "sim"},
        {"components": ["text_encoder", "dit"], "device": "sim:0", "layer_options": {"dit": {"resident_layers": 0}}},
    ):
        assert pipe.enable_omni_offload("layer", **arguments) is handle
    before.assert_same(State.of(pipe))
    assert handle.loads == loads and handle.pinned_bytes == pinned


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"slots": 1},
    {"slots": 3},
    {"components": ["dit", "text_encoder"]},
    {"components": ["text_encoder"]},
    {"layer_options": {"dit": {"resident_layers": 2}}},
    {"layer_options": {"dit": {"resident_layers": 4}}},
    {"layer_options": {"dit": {"resident_layers": 1}}, "resident_policy": "leading"},
    {"pin_memory": False},
    {"pin_memory": 40_000},
    {"device": "cpu"},
]


def test_reconfiguring_through_every_configuration(device: torch.device, sim: ModuleType) -> None:
    reference, on_cpu = resident_output(full_toy, device), run(*full_toy())
    pipe, call = full_toy()
    pinned = sim.stats()["pinned_current"]
    handles = []
    for arguments in [*CONFIGURATIONS, *reversed(CONFIGURATIONS)]:
        handle = pipe.enable_omni_offload("layer", **arguments)
        assert pipe.omni_offload is handle and all(old is handle or not old.is_enabled() for old in handles)
        handles.append(handle)
        for _ in range(2):
            assert_equal(run(pipe, call), on_cpu if arguments.get("device") == "cpu" else reference)
        assert sim.stats()["pinned_current"] - pinned == (0 if "device" in arguments else handle.pinned_bytes)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == [] and sim.stats()["pinned_current"] == pinned
    assert all(tensor.device.type == "cpu" for tensor in pipe.transformer.parameters())


@pytest.mark.parametrize("arguments", CONFIGURATIONS)
def test_enable_disable_enable(device: torch.device, arguments: dict[str, Any]) -> None:
    reference, on_cpu = resident_output(full_toy, device), run(*full_toy())
    pipe, call = full_toy()
    before = State.of(pipe)
    for _ in range(3):
        handle = pipe.enable_omni_offload("layer", **arguments)
        assert_equal(run(pipe, call), on_cpu if arguments.get("device") == "cpu" else reference)
        handle.disable()
        before.assert_same(State.of(pipe))
        assert leftovers(pipe) == []


def test_a_pipeline_on_the_device_is_taken_over(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.to(device)
    run(pipe, call)
    pipe.enable_omni_offload("layer")
    assert all(tensor.device.type == "cpu" for tensor in pipe.transformer.blocks.parameters())
    assert_equal(run(pipe, call), reference)


def test_the_index_of_the_device_counts(device: torch.device, sim: ModuleType) -> None:
    sim.configure(devices=2)
    reference = resident_output(full_toy, torch.device("sim:1"))
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer", device=1)
    assert pipe._execution_device == pipe.device == torch.device("sim:1")
    for _ in range(2):
        assert_equal(run(pipe, call), reference)
    assert {tensor.device for tensor in pipe.vae.parameters()} == {torch.device("sim:1")}
    assert handle.backend.streamer.slots.slots[0].buffer.device == torch.device("sim:1")
    moved = pipe.enable_omni_offload("layer", device="sim:0")
    assert moved is not handle and pipe.device == torch.device("sim:0")
    assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()


# ---------------------------------------------------------------------- the handle


def test_the_counters_count(device: torch.device, sim: ModuleType) -> None:
    pipe, call = build_toy(4)
    pinned = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload("layer")
    assert (handle.loads, handle.demand_loads, handle.bytes_moved) == (0, 0, 0)
    sim.reset_clock()
    run(pipe, call)
    block = handle.backend.streamer.masters[0].nbytes
    # Two steps of four blocks; the first call may prefetch one block beyond its end.
    assert 8 <= handle.loads <= 9 and handle.demand_loads == 1
    assert handle.bytes_moved == handle.loads * block
    run(pipe, call)
    assert handle.loads in (16, 17) and handle.demand_loads == 2
    # What else goes to the device in two calls are the inputs.
    assert 0 <= sim.stats()["h2d_bytes"] - handle.bytes_moved <= 2 * 4 * 8 * 4
    assert handle.device_bytes == 2 * block
    assert handle.pinned_bytes == sim.stats()["pinned_current"] - pinned == 4 * block
    pipe.disable_omni_offload()
    assert handle.device_bytes == 0 and handle.pinned_bytes == 0


def test_the_handle_prints_what_matters(device: torch.device) -> None:
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 2}})
    run(pipe, call)
    text = repr(handle)
    for part in ("<OffloadHandle enabled", f"{handle.loads} loads", "pinned", "2 of 4 blocks streamed", "2 resident"):
        assert part in text, text
    for component in ("transformer", "text_encoder", "vae"):
        assert component in text
    assert str(handle.plan) in text
    handle.disable()
    assert "disabled" in repr(handle)


def test_one_line_after_the_first_call(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    pipe, call = full_toy()
    with caplog.at_level(logging.INFO, logger="diffusers_omni_offload"):
        pipe.enable_omni_offload("layer")
        caplog.clear()
        for _ in range(3):
            run(pipe, call)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "100%" in lines[0] and "pinned" in lines[0] and "on demand" in lines[0]
    assert "transfer-bound" in lines[0] or "compute-bound" in lines[0] or "too few" in lines[0]


def test_the_line_says_what_limits_the_speed(
    device: torch.device, sim: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    for rate, verdict in ((1e6, "transfer-bound"), (1e13, "compute-bound")):
        sim.configure(h2d_bytes_per_s=rate, pageable_bytes_per_s=rate, copy_latency_s=0)
        pipe, call = build_toy(8)
        with caplog.at_level(logging.INFO, logger="diffusers_omni_offload"):
            pipe.enable_omni_offload("layer")
            caplog.clear()
            run(pipe, call)
        assert verdict in caplog.text, (rate, caplog.text)


# ---------------------------------------------------------------------- execution device


def test_stock_pipelines_find_the_execution_device(device: torch.device) -> None:
    pipe, call = build_sd3()
    pipe.enable_omni_offload("layer")
    assert pipe._execution_device == torch.device("sim:0") and pipe.device == torch.device("sim:0")
    run(pipe, call)
    assert pipe._execution_device == torch.device("sim:0")
    pipe.disable_omni_offload()
    assert pipe._execution_device == torch.device("cpu") and pipe.device == torch.device("cpu")


def test_cpu_on_request(device: torch.device) -> None:
    reference = run(*full_toy())
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer", device="cpu", components=["dit", "text_encoder"])
    assert pipe._execution_device == torch.device("cpu")
    for _ in range(3):
        assert_equal(run(pipe, call), reference)
    assert handle.loads > 0 and handle.pinned_bytes == 0


# ---------------------------------------------------------------------- the backend alone


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (OffloadConfig.from_options("layer"), LayerwiseBackend),
        (
            OffloadConfig.from_options("layer", layer_options={"dit": {"resident_layers": 1}}),
            DistributedLayerwiseBackend,
        ),
    ],
)
def test_get_offload_backend(device: torch.device, config: OffloadConfig, kind: type) -> None:
    reference = resident_output(lambda: build_toy(4), device)
    pipe, call = build_toy(4)
    backend = get_offload_backend(config, torch.device("sim:0"))
    assert type(backend) is kind and not backend.is_enabled()
    backend.enable(pipe)
    assert backend.is_enabled()
    assert_equal(_run_on(pipe, call, device), reference)
    backend.disable()
    assert not backend.is_enabled() and leftovers(pipe) == []
    backend.disable()


def _run_on(pipe: Any, call: Callable[[], dict[str, Any]], device: torch.device) -> Any:
    """A pipeline whose backend was enabled on its own reads its execution device from its components' hooks."""
    assert pipe._execution_device == torch.device("sim:0")
    return run(pipe, call)


def test_a_backend_refuses_nothing_silently(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="diffusers_omni_offload"):
        assert get_offload_backend(OffloadConfig(OffloadStrategy.NONE), torch.device("sim:0")) is None
        assert len(caplog.records) == 1 and "no strategy" in caplog.text
        caplog.clear()
        assert get_offload_backend(OffloadConfig.from_options("layer"), torch.device("mps")) is None
        assert len(caplog.records) == 1 and "mps" in caplog.text
        caplog.clear()
        assert get_offload_backend(OffloadConfig.from_options("layer"), torch.device("cuda:0")) is None
        assert len(caplog.records) == 1 and "cuda" in caplog.text


class _Unreadable:
    """A declaration that may not be looked at any more."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        raise AssertionError("a declaration was read after the plan had been resolved")


def test_backends_run_on_the_plan_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    config = OffloadConfig.from_options("layer", components=["dit", "text_encoder"])
    plan = resolve_offload_plan(pipe, config)
    for name in ("_dit_modules", "_encoder_modules", "_vae_modules", "_offload_plan"):
        monkeypatch.setattr(ToyPipeline, name, _Unreadable())
    monkeypatch.setattr(ToyPipeline, "_resident_modules", _Unreadable(), raising=False)
    monkeypatch.setattr(ToyDiT, "_layerwise_offload_blocks_attrs", _Unreadable(), raising=False)
    backend = get_offload_backend(config, torch.device("sim:0"))
    assert isinstance(backend, LayerwiseBackend)
    # The selection as well: which components and which of their blocks is what the plan says.
    monkeypatch.setattr(OffloadConfig, "components", _Unreadable(), raising=False)
    monkeypatch.setattr(OffloadConfig, "selects", _Unreadable())
    monkeypatch.setattr(OffloadConfig, "options_for", _Unreadable())
    backend.enable(None, plan)
    for _ in range(2):
        assert_equal(run(pipe, call), reference)
    assert backend.streamer.loads > 0
    backend.disable()
    assert leftovers(pipe) == []


def test_an_attribute_that_aliases_a_blocks_tensor_stays_with_its_block(device: torch.device) -> None:
    """The tensor is found under the block and under another name outside of it; there is one copy of it."""

    class Aliased(ToyDiT):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return super().forward(x, **kwargs) * self.alias.mean()

    def aliased() -> tuple[Any, Callable[[], dict[str, Any]]]:
        dit = Aliased(4).eval()
        dit.alias = dit.blocks[1].gate
        return ToyPipeline(dit), build_toy(4)[1]

    reference = resident_output(aliased, device)
    pipe, call = aliased()
    pipe.enable_omni_offload("layer")
    assert pipe.transformer.alias is pipe.transformer.blocks[1].gate
    assert pipe.transformer.alias.device.type == "cpu"
    for _ in range(3):
        assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert pipe.transformer.alias is pipe.transformer.blocks[1].gate and pipe.transformer.alias.device.type == "cpu"


# ---------------------------------------------------------------------- modes of torch and threads


def test_inference_mode_and_no_grad_calls_take_turns(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert not any(parameter.is_inference() for parameter in pipe.transformer.parameters())


def test_weights_made_under_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        reference = resident_output(full_toy, device)
        pipe, call = full_toy()
        pipe.enable_omni_offload("layer")
        assert_equal(run(pipe, call), reference)
    assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []


@pytest.mark.parametrize("slots", [1, 2])
def test_autocast_keeps_no_cast_of_a_slot(device: torch.device, slots: int) -> None:
    """Autocast caches the cast of a weight by the tensor object, whatever slot that is bound to."""
    pipe, _ = build_toy(4)
    pipe.transformer.requires_grad_(True)
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    resident, _ = build_toy(4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        reference = [resident.transformer(x), resident.transformer(x, order=[0, 1, 0, 1])]
    handle = pipe.enable_omni_offload("layer", device="cpu", slots=slots)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with handle.call():
                assert torch.equal(pipe.transformer(x), reference[0])
                assert torch.equal(pipe.transformer(x, order=[0, 1, 0, 1]), reference[1])
        assert torch.is_autocast_cache_enabled()
        # An edit between two forwards in one autocast region is not hidden by a cast from before.
        pipe.transformer.blocks[0].expand.weight.mul_(1.5)
        resident.transformer.blocks[0].expand.weight.mul_(1.5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = resident.transformer(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pipe.transformer(x), expected)
    assert not torch.equal(expected, reference[0])


def test_autocast_sees_an_edit_in_the_same_region(device: torch.device) -> None:
    pipe, _ = build_toy(4)
    handle = pipe.enable_omni_offload("layer", device="cpu")
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    edited, _ = build_toy(4)
    with torch.no_grad():
        edited.transformer.blocks[1].contract.weight.mul_(2)
        with torch.autocast("cpu", torch.bfloat16):
            expected = edited.transformer(x)
        with torch.autocast("cpu", torch.bfloat16):
            before = pipe.transformer(x)
            pipe.transformer.blocks[1].contract.weight.mul_(2)
            assert torch.equal(pipe.transformer(x), expected)
    assert not torch.equal(before, expected) and handle.loads > 0


def test_two_threads_take_turns(device: torch.device) -> None:
    """Both run the same pipeline on inputs of their own; each gets what a run alone gives."""
    inputs = [torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    resident, _ = full_toy()
    resident.to(device)
    references = [resident(x=x).images.cpu() for x in inputs]
    pipe, _ = full_toy()
    pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    barrier = threading.Barrier(2)
    inside, most = [0], [0]

    def count(module: Any, arguments: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])

    def discount(module: Any, arguments: Any, output: Any) -> None:
        inside[0] -= 1

    pipe.transformer.blocks[1].expand.register_forward_pre_hook(count)
    pipe.transformer.blocks[1].expand.register_forward_hook(discount)
    results: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            barrier.wait()
            for _ in range(4):
                results[which].append(pipe(x=inputs[which], steps=2).images.cpu())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and most[0] == 1
    for which in (0, 1):
        assert len(results[which]) == 4
        for result in results[which]:
            assert torch.equal(result, references[which])


def test_a_second_thread_waits_while_a_call_runs(device: torch.device) -> None:
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer")
    started, waited = threading.Event(), []
    x = torch.randn(1, 4, 8, device=device)

    def other() -> None:
        started.set()
        with torch.no_grad():
            pipe.transformer(x)
        waited.append("done")

    thread = threading.Thread(target=other)

    def callback(pipe: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        if step == 0:
            thread.start()
            started.wait(10)
            thread.join(0.1)
            waited.append(thread.is_alive())
        return {}

    pipe(**call(), callback_on_step_end=callback)
    thread.join(60)
    assert waited == [True, "done"] and handle.is_enabled()


# ---------------------------------------------------------------------- flags, callbacks and hooks of others


def test_an_interrupt_flag_set_by_a_callback(device: torch.device) -> None:
    """Stock pipelines stop their loop when a callback sets `pipe._interrupt`."""

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = True
        return {}

    resident, call = build_sd3()
    resident.to(device)
    reference = run(resident, lambda: {**call(), "callback_on_step_end": stop})
    whole = run(resident, call)
    pipe, _ = build_sd3()
    pipe.enable_omni_offload("layer")
    for _ in range(2):
        assert_equal(run(pipe, lambda: {**call(), "callback_on_step_end": stop}), reference)
        assert_equal(run(pipe, call), whole)
    assert (reference != whole).any()


def test_forward_hooks_of_the_user_stay(device: torch.device) -> None:
    pipe, call = full_toy()
    seen: list[str] = []
    pipe.transformer.blocks[0].register_forward_hook(lambda *args: seen.append("before"))
    pipe.enable_omni_offload("layer")
    pipe.transformer.blocks[0].register_forward_hook(lambda *args: seen.append("after"))
    pipe.transformer.register_forward_pre_hook(lambda *args: seen.append("dit"))
    run(pipe, call)
    assert seen == ["dit", "before", "after"] * 2
    pipe.disable_omni_offload()
    seen.clear()
    run(pipe, call)
    assert seen == ["dit", "before", "after"] * 2


def test_a_forward_that_was_replaced_on_the_instance_stays(device: torch.device) -> None:
    pipe, call = build_toy(4)
    block = pipe.transformer.blocks[1]
    original = block.forward
    block.forward = replaced = lambda hidden_states: original(hidden_states) * 2
    pipe.enable_omni_offload("layer")
    output = run(pipe, call)
    pipe.disable_omni_offload()
    assert vars(block)["forward"] is replaced
    pipe.to(device)
    assert_equal(output, run(pipe, call))


# ---------------------------------------------------------------------- pipelines that share components


class OtherToyPipeline(ToyPipeline):
    """Another class over the same components, as image to image is to text to image."""

    def __call__(self, *args: Any, **kwargs: Any) -> ToyOutput:
        output = super().__call__(*args, **kwargs)
        return ToyOutput(images=output.images * 2)


def test_a_stock_sibling_works_and_sees_edits(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer")
    sibling = OtherToyPipeline.from_pipe(pipe)
    assert type(sibling) is OtherToyPipeline and sibling.omni_offload is None
    assert sibling.transformer is pipe.transformer and sibling._execution_device == torch.device("sim:0")
    for _ in range(2):
        assert_equal(run(sibling, call), reference * 2)
        assert_equal(run(pipe, call), reference)
    with torch.no_grad():
        pipe.transformer.blocks[2].gate.mul_(3)
    edited, _ = full_toy()
    edited.transformer.blocks[2].gate.data.mul_(3)
    edited.to(device)
    assert_equal(run(sibling, call), run(edited, call) * 2)
    handle.disable()
    assert leftovers(pipe) == [] and leftovers(sibling) == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", ["disable", "delete"])
def test_two_pipelines_share_one_offload(device: torch.device, sim: ModuleType, first: int, how: str) -> None:
    reference = resident_output(full_toy, device)
    pinned = sim.stats()["pinned_current"]
    pipe, call = full_toy()
    pipes = [pipe, OtherToyPipeline.from_pipe(pipe)]
    references = [reference, reference * 2]
    handles = [each.enable_omni_offload("layer") for each in pipes]
    assert handles[0] is not handles[1] and handles[0].backend is handles[1].backend
    assert sim.stats()["pinned_current"] - pinned == handles[0].pinned_bytes
    for index in (0, 1, 1, 0):
        assert_equal(run(pipes[index], call), references[index])
    if how == "disable":
        pipes[first].disable_omni_offload()
        assert not handles[first].is_enabled() and handles[1 - first].is_enabled()
    else:
        pipes[first] = None
        del pipe
        gc.collect()
    other = pipes[1 - first]
    for _ in range(2):
        assert_equal(run(other, call), references[1 - first])
    other.disable_omni_offload()
    assert leftovers(other) == [] and sim.stats()["pinned_current"] == pinned


def test_a_sibling_with_other_options_is_refused_and_runs_as_it_is(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_omni_offload("layer")
    sibling = OtherToyPipeline.from_pipe(pipe)
    with pytest.raises(ValueError, match=r"transformer.*another pipeline.*same options.*disable_omni_offload\(\)"):
        sibling.enable_omni_offload("layer", slots=3)
    assert sibling.omni_offload is None
    assert_equal(run(sibling, call), reference * 2)
    assert_equal(run(pipe, call), reference)


def test_a_deleted_pipeline_is_gone(device: torch.device, sim: ModuleType) -> None:
    gc.collect()
    memory = torch.accelerator.memory_allocated(), sim.stats()["pinned_current"]
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    run(pipe, call)
    things = (pipe, handle, handle.backend, pipe.transformer, pipe.transformer.blocks[0])
    gone = [weakref.ref(thing) for thing in things]
    del pipe, handle, things
    gc.collect()
    assert [reference() for reference in gone] == [None] * 5
    assert (torch.accelerator.memory_allocated(), sim.stats()["pinned_current"]) == memory


# ---------------------------------------------------------------------- modular pipelines


def _containers(module: torch.nn.Module) -> tuple[str, ...]:
    return tuple(
        name for name, child in module.named_children() if isinstance(child, torch.nn.ModuleList) and len(child) > 1
    )


def modular() -> tuple[Any, Callable[[], dict[str, Any]]]:
    """MiniMax-H3 as a user's subclass that carries the declarations itself."""
    pipe, call = build_minimax_h3()
    cls = type(pipe)
    plan = OffloadPlan(
        block_attrs={"transformer": _containers(pipe.transformer)},
        encoder_block_attrs={"text_encoder": ("model.language_model.layers",)},
    )
    declared = {
        "_dit_modules": ["transformer"],
        "_encoder_modules": ["text_encoder"],
        "_vae_modules": ["vae", "audio_vae"],
        "_offload_plan": plan,
    }
    pipe.__class__ = type(cls.__name__, (cls,), declared)
    return pipe, call


@pytest.mark.parametrize("components", [["dit"], ["dit", "text_encoder"]])
def test_a_modular_pipeline(device: torch.device, components: list[str]) -> None:
    reference = resident_output(modular, device)
    pipe, call = modular()
    assert isinstance(pipe, ModularPipeline) and not isinstance(pipe, DiffusionPipeline)
    stock = type(pipe)
    handle = pipe.enable_omni_offload("layer", components=components)
    assert pipe.omni_offload is handle and pipe._execution_device == pipe.device == torch.device("sim:0")
    for _ in range(3):
        assert_equal(run(pipe, call), reference)
    assert handle.loads > 0
    with pytest.raises((RuntimeError, ValueError), match=r"disable_omni_offload\(\)"):
        pipe.to(device)
    assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert type(pipe) is stock and leftovers(pipe) == []
    assert pipe._execution_device == torch.device("cpu")


def test_the_names_that_the_package_exports() -> None:
    for name in diffusers_omni_offload.__all__:
        assert hasattr(diffusers_omni_offload, name), name
    for cls in (DiffusionPipeline, ModularPipeline):
        assert isinstance(cls.omni_offload, property) and cls.enable_omni_offload is enable_omni_offload
