"""Public cases of quantized and unusual tensors: moved in part, rebuilt without their notes, flattened without their
strides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from tests import tiny
from tests.comparing import State, assert_equal, leftovers
from tests.doubles import Lying, Packed, PackedLinear, Tagged, TaggedLinear, Unpinnable, Wrapped
from tests.living import fast_ones
from tests.modes import MODES, chosen, in_every_mode
from tests.quantized import KINDS, QuantizedState, build, inner_tensors, to_resident, transformer
from tests.tiny import build_toy
from tests.tiny.toy import ToyBlock

in_layers_others_slow = pytest.mark.parametrize("mode", fast_ones(MODES, "layer"))

Build = Callable[[], tuple[Any, Callable[[], dict[str, Any]]]]


def toy(make: Callable[[nn.Linear], None]) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A toy pipeline; `make` changes each linear layer of its DiT's blocks, of its text encoder and of its VAE."""
    pipe, call = build_toy(4, width=64, text_encoder=True, vae=True)
    for component in (pipe.transformer.blocks, pipe.text_encoder, pipe.vae):
        for module in list(component.modules()):
            if isinstance(module, nn.Linear):
                make(module)
    return pipe, call


def weight_as(cls: type[Wrapped]) -> Callable[[nn.Linear], None]:
    """Makes the weight of a layer one of a class of test doubles."""

    def make(linear: nn.Linear) -> None:
        linear.weight = nn.Parameter(cls.of(linear.weight), requires_grad=False)

    return make


def tagged(linear: nn.Linear) -> None:
    linear.__class__ = TaggedLinear
    linear.weight = Tagged((linear.weight.detach() * 64).round().to(torch.int8), quant_type=1 / 64)


def packed(linear: nn.Linear) -> None:
    linear.__class__ = PackedLinear
    linear.weight = Packed.of(linear.weight)


def inner_of(pipe: Any) -> dict[str, torch.Tensor]:
    """The inner tensors of all components."""
    return {
        f"{name}.{path}": tensor
        for name, component in pipe.components.items()
        if isinstance(component, nn.Module)
        for path, tensor in inner_tensors(component).items()
    }


def states_of(pipe: Any) -> list[QuantizedState]:
    return [QuantizedState.of(part) for part in pipe.components.values() if isinstance(part, nn.Module)]


def resident_output(build: Build, device: torch.device) -> Any:
    pipe, call = build()
    return tiny.run(pipe.to(device), call)


def assert_offloads(build: Build, mode: str, device: torch.device) -> None:
    """Equal twice; then everything is the object, of the bytes and where it was."""
    reference = resident_output(build, device)
    pipe, call = build()
    before = states_of(pipe)
    pipe.enable_omni_offload(**MODES[mode])
    for _ in range(2):
        assert_equal(tiny.run(pipe, call), reference)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []
    for state, now in zip(before, states_of(pipe), strict=True):
        state.assert_same(now)


@in_every_mode
def test_diffusers_13281_inner_tensors_move_with_their_wrapper(mode: str, device: torch.device) -> None:
    """The wrapper was moved, and what is inside of it stayed on the CPU."""
    build = lambda: toy(weight_as(Wrapped))  # noqa: E731
    assert_offloads(build, mode, device)
    pipe, call = build()
    seen: list[tuple[str, str]] = []

    def note(module: nn.Module, arguments: Any) -> None:
        seen.append((module.weight.codes.device.type, module.weight.scale.device.type))

    layers = [part for part in pipe.transformer.blocks.modules() if isinstance(part, nn.Linear)]
    pipe.enable_omni_offload(**MODES[mode])
    for layer in layers:
        layer.register_forward_pre_hook(note)
    tiny.run(pipe, call)
    assert set(seen) == {("sim", "sim")}
    for layer in layers:
        assert type(layer.weight) is Wrapped
        assert {tensor.device.type for tensor in inner_tensors(layer).values()} == {"cpu"}


