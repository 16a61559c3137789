"""Public cases of blocks and components that weren't found, and of state outside of blocks that was left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from diffusers_omni_offload import OffloadPlan
from tests.comparing import assert_equal, leftovers, resident_output
from tests.modes import MODES, chosen, in_every_mode
from tests.tiny import ToyDiT, ToyPipeline, build_flux2, build_sd3, build_sdxl, build_toy, run
from tests.tiny.toy import ToyBlock, ToyTextEncoder, ToyVAE
from tests.tiny.vaes import kl_vae


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True)


def test_vllm_omni_1486_all_block_lists_stream_and_the_rest_is_on_the_device(device: torch.device) -> None:
    """Only one of two block lists was streamed, and what the transformer holds directly stayed on the CPU."""
    reference = resident_output(build_flux2, device)
    pipe, call = build_flux2(3, 4)
    handle = pipe.enable_omni_offload("layer")
    (stack,) = handle.plan.stacks
    assert len(stack.streamed) == 7
    streamed = {id(tensor) for block in stack.blocks for tensor in [*block.parameters(), *block.buffers()]}
    for component in (pipe.transformer, pipe.text_encoder, pipe.vae):
        for name, tensor in [*component.named_parameters(), *component.named_buffers()]:
            assert tensor.device.type == ("cpu" if id(tensor) in streamed else "sim"), name
    assert_equal(run(pipe, call), reference)


class _Inner(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.layers = blocks


class NestedDiT(ToyDiT):
    """The blocks lie in a list of a child."""

    def __init__(self) -> None:
        super().__init__(4)
        self.block = _Inner(self.blocks)
        del self.blocks

    @property
    def blocks_of_forward(self) -> nn.ModuleList:
        return self.block.layers

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = self.proj_in(x)
        for block in self.blocks_of_forward:
            hidden_states = block(hidden_states)
        return self.proj_out(self.norm(hidden_states))


class PropertyDiT(NestedDiT):
    """The same, and the declaration names a property."""

    @property
    def layers(self) -> nn.ModuleList:
        return self.block.layers


class DictDiT(NestedDiT):
    """The blocks lie in a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        first, last = nn.ModuleList(self.block.layers[:2]), nn.ModuleList(self.block.layers[2:])
        del self.block
        self.parts = nn.ModuleDict({"first": first, "last": last})

    @property
    def blocks_of_forward(self) -> Any:
        return [*self.parts["first"], *self.parts["last"]]


