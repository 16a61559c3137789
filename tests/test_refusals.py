"""What can't work is refused in a sentence that says what to do, and the pipeline goes on working as before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import apply_group_offloading
from torch import nn

import diffusers_omni_offload
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.tiny import ToyDiT, ToyPipeline, build_toy, build_wan, run
from tests.tiny.toy import ToyBlock, ToyTextEncoder, ToyVAE


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A toy pipeline with a DiT of four blocks, a text encoder and a VAE."""
    return build_toy(4, text_encoder=True, vae=True)


def group_offload(pipe: Any, device: torch.device) -> None:
    pipe.enable_group_offload(
        onload_device=device, offload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )


# ---------------------------------------------------------------------- what a block may do


def wants_gradients(pipe: Any, device: torch.device) -> None:
    with torch.enable_grad():
        pipe.transformer(torch.randn(1, 4, 8, device=device))


def input_wants_gradients(pipe: Any, device: torch.device) -> None:
    pipe.transformer.requires_grad_(False)
    try:
        with torch.enable_grad():
            pipe.transformer(torch.randn(1, 4, 8, device=device, requires_grad=True))
    finally:
        pipe.transformer.requires_grad_(True)


@pytest.mark.parametrize("forward", [wants_gradients, input_wants_gradients])
def test_autograd_is_refused(device: torch.device, forward: Callable[..., None]) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_omni_offload("layer")
    with pytest.raises(RuntimeError, match=r"transformer\.blocks\.0 .*gradient.*inference.*no_grad"):
        forward(pipe, device)
    assert_equal(run(pipe, call), reference)
    assert_equal(run(pipe, call), reference)


def test_frozen_weights_run_with_gradients_enabled(device: torch.device) -> None:
    """Grad mode alone is no reason to refuse: nothing here could need a gradient."""
    pipe, _ = full_toy()
    pipe.transformer.requires_grad_(False)
    pipe.enable_omni_offload("layer")
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    resident, _ = full_toy()
    resident.to(device).transformer.requires_grad_(False)
    with torch.enable_grad():
        assert torch.equal(pipe.transformer(x.to(device)).cpu(), resident.transformer(x.to(device)).cpu())


class CountingBlock(ToyBlock):
    """Writes a buffer of its own in each forward, as a running statistic does."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.shift.add_(1.0)
        return super().forward(hidden_states)


class LeakingBlock(ToyBlock):
    """Returns its own weight instead of something computed from it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output = super().forward(hidden_states)
        return self.gate.expand_as(output) if self.leaks else output


def toy_with_block(
    cls: type[ToyBlock], index: int, **attributes: Any
) -> tuple[ToyPipeline, Callable[[], dict[str, Any]]]:
    pipe, call = build_toy(4)
    block = pipe.transformer.blocks[index]
    block.__class__ = cls
    for name, value in attributes.items():
        setattr(block, name, value)
    return pipe, call


def test_a_block_that_writes_its_buffers_is_refused(device: torch.device) -> None:
    reference = resident_output(lambda: toy_with_block(CountingBlock, 2, writes=False), device)
    pipe, call = toy_with_block(CountingBlock, 2, writes=False)
    pipe.enable_omni_offload("layer")
    pipe.transformer.blocks[2].writes = True
    before = State.of(pipe)
    with pytest.raises(RuntimeError, match=r"transformer\.blocks\.2\.shift was written.*(eval|resident)"):
        run(pipe, call)
    before.assert_same(State.of(pipe))
    pipe.transformer.blocks[2].writes = False
    assert_equal(run(pipe, call), reference)


def test_a_resident_block_may_write_its_buffers(device: torch.device) -> None:
    """The message says "make the block resident", and then it works as it does without offload."""
    reference = resident_output(lambda: toy_with_block(CountingBlock, 0, writes=True), device, calls=2)
    pipe, call = toy_with_block(CountingBlock, 0, writes=True)
    pipe.enable_omni_offload("layer", layer_options={"dit": {"resident_layers": 1}}, resident_policy="leading")
    run(pipe, call)
    assert_equal(run(pipe, call), reference)


