"""Weights whose bytes can't be taken are refused by their type's name, and nothing was touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu
from torch import nn

from tests import tiny
from tests.comparing import State, leftovers
from tests.doubles import Opaque, Reclassed, Repacked, Wrapped
from tests.modes import MODES
from tests.quantized import QuantizedState, build, inner_tensors
from tests.tiny import build_toy

in_streams_and_swaps = pytest.mark.parametrize("mode", ["layer", "module"])


def replace_weight(linear: nn.Linear, weight: torch.Tensor) -> None:
    """Give a layer another weight, of whatever kind."""
    del linear.weight
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)


def toy(weight: Callable[[torch.Tensor], torch.Tensor], block: int = 2) -> tuple[Any, Any]:
    """A toy pipeline with one weight of another kind."""
    pipe, call = build_toy(4, width=64, text_encoder=True, vae=True)
    linear = pipe.transformer.blocks[block].expand
    replace_weight(linear, weight(linear.weight.detach()))
    return pipe, call


def conjugated(weight: torch.Tensor) -> torch.Tensor:
    return torch.complex(weight, weight).conj()


def nested(weight: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([weight[:3], weight[3:]], layout=torch.jagged)


STRANGE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a wrapper that doesn't say what is inside": (Opaque, "Opaque"),
    "sparse": (torch.Tensor.to_sparse, "sparse"),
    "compressed sparse": (torch.Tensor.to_sparse_csr, "sparse_csr"),
    "nested": (nested, "NestedTensor|nested|jagged"),
    "nested, the older kind": (lambda weight: torch.nested.nested_tensor([weight[:3], weight[3:]]), "nested"),
    "a conjugated view": (conjugated, "conjugated"),
    "another form on the device": (Repacked.of, "Repacked"),
    "another class on the device": (Reclassed.of, "Reclassed"),
}


def state_of(pipe: Any) -> State:
    """The pipeline without the weight that torch can't compare."""
    linear = pipe.transformer.blocks[2].expand
    weight = linear._parameters.pop("weight")
    try:
        return State.of(pipe)
    finally:
        # The order of parameters stays, too.
        linear._parameters = {"weight": weight, **linear._parameters}


@in_streams_and_swaps
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_strange_weights(name: str, mode: str, device: torch.device) -> None:
    make, named = STRANGE[name]
    pipe, _ = toy(make)
    before, weight = state_of(pipe), pipe.transformer.blocks[2].expand.weight
    with pytest.raises(TypeError, match=rf"transformer\.blocks\.2\.expand\.weight.*({named})"):
        pipe.enable_omni_offload(**MODES[mode])
    assert leftovers(pipe) == [] and pipe.transformer.blocks[2].expand.weight is weight
    before.assert_same(state_of(pipe))


class RepackedIfWide(Repacked):
    """Has another form on a device where its shape suits a kernel there."""

    def dequantize(self) -> torch.Tensor:
        return super().dequantize() if self.is_wide else Wrapped.dequantize(self)

    @property
    def is_wide(self) -> bool:
        return max(self.codes.shape) % 128 == 0

    def _moved(self, device: Any, non_blocking: bool) -> Wrapped:
        return super()._moved(device, non_blocking) if self.is_wide else Wrapped._moved(self, device, non_blocking)


@in_streams_and_swaps
def test_a_kind_that_changes_its_form_by_shape(mode: str, device: torch.device) -> None:
    """The first weight of a class says nothing of the others: kernels ask for shapes."""
    pipe, _ = build_toy(4, width=64, sizes=[96, 96, 128, 128], text_encoder=True, vae=True)
    for block in pipe.transformer.blocks:
        replace_weight(block.expand, RepackedIfWide.of(block.expand.weight.detach()))
    with pytest.raises(TypeError, match=r"transformer\.blocks\.2\.expand\.weight.*RepackedIfWide"):
        pipe.enable_omni_offload(**MODES[mode])
    assert leftovers(pipe) == []


@in_streams_and_swaps
def test_weights_that_a_run_on_the_cpu_has_packed(mode: str, device: torch.device) -> None:
    """bitsandbytes packs 4-bit weights anew for some CPUs when they first run there; another device can't read that."""
    pipe, _ = build("bitsandbytes nf4", "sd3", 128)
    layer = pipe.transformer.transformer_blocks[1].attn.to_q
    layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    assert layer.weight.quant_state.packing_format_for_cpu
    before = QuantizedState.of(pipe.transformer)
    with pytest.raises(TypeError, match=r"transformer_blocks\.1\.attn\.to_q\.weight.*Params4bit.*CPU"):
        pipe.enable_omni_offload(**MODES[mode])
    assert leftovers(pipe) == []
    before.assert_same(QuantizedState.of(pipe.transformer))


def test_what_is_packed_for_the_cpu_later_is_refused_in_the_next_call(device: torch.device) -> None:
    pipe, call = build("bitsandbytes nf4", "sd3", 128)
    pipe.enable_omni_offload("layer")
    tiny.run(pipe, call)
    weight = pipe.transformer.transformer_blocks[1].attn.to_q.weight
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
    with pytest.raises(TypeError, match=r"transformer_blocks\.1\.attn\.to_q\.weight.*Params4bit.*CPU"):
        tiny.run(pipe, call)


def test_a_kind_that_comes_later_is_refused_in_the_next_call(device: torch.device) -> None:
    pipe, call = build_toy(4, width=64)
    pipe.enable_omni_offload("layer")
    tiny.run(pipe, call)
    linear = pipe.transformer.blocks[2].expand
    replace_weight(linear, Opaque(linear.weight.detach().clone()))
    with pytest.raises(TypeError, match=r"transformer\.blocks\.2\.expand\.weight.*Opaque"):
        tiny.run(pipe, call)


def test_what_is_left_out_may_be_of_any_kind_the_device_takes(device: torch.device) -> None:
    """Nothing is refused because of components that stay where they are put."""
    pipe, call = build_toy(4, width=64, text_encoder=True, vae=True)
    resident, _ = build_toy(4, width=64, text_encoder=True, vae=True)
    embed = pipe.text_encoder.layers[0].expand
    for layer in (embed, resident.text_encoder.layers[0].expand):
        replace_weight(layer, Repacked.of(layer.weight.detach()))
    expected = tiny.run(resident.to(device), call)
    pipe.enable_omni_offload("layer")
    assert (tiny.run(pipe, call) == expected).all()
    assert {tensor.device.type for tensor in inner_tensors(embed).values()} == {"sim"}
