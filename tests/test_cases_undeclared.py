"""The public cases of blocks and components that weren't found, on pipelines that declare nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_omni_offload.adapters.flux2 import Flux2Offload
from tests.comparing import assert_equal, leftovers, resident_output
from tests.test_cases_discovery import DictDiT, ManyBuffersBlock, NestedDiT, PropertyDiT, TiedDiT
from tests.tiny import ToyDiT, ToyPipeline, build_flux2, build_minimax_h3, build_sd3, build_toy, run
from tests.tiny.toy import ToyBlock

Build = Callable[[], tuple[Any, Callable[[], dict[str, Any]]]]


class UndeclaredPipeline(ToyPipeline):
    """A toy pipeline of which nothing is known but the names of its components."""

    _dit_modules = None  # type: ignore[assignment]
    _encoder_modules = None  # type: ignore[assignment]
    _vae_modules = None  # type: ignore[assignment]
    _offload_plan = None  # type: ignore[assignment]


def undeclared(dit: Callable[[], nn.Module], **components: Any) -> Build:
    return lambda: (UndeclaredPipeline(dit().eval(), **components), build_toy(4)[1])


def streams(build: Build, device: torch.device, sim: ModuleType, **options: Any) -> Any:
    """The offloaded pipeline, of which two calls were equal to the resident one's, without hazards."""
    reference = resident_output(build, device)
    pipe, call = build()
    handle = pipe.enable_omni_offload("layer", **options)
    for _ in range(2):
        assert_equal(run(pipe, call), reference)
    assert sim.hazards() == [] and handle.bytes_moved > 0
    return pipe


@pytest.fixture
def without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock pipelines are on their own: no class has an adapter."""
    monkeypatch.setattr("diffusers_omni_offload.pipeline.adapter_for", lambda cls: None)
    monkeypatch.setattr("diffusers_omni_offload.composition.adapter_for", lambda cls: None)


@pytest.mark.usefixtures("without_adapters")
def test_vllm_omni_1486_all_block_lists_stream(device: torch.device, sim: ModuleType) -> None:
    """Two lists of blocks, and the same of them that the adapter declares."""
    pipe = streams(lambda: build_flux2(3, 4), device, sim, components=["dit", "text_encoder"])
    stacks = {stack.component: stack for stack in pipe.omni_offload.plan.stacks}
    declared = Flux2Offload._offload_plan
    containers = {path.rpartition(".")[0] for path in stacks["transformer"].block_paths}
    assert containers == set(declared.block_attrs["transformer"]) and len(stacks["transformer"].streamed) == 7
    found = {path.rpartition(".")[0] for path in stacks["text_encoder"].block_paths}
    alternatives = "|".join(declared.encoder_block_attrs["text_encoder"]).split("|")
    assert found and found <= set(alternatives)


@pytest.mark.parametrize("cls", [NestedDiT, PropertyDiT, DictDiT])
def test_vllm_omni_7186_blocks_at_any_depth(device: torch.device, sim: ModuleType, cls: type[NestedDiT]) -> None:
    """Nested lists, a list behind a property, and a dict of lists."""
    pipe = streams(undeclared(cls), device, sim)
    (stack,) = pipe.omni_offload.plan.stacks
    assert len(stack.streamed) == 4
    streamed = {id(tensor) for block in stack.blocks for tensor in [*block.parameters(), *block.buffers()]}
    for tensor in [*pipe.transformer.parameters(), *pipe.transformer.buffers()]:
        assert tensor.device.type == ("cpu" if id(tensor) in streamed else "sim")


def test_vllm_omni_2935_a_pipeline_within_a_pipeline(device: torch.device, sim: ModuleType) -> None:
    class Outer(UndeclaredPipeline):
        def __init__(self, inner: Any) -> None:
            super(ToyPipeline, self).__init__()
            self.register_to_config()
            self.inner = inner

        def __call__(self, **arguments: Any) -> Any:
            return self.inner(**arguments)

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        toy, call = build_toy(4, text_encoder=True, vae=True)
        return Outer(UndeclaredPipeline(toy.transformer, None, toy.text_encoder, toy.vae)), call

    inner, call = build_toy(4, text_encoder=True, vae=True)
    reference = resident_output(lambda: (inner, call), device)
    outer, call = build()
    handle = outer.enable_omni_offload("layer", components=["dit", "text_encoder"])
    assert [stack.component for stack in handle.plan.stacks] == ["inner.transformer", "inner.text_encoder"]
    for _ in range(2):
        assert_equal(run(outer, call), reference)
    outer.disable_omni_offload()
    assert leftovers(outer.inner) == []


def test_vllm_omni_2935_nothing_to_stream_is_an_error(device: torch.device) -> None:
    """No lists of blocks, and no component that could be a DiT: both name what there is and what to declare."""

    class Flat(ToyDiT):
        def __init__(self) -> None:
            super().__init__(0)

    pipe = UndeclaredPipeline(Flat().eval())
    with pytest.raises(ValueError, match=r"'transformer' \(a Flat\) declares no blocks.*block_attrs"):
        pipe.enable_omni_offload("layer")
    nameless, _ = undeclared(lambda: ToyDiT(3))()
    nameless.register_modules(transformer=None, text_encoder=None)
    nameless.network = ToyDiT(3)
    with pytest.raises(ValueError, match=r"no DiT.*network \(ToyDiT\).*_dit_modules.*register_adapter"):
        nameless.enable_omni_offload("layer")
    assert pipe.omni_offload is None and nameless.omni_offload is None


def test_accelerate_2701_every_kind_of_buffer(device: torch.device, sim: ModuleType) -> None:
    def build() -> nn.Module:
        dit = ToyDiT(4)
        dit.blocks = nn.ModuleList(ManyBuffersBlock(index) for index in range(4))
        return dit

    streams(undeclared(build), device, sim)


def test_cache_dit_1111_tied_weights(device: torch.device, sim: ModuleType) -> None:
    streams(undeclared(TiedDiT), device, sim)


def test_vllm_omni_6456_placeholders_are_not_in_the_ring(device: torch.device, sim: ModuleType) -> None:
    def build() -> nn.Module:
        dit = ToyDiT(4)
        dit.blocks = nn.ModuleList([nn.Identity(), *dit.blocks, nn.Identity()])
        return dit

    pipe = streams(undeclared(build), device, sim)
    assert len(pipe.omni_offload.plan.stacks[0].blocks) == 4
    before = pipe.omni_offload.demand_loads
    run(pipe, build_toy(4)[1])
    assert pipe.omni_offload.demand_loads - before == 1


@pytest.mark.usefixtures("without_adapters")
def test_diffusers_12319_convolutions_outside_of_any_list(device: torch.device, sim: ModuleType) -> None:
    streams(build_sd3, device, sim, components=["dit", "text_encoder"])


@pytest.mark.usefixtures("without_adapters")
def test_a_modular_pipeline(device: torch.device, sim: ModuleType) -> None:
    """Its components are those of its blocks, and it has no offload sequence."""
    pipe = streams(build_minimax_h3, device, sim, components=["dit", "text_encoder"])
    assert {stack.component for stack in pipe.omni_offload.plan.stacks} == {"transformer", "text_encoder"}


class GroupedDiT(NestedDiT):
    """A list of lists, as the UNet of Stable Cascade has it."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([nn.ModuleList(self.block.layers[:1]), nn.ModuleList(self.block.layers[1:])])
        del self.block

    @property
    def blocks_of_forward(self) -> Any:
        return [block for group in self.groups for block in group]