def test_a_block_that_returns_a_view_of_its_weights_is_refused(device: torch.device) -> None:
    reference = resident_output(lambda: toy_with_block(LeakingBlock, 1, leaks=False), device)
    pipe, call = toy_with_block(LeakingBlock, 1, leaks=True)
    pipe.enable_omni_offload("layer")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"transformer\.blocks\.1 returned a view of .*own weights.*clone"):
            run(pipe, call)
    pipe.transformer.blocks[1].leaks = False
    assert_equal(run(pipe, call), reference)


def test_a_view_returned_inside_a_container_is_refused(device: torch.device) -> None:
    class Nested(ToyBlock):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return {"output": super().forward(hidden_states), "more": [(self.shift[1:],)]}

    pipe, _ = toy_with_block(Nested, 3)
    pipe.enable_omni_offload("layer")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"blocks\.3 returned a view"):
        pipe.transformer.blocks[3](torch.randn(1, 4, 32, device=device))


def test_stream_capture_is_refused(device: torch.device, sim: ModuleType) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)
    sim.configure(capturing=1)
    with pytest.raises(RuntimeError, match=r"transformer\.blocks\.0 .*captur.*CUDA graphs"):
        run(pipe, call)
    sim.configure(capturing=0)
    assert_equal(run(pipe, call), reference)


# ---------------------------------------------------------------------- moving, copying, other offloads


def _deepcopy_pipe(pipe: Any, device: torch.device) -> None:
    copy.deepcopy(pipe)


def _deepcopy_component(pipe: Any, device: torch.device) -> None:
    copy.deepcopy(pipe.transformer)


def _deepcopy_resident_component(pipe: Any, device: torch.device) -> None:
    copy.deepcopy(pipe.vae)


def _deepcopy_block(pipe: Any, device: torch.device) -> None:
    copy.deepcopy(pipe.transformer.blocks[1])


def _pickle_pipe(pipe: Any, device: torch.device) -> None:
    pickle.dumps(pipe)


def _pickle_component(pipe: Any, device: torch.device) -> None:
    pickle.dumps(pipe.transformer)


def _pickle_block(pipe: Any, device: torch.device) -> None:
    pickle.dumps(pipe.transformer.blocks[1])


def _sibling_hooks(pipe: Any, device: torch.device) -> None:
    ToyPipeline.from_pipe(pipe).remove_all_hooks()


FOREIGN_CALLS: dict[str, Callable[[Any, torch.device], Any]] = {
    "pipe.to(device)": lambda pipe, device: pipe.to(device),
    "pipe.to(device index)": lambda pipe, device: pipe.to("sim:0"),
    "pipe.to(device, dtype)": lambda pipe, device: pipe.to(device, torch.float32),
    "pipe.to(device=)": lambda pipe, device: pipe.to(device=device),
    "component.to(other device)": lambda pipe, device: pipe.transformer.to("meta"),
    "resident component.to(other device)": lambda pipe, device: pipe.vae.to("meta"),
    "model offload": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "sequential offload": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "group offload": group_offload,
    "group offload of a component": lambda pipe, device: pipe.transformer.enable_group_offload(
        onload_device=device, offload_type="leaf_level"
    ),
    "group offload of a resident component": lambda pipe, device: pipe.vae.enable_group_offload(
        onload_device=device, offload_type="leaf_level"
    ),
    "group offload of a sibling": lambda pipe, device: group_offload(ToyPipeline.from_pipe(pipe), device),
    "model offload of a sibling": lambda pipe, device: ToyPipeline.from_pipe(pipe).enable_model_cpu_offload(
        device=device
    ),
    "sequential offload of a sibling": lambda pipe, device: ToyPipeline.from_pipe(pipe).enable_sequential_cpu_offload(
        device=device
    ),
    "remove_all_hooks": lambda pipe, device: pipe.remove_all_hooks(),
    "remove_all_hooks of a sibling": _sibling_hooks,
    "reset_device_map": lambda pipe, device: pipe.reset_device_map(),
    "deepcopy": _deepcopy_pipe,
    "deepcopy of a component": _deepcopy_component,
    "deepcopy of a resident component": _deepcopy_resident_component,
    "deepcopy of a block": _deepcopy_block,
    "pickle": _pickle_pipe,
    "pickle of a component": _pickle_component,
    "pickle of a block": _pickle_block,
}


