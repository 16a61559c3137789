"""Public cases of turning offload on and off, sharing, failing and freeing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_omni_offload import OffloadPlan
from tests.comparing import State, assert_equal, leftovers, modules, resident_output
from tests.modes import MODES, in_every_mode
from tests.tiny import ToyDiT, ToyPipeline, build_sd3, build_toy, build_wan, run
from tests.tiny.toy import ToyOutput, ToyTextEncoder, ToyVAE


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True)


def _hooks(pipe: Any) -> dict[str, list[str]]:
    return {
        path: list(vars(module)["_diffusers_hook"].hooks)
        for path, module in modules(pipe)
        if "_diffusers_hook" in vars(module) and vars(module)["_diffusers_hook"].hooks
    }


@in_every_mode
def test_diffusers_2907_enabling_twice_stacks_nothing(device: torch.device, mode: str) -> None:
    """The second time added hooks to the first's, and the execution device was lost."""
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pinned = pipe.enable_omni_offload(**MODES[mode]).pinned_bytes
    before = _hooks(pipe)
    assert before and all(name.startswith("omni_offload") for names in before.values() for name in names)
    pipe.enable_omni_offload(**MODES[mode])
    assert _hooks(pipe) == before and pipe.omni_offload.pinned_bytes == pinned
    assert_equal(run(pipe, call), reference)
    pipe.enable_omni_offload(**MODES[mode], slots=3)
    assert _hooks(pipe) == before and pipe.omni_offload.pinned_bytes == pinned
    assert pipe._execution_device == torch.device("sim:0")
    assert_equal(run(pipe, call), reference)


_OPTIONS: list[dict[str, Any] | None] = [
    None,
    {},
    {"components": ["dit", "text_encoder"]},
    {"slots": 1},
    MODES["module"],
    MODES["mixed"],
    {"components": {"dit": "module", "vae": "module"}},
]


@pytest.mark.parametrize("second", range(len(_OPTIONS)))
@pytest.mark.parametrize("first", range(len(_OPTIONS)))
def test_diffusers_10452_switching_modes_leaves_nothing_of_the_old_one(
    device: torch.device, sim: ModuleType, first: int, second: int
) -> None:
    """There was no way to turn offload off, and switching kept the old footprint."""
    reference, on_cpu = resident_output(full_toy, device), run(*full_toy())
    pipe, call = full_toy()
    originals = {path: type(module).forward for path, module in modules(pipe)}
    before, memory = State.of(pipe), _memory(sim)
    for options in (_OPTIONS[first], _OPTIONS[second]):
        if options is None:
            pipe.disable_omni_offload()
        else:
            pipe.enable_omni_offload(**options)
        assert_equal(run(pipe, call), on_cpu if options is None else reference)
    pipe.disable_omni_offload()
    assert_equal(run(pipe, call), on_cpu)
    before.assert_same(State.of(pipe))
    assert leftovers(pipe) == [] and _memory(sim) == memory
    for path, module in modules(pipe):
        assert module.forward.__func__ is originals[path] and module.forward.__self__ is not None


def _memory(sim: ModuleType) -> tuple[int, int]:
    gc.collect()
    return torch.accelerator.memory_allocated(), sim.stats()["pinned_current"]


@in_every_mode
def test_diffusers_11768_no_module_keeps_state_of_ours(device: torch.device, mode: str) -> None:
    """Removing hooks stopped at a parent that had none, and what lay below acted later; a cache's hook stays here."""
    from diffusers import FirstBlockCacheConfig

    pipe, call = build_wan(two_stage=False)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    before = _hooks(pipe)
    assert before
    pipe.enable_omni_offload(**MODES[mode])
    run(pipe, call)
    pipe.disable_omni_offload()
    assert _hooks(pipe) == before
    pipe.transformer.disable_cache()
    allowed = {"forward", "_diffusers_hook"}
    for path, module in modules(pipe):
        assert not {"_hf_hook", "_apply", "enable_group_offload"} & vars(module).keys(), path
        if path.startswith("transformer"):
            # diffusers leaves its own empty registry and a bound forward behind.
            assert not vars(module).keys() & allowed or not vars(module)["_diffusers_hook"].hooks
        else:
            assert not vars(module).keys() & allowed, path