class InterleavedDiT(ToyDiT):
    """A second list runs within the loop over the first, as in WanAnimate and Latte."""

    def __init__(self) -> None:
        super().__init__(4)
        self.face_blocks = nn.ModuleList(ToyBlock(32, 48, seed=40 + index) for index in range(2))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = self.proj_in(x)
        for index, block in enumerate(self.blocks):
            hidden_states = block(hidden_states)
            if index % 2 == 0:
                hidden_states = self.face_blocks[index // 2](hidden_states)
        return self.proj_out(self.norm(hidden_states))


class PeekingDiT(ToyDiT):
    """Uses a layer of its first block before that block runs, as `DiTTransformer2DModel` does."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = self.proj_in(x)
        hidden_states = hidden_states + self.blocks[0].contract(self.blocks[0].expand(hidden_states)).tanh()
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return self.proj_out(self.norm(hidden_states))


@pytest.mark.parametrize(("cls", "count"), [(GroupedDiT, 4), (InterleavedDiT, 6), (PeekingDiT, 3)])
def test_lists_of_other_shapes_and_orders(
    device: torch.device, sim: ModuleType, cls: Callable[[], nn.Module], count: int
) -> None:
    pipe = streams(undeclared(cls), device, sim)
    assert len(pipe.omni_offload.plan.stacks[0].streamed) == count


def test_a_list_within_another_lists_loop_is_learned(device: torch.device, sim: ModuleType) -> None:
    """Its order isn't the declared one: at first blocks are loaded on demand, later none but the first is."""
    pipe = streams(undeclared(InterleavedDiT), device, sim)
    call = build_toy(4)[1]
    run(pipe, call)
    before = pipe.omni_offload.demand_loads
    run(pipe, call)
    assert pipe.omni_offload.demand_loads - before == 1


def test_resident_blocks_by_declaration(device: torch.device, sim: ModuleType) -> None:
    class KeepingPipeline(ToyPipeline):
        _resident_modules = ["transformer.blocks.1"]

    pipe = streams(lambda: (KeepingPipeline(ToyDiT(4).eval()), build_toy(4)[1]), device, sim)
    assert pipe.omni_offload.plan.stacks[0].block_paths == ("blocks.0", "blocks.2", "blocks.3")
    dit = pipe.transformer
    assert {tensor.device.type for tensor in dit.blocks[1].parameters()} == {"sim"}
    assert {tensor.device.type for tensor in dit.blocks[2].parameters()} == {"cpu"}