@pytest.mark.parametrize("name", FOREIGN_CALLS)
def test_calls_that_would_take_it_apart_are_refused(device: torch.device, sim: ModuleType, name: str) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)
    before, held = State.of(pipe), torch.accelerator.memory_allocated()
    with pytest.raises((RuntimeError, ValueError), match=r"offloaded.*disable_omni_offload\(\)"):
        FOREIGN_CALLS[name](pipe, device)
    before.assert_same(State.of(pipe))
    assert torch.accelerator.memory_allocated() <= held
    assert handle.is_enabled()
    assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []
    assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.parameters())


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe, device: pipe.to("cpu"),
        lambda pipe, device: pipe.transformer.to(device),
        lambda pipe, device: pipe.transformer.to("cpu"),
        lambda pipe, device: pipe.vae.to("cpu"),
        lambda pipe, device: pipe.vae.to(device),
        lambda pipe, device: pipe.transformer.cpu(),
        lambda pipe, device: pipe.to(torch.float32),
    ],
)
def test_moves_that_libraries_make_as_a_matter_of_course_change_nothing(
    device: torch.device, move: Callable[..., Any]
) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_omni_offload("layer")
    before = State.of(pipe)
    move(pipe, device)
    before.assert_same(State.of(pipe))
    assert_equal(run(pipe, call), reference)


OTHERS: dict[str, Callable[[Any, torch.device], Any]] = {
    "accelerate's": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "accelerate's AlignDevicesHook": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "diffusers' group offload": group_offload,
    "transformer's weights are moved by diffusers' group offload": lambda pipe, device: apply_group_offloading(
        pipe.transformer, device, offload_type="leaf_level"
    ),
}


@pytest.mark.parametrize("owner", OTHERS)
def test_ours_is_refused_while_theirs_is_on(device: torch.device, owner: str) -> None:
    # Only the DiT: group offload doesn't know the entry points of the other toy components.
    reference = resident_output(lambda: build_toy(4), device)
    pipe, call = build_toy(4)
    OTHERS[owner](pipe, device)
    before = {path: sorted(vars(module)) for path, module in pipe.transformer.named_modules()}
    with pytest.raises((RuntimeError, ValueError), match=f"(?s){owner}.*(remove_all_hooks|anew)"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None
    assert {path: sorted(vars(module)) for path, module in pipe.transformer.named_modules()} == before
    assert_equal(run(pipe, call), reference)


def test_the_way_out_of_model_offload_that_the_message_names_works(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    pipe.enable_model_cpu_offload(device=device)
    run(pipe, call)
    with pytest.raises(RuntimeError, match=r"pipe\.remove_all_hooks\(\)"):
        pipe.enable_omni_offload("layer")
    pipe.remove_all_hooks()
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)


@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
def test_group_offload_applied_behind_our_back_is_refused_at_the_next_call(
    device: torch.device, component: str
) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)
    apply_group_offloading(getattr(pipe, component), device, offload_type="leaf_level")
    loads = handle.loads
    with pytest.raises(RuntimeError, match=rf"(?s){component}.*group offload.*(Remove|disable_omni_offload)"):
        run(pipe, call)
    assert handle.loads == loads