@in_every_mode
@pytest.mark.parametrize("where", ["sim", "sim:0", "cpu"])
def test_diffusers_7448_moving_an_offloaded_pipeline(
    device: torch.device, sim: ModuleType, where: str, mode: str
) -> None:
    """`pipe.to("cuda")` after enabling moved everything to the device, or failed with an obscure error."""
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload(**MODES[mode])
    run(pipe, call)
    torch.accelerator.reset_peak_memory_stats()
    held = torch.accelerator.memory_allocated()
    if where == "cpu":
        assert pipe.to("cpu") is pipe
    else:
        with pytest.raises(ValueError, match=r"offloaded.*disable_omni_offload\(\)"):
            pipe.to(where)
        for component in (pipe.transformer, pipe.text_encoder, pipe.vae):
            component.to(where)
    assert torch.accelerator.max_memory_allocated() - held <= handle.device_bytes
    assert_equal(run(pipe, call), reference)


class SecondPipeline(ToyPipeline):
    """Another pipeline class over the same components."""

    def __call__(self, *args: Any, **kwargs: Any) -> ToyOutput:
        return ToyOutput(images=super().__call__(*args, **kwargs).images * 2)


@pytest.mark.parametrize("how", ["from_pipe", "components"])
@pytest.mark.parametrize("end", ["disable first", "disable second", "delete first", "delete second"])
@in_every_mode
def test_diffusers_7891_pipelines_that_share_components(
    device: torch.device, sim: ModuleType, how: str, end: str, mode: str
) -> None:
    """Hooks belong to a module, settings to one pipeline: mixed devices, crashes, components without offload."""
    reference = resident_output(full_toy, device)
    memory = _memory(sim)
    first, call = full_toy()
    second = SecondPipeline.from_pipe(first) if how == "from_pipe" else SecondPipeline(**first.components)
    weights = first.enable_omni_offload(**MODES[mode]).pinned_bytes
    second.enable_omni_offload(**MODES[mode])
    assert _memory(sim)[1] - memory[1] == weights
    for _ in range(2):
        assert_equal(run(first, call), reference)
        assert_equal(run(second, call), reference * 2)
    if end == "disable first":
        first.disable_omni_offload()
    elif end == "disable second":
        second.disable_omni_offload()
    elif end == "delete first":
        first = None
    else:
        second = None
    gc.collect()
    for pipe, factor in ((first, 1), (second, 2)):
        if pipe is not None and pipe.omni_offload is not None:
            for _ in range(2):
                assert_equal(run(pipe, call), reference * factor)
    left = [pipe for pipe in (first, second) if pipe is not None]
    for pipe in left:
        pipe.disable_omni_offload()
    assert all(leftovers(pipe) == [] for pipe in left)
    del pipe, left
    first = second = None
    assert _memory(sim) == memory


class WithoutCleanup(ToyPipeline):
    """A community pipeline: its call ends without `maybe_free_model_hooks`."""

    def maybe_free_model_hooks(self) -> None:
        raise AssertionError("this pipeline never calls it")

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> ToyOutput:
        tokens = torch.arange(4, device=self._execution_device)[None]
        latents = x.to(self._execution_device) + self.text_encoder(tokens).mean(-1, keepdim=True)
        return ToyOutput(images=self.vae.decode(self.transformer(latents)))


@pytest.mark.parametrize("options", [*MODES.values(), {"components": ["dit", "text_encoder"]}])
def test_diffusers_5680_no_cleanup_at_the_end_of_a_call(device: torch.device, options: dict[str, Any]) -> None:
    """Weights stayed on the device after a call, and the second one ran out of memory."""
    parts = {"transformer": ToyDiT(6).eval(), "text_encoder": ToyTextEncoder(6).eval(), "vae": ToyVAE().eval()}
    pipe = WithoutCleanup(**parts)
    call = lambda: {"x": torch.ones(1, 4, 8)}  # noqa: E731
    pipe.enable_omni_offload(**options)
    idle = torch.accelerator.memory_allocated()
    outputs = []
    for _ in range(3):
        outputs.append(run(pipe, call))
        assert torch.accelerator.memory_allocated() == idle
    pipe.disable_omni_offload()
    pipe.to(device)
    for output in outputs:
        assert_equal(output, run(pipe, call))