@pytest.mark.parametrize(
    ("cls", "container"), [(NestedDiT, "block.layers"), (PropertyDiT, "layers"), (DictDiT, "parts")]
)
def test_vllm_omni_7186_blocks_are_found_by_identity_at_any_depth(
    device: torch.device, cls: type[NestedDiT], container: str
) -> None:
    """The child that owns the blocks counted as non-block state, so enabling moved the whole model to the device."""

    class Nested(ToyPipeline):
        _dit_modules = ["transformer"]
        _encoder_modules: list[str] = []
        _offload_plan = OffloadPlan(block_attrs={"transformer": (container,)})

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        return Nested(cls().eval()), build_toy(4)[1]

    reference = resident_output(build, device)
    pipe, call = build()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    handle = pipe.enable_omni_offload("layer")
    assert sum(len(stack.streamed) for stack in handle.plan.stacks) == 4
    blocks = {id(tensor) for block in pipe.transformer.blocks_of_forward for tensor in block.state_dict().values()}
    rest = [t for t in [*pipe.transformer.parameters(), *pipe.transformer.buffers()] if t.device.type == "sim"]
    assert rest and not blocks & {id(tensor) for tensor in rest}
    allowed = sum(-(-tensor.nbytes // 512) * 512 for tensor in rest) + handle.device_bytes + 2 * 512
    assert torch.accelerator.max_memory_allocated() - before <= allowed
    assert_equal(run(pipe, call), reference)


@in_every_mode
def test_vllm_omni_2935_a_pipeline_within_a_pipeline_is_offloaded(device: torch.device, mode: str) -> None:
    """Offload silently did nothing for a pipeline that wraps another."""

    class Outer(DiffusionPipeline):
        _dit_modules = ["inner.transformer"]
        _encoder_modules = ["inner.text_encoder"]
        _vae_modules = ["inner.vae"]
        _offload_plan = OffloadPlan(block_attrs={"inner.transformer": ("blocks",)})

        def __init__(self, inner: ToyPipeline) -> None:
            super().__init__()
            self.register_to_config()
            self.inner = inner

        def __call__(self, **kwargs: Any) -> Any:
            return self.inner(**kwargs)

    reference = resident_output(full_toy, device)
    inner, call = full_toy()
    outer = Outer(inner)
    handle = outer.enable_omni_offload(**MODES[mode])
    assert handle.plan.streamed_bytes > 0 or mode == "module"
    assert set(handle.plan.swapped) == {
        f"inner.{name}"
        for name, kind in (("transformer", "dit"), ("text_encoder", "text_encoder"), ("vae", "vae"))
        if chosen(mode, kind) == "module"
    }
    for _ in range(2):
        assert_equal(run(outer, call), reference)
    assert handle.loads + handle.swaps > 0 and handle.bytes_moved > 0
    outer.disable_omni_offload()
    assert leftovers(inner) == []


def test_vllm_omni_2935_nothing_to_stream_is_an_error(device: torch.device) -> None:
    """A model without repeated blocks, and a component that isn't there."""

    class Flat(ToyPipeline):
        _dit_modules = ["transformer"]
        _encoder_modules: list[str] = []
        _offload_plan = None

    pipe = Flat(ToyDiT(3).eval())
    with pytest.raises(ValueError, match=r"transformer.*declares no blocks"):
        pipe.enable_omni_offload("layer")
    with pytest.raises(ValueError, match="Did you mean 'dit'"):
        pipe.enable_omni_offload("layer", components=["dt"])
    assert pipe.omni_offload is None


@in_every_mode
@pytest.mark.parametrize("name", ["sd3", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_diffusers_12319_convolutions_outside_of_any_list(device: torch.device, name: str, mode: str) -> None:
    """`quant_conv` and `post_quant_conv` of a VAE stayed on the CPU; both encode and decode are compared."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_sd3(t5=False) if name == "sd3" else build_sdxl()
        pipe.vae = kl_vae(4, quant=True)
        return pipe, call

    reference = resident_output(build, device)
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    resident, _ = build()
    with torch.no_grad():
        encoded = resident.vae.to(device).encode(image.to(device)).latent_dist.mean.cpu()
    pipe, call = build()
    pipe.enable_omni_offload(**MODES[mode])
    assert_equal(run(pipe, call), reference)
    with torch.no_grad():
        assert torch.equal(pipe.vae.encode(image.to(device)).latent_dist.mean.cpu(), encoded)


class PlainTensorBlock(ToyBlock):
    """Reads tensors that are neither parameters nor buffers."""

    def __init__(self, registered: bool, width: int, **kwargs: Any) -> None:
        super().__init__(width, 2 * width, **kwargs)
        scale = torch.linspace(0.5, 1.5, width)
        if registered:
            self.register_buffer("plain_scale", scale, persistent=False)
        else:
            self.plain_scale = scale

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * self.plain_scale.to(hidden_states.device)


@in_every_mode
@pytest.mark.parametrize("registered", [False, True])
def test_vllm_omni_4247_plain_tensor_attributes_are_named(
    device: torch.device, registered: bool, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A weight that was kept as a plain attribute can't be seen by any offloader: say so, and what to do.

    For a swapped component it is a remark: without offload, too, it would have to move such a tensor itself.
    """

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = full_toy()
        pipe.transformer.blocks[1] = PlainTensorBlock(registered, 32, seed=1).eval()
        pipe.text_encoder.layers[1] = PlainTensorBlock(registered, 8, seed=2).eval()
        return pipe, call

    reference = resident_output(build, device)
    pipe, call = build()
    with caplog.at_level(logging.INFO, logger="diffusers_omni_offload"):
        pipe.enable_omni_offload(**MODES[mode])
    for path, kind in (("transformer.blocks.1", "dit"), ("text_encoder.layers.1", "text_encoder")):
        choice = chosen(mode, kind)
        levels = [record.levelname for record in caplog.records if f"{path}.plain_scale" in record.getMessage()]
        expected = {"layer": ["WARNING"], "module": ["INFO"], "resident": []}[choice]
        assert levels == ([] if registered else expected)
    assert ("buffers" in caplog.text) is not registered
    for _ in range(2):
        assert_equal(run(pipe, call), reference)


class ManyBuffersBlock(ToyBlock):
    """A persistent, a non-persistent and an integer buffer, and one in the module that has parameters as well."""

    def __init__(self, seed: int, width: int = 32) -> None:
        super().__init__(width, 2 * width, seed=seed)
        self.register_buffer("table", torch.linspace(0.1, 1, width) * (seed + 1), persistent=True)
        self.register_buffer("rotary", torch.linspace(-1, 1, width).cos() * (seed + 1), persistent=False)
        self.register_buffer("index", torch.randperm(width, generator=torch.Generator().manual_seed(seed)))
        self.expand.register_buffer("offset", torch.linspace(0, 1, 2 * width), persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for buffer in (self.table, self.rotary, self.index, self.expand.offset):
            assert buffer.device == hidden_states.device
        mixed = super().forward(hidden_states)[..., self.index]
        return torch.tanh(mixed * self.table + self.rotary + self.expand.offset.mean())


@in_every_mode
def test_accelerate_2701_every_kind_of_buffer(device: torch.device, mode: str) -> None:
    """Models with buffers didn't work with a per-layer offload; all kinds are in each block here."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = full_toy()
        for index in range(4):
            pipe.transformer.blocks[index] = ManyBuffersBlock(index).eval()
        for index in range(2):
            pipe.text_encoder.layers[index] = ManyBuffersBlock(10 + index, 8).eval()
        return pipe, call

    reference = resident_output(build, device)
    pipe, call = build()
    fresh, _ = build()
    pipe.enable_omni_offload(**MODES[mode])
    for _ in range(3):
        assert_equal(run(pipe, call), reference)
    pipe.disable_omni_offload()
    for name in ("transformer", "text_encoder"):
        for ours, theirs in zip(getattr(pipe, name).modules(), getattr(fresh, name).modules(), strict=True):
            assert ours._non_persistent_buffers_set == theirs._non_persistent_buffers_set
            for key, buffer in ours._buffers.items():
                wanted = theirs._buffers[key]
                assert buffer.dtype == wanted.dtype and buffer.device.type == "cpu" and torch.equal(buffer, wanted), key


class TiedDiT(ToyDiT):
    """An embedding whose weight is the head's too, and blocks that share one weight."""

    def __init__(self) -> None:
        super().__init__(4)
        self.embed = nn.Embedding(8, 32)
        with torch.no_grad():
            self.embed.weight.copy_(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
        self.head = nn.Linear(32, 8, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[3].expand.weight = self.blocks[0].expand.weight
        self.blocks[2].gate = self.blocks[1].gate
        # Tied between a block and what isn't a block.
        self.proj_in.bias = self.blocks[1].contract.bias

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(x, **kwargs) + self.head(self.embed(x.argmax(-1)))


class TiedEncoder(ToyTextEncoder):
    """A tied embedding and head, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(tokens))


@in_every_mode
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_cache_dit_1111_tied_weights_have_one_copy(
    device: torch.device, sim: ModuleType, slots: int, mode: str
) -> None:
    """Each side of a tie had a mirror of its own, and rebinding the one corrupted the other."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        encoder = TiedEncoder().eval()
        pipe = ToyPipeline(TiedDiT().eval(), text_encoder=encoder, vae=ToyVAE().eval())
        encoder.layers[1].gate = pipe.transformer.proj_out.bias
        return pipe, build_toy(4)[1]

    def assert_tied(pipe: Any) -> None:
        dit, encoder = pipe.transformer, pipe.text_encoder
        assert dit.head.weight is dit.embed.weight
        assert dit.blocks[3].expand.weight is dit.blocks[0].expand.weight
        assert dit.blocks[2].gate is dit.blocks[1].gate
        assert dit.proj_in.bias is dit.blocks[1].contract.bias
        assert encoder.head.weight is encoder.embed.weight
        assert encoder.layers[1].gate is dit.proj_out.bias  # They take turns, and both hold it.

    reference = resident_output(build, device)
    pipe, call = build()
    pinned = sim.stats()["pinned_current"]
    handle = pipe.enable_omni_offload(**MODES[mode], slots=slots)
    checked: list[int] = []
    for part in (pipe.transformer.blocks[2].expand, pipe.text_encoder.layers[1].expand):
        part.register_forward_pre_hook(lambda *args: checked.append(assert_tied(pipe) or 1))
    for _ in range(3):
        assert_tied(pipe)
        assert_equal(run(pipe, call), reference)
    assert checked
    offloaded = [
        pipe.transformer if mode == "module" else pipe.transformer.blocks,
        *([pipe.text_encoder] if mode != "layer" else []),
        *([pipe.vae] if mode == "mixed" else []),
    ]
    unique = {id(t): -(-t.nbytes // 256) * 256 for part in offloaded for t in [*part.parameters(), *part.buffers()]}
    assert sim.stats()["pinned_current"] - pinned == handle.pinned_bytes <= sum(unique.values())
    pipe.disable_omni_offload()
    assert_tied(pipe)
    assert leftovers(pipe) == []


def test_vllm_omni_6456_placeholders_are_not_in_the_ring(device: torch.device) -> None:
    """Entries without weights stood in the prefetch ring, so the prefetch that goes round never happened."""

    class Doubling(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states * 2

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_toy(4)
        real = list(pipe.transformer.blocks)
        pipe.transformer.blocks = nn.ModuleList([nn.Identity(), *real[:2], Doubling(), *real[2:], Doubling()])
        return pipe, lambda: {**call(), "steps": 5}

    reference = resident_output(build, device)
    pipe, call = build()
    handle = pipe.enable_omni_offload("layer")
    (stack,) = handle.plan.stacks
    assert len(stack.blocks) == 4 and not any(isinstance(block, (nn.Identity, Doubling)) for block in stack.blocks)
    for _ in range(3):
        before = handle.demand_loads
        assert_equal(run(pipe, call), reference)
        assert handle.demand_loads - before == 1


def test_components_in_plain_containers_are_placed(device: torch.device) -> None:
    """Modules that a pipeline holds in a list or dict that isn't registered are found all the same."""
    pipe, call = build_toy(4)
    pipe.extras = [nn.Linear(4, 4), {"not": "a module"}]
    pipe.by_name = {"probe": nn.Linear(2, 2)}
    pipe.holder = SimpleNamespace(module=nn.Linear(2, 2))
    pipe.enable_omni_offload("layer")
    assert pipe.extras[0].weight.device.type == "sim" and pipe.by_name["probe"].weight.device.type == "sim"
    assert run(pipe, call).size
    pipe.disable_omni_offload()
    assert pipe.extras[0].weight.device.type == "cpu" and pipe.by_name["probe"].weight.device.type == "cpu"