def test_accelerate_hooks_put_on_behind_our_back_are_refused_at_the_next_call(device: torch.device) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    pipe, call = full_toy()
    pipe.enable_omni_offload("layer")
    add_hook_to_module(pipe.vae, AlignDevicesHook(execution_device=device))
    with pytest.raises(RuntimeError, match=r"vae is offloaded.*AlignDevicesHook.*disable_omni_offload\(\)"):
        run(pipe, call)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mode": "layers"}, ValueError, "mode.*'layers'.*Did you mean 'layer'"),
        ({"mode": "modul"}, ValueError, "Did you mean 'module'"),
        ({"mode": 3}, TypeError, "mode.*string"),
        ({"components": ["dits"]}, ValueError, "components.*'dits'.*Did you mean 'dit'"),
        ({"components": ["textencoder"]}, ValueError, "Did you mean 'text_encoder'"),
        ({"components": "dit"}, TypeError, r"\['dit'\]"),
        ({"components": []}, ValueError, "components is empty.*dit"),
        ({"components": ["image_encoder"]}, ValueError, "image_encoder.*leave it out"),
        ({"layer_options": {"dit": {"resident_layer": 2}}}, ValueError, "Did you mean 'resident_layers'"),
        ({"layer_options": {"text_encoder": {}}}, ValueError, "text_encoder.*add it to components"),
        ({"layer_options": {"dit": {"resident_layers": -1}}}, ValueError, "resident_layers is -1.*at least 0"),
        ({"layer_options": {"dit": {"weight_transfer": "all-gather"}}}, ValueError, "Did you mean 'allgather'"),
        ({"layer_options": {"dit": {"source": "disk"}}}, ValueError, "source.*memory.*checkpoint"),
        ({"slots": 0}, ValueError, "slots is 0.*from 1"),
        ({"slots": True}, TypeError, "slots"),
        ({"resident_policy": "leeding"}, ValueError, "Did you mean 'leading'"),
        ({"pin_memory": "yes"}, TypeError, "pin_memory.*budget"),
        ({"pin_memory": -1}, ValueError, "pin_memory is -1"),
        ({"device": "mps"}, ValueError, r"mps.*memory.*pipe\.to"),
        ({"device": "sim:3"}, ValueError, "sim:3.*1 of type"),
        ({"device": "nonsense"}, ValueError, "nonsense"),
        ({"layer_options": {"dit": {"resident_layers": 3}}}, ValueError, "resident_layers=3 leaves one.*at most 2"),
    ],
)
def test_wrong_arguments_name_what_is_allowed(
    device: torch.device, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    before, held = State.of(pipe), torch.accelerator.memory_allocated()
    with pytest.raises(error, match=f"(?s){words}"):
        pipe.enable_omni_offload(**arguments)
    before.assert_same(State.of(pipe))
    assert torch.accelerator.memory_allocated() == held
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)


def test_wrong_arguments_leave_an_offloaded_pipeline_offloaded(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer")
    for arguments in ({"components": ["unet"]}, {"layer_options": {"dit": {"resident_layers": 3}}}, {"mode": "whole"}):
        with pytest.raises(ValueError):
            pipe.enable_omni_offload(**arguments)
        assert pipe.omni_offload is handle and handle.is_enabled()
        assert_equal(run(pipe, call), reference)


# ---------------------------------------------------------------------- pipelines that can't be offloaded


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_stream_is_an_error(device: torch.device, count: int) -> None:
    pipe, call = build_toy(count)
    before = State.of(pipe)
    with pytest.raises(ValueError, match=r"transformer.*(no blocks|single block)"):
        pipe.enable_omni_offload("layer")
    before.assert_same(State.of(pipe))
    assert run(pipe, call).size


def test_a_pipeline_without_any_known_component_is_an_error(device: torch.device) -> None:
    class Unknown(DiffusionPipeline):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.register_modules(network=network)

    pipe = Unknown(ToyDiT(2))
    with pytest.raises(ValueError, match=r"Unknown.*(no DiT|[Dd]eclare)"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None and leftovers(pipe) == []


def toy_with_a_large_encoder() -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = full_toy()
    pipe.text_encoder = ToyTextEncoder(num_layers=16, width=32).eval()
    return pipe, call


def test_too_little_memory_names_the_sizes_and_a_call_that_fits(device: torch.device, sim: ModuleType) -> None:
    reference = resident_output(toy_with_a_large_encoder, device)
    pipe, call = toy_with_a_large_encoder()
    before = State.of(pipe)
    held = torch.accelerator.memory_allocated()
    # Room for the slots and all that isn't in blocks, but not for the text encoder's 16 blocks as well.
    sim.configure(capacity_bytes=held + 100 * 1024)
    with pytest.raises(RuntimeError, match=r"(?s)sim:0.*100\.0 KiB free.*needs .*KiB") as caught:
        pipe.enable_omni_offload("layer")
    message = str(caught.value)
    assert "components=['dit', 'text_encoder']" in message
    assert all(part in message for part in ("for what isn't offloaded", "for resident blocks", "for slots")), message
    before.assert_same(State.of(pipe))
    assert torch.accelerator.memory_allocated() == held
    pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    assert torch.accelerator.memory_allocated() <= held + 100 * 1024
    sim.configure(capacity_bytes=None)
    assert_equal(run(pipe, call), reference)


def test_too_little_memory_for_a_second_configuration_keeps_the_first(device: torch.device, sim: ModuleType) -> None:
    reference = resident_output(toy_with_a_large_encoder, device)
    pipe, call = toy_with_a_large_encoder()
    handle = pipe.enable_omni_offload("layer", components=["dit", "text_encoder"])
    assert_equal(run(pipe, call), reference)
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 16 * 1024)
    with pytest.raises(RuntimeError, match="free, and this needs"):
        pipe.enable_omni_offload("layer")
    sim.configure(capacity_bytes=None)
    assert pipe.omni_offload is handle
    assert_equal(run(pipe, call), reference)


def test_far_too_little_memory_says_that_nothing_fits(device: torch.device, sim: ModuleType) -> None:
    pipe, call = build_wan()
    before = State.of(pipe)
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 4096)
    with pytest.raises(RuntimeError, match=r"4.0 KiB free.*needs.*(free some|Free some)"):
        pipe.enable_omni_offload("layer")
    before.assert_same(State.of(pipe))
    sim.configure(capacity_bytes=None)
    pipe.enable_omni_offload("layer")
    assert run(pipe, call).size