@in_every_mode
@pytest.mark.parametrize("what", ["out of memory", "interrupt in a callback", "interrupt flag"])
def test_scope_136_a_pipeline_goes_on_after_a_failure(
    device: torch.device, sim: ModuleType, what: str, mode: str
) -> None:
    """After an out-of-memory error or an interrupt the pipeline could not be used again, even at a smaller size."""
    resident, call = build_sd3()
    resident.to(device)
    reference = run(resident, call)
    pipe, _ = build_sd3()
    pipe.enable_omni_offload(**MODES[mode])
    run(pipe, call)
    gc.collect()
    idle = torch.accelerator.memory_allocated()
    if what == "out of memory":
        sim.configure(capacity_bytes=idle + 64 * 1024)
        with pytest.raises(torch.OutOfMemoryError):
            run(pipe, lambda: {**call(), "height": 256, "width": 256})
        sim.configure(capacity_bytes=None)
    elif what == "interrupt in a callback":

        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt("injected")

        with pytest.raises(KeyboardInterrupt, match=r"^injected$"):
            run(pipe, lambda: {**call(), "callback_on_step_end": interrupt})
    else:

        def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            pipe._interrupt = step == 1
            return {}

        run(pipe, lambda: {**call(), "num_inference_steps": 4, "callback_on_step_end": stop})
    gc.collect()
    assert torch.accelerator.memory_allocated() == idle
    assert_equal(run(pipe, call), reference)


@in_every_mode
@pytest.mark.parametrize("where", ["text_encoder.layers.1", "transformer.blocks.2.expand", "vae.decoder"])
def test_scope_136_out_of_memory_inside_a_component(
    device: torch.device, sim: ModuleType, where: str, mode: str
) -> None:
    """Its weights are on the device at that moment, and leave it with the exception, which is torch's own."""
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_omni_offload(**MODES[mode])
    run(pipe, call)
    gc.collect()  # What earlier tests have left would be counted as idle.
    before, idle = State.of(pipe), torch.accelerator.memory_allocated()
    part = pipe.components[where.split(".")[0]].get_submodule(where.partition(".")[2])
    removable = part.register_forward_pre_hook(lambda *_: torch.empty(1 << 40, device=device))
    sim.configure(capacity_bytes=4 * idle + (1 << 24))  # Most of it is free: a VAE that runs asks nobody for room.
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=r"^sim out of memory"):
            run(pipe, call)
        gc.collect()
        assert torch.accelerator.memory_allocated() == idle
    removable.remove()
    before.assert_same(State.of(pipe))
    assert_equal(run(pipe, call), reference)


def test_diffusers_5281_components_that_are_swapped_in_after_enabling(device: torch.device) -> None:
    """A new ControlNet ran but was never offloaded: taken in if it lives on the device, else "enable again"."""

    class WithControl(ToyPipeline):
        _dit_modules = ["transformer"]
        _encoder_modules: list[str] = []
        _resident_modules = ["controlnet"]
        _offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})
        controlnet: Any = None

        @torch.no_grad()
        def __call__(self, **kwargs: Any) -> Any:
            output = super().__call__(**kwargs)
            return ToyOutput(images=self.controlnet(output.images) if self.controlnet is not None else output.images)

    def control(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Linear(8, 8)

    def build(seed: int) -> Callable[[], tuple[Any, Any]]:
        def make() -> tuple[Any, Any]:
            pipe = WithControl(ToyDiT(4).eval())
            pipe.controlnet = control(seed)
            return pipe, build_toy(4)[1]

        return make

    references = {seed: resident_output(_placed(build(seed), device), device) for seed in (1, 2)}
    pipe, call = build(1)()
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), references[1])
    old, pipe.controlnet = pipe.controlnet, control(2)
    assert_equal(run(pipe, call), references[2])
    assert not {"_hf_hook", "_diffusers_hook", "forward", "_apply"} & vars(old).keys()
    old_dit, pipe.transformer = pipe.transformer, ToyDiT(4, seed=5).eval()
    with pytest.raises(RuntimeError, match=r"transformer.*replaced.*enable_omni_offload\(\) again"):
        run(pipe, call)
    pipe.disable_omni_offload()
    assert not {"_hf_hook", "_diffusers_hook", "forward", "_apply"} & vars(old_dit).keys()
    assert all(tensor.device.type == "cpu" for tensor in [*old_dit.parameters(), *old_dit.buffers()])