@in_every_mode
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_diffusers_14433_only_host_memory_is_pinned(
    mode: str, where: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inner tensors that were on the device already were asked to be pinned: "cannot pin" in the first forward."""
    asked: list[str] = []
    original = torch.Tensor.pin_memory

    def pin_memory(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        asked.append(tensor.device.type)
        return original(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)

    def build() -> Any:
        pipe, call = toy(weight_as(Unpinnable))
        return pipe.to(where), call

    reference = resident_output(build, device)
    pipe, call = build()
    pipe.enable_omni_offload(**MODES[mode])
    for _ in range(2):
        assert_equal(tiny.run(pipe, call), reference)
    assert set(asked) <= {"cpu"}
    assert pipe.omni_offload.pinned_bytes > 0


@in_every_mode
def test_diffusers_12610_a_wrapper_that_lies_about_its_device(mode: str, device: torch.device) -> None:
    """The wrapper said "cuda", so it was left alone, and its inner data was not there."""
    build = lambda: toy(weight_as(Lying))  # noqa: E731
    assert_offloads(build, mode, device)
    pipe, call = build()
    pipe.enable_omni_offload(**MODES[mode])
    tiny.run(pipe, call)
    weight = pipe.transformer.blocks[1].expand.weight
    assert weight.device.type == "sim" and weight.codes.device.type == weight.scale.device.type == "cpu"
    if chosen(mode, "text_encoder") == "resident":
        assert pipe.text_encoder.layers[0].expand.weight.codes.device.type == "sim"


def assert_refused(build: Build, mode: str, device: torch.device, cls: type) -> None:
    """The type's name is in the refusal, and nothing was touched."""
    pipe, _ = build()
    before, objects = State.of(pipe), {path: id(tensor) for path, tensor in inner_of(pipe).items()}
    with pytest.raises(TypeError, match=rf"transformer\.blocks\.0\..* is a {cls.__name__}, .*isn't known here"):
        pipe.enable_omni_offload(**MODES[mode])
    assert leftovers(pipe) == []
    before.assert_same(State.of(pipe))
    assert objects == {path: id(tensor) for path, tensor in inner_of(pipe).items()}


@in_every_mode
def test_diffusers_10526_parameters_are_not_made_anew(mode: str, device: torch.device) -> None:
    """Parameters were rebuilt by calling their class, which wanted more arguments."""
    assert_refused(lambda: toy(tagged), mode, device, Tagged)


@in_layers_others_slow
@pytest.mark.parametrize("kind", fast_ones(["gguf q8_0", "gguf q4_0"], "gguf q8_0"))
def test_diffusers_14691_a_gguf_weight_keeps_its_type(kind: str, mode: str, device: torch.device) -> None:
    """Rebuilt parameters had lost their `quant_type`: KeyError None in the first forward."""
    pipe, call = build(kind, "sd3", 128)
    weights = {path: weight for path, weight in pipe.transformer.named_parameters() if hasattr(weight, "quant_type")}
    types = {path: (weight.quant_type, weight.quant_shape) for path, weight in weights.items()}
    assert len(weights) > 40

    def assert_kept() -> None:
        for path, weight in pipe.transformer.named_parameters():
            if path in weights:
                assert weight is weights[path] and (weight.quant_type, weight.quant_shape) == types[path]

    pipe.enable_omni_offload(**MODES[mode])
    assert_kept()
    pipe(**call(), callback_on_step_end=lambda *args: assert_kept() or {})
    assert_kept()
    pipe.disable_omni_offload()
    assert_kept()


@in_every_mode
def test_vllm_omni_5988_packed_codes_with_a_state_object(mode: str, device: torch.device) -> None:
    """Codes went to the device, and the scale in the object beside them did not."""
    assert_refused(lambda: toy(packed), mode, device, Packed)


class OddTensors(nn.Module):
    """Adds to its input what it reads of tensors that aren't simply contiguous."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return 0.05 * torch.randn(*shape, generator=generator)

        self.columns = nn.Parameter(noise(48, 64).t(), requires_grad=False)
        self.channels_last = nn.Parameter(noise(8, 4, 3, 3).to(memory_format=torch.channels_last), requires_grad=False)
        self.scalar = nn.Parameter(noise(1).reshape(()), requires_grad=False)
        self.register_buffer("expanded", noise(64, 1).expand(64, 48))
        self.register_buffer("overlapping", noise(80).as_strided((32, 24), (1, 2)))
        self.register_buffer("empty", torch.empty(0, 5))
        self.register_buffer("part", noise(100)[7:71])
        self.seen: list[dict[str, tuple[tuple[int, ...], str, int]]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self._parameters, **self._buffers}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.seen.append(
            {
                name: (t.stride(), t.device.type, t.data_ptr() % 32 if t.numel() else 0)
                for name, t in self.tensors().items()
            }
        )
        # Elements only: how a sum is rounded depends on strides, which a resident run doesn't keep.
        mixed = self.columns[:, 3] + self.expanded[:, 5] + self.part + self.overlapping[:, 7].repeat(2)
        return hidden_states + mixed + self.channels_last.flatten()[:64] * self.scalar


class OddBlock(ToyBlock):
    """A block with such a part."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.odd(super().forward(hidden_states))


def with_odd_tensors() -> tuple[Any, Any]:
    pipe, call = build_toy(4, width=64, text_encoder=True, vae=True)
    for number in (1, 2):
        block = pipe.transformer.blocks[number]
        block.__class__, block.odd = OddBlock, OddTensors(number)
    return pipe, call


@in_every_mode
def test_vllm_omni_5988_strides_and_alignment_are_kept(mode: str, device: torch.device) -> None:
    """Weights were flattened in logical order: kernels refused column-major ones, channels-last ones became slow."""
    reference = resident_output(with_odd_tensors, device)
    pipe, call = with_odd_tensors()
    odd = [pipe.transformer.blocks[number].odd for number in (1, 2)]
    before = [{name: (t.stride(), t.shape) for name, t in block.tensors().items()} for block in odd]
    values = [{name: t.detach().clone() for name, t in block.tensors().items()} for block in odd]
    pipe.enable_omni_offload(**MODES[mode])
    for _ in range(2):
        assert_equal(tiny.run(pipe, call), reference)
    pipe.disable_omni_offload()
    for block, geometry, expected in zip(odd, before, values, strict=True):
        for seen in block.seen:
            assert seen == {name: (stride, "sim", 0) for name, (stride, _) in geometry.items()}
        assert {name: (t.stride(), t.shape) for name, t in block.tensors().items()} == geometry
        for name, value in expected.items():
            assert torch.equal(block.tensors()[name], value) and block.tensors()[name].device.type == "cpu"


@in_layers_others_slow
def test_vllm_omni_6897_saved_float8_weights(mode: str, device: torch.device, tmp_path: Path) -> None:
    """Weights that were quantized before they were saved couldn't be staged; they were repacked into plain ones."""
    known = KINDS["torchao float8"]
    known.apply(transformer("sd3", 128)).save_pretrained(tmp_path)

    def load() -> Any:
        pipe, call = tiny.build_sd3(t5=False)
        pipe.to(torch.bfloat16)
        pipe.transformer = SD3Transformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
        return pipe, call

    assert type(load()[0].transformer.transformer_blocks[0].attn.to_q.weight).__name__ == "Float8Tensor"
    assert_offloads(load, mode, device)


@in_layers_others_slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_diffusers_11101_casting_code_reads_the_storage_dtype(
    mode: str, when: str, device: torch.device, sim: ModuleType
) -> None:
    """Two hooks rewrote the parameters, and code that casts its input to `weight.dtype` got a placeholder's."""
    _, call = tiny.build_sd3(t5=False)
    cast = KINDS["layerwise casting"].apply
    resident, _ = build("layerwise casting", "sd3", 128)
    reference = tiny.run(to_resident(resident, device), call)
    pipe, _ = tiny.build_sd3(t5=False)
    pipe.to(torch.bfloat16)
    pipe.transformer = transformer("sd3", 128)
    if when == "before":
        cast(pipe.transformer)
    pipe.enable_omni_offload(**MODES[mode])
    if when == "after":
        cast(pipe.transformer)
    weight = pipe.transformer.transformer_blocks[1].attn.to_q.weight
    seen = []

    def note(*args: Any) -> dict[str, Any]:
        seen.append((weight.dtype, weight.shape))
        return {}

    for _ in range(2):
        note()
        assert_equal(tiny.to_array(pipe(**call(), callback_on_step_end=note)), reference)
    assert set(seen) == {(torch.float8_e4m3fn, torch.Size([128, 128]))}