def test_a_component_with_a_device_map_is_refused(device: torch.device) -> None:
    pipe, call = full_toy()
    pipe.transformer.hf_device_map = {"": "sim:0"}
    with pytest.raises((RuntimeError, ValueError), match=r"transformer.*device_map.*reset_device_map\(\)"):
        pipe.enable_omni_offload("layer")
    del pipe.transformer.hf_device_map
    pipe.enable_omni_offload("layer")
    assert run(pipe, call).size


def test_a_pipeline_with_a_device_map_is_refused(device: torch.device) -> None:
    """diffusers notes on the pipeline which device each component was placed on."""
    pipe, call = full_toy()
    pipe.hf_device_map = {"transformer": "sim:0", "text_encoder": "sim:0", "vae": "cpu"}
    with pytest.raises((RuntimeError, ValueError), match=r"device_map.*reset_device_map\(\)"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None
    pipe.hf_device_map = None
    pipe.enable_omni_offload("layer")
    assert run(pipe, call).size


class Wrapped(nn.Parameter):
    """A parameter of a type of its own."""


@pytest.mark.parametrize("place", ["block", "non-block"])
def test_a_tensor_subclass_is_refused_by_name(device: torch.device, place: str) -> None:
    pipe, _ = full_toy()
    owner = pipe.transformer.blocks[2].expand if place == "block" else pipe.transformer.proj_out
    owner._parameters["weight"] = Wrapped(owner.weight.data)
    path = "transformer.blocks.2.expand.weight" if place == "block" else "transformer.proj_out.weight"
    before = State.of(pipe)
    with pytest.raises(TypeError, match=f"{path} is a Wrapped.*unquantized"):
        pipe.enable_omni_offload("layer")
    before.assert_same(State.of(pipe))


@pytest.mark.parametrize("component", ["transformer", "vae"])
def test_weights_on_the_meta_device_are_refused_by_name(device: torch.device, component: str) -> None:
    pipe, _ = full_toy()
    getattr(pipe, component).to("meta")
    with pytest.raises(ValueError, match=f"{component}.*meta device.*load"):
        pipe.enable_omni_offload("layer")
    assert pipe.omni_offload is None and leftovers(pipe) == []


# ---------------------------------------------------------------------- components that come and go


def test_a_replaced_streamed_component_is_refused_at_the_next_call(device: torch.device) -> None:
    def replaced() -> tuple[Any, Any]:
        pipe, call = full_toy()
        pipe.transformer = ToyDiT(4, seed=3).eval()
        return pipe, call

    reference = resident_output(replaced, device)
    pipe, call = full_toy()
    old = pipe.transformer
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    pipe.transformer = ToyDiT(4, seed=3).eval()
    with pytest.raises(
        RuntimeError, match=r"transformer .*replaced.*disable_omni_offload\(\).*enable_omni_offload\(\)"
    ):
        run(pipe, call)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []
    assert not {"forward", "_hf_hook", "_diffusers_hook", "_apply"} & vars(old).keys()
    assert all(tensor.device.type == "cpu" for tensor in [*old.parameters(), *old.buffers()])
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), reference)