def _placed(build: Callable[[], tuple[Any, Any]], device: torch.device) -> Callable[[], tuple[Any, Any]]:
    """`pipe.to()` moves registered components only."""

    def make() -> tuple[Any, Any]:
        pipe, call = build()
        pipe.controlnet.to(device)
        return pipe, call

    return make


@pytest.mark.parametrize("options", [*MODES.values(), {"components": ["dit", "text_encoder"]}])
def test_diffusers_7970_ten_calls_hold_what_one_holds(
    device: torch.device, sim: ModuleType, options: dict[str, Any]
) -> None:
    """Host memory grew with every call and wasn't given back by deleting the pipeline."""
    memory = _memory(sim)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload(**options)
    run(pipe, call)
    offloaded = [block for stack in handle.plan.stacks for block in stack.blocks]
    offloaded += [handle.plan.component(path).module for path in handle.plan.swapped]
    tensors = [tensor for module in offloaded for tensor in [*module.parameters(), *module.buffers()]]
    held, addresses = _memory(sim), [tensor.data_ptr() for tensor in tensors]
    for _ in range(10):
        run(pipe, call)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert _memory(sim) == held
    gone = [weakref.ref(thing) for thing in (pipe, handle, handle.backend, pipe.transformer.blocks[0], pipe.vae)]
    del pipe, handle, offloaded, tensors
    assert _memory(sim) == memory
    assert [reference() for reference in gone] == [None] * len(gone)


@pytest.mark.parametrize("options", [*MODES.values(), {"components": ["dit", "text_encoder"]}])
def test_vllm_omni_6451_the_second_call_peaks_no_higher(device: torch.device, options: dict[str, Any]) -> None:
    """The first request was fine, the second ran out of memory: what was resident after it differed."""
    pipe, call = build_sd3()
    pipe.enable_omni_offload(**options)
    pipe.scheduler.set_timesteps(2, device=device)  # It keeps its tensors of the last call on the device.
    peaks = []
    for _ in range(4):
        torch.accelerator.reset_peak_memory_stats()
        run(pipe, call)
        peaks.append(torch.accelerator.max_memory_allocated())
    assert peaks[1] <= peaks[0] and len(set(peaks[1:])) == 1


@in_every_mode
@pytest.mark.parametrize("place", ["pipeline", "component"])
def test_diffusers_7914_a_device_map_owns_the_placement(device: torch.device, place: str, mode: str) -> None:
    """A pipeline that was loaded with a device map was asked to offload: two owners of the placement."""
    pipe, call = full_toy()
    owner = pipe if place == "pipeline" else pipe.text_encoder
    owner.hf_device_map = {"": "sim:0"} if place == "component" else {"transformer": "sim:0", "vae": "cpu"}
    before = {path: sorted(vars(module)) for path, module in modules(pipe)}
    with pytest.raises((RuntimeError, ValueError), match=r"device_map.*reset_device_map\(\)"):
        pipe.enable_omni_offload(**MODES[mode])
    assert {path: sorted(vars(module)) for path, module in modules(pipe)} == before and pipe.omni_offload is None
    owner.hf_device_map = None
    pipe.enable_omni_offload(**MODES[mode])
    assert run(pipe, call).size


@in_every_mode
def test_diffusers_7914_the_old_offload_is_named(device: torch.device, mode: str) -> None:
    """Never two sets of hooks: accelerate's are refused by name, and removing them is what helps."""
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_model_cpu_offload(device=device)
    with pytest.raises(RuntimeError, match=r"accelerate's .*remove_all_hooks\(\)"):
        pipe.enable_omni_offload(**MODES[mode])
    pipe.remove_all_hooks()
    pipe.enable_omni_offload(**MODES[mode])
    assert_equal(run(pipe, call), reference)
