"""Test doubles of quantized weights: each has one property that offloading was seen to stumble over."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Wrapped(torch.Tensor):
    """Codes of 8 bits and a scale for each row; the wrapper itself has no bytes.

    It knows the few operators that moving needs, and `linear`; anything else is an error, as it may be in a library.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        wrapper.codes, wrapper.scale = codes, scale
        return wrapper

    @classmethod
    def of(cls, weight: torch.Tensor) -> Wrapped:
        """`weight`, quantized."""
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def dequantize(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Wrapped:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dequantize(), *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (aten.detach.default, aten.alias.default, aten.clone.default):
            moved = cls(function(args[0].codes), function(args[0].scale))
        elif function is aten._to_copy.default:
            # Codes stay codes, whatever dtype is asked for.
            moved = args[0]._moved(kwargs.get("device"), kwargs.get("non_blocking", False))
        else:
            raise NotImplementedError(f"{cls.__name__} has no {function}.")
        return return_and_correct_aliasing(function, args, kwargs, moved)

    def _moved(self, device: Any, non_blocking: bool) -> Wrapped:
        return type(self)(*(part.to(device, non_blocking=non_blocking) for part in (self.codes, self.scale)))


class Unpinnable(Wrapped):
    """Asked whether it is pinned, it raises."""

    def is_pinned(self, *args: Any) -> bool:
        raise NotImplementedError("Unpinnable has no is_pinned.")

    def pin_memory(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError("Unpinnable has no pin_memory.")


class Lying(Wrapped):
    """Says that it is on the device, wherever its codes are."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("sim", 0)


class Repacked(Wrapped):
    """Its codes are laid out in another way on a device, as kernels of some GPUs want them."""

    def dequantize(self) -> torch.Tensor:
        codes = self.codes if self.codes.device.type == "cpu" else self.codes.t()
        return codes.to(self.scale.dtype) * self.scale

    def _moved(self, device: Any, non_blocking: bool) -> Wrapped:
        moved = super()._moved(device, non_blocking)
        if moved.codes.device.type != self.codes.device.type:
            moved.codes = moved.codes.t().contiguous()
        return moved


class Reclassed(Wrapped):
    """Becomes another class on a device."""

    def _moved(self, device: Any, non_blocking: bool) -> Wrapped:
        moved = super()._moved(device, non_blocking)
        return Wrapped(moved.codes, moved.scale) if moved.codes.device.type != "cpu" else moved


class Opaque(torch.Tensor):
    """Doesn't say what is inside."""

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [argument.inner if isinstance(argument, Opaque) else argument for argument in args]
        result = function(*args, **(kwargs or {}))
        return Opaque(result) if function is aten.detach.default else result


class Tagged(nn.Parameter):
    """A parameter that can't be made without saying what its bytes mean."""

    quant_type: float

    @staticmethod
    def __new__(cls: type, data: torch.Tensor, *, quant_type: float) -> Any:
        parameter = torch.Tensor._make_subclass(cls, data, False)
        parameter.quant_type = quant_type
        return parameter

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, Tagged) and not hasattr(result, "quant_type"):
            result.quant_type = next(tensor.quant_type for tensor in args if isinstance(tensor, Tagged))
        return result


class TaggedLinear(nn.Linear):
    """Computes with a `Tagged` weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.Tensor._make_subclass(torch.Tensor, self.weight)
        return F.linear(x, weight.float() * self.weight.quant_type, self.bias)


class Packing:
    """How a packed weight is read: an object beside the weight, with a tensor of its own."""

    def __init__(self, scale: torch.Tensor, shape: torch.Size) -> None:
        self.scale, self.shape = scale, shape

    def to(self, device: Any) -> Packing:
        """The same on another device."""
        return Packing(self.scale.to(device), self.shape)


class Packed(nn.Parameter):
    """Two codes of 4 bits a byte, and a `Packing` that has the scale."""

    packing: Packing

    @staticmethod
    def __new__(cls: type, data: torch.Tensor, packing: Packing) -> Any:
        parameter = torch.Tensor._make_subclass(cls, data, False)
        parameter.packing = packing
        return parameter

    @classmethod
    def of(cls, weight: torch.Tensor) -> Packed:
        """`weight`, quantized."""
        scale = weight.detach().abs().amax(1, keepdim=True) / 7
        codes = ((weight.detach() / scale).round() + 8).to(torch.uint8)
        return cls(codes[:, ::2] << 4 | codes[:, 1::2], Packing(scale, weight.shape))


class PackedLinear(nn.Linear):
    """Computes with a `Packed` weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed, packing = torch.Tensor._make_subclass(torch.Tensor, self.weight), self.weight.packing
        codes = torch.stack([packed >> 4, packed & 15], -1).reshape(packing.shape)
        return F.linear(x, (codes.float() - 8) * packing.scale, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        packing = self.weight.packing
        super()._apply(fn, recurse)
        self.weight.packing = Packing(fn(packing.scale), packing.shape)
        return self
