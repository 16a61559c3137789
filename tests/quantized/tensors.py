"""The plain tensors that hold the bytes of quantized weights, found without any help of the package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear8bitLt, Params4bit
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def inner_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor below `module` that holds bytes, by a path that says where it is in its parameter."""
    found: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                found.update(_inside(tensor, f"{path}.{name}"))
        if isinstance(part, Linear8bitLt):
            # They are on the weight until the first forward, and on the module's state afterwards.
            holder: Any = part.weight if part.weight.CB is not None else part.state
            found[f"{path}.CB"], found[f"{path}.SCB"] = holder.CB, holder.SCB
    return found


def _inside(tensor: torch.Tensor, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _inside(getattr(tensor, name), f"{path}.{name}")
        return
    yield path, tensor
    if isinstance(tensor, Params4bit):
        yield from _of_quant_state(tensor.quant_state, f"{path}.quant_state")


def _of_quant_state(state: QuantState | None, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if state is not None:
        for name in ("absmax", "code", "offset"):
            if getattr(state, name) is not None:
                yield f"{path}.{name}", getattr(state, name)
        yield from _of_quant_state(state.state2, f"{path}.state2")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` without its subclass, sharing its bytes."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in their logical order."""
    return plain(tensor).contiguous().reshape(-1).view(torch.uint8)


def quantized_bytes(modules: Iterable[nn.Module]) -> int:
    """How many bytes the weights of these modules are, each module's storages counted once."""
    total = 0
    for module in modules:
        sizes = {(tensor.data_ptr(), tensor.nbytes) for tensor in map(plain, inner_tensors(module).values())}
        total += sum(size for _, size in sizes)
    return total


@dataclass(frozen=True)
class QuantizedState:
    """A model's weights as they are now: the objects that modules hold, what libraries note on them, and all bytes."""

    parameters: dict[str, int]
    attributes: dict[str, Any]
    geometry: dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> QuantizedState:
        parameters = {path: id(tensor) for path, tensor in [*model.named_parameters(), *model.named_buffers()]}
        attributes = {path: _attributes(parameter) for path, parameter in model.named_parameters()}
        geometry, values = {}, {}
        for path, tensor in inner_tensors(model).items():
            tensor = plain(tensor)
            geometry[path] = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            values[path] = bytes_of(tensor).cpu().clone()
        return cls(parameters, attributes, geometry, values)

    def assert_same(self, other: QuantizedState) -> None:
        """Equal in everything, bytes too."""
        assert other.parameters == self.parameters
        assert other.attributes == self.attributes
        assert other.geometry == self.geometry
        for path, value in self.values.items():
            assert torch.equal(value, other.values[path]), path


def _attributes(parameter: torch.Tensor) -> tuple[Any, ...]:
    """A parameter's class and the plain values that its library notes on it."""
    simple = (str, int, float, bool, torch.dtype, torch.Size, tuple)
    noted = {name: value for name, value in vars(parameter).items() if isinstance(value, simple)}
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        noted["quant_state"] = id(state)
        noted |= {f"quant_state.{name}": value for name, value in vars(state).items() if isinstance(value, simple)}
    if is_traceable_wrapper_subclass(parameter):
        noted["flattened"] = repr(parameter.__tensor_flatten__())
    return type(parameter), parameter.dtype, parameter.shape, parameter.requires_grad, noted