def test_a_streamed_component_set_to_none_is_refused_at_the_next_call(device: torch.device) -> None:
    pipe, call = build_toy(4, two_stage=True)
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    pipe.transformer_2 = None
    with pytest.raises(RuntimeError, match=r"transformer_2 .*removed.*disable_omni_offload\(\)"):
        run(pipe, call)
    pipe.disable_omni_offload()
    pipe.enable_omni_offload("layer")
    assert_equal(run(pipe, call), resident_output(lambda: build_toy(4), device))


def test_a_replaced_vae_is_taken_in(device: torch.device) -> None:
    def replaced() -> tuple[Any, Any]:
        pipe, call = full_toy()
        pipe.vae = ToyVAE(seed=61).eval()
        return pipe, call

    reference = resident_output(replaced, device)
    pipe, call = full_toy()
    old = pipe.vae
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    pipe.vae = ToyVAE(seed=61).eval()
    assert_equal(run(pipe, call), reference)
    assert not {"forward", "_hf_hook", "_diffusers_hook", "_apply"} & vars(old).keys()
    pipe.disable_omni_offload()
    assert leftovers(pipe) == [] and next(pipe.vae.parameters()).device.type == "cpu"


def test_a_resident_component_set_to_none_is_let_go(device: torch.device) -> None:
    reference = resident_output(lambda: build_toy(4, text_encoder=True), device)
    pipe, call = full_toy()
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    pipe.vae = None
    assert_equal(run(pipe, call), reference)


def test_a_component_that_is_registered_later_is_taken_in(device: torch.device) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = build_toy(4, text_encoder=True)
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    pipe.register_modules(vae=ToyVAE().eval())
    assert_equal(run(pipe, call), reference)
    assert next(pipe.vae.parameters()).device.type == device.type
    pipe.disable_omni_offload()
    assert leftovers(pipe) == [] and next(pipe.vae.parameters()).device.type == "cpu"


def test_a_later_component_that_does_not_fit_leaves_the_rest_as_it_was(device: torch.device, sim: ModuleType) -> None:
    pipe, call = build_toy(4, text_encoder=True)
    reference = resident_output(lambda: build_toy(4, text_encoder=True), device)
    pipe.enable_omni_offload("layer")
    run(pipe, call)
    vae = nn.Linear(512, 512)
    pipe.extra = vae
    sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + 65536)
    with pytest.raises(RuntimeError, match=r"extra takes 1\.0 MiB .*64\.0 KiB free"):
        run(pipe, call)
    sim.configure(capacity_bytes=None)
    assert vae.weight.device.type == "cpu" and "_hf_hook" not in vars(vae)
    del pipe.extra
    assert_equal(run(pipe, call), reference)


# ---------------------------------------------------------------------- while a call runs


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda pipe: pipe.disable_omni_offload(), "can't be disabled while a call"),
        (lambda pipe: pipe.enable_omni_offload("layer", slots=3), "can't be changed while a call"),
    ],
)
def test_offload_is_not_changed_while_a_call_runs(
    device: torch.device, action: Callable[[Any], Any], words: str
) -> None:
    reference = resident_output(full_toy, device)
    pipe, call = full_toy()
    handle = pipe.enable_omni_offload("layer")
    with pytest.raises(RuntimeError, match=words):
        pipe(**call(), callback_on_step_end=lambda pipe, step, timestep, tensors: action(pipe))
    assert pipe.omni_offload is handle
    assert_equal(run(pipe, call), reference)


def test_a_disabled_handle_says_so(device: torch.device) -> None:
    pipe, _ = full_toy()
    handle = pipe.enable_omni_offload("layer")
    handle.disable()
    assert not handle.is_enabled() and pipe.omni_offload is None
    with pytest.raises(RuntimeError, match=r"was disabled.*enable_omni_offload"), handle.call():
        pass
    with pytest.raises(RuntimeError, match=r"was disabled.*enable_omni_offload"):
        handle.refresh()
    handle.disable()
    diffusers_omni_offload.disable_omni_offload(pipe)
